"""The door for files from outside: regular files inside of a directory, bounded, or an error in one line (I23)."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from wicore_trt.errors import CheckpointError, EngineFormatError
from wicore_trt.files import MAX_DEPTH, UntrustedFiles, is_present, make_printable, quote_arg


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 38)


def test_a_file_that_this_user_may_not_read_is_not_to_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.touch()

    def refuse(name: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="config.json cannot be read: Permission denied. Let this user read it"):
        UntrustedFiles(tmp_path, fix="Download it again.").read_bytes(path)


@pytest.mark.parametrize("within", [True, False], ids=["inside", "anywhere"])
@pytest.mark.parametrize("make", [fifo, unix_socket, device, folder, dangling, loop, sparse])
def test_what_is_no_file_of_that_size_is_refused(
    make: Callable[[Path], None], within: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.json"
    make(path)
    door = UntrustedFiles(tmp_path if within else None, EngineFormatError, fix="Download it again.")
    for read in (
        door.read_bytes,
        door.read_text,
        door.read_json,
        lambda p: door.copy_file(p, tmp_path / "copy", limit=1 << 20),
    ):
        with pytest.raises(EngineFormatError, match=r"config\.json") as caught:
            read(path)
        assert "\n" not in str(caught.value)
    assert is_present(path)
    assert not (tmp_path / "copy").exists()


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x\.json is missing"):
        UntrustedFiles().read_json(tmp_path / "x.json")
    assert not is_present(tmp_path / "x.json")
    (tmp_path / "file").write_text("x")
    assert not is_present(tmp_path / "file/below")
    for name in ("a\0b", "\ud800"):  # a recipe may have either, no file system has
        assert not is_present(tmp_path / name)


def test_links_stay_inside(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "real").mkdir(parents=True)
    (model / "real/a.json").write_text("{}")
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    (model / "inside.json").symlink_to("real/a.json")
    (model / "outside.json").symlink_to("../secret.json")
    (model / "folder").symlink_to("..")
    door = UntrustedFiles(model)
    assert door.read_json(model / "inside.json") == {}
    for name in ("outside.json", "folder/secret.json"):
        with pytest.raises(CheckpointError, match="outside of"):
            door.read_json(model / name)
    assert UntrustedFiles().read_json(model / "outside.json") == {"secret": 1}  # named by the user himself
    (tmp_path / "alias").symlink_to("model")
    assert UntrustedFiles(tmp_path / "alias").read_json(tmp_path / "alias/inside.json") == {}


def test_snapshots_of_the_hub_cache_link_to_their_own_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "0123").write_text("{}")
    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    (snapshot / "other.json").symlink_to("../../../secret.json")
    door = UntrustedFiles(snapshot)
    assert door.read_json(snapshot / "config.json") == {}
    with pytest.raises(CheckpointError, match="outside of"):
        door.read_json(snapshot / "other.json")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is not valid JSON"),
        (b"[]", "holds a list where a JSON object belongs"),
        (b"null", "holds null"),
        (b"\xff{}", r"cannot be read as UTF-8 \(byte 0"),
        (b"\xef\xbb\xbf{}", "is not valid JSON"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' stands twice"),
        (b'{"a": NaN}', "NaN is no JSON number that a float holds"),
        (b'{"a": [-Infinity]}', "-Infinity is no JSON number that a float holds"),
        (b'{"a": 1e999}', "1e999 is no JSON number that a float holds"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", f"more than {MAX_DEPTH} deep"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, f"more than {MAX_DEPTH} deep"),
    ],
)
def test_bad_json(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"engine\.json .*{reason}"):
        UntrustedFiles(tmp_path).read_json(path)


def test_good_json(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, {"b": "ü \U0001f600"}], "deep": json.loads("[" * 30 + "]" * 30)}
    for ascii_only in (True, False):
        (tmp_path / "x.json").write_text(json.dumps(value, ensure_ascii=ascii_only), encoding="utf-8")
        assert UntrustedFiles(tmp_path).read_json(tmp_path / "x.json") == value


def test_limits_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 100)
    assert UntrustedFiles().read_bytes(path, limit=100) == b"x" * 100
    assert UntrustedFiles().copy_file(path, tmp_path / "copy", limit=100).read_bytes() == b"x" * 100
    for refused in (
        lambda: UntrustedFiles().read_bytes(path, limit=99),
        lambda: UntrustedFiles().copy_file(path, tmp_path / "c2", limit=99),
    ):
        with pytest.raises(CheckpointError, match="has 100 bytes, more than the 99"):
            refused()
    with pytest.raises(FileExistsError):
        UntrustedFiles().copy_file(path, tmp_path / "copy", limit=100)


def test_errors_while_reading_are_the_doors(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    with (
        pytest.raises(CheckpointError, match="x cannot be read: Input/output error"),
        UntrustedFiles().open_file(tmp_path / "x"),
    ):
        raise OSError(5, "Input/output error")


def test_quoted_words_come_back_from_a_shell() -> None:
    words = [
        "plain",
        "with space",
        "two  blanks",
        "'q\"",
        "$(touch x)",
        "a\nb",
        "ü\U0001f600",
        "%s{}",
        "back\\slash\t'",
        "\udcff",
    ]
    for word in words:
        text = quote_arg(word)
        assert "\n" not in text
        out = subprocess.run(["bash", "-c", f"printf %s {text}"], capture_output=True, check=True).stdout
        assert out == os.fsencode(word)
    assert shlex.split(quote_arg("-rf")) == ["./-rf"]


def test_printable_spells_bytes_out() -> None:
    assert make_printable("by\udcfftes ü") == "by\\xfftes ü"
