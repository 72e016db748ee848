"""No tenant ever meets another tenant's pages: 100,000 probes of names, slots and sealed parts (I19)."""

from __future__ import annotations

import os
import random

from wicore_trt.kv.disk.cipher import PageCipher
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.pages.page import Page

# Salts that a careless concatenation or normalisation would mix up.
SALTS = (
    "",
    "a",
    "A",
    "a ",
    " a",
    "aa",
    "a\0",
    "\0a",
    "ä",
    "a\u0308",
    "a" * 64,
    "a" * 65,
    "b",
    "ab",
    "a,b",
    "0",
    "00",
    "1",
)
PAGE_TOKENS = 4


def prompts(rng: random.Random, count: int, pages: int) -> list[list[int]]:
    """Prompts that share prefixes, as chats do."""
    shared = [rng.randrange(1000) for _ in range(pages * PAGE_TOKENS)]
    cuts = [rng.randrange(pages) * PAGE_TOKENS for _ in range(count)]
    return [shared[:cut] + [rng.randrange(1000) for _ in range(pages * PAGE_TOKENS - cut)] for cut in cuts]


def chain(keys: KeyChain, tokens: list[int], salt: str) -> list[Page]:
    names, found = keys.derive_names("", salt), list[bytes]()
    names.extend_keys(found, tokens)
    return [Page(k, "global", i, found[i - 1] if i else None, names.tag) for i, k in enumerate(found)]


def test_names_of_one_tenant_are_never_names_of_another() -> None:
    """Each tenant asks for the very prompts of every other one: some 100,000 look-ups, no hit."""
    rng = random.Random(os.urandom(8))
    keys, asked = KeyChain("engine", PAGE_TOKENS), prompts(rng, 75, 8)
    held = {salt: {p.name for tokens in asked for p in chain(keys, tokens, salt)} for salt in SALTS}
    probes = hits = 0
    for salt in SALTS:
        assert held[salt] == {p.name for tokens in asked for p in chain(keys, tokens, salt)}, "own pages are found"
        for other in SALTS:
            if other != salt:
                probes += len(held[other])
                hits += len(held[salt] & held[other])
    assert probes > 85_000 and hits == 0
    assert len({keys.derive_names("", salt).tag for salt in SALTS}) == len(SALTS)


def test_parts_sealed_for_one_tenant_open_for_no_other() -> None:
    """Even one who knows the page's name and all its numbers, and holds the master key's process."""
    rng = random.Random(os.urandom(8))
    cipher, tags = PageCipher(os.urandom(32)), [KeyChain("engine", 4).derive_names("", salt).tag for salt in SALTS]
    opened = 0
    for i in range(1000):
        owner, data = rng.choice(tags), rng.randbytes(64)
        page = Page(rng.randbytes(32), "global", i, None, owner)
        sealed, text = cipher.seal(page, 0, 1, i, b"", memoryview(data))
        for tag in tags:
            thief, out = Page(page.key, "global", i, None, tag), bytearray(text)
            try:
                cipher.open(thief, 0, 1, i, b"", sealed, memoryview(out))
            except ValueError:
                continue
            opened += 1
            assert tag == owner and out == data
    assert opened == 1000, "only the owner"
