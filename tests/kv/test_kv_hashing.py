"""Page keys: deterministic across processes, different as soon as one input differs (I1)."""

from __future__ import annotations

import pickle
import subprocess
import sys
from array import array
from hashlib import blake2b
from operator import eq, ne

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.pages.page import Page

SECRET = b"s" * 32


def keys_of(tokens, *, fingerprint="engine", page_tokens=4, who="", salt="", rank=0, world=1, secret=SECRET):
    keys: list[bytes] = []
    chain = KeyChain(fingerprint, page_tokens, rank=rank, world=world, secret=secret)
    chain.derive_names(who, salt).extend_keys(keys, tokens)
    return keys


def test_only_full_pages_have_keys():
    assert [len(keys_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_extending_step_by_step_equals_extending_at_once():
    names, keys, tokens = KeyChain("engine", 4, secret=SECRET).derive_names("", "tenant"), [], list(range(40))
    for n in range(41):
        names.extend_keys(keys, tokens[:n])
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
        keys_of(tokens, who="a"),
        keys_of(tokens, who="a", salt="a"),
        keys_of(tokens, who="ab", salt="c"),
        keys_of(tokens, who="a", salt="bc"),
        keys_of(tokens, fingerprint="engine\0", who=""),
        keys_of(tokens, secret=b"t" * 32),
        keys_of(tokens, rank=1, world=2),
        keys_of(tokens, rank=0, world=2),
    ]
    everything = [key for keys in variants for key in keys]
    assert len(set(everything)) == len(everything)


def test_keys_are_equal_in_another_process():
    program = (
        "from wicore_trt.kv.pages.hashing import KeyChain\n"
        "keys = []\n"
        "KeyChain('engine', 4, secret=b's' * 32).derive_names('', 'tenant').extend_keys(keys, range(16))\n"
        "print(b''.join(keys).hex())"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert bytes.fromhex(out) == b"".join(keys_of(list(range(16)), salt="tenant"))


def test_without_a_secret_nobody_has_the_names_again():
    tokens = list(range(16))
    assert not set(keys_of(tokens, secret=None)) & set(keys_of(tokens, secret=None))


def test_a_tag_is_the_tenants_and_no_salt_makes_another_tenant():
    """Else a client could multiply its quota, or read events of another one, by its choice of salt."""
    names = KeyChain("engine", 4, secret=SECRET).derive_names
    assert (
        names("who", "a").tag
        == names("who", "b").tag
        == KeyChain("other", 8, secret=SECRET).derive_names("who", "").tag
    )
    assert names("who", "a").scope != names("who", "b").scope
    assert names("", "a").tag != names("", "b").tag
    tags = [names(who, salt).tag for who, salt in [("", ""), ("", "who"), ("who", ""), ("", "a"), ("a", "")]]
    assert len(set(tags)) == len(tags)
    assert names("who", "").tag != KeyChain("engine", 4).derive_names("who", "").tag, "a tag needs the secret"


@given(st.text(alphabet=st.characters(codec=None), max_size=4), st.text(alphabet=st.characters(codec=None), max_size=4))
def test_any_text_is_a_tenant_and_a_salt(who, salt):
    """Lone surrogates too, which UTF-8 has no bytes for and which a request through Python may carry."""
    names = KeyChain("engine", 4, secret=SECRET).derive_names
    for other in ("\ud800", "a"):
        assert (names(who, salt).scope == names(other, other).scope) == (who == salt == other)


def test_names_take_the_secret():
    """One who is told keys and parents, as in events and on disk, tries the tokens of a page that he nearly knows."""
    tokens, page = list(range(40)), 4
    keys = keys_of(tokens, salt="customer")
    told, parent = keys[5], keys[4]
    payload = array("I", tokens[5 * page : 6 * page]).tobytes()
    for key in (b"", parent, keys[0]):
        for person in (b"wicore-kv-page", b""):
            for text in (parent + payload, payload):
                assert blake2b(text, digest_size=32, key=key, person=person).digest() != told
    strangers = KeyChain("engine", page, secret=b"x" * 32).derive_names("", "customer")
    guessed = list(keys[:5])
    strangers.extend_keys(guessed, tokens[:24])
    assert guessed[5] != told


def test_pages_are_equal_by_what_names_them():
    """Whoever compares them, and however: a copy that another process sent is the same page."""
    page = Page(bytes(32), "global", 3, bytes(31) + b"1", bytes(16), b"abcd")
    copy, unknown = pickle.loads(pickle.dumps(page)), structs.replace(page, tokens=b"")
    assert copy is not page and copy.tokens == b"abcd" and len({page, copy, unknown}) == 1
    for same in (copy, unknown):
        assert (eq(same, page), ne(same, page)) == (True, False)
    others: tuple[dict[str, object], ...] = (
        {"key": bytes(31) + b"2"}, {"group": "local"}, {"index": 4}, {"parent": None}, {"tenant": b"1" * 16},
    )  # fmt: skip
    for other in (*(structs.replace(page, **changed) for changed in others), "page"):
        assert (eq(page, other), ne(page, other)) == (False, True)
