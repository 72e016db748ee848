"""`wicore kv inspect`, `verify`, `purge` as a user meets them: output, questions, exit codes."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from disk_campaign import SLOT, Campaign, Waiter, make_page, namespace, open_store, part_count, tag_of
from disk_damage import Damage, Vandal
from fault_injection import FaultPlan

from wicore_trt.cli.main import run_command
from wicore_trt.kv.disk.cipher import PageCipher
from wicore_trt.kv.disk.claim import derive_secret
from wicore_trt.kv.disk.files import Files, aligned_buffer, write_file
from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.pages.hashing import tenant_tag

NAME = namespace().digest.hex()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A disk cache of tenant "t", with the secret that `tag_of` takes."""
    path = tmp_path / "cache"
    path.mkdir()
    (path / "secret").write_bytes(bytes(32))
    campaign = Campaign(path, FaultPlan(), seed=1)
    campaign.run(3)
    campaign.store.close()
    return path


def pages(path: Path, capsys: pytest.CaptureFixture[str]) -> int:
    assert run_command(["kv", "inspect", str(path), "--json"]) == 0
    return sum(found["pages"] for found in json.loads(capsys.readouterr().out)["namespaces"])


def test_inspect(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = pages(cache, capsys)
    assert count > 10
    assert run_command(["kv", "inspect", str(cache)]) == 0
    text = capsys.readouterr().out
    for word in (NAME, "engine", "page_tokens", "global", "local", tag_of("t").hex(), f"0 of {count}"):
        assert word in text
    assert "in motion" not in text
    store = open_store(cache)
    assert run_command(["kv", "inspect", str(cache)]) == 0
    assert f"process {os.getpid()}: numbers may be in motion" in capsys.readouterr().out
    store.close()
    (cache / NAME / "namespace.json").write_text("{}")
    assert run_command(["kv", "inspect", str(cache)]) == 0
    assert "cannot be used" in capsys.readouterr().out


def test_verify(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = pages(cache, capsys)
    assert run_command(["kv", "verify", str(cache)]) == 0
    captured = capsys.readouterr()
    assert f"good                           {count}" in captured.out and captured.err == f"Checking {NAME[:8]} ...\n"
    assert Vandal(cache / NAME, SLOT).do(Damage.STALE_INDEX) is False
    slab = cache / NAME / "slab-00000"
    slab.write_bytes(bytes(slab.stat().st_size))
    assert run_command(["kv", "verify", str(cache), "--dry-run", "--json"]) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["faults"] == {"header checksum": report["pages"] - report["good"]} and not captured.err
    assert pages(cache, capsys) == count
    assert run_command(["kv", "verify", str(cache)]) == 1
    assert "damaged: header checksum" in capsys.readouterr().out
    assert pages(cache, capsys) == report["good"] < count
    assert run_command(["kv", "verify", str(cache)]) == 0


def test_verify_with_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign(tmp_path / "cache", FaultPlan(), seed=1, cipher=PageCipher(b"k" * 32))
    campaign.run(1)
    campaign.store.close()
    key = tmp_path / "my key"
    key.write_bytes(b"k" * 32)
    verify = ["kv", "verify", str(tmp_path / "cache")]
    assert run_command([*verify, "--key-file", str(key)]) == 3
    assert f"chmod 600 '{key}'" in capsys.readouterr().err
    key.chmod(0o600)
    assert run_command([*verify, "--key-file", str(key)]) == 0
    assert "--key-file" not in capsys.readouterr().out
    assert run_command(verify) == 0
    assert "tag not checked (--key-file)" in capsys.readouterr().out
    key.write_bytes(b"x" * 32)
    assert run_command([*verify, "--key-file", str(key)]) == 3
    assert "Nothing was cleared" in capsys.readouterr().err


def test_purge_asks(cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    count = pages(cache, capsys)
    for answer, code, said in (("n\n", 1, "Nothing was del"), ("\n", 1, "Nothing was del"), ("", 3, "Give --yes.")):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert run_command(["kv", "purge", str(cache)]) == code
        told = capsys.readouterr()
        assert (
            "Delete everything" in told.err and said in told.out + told.err and (code == 1 or "\nerror: " in told.err)
        )
    assert pages(cache, capsys) == count
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run_command(["kv", "purge", str(cache)]) == 0
    assert f"Removed {count} pages" in capsys.readouterr().out
    assert pages(cache, capsys) == 0 and not (cache / NAME).exists()


@pytest.mark.parametrize("how", [["--salt", "t"], ["--tenant", tag_of("t").hex()], ["--namespace", NAME[:8]]])
def test_purge_a_part(cache: Path, capsys: pytest.CaptureFixture[str], how: list[str]) -> None:
    count = pages(cache, capsys)
    assert run_command(["kv", "purge", str(cache), "--yes", "--json", "--salt", "nobody"]) == 0
    assert json.loads(capsys.readouterr().out)["pages"] == 0 < count == pages(cache, capsys)
    assert run_command(["kv", "purge", str(cache), "--yes", *how]) == 0
    text = capsys.readouterr().out
    assert f"Removed {count} pages" in text and NAME in text
    assert ("deleted" in text) is (how[0] == "--namespace")
    assert pages(cache, capsys) == 0


@pytest.mark.parametrize("kept", [True, False])
def test_purge_takes_the_servers_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Of the setting where there is one, else of the directory; tenants by name and by salt are not the same."""
    path = tmp_path / "cache"
    store = open_store(path)
    secret = store.secret if kept else derive_secret("servers salt")
    tags = tenant_tag(secret, "alice"), tenant_tag(secret, "", "alice"), tenant_tag(secret, "b")
    for number, tag in enumerate(tags):
        page, waiter = make_page(number + 1, tag), Waiter(1)
        slots = range(4 * number, 4 * number + part_count(page))
        parts = [aligned_buffer(SLOT) for _ in slots]
        assert store.write_page(page, slots, parts, waiter.callback(0)) and waiter.wait() == [Outcome.OK]
    store.close()
    if not kept:
        monkeypatch.setenv("WICORE_KV__SALT", "servers salt")
    purge = ["kv", "purge", str(path), "--yes", "--json"]
    for how, removed in ((["--tenant-name", "c"], 0), (["--tenant-name", "alice"], 1), (["--salt", "alice"], 1)):
        assert run_command([*purge, *how]) == 0
        assert json.loads(capsys.readouterr().out)["pages"] == removed, how
    assert pages(path, capsys) == 1
    monkeypatch.delenv("WICORE_KV__SALT", raising=False)
    (path / "secret").unlink()
    assert run_command([*purge, "--salt", "alice"]) == 3 and "WICORE_KV__SALT" in capsys.readouterr().err
    (path / "secret").symlink_to("elsewhere")
    assert (
        run_command([*purge, "--salt", "alice"]) == 4
        and f"{path / 'secret'}: a symbolic link" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["inspect", "{none}"], 1, "kv.disk_path"),
        (["verify", "{none}"], 1, "kv.disk_path"),
        (["purge", "{none}", "--yes"], 1, "kv.disk_path"),
        (["purge", "{none}"], 1, "kv.disk_path"),  # said before the question
        (["purge", "{cache}", "-y", "--salt", "a", "--tenant", "b"], 3, "Give one"),
        (["purge", "{cache}", "-y", "--tenant", "b"], 3, "32 hexadecimal digits"),
        (["purge", "{cache}", "-y", "--namespace", "zz"], 1, "wicore kv inspect"),
        (["verify", "{cache}", "--key-file", "{none}"], 3, "umask 077"),
    ],
)
def test_mistakes_are_told_with_the_fix(
    cache: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, words: str
) -> None:
    where = {"none": str(cache / "none"), "cache": str(cache)}
    assert run_command(["kv", *(arg.format(**where) for arg in args)]) == code
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_server_keeps_its_directory(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(cache)
    for args in (["verify", str(cache)], ["purge", str(cache), "--yes"]):
        assert run_command(["kv", *args]) == 4
        assert f"process {os.getpid()}. Stop the server first" in capsys.readouterr().err
    store.close()


def test_a_tenant_is_purged_from_replicas_and_from_where_one_engine_served_with_another_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, home in enumerate((tmp_path, tmp_path / "replica-0", tmp_path / "replica-1")):
        home.mkdir(mode=0o700, exist_ok=True)
        write_file(Files(), home / "secret", bytes([number > 0] * 32))
        store, page, waiter = open_store(home), make_page(1, tenant_tag(bytes([number > 0] * 32), "alice")), Waiter(1)
        slots = range(part_count(page))
        parts = [aligned_buffer(SLOT) for _ in slots]
        assert store.write_page(page, slots, parts, waiter.callback(0)) and waiter.wait() == [Outcome.OK]
        store.close()
    assert run_command(["kv", "purge", str(tmp_path), "--yes", "--json", "--tenant-name", "alice"]) == 0
    assert json.loads(capsys.readouterr().out)["pages"] == 3
