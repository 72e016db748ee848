"""Digests of pages: numpy and the native library against Python's integers, and what they notice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from wicore_trt.runtime import page_digest
from wicore_trt.runtime.page_digest import CHUNK_BYTES, PAIRS, PageDigest

KEY = bytes(range(32))


def definition(digest: PageDigest, page: bytes) -> bytes:
    """The formulas of the module, word by word."""
    page += bytes(-len(page) % CHUNK_BYTES)
    m = [int.from_bytes(page[i : i + 4], "little") for i in range(0, len(page), 4)]
    words = [int(word) for word in digest.words]
    a, b = words[: PAIRS + 1], words[PAIRS + 1 : 2 * PAIRS + 2]
    c, e = words[2 * PAIRS + 2 :][: digest.second_pairs], words[2 * PAIRS + 2 :][digest.second_pairs :]

    def nh(x: int, y: int, key_x: int, key_y: int) -> int:
        return ((x + key_x) % 2**32) * ((y + key_y) % 2**32)

    pairs = []
    for at in range(0, len(m), 2 * PAIRS):
        for t in (0, 1):
            s = sum(nh(m[at + i], m[at + PAIRS + i], a[i + t], b[i + t]) for i in range(PAIRS)) % 2**64
            pairs.append((s % 2**32, s >> 32))
    sums = [sum(nh(x, y, c[j + t], e[j + t]) for j, (x, y) in enumerate(pairs)) % 2**64 for t in (0, 1)]
    return b"".join(s.to_bytes(8, "little") for s in sums)


@pytest.fixture(params=["numpy", "native"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(page_digest, "_library", lambda: None)
    elif page_digest._library() is None:
        pytest.skip("the native kernels were not built")
    return str(request.param)


@pytest.mark.parametrize("size", [4, 4092, 4096, 4100, 70 * 4096, 70 * 4096 + 128])
def test_the_digest_is_what_its_definition_says(library: str, size: int) -> None:
    digest, page = PageDigest(KEY, 70 * 4096 + 128), random.Random(size).randbytes(size)
    assert digest.compute_digest([memoryview(page)]) == definition(digest, page)
    ones = b"\xff" * size  # sums overflow
    assert digest.compute_digest([memoryview(ones)]) == definition(digest, ones)


def test_the_parts_of_a_page_make_no_difference(library: str) -> None:
    digest, page = PageDigest(KEY, 1 << 20), memoryview(random.Random(3).randbytes(11 * 4096 + 64))
    whole = digest.compute_digest([page])
    assert digest.compute_digest([page[:4096], page[4096 : 9 * 4096], page[9 * 4096 :]]) == whole
    assert PageDigest(KEY, 1 << 22).compute_digest([page]) != whole, "the key's second part begins elsewhere"


def test_any_bit_and_any_two_words_are_noticed(library: str) -> None:
    rng, digest = random.Random(5), PageDigest(KEY, 3 * 4096)
    page = np.frombuffer(rng.randbytes(2 * 4096 + 512), np.uint8).copy()
    before = digest.compute_digest([memoryview(page)])
    for bit in [rng.randrange(len(page) * 8) for _ in range(2000)]:
        page[bit // 8] ^= 1 << bit % 8
        assert digest.compute_digest([memoryview(page)]) != before, f"bit {bit}"
        page[bit // 8] ^= 1 << bit % 8
    words = page.view("<u4")
    for _ in range(2000):
        i, j = rng.sample(range(len(words)), 2)
        words[[i, j]] = words[[j, i]]
        assert (digest.compute_digest([memoryview(page)]) == before) == (words[i] == words[j])
        words[[i, j]] = words[[j, i]]
    assert digest.compute_digest([memoryview(page)]) == before


def test_another_key_is_another_digest(library: str) -> None:
    page = memoryview(bytes(8192))
    found = {PageDigest(bytes([i]) * 32, 8192).compute_digest([page]) for i in range(50)}
    assert len(found) == 50


def test_sums_that_collide_for_one_iteration_do_not_for_both(library: str) -> None:
    """With one iteration a page collides with itself less one word where its partner's key is zero: such a key is made
    here. The other iteration has another key there."""
    digest = PageDigest(KEY, 4096)
    digest.words[PAIRS + 1 + 7] = 0  # b[7], so m[7] times m[512 + 7] = 0 is nothing in iteration 0
    page = np.zeros(1024, "<u4")
    before = digest.compute_digest([memoryview(page)])  # type: ignore[arg-type]
    page[7] = 12345
    assert digest.compute_digest([memoryview(page)]) != before  # type: ignore[arg-type]
