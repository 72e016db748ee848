"""API keys: the file's lines, its mode, and that no key is ever shown."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from wicore_trt.access.keys import EVERYBODY, Identity, KeyRing
from wicore_trt.config import resolve_settings
from wicore_trt.core.shares import Gate
from wicore_trt.errors import ConfigError, QueueFullError
from wicore_trt.kv.disk.cipher import load_key_file

ALICE, BOB, OPS = "alice-secret-0123456789", "bob-secret-0123456789", "ops-secret-0123456789"


def written(path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_keys_stand_for_tenants_and_operators(tmp_path):
    text = f"# keys\n\nalice:{ALICE}\n  alice:{ALICE}-new  \nbob:{BOB}\nops:{OPS}:operator\n"
    ring = KeyRing.from_files("the single key", written(tmp_path / "keys", text))
    assert ring.find_identity(ALICE) == ring.find_identity(f"{ALICE}-new") == Identity("alice")
    assert ring.find_identity(BOB) == Identity("bob") and ring.find_identity(OPS) == Identity("ops", operator=True)
    assert ring.find_identity("the single key") == EVERYBODY == Identity("", operator=True)
    for wrong in ("", ALICE[:-1], ALICE.upper(), f" {ALICE}", "alice", "\udcff", "x" * 10_000):
        assert ring.find_identity(wrong) is None
    assert not any(key in repr(vars(ring)) for key in (ALICE, BOB, OPS, "the single key"))


def test_an_identity_knows_what_its_key_stands_for_later(tmp_path):
    """By a name that another process, which reads the same key, gives it too."""
    alice, bob = "a" * 16, "b" * 16
    keys = KeyRing({alice: Identity("alice"), bob: Identity("bob")})
    one, other = keys.find_identity(alice), keys.find_identity(bob)
    assert keys.refresh_identity(one) == one and one.key != other.key and alice.encode() not in one.key
    keys.replace_keys(KeyRing({alice: Identity("carol", operator=True)}))
    assert keys.refresh_identity(one) == keys.find_identity(alice) == Identity("carol", operator=True)
    assert keys.refresh_identity(other) is None
    ask = "from wicore_trt.access.keys import *; "
    ask += f"print(KeyRing({{{alice!r}: EVERYBODY}}).find_identity({alice!r}).key.hex())"
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert told.strip() == one.key.hex()
    assert KeyRing({}).refresh_identity(EVERYBODY) == EVERYBODY and keys.refresh_identity(EVERYBODY) is None


def test_without_keys_everybody_is_the_one_trusted_user():
    ring = KeyRing.from_files(None, None)
    assert not ring.needed and ring.find_identity("") == ring.find_identity("anything") == EVERYBODY


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        (f"alice:{ALICE}\nbob\n", "line 2"),
        (f"a b:{ALICE}", "line 1: a tenant's name"),
        (f":{ALICE}", "line 1: a tenant's name"),
        ("alice:short", "line 1: a key has"),
        (f"alice:{ALICE} trailing", "line 1: a key has"),
        (f"alice:{ALICE}:root", "line 1: behind a key"),
        (f"alice:{ALICE}:", "line 1: behind a key"),
        (f"alice:{ALICE}:requests=0", "line 1: behind a key"),
        (f"alice:{ALICE}:tokens=1e9", "line 1: behind a key"),
        (f"alice:{ALICE}:tokens=1:tokens=2", "line 1: behind a key"),
        (f"alice:{ALICE}:operator:operator", "line 1: behind a key"),
        (f"alice:{ALICE}\nbob:{ALICE}", "line 2: the key is there already"),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_no_key_is_shown(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said) as error:
        KeyRing.from_files(None, written(tmp_path / "keys", text))
    assert "secret" not in str(error.value) and "short" not in str(error.value)


def test_a_file_that_others_may_read_or_nobody_can_is_refused(tmp_path):
    path = written(tmp_path / "my keys", f"alice:{ALICE}", 0o640)
    with pytest.raises(ConfigError, match="chmod 600 '.*my keys'$"):
        KeyRing.from_files(None, path)
    with pytest.raises(ConfigError, match="cannot read"):
        KeyRing.from_files(None, str(tmp_path / "missing"))
    (tmp_path / "binary").write_bytes(os.urandom(64) + b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        KeyRing.from_files(None, str(tmp_path / "binary"))
    with pytest.raises(ConfigError, match=r"also in server\.keys_file"):
        KeyRing.from_files(ALICE, written(tmp_path / "keys", f"alice:{ALICE}"))


def test_the_single_key_is_not_printed(monkeypatch):
    monkeypatch.setenv("WICORE_SERVER__API_KEY", OPS)
    monkeypatch.setenv("WICORE_SERVER__KEYS_FILE", "/etc/wicore/keys")
    text = resolve_settings(None).render()
    assert OPS not in text and 'keys_file: "/etc/wicore/keys"' in text


def test_a_tenant_takes_half_of_the_places_and_another_finds_room():
    gate = Gate(8, "calls")
    held = []

    def take(tenant: str) -> bool:
        place = gate.hold_place(tenant)
        try:
            place.__enter__()
        except Exception:
            return False
        held.append(place)
        return True

    assert [take("flood") for _ in range(6)] == [True] * 4 + [False] * 2
    assert [take("polite") for _ in range(3)] == [True, True, False]
    assert [take("") for _ in range(3)] == [True, True, False]
    for place in held:
        place.__exit__(None, None, None)
    assert gate.taken_places == 0 and take("flood")


def test_refusals_tell_a_tenant_nothing_of_the_others():
    """Neither the text nor the number of places at which it comes count them more finely than sixteenths."""
    texts, counts = set(), set()
    for others in (*range(1, 65), 1000, 1023, 1024):
        gate, own = Gate(1024, "calls"), 0
        with ExitStack() as held:
            for _ in range(others):
                held.enter_context(gate.hold_place(""))
            with pytest.raises(QueueFullError) as error:
                while True:
                    held.enter_context(gate.hold_place("curious"))
                    own += 1
        texts.add((str(error.value), error.value.retry_after_s))
        if others <= 64:
            counts.add(own)
    assert len(texts) == 1 and counts == {480}, (texts, counts)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    """A pipe would hold the process up that reads it, for ever; what comes out of one comes once."""
    os.mkfifo(tmp_path / "fifo", 0o600)
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as pipe:
        pipe.write(f"alice:{ALICE}\n")
        pipe.flush()
        for path in (str(tmp_path / "fifo"), f"/dev/fd/{reader}"):
            with pytest.raises(ConfigError, match="a named pipe, not a regular file") as error:
                KeyRing.from_files(None, path)
            assert "again on reload" in str(error.value)
    with pytest.raises(ConfigError, match="a directory"):
        KeyRing.from_files(None, str(tmp_path))
    with pytest.raises(ConfigError, match="not a regular file"):
        load_key_file(tmp_path / "fifo")
