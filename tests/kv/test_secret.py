"""The operator's secret: kept beside the pages, closed to others, and what names and tags need."""

from __future__ import annotations

import itertools
import os
import random
import stat
import time
from array import array
from hashlib import blake2b
from pathlib import Path

import pytest
from campaign import Stack
from disk_campaign import open_store
from fakes import make_core

from wicore_trt.config import KVSettings
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.disk import claim
from wicore_trt.kv.disk.claim import SECRET, derive_secret, list_unused, share_secret
from wicore_trt.types import GenerateRequest, SamplingParams

SEED = int.from_bytes(os.urandom(4), "little")


def test_events_do_not_let_anybody_guess_a_prompt() -> None:
    """A template that everybody knows and six digits of another tenant: nobody finds them from parents and keys."""
    rng = random.Random(SEED)
    core = make_core(kv=KVSettings(host_bytes=1 << 20, salt="s"), page_tokens=4, max_context=256)
    template, code = list(range(5, 41)), [rng.randrange(20, 24) for _ in range(4)]
    core.add(GenerateRequest("v", (*template, *code, 3), SamplingParams(temperature=0, max_tokens=1), cache_salt="v"))
    while core.has_work:
        core.step()
    core.scheduler.manager.events.publish_step()
    told = {
        page.index: page for found in core.scheduler.manager.events.take_snapshot().pages.values() for page in found
    }
    page = told[len(template) // 4]
    guesses = [array("I", guess).tobytes() for guess in itertools.product(range(20, 24), repeat=4)]
    assert array("I", code).tobytes() in guesses
    for payload, key, person in itertools.product(guesses, (b"", page.parent), (b"", b"wicore-kv-page")):
        for text in (page.parent + payload, payload):
            assert blake2b(text, digest_size=32, key=key, person=person).digest() != page.key, f"seed {SEED}"
    unkeyed = [blake2b(salt, digest_size=16, person=b"wicore-kv-tenant").digest() for salt in (b"v", b"salt" + b"v")]
    assert page.tenant not in unkeyed
    core.close()


def test_a_restart_has_the_secret_and_another_directory_has_not(tmp_path: Path) -> None:
    stores = [open_store(tmp_path / name) for name in "ab"]
    file = tmp_path / "a" / SECRET
    assert stores[0].secret == file.read_bytes() != stores[1].secret and len(stores[0].secret) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for store in stores:
        store.close()
    again = open_store(tmp_path / "a")
    assert again.secret == stores[0].secret
    again.close()


def test_one_engine_and_replicas_in_turns_keep_one_secret(tmp_path: Path) -> None:
    share_secret(tmp_path, 2)
    secrets = [(tmp_path / f"replica-{i}" / SECRET).read_bytes() for i in range(2)]
    alone = open_store(tmp_path)
    alone.close()
    assert [alone.secret] * 2 == secrets
    (tmp_path / SECRET).write_bytes(bytes(32))  # as an engine alone drew its own before
    share_secret(tmp_path, 3)
    assert {(tmp_path / f"replica-{i}" / SECRET).read_bytes() for i in range(3)} == {alone.secret}


def test_servers_that_start_at_once_share_one_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes; one is slow between what it reads and writes, so that the other's turn comes there."""
    write = claim.write_file
    monkeypatch.setattr(claim, "write_file", lambda *given: (time.sleep(delay), write(*given)))
    children = []
    for delay in (0.0, 0.05):
        if not (child := os.fork()):
            monkeypatch.setattr("secrets.token_bytes", lambda n: (time.sleep(0.2), os.urandom(n))[1])
            try:
                share_secret(tmp_path / "kv", 3)
                (tmp_path / f"seen-{delay}").write_bytes((tmp_path / "kv/replica-0" / SECRET).read_bytes())
            finally:
                os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    found = {path.read_bytes() for path in [*tmp_path.glob("seen-*"), *(tmp_path / "kv").glob(f"replica-*/{SECRET}")]}
    assert len(found) == 1 and len(list(tmp_path.glob("seen-*"))) == 2


def test_directories_of_another_number_of_replicas_are_told(tmp_path: Path) -> None:
    alone = open_store(tmp_path)
    alone.close()
    namespace = next(entry for entry in tmp_path.iterdir() if entry.is_dir())
    share_secret(tmp_path, 3)
    homes = [tmp_path / f"replica-{i}" for i in range(3)]
    assert list_unused(tmp_path, 3) == [namespace]
    assert list_unused(tmp_path, 2) == sorted([namespace, homes[2]])
    assert list_unused(tmp_path, 1) == homes
    assert list_unused(tmp_path / "none", 2) == []


@pytest.mark.parametrize("damage", ["gone", "short", "half written"])
def test_without_its_secret_a_cache_is_cold_and_goes_on(tmp_path: Path, damage: str) -> None:
    """Warm after a restart; after the loss of the secret nothing is found, nothing is wrong, and new pages are."""
    stack = Stack(tmp_path, seed=SEED, host_slots=400)
    prompts = [stack.tokens(24) for _ in range(3)]

    def found() -> int:
        hits = 0
        for tokens in prompts:
            pages_of = stack.manager.chain.derive_names("", "")
            keys: list[bytes] = []
            pages_of.extend_keys(keys, tokens)
            hits += sum(stack.tiers.disk.find_copy("global", key) is not None for key in keys)
        return hits

    for tokens in prompts:
        stack.add(tokens, answer=2)
    stack.settle()
    stack.settle_transfers()
    stack.restart()
    warm = found()
    assert warm >= 3 * 5
    file = tmp_path / SECRET
    stack.core.close()
    if damage == "gone":
        file.unlink()
    elif damage == "short":
        file.write_bytes(b"x" * 31)
    else:
        file.unlink()
        (tmp_path / f"{SECRET}.new").write_bytes(b"x" * 7)
    stack.open()
    assert found() == 0 and file.stat().st_size == 32
    for tokens in prompts:
        stack.add(tokens, answer=2)
    stack.settle()
    stack.settle_transfers()
    assert found() == warm and stack.wrong == 0
    stack.check_idle()
    stack.close()


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "directory", "writable"])
def test_a_secret_that_others_may_set_is_refused(tmp_path: Path, kind: str) -> None:
    home = tmp_path / "cache"
    home.mkdir()
    aside, file = tmp_path / "aside", home / SECRET
    aside.write_bytes(b"k" * 32)
    aside.chmod(0o600)
    if kind == "link":
        file.symlink_to(aside)
    elif kind == "hard link":
        file.hardlink_to(aside)
    elif kind == "pipe":
        os.mkfifo(file, 0o600)
    elif kind == "directory":
        file.mkdir()
    else:
        file.write_bytes(b"k" * 32)
        file.chmod(0o622)
    with pytest.raises(EnvironmentUnfitError, match=f"{file}: it is "):
        open_store(home)
    assert aside.read_bytes() == b"k" * 32


def test_a_salt_in_the_settings_takes_the_place_of_the_file(tmp_path: Path) -> None:
    """Two servers with one salt name pages alike wherever their directories are."""
    tags = []
    for name, salt in (("a", "salt"), ("b", "salt"), ("c", None)):
        stack = Stack(tmp_path / name, seed=SEED, salt=salt)
        tags.append(stack.manager.chain.derive_names("who", "").tag)
        stack.close()
    assert tags[0] == tags[1] != tags[2]
    assert len(derive_secret("\ud800")) == 32
