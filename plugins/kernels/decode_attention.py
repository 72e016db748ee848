"""Attention of one query row per sequence over paged KV, with the keys of a sequence split over programs.

Knows pages, windows and grouped queries; not models. Softmax, partial results and sums are float32; operands of both
products have the queries' type, over E4M3 pages float16. Invariants: a row's result depends on its own sequence and on
the configuration alone: splits follow from the sequence's length, and splits are added in order whoever adds them. A
slot that the query does not see is never read, nor is page -1. A page that it sees and that is absent makes the row
NaN; a row of length 0 is 0. Lengths lie on the device, so one CUDA graph serves all of them.

Query heads of HEADS neighbouring KV heads are the rows of one tile, block-diagonal over the KV heads' columns: rows
pad to 16 anyway, so this costs no more products than a tile per KV head, HEADS times fewer exponentials, and reads KV
in runs of HEADS * D. Split softmax: arXiv:2311.01282; online softmax: arXiv:2205.14135.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.e4m3 import decode, halves
from wicore_trt.plugins.kernels.order import order_columns
from wicore_trt.plugins.kernels.turns import take_turn

LOG2_E = tl.constexpr(1.4426950408889634)
CHUNK = tl.constexpr(16)
"""Splits that are added at once."""


@triton.jit
def half_queries(q):
    """float16 queries [rows, columns] and the power of two per row that they were divided by.

    float16 holds every E4M3 value, and what a row loses is below 2**-24 of its largest element.
    """
    wide = q.to(tl.float32)
    bits = tl.max(tl.abs(wide), axis=1).to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 1 << 23), 253 << 23)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    return (wide * inverse[:, None]).to(tl.float16), bits.to(tl.float32, bitcast=True)


@triton.jit
def widen(x, dtype: tl.constexpr, FP8: tl.constexpr):
    """Stored keys or values as operands. FP8: 0 none, 1 E4M3 by integer arithmetic (sm80), 2 by instructions (sm89)."""
    if FP8 == 2:
        x = x.to(tl.float8e4nv, bitcast=True)
    elif FP8 == 1:
        x = decode(x)
    return x.to(dtype)


@triton.jit
def widen_pairs(x, FP8: tl.constexpr):
    """float16 operands of the even and the odd elements of E4M3 pairs (uint16).

    Pairs, because operands come out of shared memory 16 bits at a time: single bytes of values, whose rows are what is
    summed over, would be loaded one by one.
    """
    if FP8 == 2:
        even, odd = halves(x)
    else:
        even, odd = decode((x & 0xFF).to(tl.uint8)).to(tl.float16), decode((x >> 8).to(tl.uint8)).to(tl.float16)
    return even, odd


@triton.jit
def _combine_head(partials, stats, out, n_splits, used, D: tl.constexpr):
    """One head's result from its `used` splits; the pointers are the head's own. `.cg`: other programs wrote these."""
    i, d = tl.arange(0, CHUNK), tl.arange(0, D)
    top = -float("inf")
    for c in range(0, used, CHUNK):
        top = tl.maximum(top, tl.max(tl.load(stats + c + i, c + i < used, -float("inf"), cache_modifier=".cg"), 0))
    base = tl.where(top == -float("inf"), 0.0, top)
    acc, total = tl.zeros([D], tl.float32), 0.0
    for c in range(0, used, CHUNK):
        there = c + i < used
        fade = tl.exp2(tl.load(stats + c + i, there, -float("inf"), cache_modifier=".cg") - base)
        total += tl.sum(tl.load(stats + n_splits + c + i, there, 0.0, cache_modifier=".cg") * fade, 0)
        values = tl.load(partials + (c + i)[:, None] * D + d, there[:, None], 0.0, cache_modifier=".cg")
        acc += tl.sum(values * fade[:, None], 0)
    tl.store(out + d, (acc / total).to(out.dtype.element_ty))


@triton.jit
def _combine_if_last(arrived, partials, stats, out, heads, n_splits, used, LIVE: tl.constexpr, D: tl.constexpr):
    """`_combine_head` of a group's LIVE heads from row `heads` on, by the last of its `used` programs."""
    # Every thread's stores are before the barrier, and the counter releases and acquires for all of them.
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == used - 1:
        for h in range(LIVE):
            at = heads + h
            parts, found = partials + at * n_splits * D, stats + at * 2 * n_splits
            _combine_head(parts, found, out + h * D, n_splits, used, D)
        tl.store(arrived, 0)


@triton.jit
def _take_scores(scores, top, total, hidden, scale):
    """Take the scores of a block of keys into the online softmax: (top, total) before and after, the block's weights,
    and what earlier results fade by.

    `hidden` is added to the scores: 0 for a key to use, -inf for one that is not seen, NaN for one that is not there.
    `top` is the largest score so far in units of log2, `total` the sum of weights.
    """
    scores = scores * scale[:, None] + hidden[None, :]
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    return new_top, total * fade + tl.sum(weights, axis=1), weights, fade[:, None]


@triton.jit
def _take_pairs(keys, values, there, query_even, query_odd, top, total, hidden, scale, even, odd, FP8: tl.constexpr):
    """`_take_scores` of a block of E4M3 pairs at pointers `keys` and `values` (uint16), and its values into the sums of
    the even and the odd columns: (top, total, even, odd)."""
    k_even, k_odd = widen_pairs(tl.load(keys, there[:, None], 0), FP8)
    v_even, v_odd = widen_pairs(tl.load(values, there[:, None], 0), FP8)
    scores = tl.dot(query_odd, tl.trans(k_odd), tl.dot(query_even, tl.trans(k_even)))
    top, total, weights, fade = _take_scores(scores, top, total, hidden, scale)
    even = tl.dot(weights.to(tl.float16), v_even, even * fade)
    odd = tl.dot(weights.to(tl.float16), v_odd, odd * fade)
    return top, total, even, odd


@triton.jit
def splits_of(length, window, n_splits, BLOCK_K: tl.constexpr, LEAST: tl.constexpr):
    """(first key the query sees, blocks from there on, splits in use) of a sequence: split z takes blocks
    [z * blocks // used, (z + 1) * blocks // used), about LEAST of them or more."""
    low = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    blocks = tl.cdiv(length - low, BLOCK_K)
    return low, blocks, tl.maximum(tl.minimum(n_splits, tl.cdiv(blocks, LEAST)), 1)


@triton.jit
def split_decode(
    q,
    out,
    pool,
    tables,
    kv_lengths,
    kv_scale,
    partials,
    stats,
    arrived,
    softmax_scale,
    window,
    table_length,
    n_splits,
    q_row,
    out_row,
    pool_page,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEAST: tl.constexpr,
    FP8: tl.constexpr,
    FUSED: tl.constexpr,
    ORDERED: tl.constexpr = False,
    DEPENDENT: tl.constexpr = 0,
):
    """out[s, h] = softmax(q[s, h] . K * softmax_scale) V over the last `window` (0: all) of kv_lengths[s] keys.

    q, out: element (s, h, d) at s * q_row (out_row) + h * D + d; query head h reads KV head h // REPEAT. `pool` is the
    layer's part of page 0 of [pages, .., 2, PAGE_TOKENS, KV_HEADS, D]; key n of s lies in page tables[s, n //
    PAGE_TOKENS] (int32 [S, table_length]). kv_scale: float32, what E4M3 keys and values are multiplied by.
    Sequences that use more than one split leave float32 partials [S, heads, n_splits, D], and their maxima and sums of
    weights in stats [S, heads, 2, n_splits]; FUSED: the last program of (s, group of heads) to arrive adds them up,
    counting in arrived int32 [S, KV_HEADS // HEADS], which is 0 before and after. ORDERED, of one split: out has its
    columns in the order of `kernels.order`.
    Grid: (KV_HEADS // HEADS, n_splits, S).
    """
    LIVE: tl.constexpr = HEADS * REPEAT  # rows in use
    TOKEN: tl.constexpr = KV_HEADS * D
    group, z, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(kv_lengths + s)
    low, blocks, used = splits_of(length, window, n_splits, BLOCK_K, LEAST)
    i = tl.arange(0, BLOCK_K)
    pool += group * (HEADS * D)
    table = tables + s * table_length
    reach = tl.minimum(length, table_length * PAGE_TOKENS)
    first = z * blocks // used
    # A block's pages are loaded one block ahead: Triton prefetches what follows from a load half as deep.
    n = low + first * BLOCK_K + i
    end = tl.where(z < used, reach, 0)
    page = tl.load(table + n // PAGE_TOKENS, (n >= low) & (n < end), -1)
    take_turn(DEPENDENT)
    if z >= used:
        return
    r, c = tl.arange(0, ROWS), tl.arange(0, HEADS * D)
    row, column = r[:, None], c[None, :]
    own = (column // D == row // REPEAT) & (row < LIVE)
    elements = (group * LIVE + row) * D + column % D
    query = tl.load(q + s * q_row + elements, own, 0.0)
    factor = 1.0
    if FP8:
        factor = tl.load(kv_scale)
        half, scale = half_queries(query)
        query_even, query_odd = tl.split(tl.reshape(half, [ROWS, HEADS * D // 2, 2]))
        scale *= softmax_scale * LOG2_E * factor
        pairs = pool.to(tl.pointer_type(tl.uint16))
        pair = tl.arange(0, HEADS * D // 2)
        even = tl.zeros([ROWS, HEADS * D // 2], tl.float32)
        odd = tl.zeros([ROWS, HEADS * D // 2], tl.float32)
    else:
        scale = tl.full([ROWS], softmax_scale * LOG2_E, tl.float32)
        acc = tl.zeros([ROWS, HEADS * D], tl.float32)
    heads = s * (KV_HEADS * REPEAT) + group * LIVE  # rows of `stats` and the like before the first head

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for block in range(first, (z + 1) * blocks // used):
        n = low + block * BLOCK_K + i
        seen = (n >= low) & (n < length)
        there = page >= 0
        hidden = tl.where(there, 0.0, tl.where(seen, float("nan"), float("-inf")))
        if FP8:
            at = page.to(tl.int64) * (pool_page // 2) + n % PAGE_TOKENS * (TOKEN // 2)
            keys = pairs + at[:, None] + pair[None, :]
            values = keys + PAGE_TOKENS * TOKEN // 2
            top, total, even, odd = _take_pairs(
                keys, values, there, query_even, query_odd, top, total, hidden, scale, even, odd, FP8
            )
        else:
            at = page.to(tl.int64) * pool_page + n % PAGE_TOKENS * TOKEN
            keys = pool + at[:, None] + c[None, :]
            k, v = tl.load(keys, there[:, None], 0), tl.load(keys + PAGE_TOKENS * TOKEN, there[:, None], 0)
            top, total, weights, fade = _take_scores(tl.dot(query, tl.trans(k)), top, total, hidden, scale)
            acc = tl.dot(weights.to(v.dtype), v, acc * fade)
        page = tl.load(table + (n + BLOCK_K) // PAGE_TOKENS, n + BLOCK_K < reach, -1)
    if FP8:
        acc = tl.reshape(tl.join(even, odd), [ROWS, HEADS * D])

    if used == 1:
        all_keys = tl.where(total == 0, 1.0, total)  # a sequence of length 0
        result = acc / all_keys[:, None] * factor
        if ORDERED:
            elements = (group * LIVE + row) * D + order_columns(column % D)
        tl.store(out + s * out_row + elements, result.to(out.dtype.element_ty), own)
        return
    tl.store(partials + ((heads + row) * n_splits + z) * D + column % D, acc * factor, own)
    tl.store(stats + (heads + r) * 2 * n_splits + z, top, r < LIVE)
    tl.store(stats + ((heads + r) * 2 + 1) * n_splits + z, total, r < LIVE)
    if FUSED:
        to, counter = out + s * out_row + group * (LIVE * D), arrived + s * (KV_HEADS // HEADS) + group
        _combine_if_last(counter, partials, stats, to, heads, n_splits, used, LIVE, D)


@triton.jit
def combine_splits(
    out,
    kv_lengths,
    partials,
    stats,
    window,
    n_splits,
    out_row,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEAST: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
):
    """Adds up what `split_decode` without FUSED left; sequences of one split are done already. Grid: (heads, S)."""
    take_turn(DEPENDENT)
    head, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(kv_lengths + s)
    _, _, used = splits_of(length, window, n_splits, BLOCK_K, LEAST)
    if used > 1:
        at = s * tl.num_programs(0) + head
        parts, found = partials + at * n_splits * D, stats + at * 2 * n_splits
        _combine_head(parts, found, out + s * out_row + head * D, n_splits, used, D)
