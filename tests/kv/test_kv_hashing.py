"""Page keys: deterministic across processes, different as soon as one input differs."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from wicore_trt.kv.hashing import KeyChain


def keys_of(tokens, *, fingerprint="engine", page_tokens=4, salt="", rank=0, world=1):
    keys: list[bytes] = []
    KeyChain(fingerprint, page_tokens, rank=rank, world=world).extend(keys, tokens, salt)
    return keys


def test_only_full_pages_have_keys():
    assert [len(keys_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_extending_step_by_step_equals_extending_at_once():
    chain, keys, tokens = KeyChain("engine", 4), [], list(range(40))
    for n in range(41):
        chain.extend(keys, tokens[:n], "tenant")
    assert keys == keys_of(tokens, salt="tenant")


@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=24), st.integers(0, 7), st.integers(0, 2**32 - 1))
def test_a_changed_token_changes_its_page_and_all_later_ones(tokens, position, token):
    changed = [*tokens[:position], token, *tokens[position + 1 :]]
    before, after = keys_of(tokens), keys_of(changed)
    if token == tokens[position]:
        assert before == after
    else:
        assert before[: position // 4] == after[: position // 4]
        assert not set(before[position // 4 :]) & set(after[position // 4 :])


def test_every_part_of_the_identity_changes_every_key():
    tokens = list(range(16))
    variants = [
        keys_of(tokens),
        keys_of(tokens, fingerprint="other"),
        keys_of(tokens, page_tokens=8),
        keys_of(tokens, salt="a"),
        keys_of(tokens, salt="b"),
        keys_of(tokens, rank=1, world=2),
        keys_of(tokens, rank=0, world=2),
    ]
    everything = [key for keys in variants for key in keys]
    assert len(set(everything)) == len(everything)


def test_keys_are_equal_in_another_process():
    program = (
        "from wicore_trt.kv.hashing import KeyChain\n"
        "keys = []\n"
        "KeyChain('engine', 4).extend(keys, range(16), 'tenant')\n"
        "print(b''.join(keys).hex())"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert bytes.fromhex(out) == b"".join(keys_of(list(range(16)), salt="tenant"))
