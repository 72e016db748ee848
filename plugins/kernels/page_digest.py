"""Digests of KV pages where they lie, at the speed of memory: `runtime.page_digest` says what they are.

It must not know what a page holds. Invariant: it reads the bytes of the pages it is given and adds to their sums; no
other byte is touched.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.step_layout import DIGEST_BLOCK_BYTES

PAIRS = 512
CHUNKS = DIGEST_BLOCK_BYTES // (8 * PAIRS)


@triton.jit
def nh(x, y, key_x, key_y):
    return (x + key_x).to(tl.uint64) * (y + key_y).to(tl.uint64)


@triton.jit
def page_digest(memory, offsets, lengths, key, sums, second, PAIRS: tl.constexpr, CHUNKS: tl.constexpr):
    """sums (int64 [pages, 2], zeros before) += what these chunks of page p add to its digest. Its words are
    memory (uint32)[offsets[p] ... + lengths[p]], a multiple of 4 of them; key (uint32) as `PageDigest.words`, whose
    second level has `second` pairs. Grid: (cdiv(most chunks of a page, CHUNKS), pages).
    """
    page = tl.program_id(1)
    words = tl.multiple_of(tl.load(lengths + page), 4)
    start = memory + tl.multiple_of(tl.load(offsets + page), 4)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    i = tl.arange(0, PAIRS)
    at = chunk[:, None] * (2 * PAIRS) + i[None, :]
    m = tl.load(start + at, mask=at < words, other=0)
    n = tl.load(start + at + PAIRS, mask=at + PAIRS < words, other=0)
    b = key + PAIRS + 1
    s = tl.sum(nh(m, n, tl.load(key + i)[None, :], tl.load(b + i)[None, :]), axis=1)
    t = tl.sum(nh(m, n, tl.load(key + i + 1)[None, :], tl.load(b + i + 1)[None, :]), axis=1)
    here = chunk * (2 * PAIRS) < words
    c = b + PAIRS + 1 + 2 * chunk
    e = c + second
    c0, e0 = tl.load(c, mask=here, other=0), tl.load(e, mask=here, other=0)
    c1, e1 = tl.load(c + 1, mask=here, other=0), tl.load(e + 1, mask=here, other=0)
    c2, e2 = tl.load(c + 2, mask=here, other=0), tl.load(e + 2, mask=here, other=0)
    s_low, s_high = s.to(tl.uint32), (s >> 32).to(tl.uint32)
    t_low, t_high = t.to(tl.uint32), (t >> 32).to(tl.uint32)
    nothing = tl.zeros([CHUNKS], tl.uint64)
    first = tl.where(here, nh(s_low, s_high, c0, e0) + nh(t_low, t_high, c1, e1), nothing)
    other = tl.where(here, nh(s_low, s_high, c1, e1) + nh(t_low, t_high, c2, e2), nothing)
    tl.atomic_add(sums + 2 * page, tl.sum(first, axis=0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums + 2 * page + 1, tl.sum(other, axis=0).to(tl.int64, bitcast=True), sem="relaxed")


def page_digest_spec() -> KernelSpec:
    """The kernel; it is the same for all pages."""
    signature = {"memory": "*u32", "offsets": "*i64", "lengths": "*i64", "key": "*u32", "sums": "*i64", "second": "i64"}
    constants = {"PAIRS": PAIRS, "CHUNKS": CHUNKS}
    return KernelSpec("page_digest", page_digest, signature, constants, frozenset({"memory"}), num_warps=4)
