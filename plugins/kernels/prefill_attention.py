"""Causal attention of many tokens per sequence over paged KV: ragged, chunked, windowed.

Knows pages, windows and grouped queries; not models. Softmax and sums are float32; operands of both products have the
queries' type, over E4M3 pages float16. Invariants: slots of other sequences, slots behind the last token and page -1
are never read; a page that a block of tokens sees and that is absent makes the block NaN; a row's result does not
depend on which rows share its block, because key blocks lie at absolute positions and a block without visible keys
changes nothing. A key of the own sequence that is not finite may reach rows of its block that do not see it.
Where a kernel takes key ends, rows of an image see all of it. Rows whose keys of whole segments another product takes
(`kernels.segments`) leave those out here. Few rows behind many keys are shared by several programs, each with a range
of the keys; `kernels.segments.add_splits` adds up what those give.

Online softmax: arXiv:2205.14135. A block holds tokens of one sequence and one query head; the programs of one KV head
are neighbours and share its keys in L2. The scale is applied inside the exponent's multiply-add.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.decode_attention import half_queries, widen
from wicore_trt.plugins.kernels.turns import take_turn

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _find_sequence(cu_seqlens, n_sequences, block, TOKENS: tl.constexpr):
    """The sequence that row block `block` belongs to: blocks of sequence s begin at cu_seqlens[s] // TOKENS + s.

    That leaves each sequence enough blocks whatever the lengths are, and needs no table made on the host.
    """
    begun = 0
    for base in range(0, n_sequences, 64):
        s = base + tl.arange(0, 64)
        opens = tl.load(cu_seqlens + s, mask=s < n_sequences, other=0) // TOKENS + s
        begun += tl.sum(((s < n_sequences) & (opens <= block)).to(tl.int32), axis=0)
    return begun - 1


@triton.jit
def _some_absent(table, first, last, table_length):
    """How many of the table's entries [first, last] are -1 or lie behind its end."""
    count = 0
    for base in range(first, last + 1, 256):
        j = base + tl.arange(0, 256)
        page = tl.load(table + j, (j <= last) & (j < table_length), -1)
        count += tl.sum(((page < 0) & (j <= last)).to(tl.int32), axis=0)
    return count


@triton.jit
def _key_block(
    acc,
    top,
    total,
    page,
    q,
    pool,
    table,
    begin,
    low,
    last,
    position,
    newest,
    scale,
    window,
    pool_page,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TOKEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Take keys [begin, begin + BLOCK_K) into a block's online softmax: (acc, top, total) before and after.

    `top` is the largest score so far, unscaled. `page` holds the keys' pages before and those of the next block after:
    Triton prefetches what follows from a load half as deep. Rows see keys (position - window, newest]. EDGE: some row
    does not see some of the keys; keys outside [low, last] are then not even loaded. All pages are there.
    """
    n = begin + tl.arange(0, BLOCK_K)
    d = tl.arange(0, D)
    keys = pool + (page.to(tl.int64) * pool_page + n % PAGE_TOKENS * TOKEN)[:, None] + d[None, :]
    if EDGE:
        wanted = ((n >= low) & (n <= last))[:, None]
        k = tl.load(keys, wanted, 0)
        v = tl.load(keys + PAGE_TOKENS * TOKEN, wanted, 0)
    else:
        k = tl.load(keys)
        v = tl.load(keys + PAGE_TOKENS * TOKEN)
    page = tl.load(table + (n + BLOCK_K) // PAGE_TOKENS, n + BLOCK_K <= last, 0)
    k, v = widen(k, q.dtype, FP8), widen(v, q.dtype, FP8)
    scores = tl.dot(q, tl.trans(k))
    if EDGE:
        seen = (n[None, :] <= newest[:, None]) & ((window <= 0) | (n[None, :] > position[:, None] - window))
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top * scale)  # a row that has seen nothing yet
    weights = tl.exp2(tl.fma(scores, scale[:, None], -base[:, None]))
    # Exactly 1 where nothing is larger: base is rounded, and a block that a row does not see at all, which is there for
    # the other rows, must not move it.
    fade = tl.where(new_top == top, 1.0, tl.exp2(tl.fma(top, scale, -base)))
    total = tl.fma(total, fade, tl.sum(weights, axis=1))
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None])
    return acc, new_top, total, page


@triton.jit
def _newest_keys(key_ends, begin, token, length, position, front, last):
    """The last key that each token sees, that all of them see, and that any of them sees."""
    newest = position
    if key_ends is not None:
        newest = tl.load(key_ends + begin + token, token < length, 0) - 1
        front = tl.min(tl.where(token < length, newest, 2147483647), axis=0)
        last = tl.max(newest, axis=0)
    return newest, front, last


@triton.jit
def _left_out(first, length, token0, segment, segment_rows, least_rows):
    """How many keys are left out for the block of token `token0`, by `decode_layout.Segments`."""
    rest = length % segment_rows
    dense = (first >= segment) & (token0 < length - tl.where(rest < least_rows, rest, 0))
    return tl.where(dense, first // segment * segment, 0)


@triton.jit
def _range_of(number, keys, LEAST: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """[first, end) of the keys that program `number` takes of `keys`; whole blocks but for the last."""
    used = tl.minimum(tl.cdiv(keys, LEAST), SPLITS)
    each = tl.cdiv(tl.cdiv(keys, used), BLOCK_K) * BLOCK_K
    return number * each, tl.minimum((number + 1) * each, keys)


@triton.jit
def paged_prefill(
    q,
    out,
    pool,
    tables,
    cu_seqlens,
    first_positions,
    kv_scale,
    lse,
    softmax_scale,
    window,
    n_sequences,
    table_length,
    segment,
    segment_rows,
    least_rows,
    split_rows,
    q_row,
    out_row,
    pool_page,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8: tl.constexpr,
    SEGMENTED: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
    key_ends=None,
):
    """out[i, h] = softmax(q[i, h] . K * softmax_scale) V over the keys that token i sees.

    q, out, pool, tables, kv_scale and FP8 as in `split_decode`. Rows [cu_seqlens[s], cu_seqlens[s + 1]) (int32[S + 1])
    are sequence s at positions first_positions[s] (int32[S]), + 1, ...; a token at p sees positions (p - window, p],
    or [0, p] when window is 0. Grid: (KV_HEADS * REPEAT, N // BLOCK_M + S); a sequence's last, longest block is first.

    SEGMENTED (window is 0): of `decode_layout.Segments.dense_rows` rows of a sequence keys before its last whole
    segment of `segment` keys are left out, and the natural logarithms of the sums of exponentials go to `lse` float32
    [N, KV_HEADS * REPEAT]. Where a result is NaN for an absent page, its sum may be whatever it was.

    SPLITS > 1 (window is 0): programs (.., .., i) take a range of the keys each, of LEAST keys or more but for the last
    one; `out` is float32 [SPLITS, split_rows, KV_HEADS * REPEAT, D] and `lse` [SPLITS, split_rows, KV_HEADS * REPEAT],
    -inf where a range is empty, whose results are not written. Grid: as above, and SPLITS.

    With `key_ends` (int32 [N]) row i sees positions before key_ends[i] in place of those up to its own. No key end is
    behind the last token of its sequence.
    """
    take_turn(DEPENDENT)
    TOKEN: tl.constexpr = KV_HEADS * D
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    s = _find_sequence(cu_seqlens, n_sequences, block, BLOCK_M)
    begin = tl.load(cu_seqlens + s)
    length = tl.load(cu_seqlens + s + 1) - begin
    token0 = (block - begin // BLOCK_M - s) * BLOCK_M
    if token0 >= length:
        return
    first = tl.load(first_positions + s)
    token = token0 + tl.arange(0, BLOCK_M)
    position = first + token
    live = (token < length)[:, None]
    d = tl.arange(0, D)[None, :]
    row = (begin + token).to(tl.int64)[:, None]
    if SPLITS > 1:
        out += tl.program_id(2).to(tl.int64) * split_rows * out_row
        lse += tl.program_id(2).to(tl.int64) * split_rows * (KV_HEADS * REPEAT)
    to = out + row * out_row + head * D + d
    table = tables + s.to(tl.int64) * table_length
    # Positions of the first and the last token of the block, and the keys that both of them see: [middle, tail).
    front = first + token0
    last = first + tl.minimum(token0 + BLOCK_M, length) - 1
    low = tl.where(window > 0, tl.maximum(front - window + 1, 0), 0)
    all_from = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    middle = tl.cdiv(all_from, BLOCK_K) * BLOCK_K
    newest, front, last = _newest_keys(key_ends, begin, token, length, position, front, last)
    if SEGMENTED:
        low = _left_out(first, length, token0, segment, segment_rows, least_rows)
        middle = low
    tail = tl.maximum((front + 1) // BLOCK_K * BLOCK_K, middle)
    if SPLITS > 1:
        low, end = _range_of(tl.program_id(2), last + 1, LEAST, SPLITS, BLOCK_K)
        if low >= end:
            tl.store(lse + (begin + token) * (KV_HEADS * REPEAT) + head, float("-inf"), token < length)
            return
        middle, tail, last = low, tl.maximum(tl.minimum(tail, end), low), end - 1
    if _some_absent(table, low // PAGE_TOKENS, last // PAGE_TOKENS, table_length) > 0:
        tl.store(to, tl.full([BLOCK_M, D], float("nan"), tl.float32).to(out.dtype.element_ty), live)
        if SPLITS > 1:
            tl.store(lse + (begin + token) * (KV_HEADS * REPEAT) + head, float("nan"), token < length)
        return

    query = tl.load(q + row * q_row + head * D + d, live, 0.0)
    factor = 1.0
    if FP8:
        factor = tl.load(kv_scale)
        half, scale = half_queries(query)
        query, scale = half, scale * (softmax_scale * LOG2_E * factor)
    else:
        scale = tl.zeros([BLOCK_M], tl.float32) + softmax_scale * LOG2_E
    pool += head // REPEAT * D
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    n0 = low // BLOCK_K * BLOCK_K + tl.arange(0, BLOCK_K)
    page = tl.load(table + n0 // PAGE_TOKENS, (n0 >= low) & (n0 <= last), 0)
    for n in range(low // BLOCK_K * BLOCK_K, tl.minimum(middle, last + 1), BLOCK_K):
        acc, top, total, page = _key_block(
            acc, top, total, page, query, pool, table, n, low, last, position, newest, scale, window, pool_page,
            D, PAGE_TOKENS, TOKEN, BLOCK_K, FP8, True,
        )  # fmt: skip
    for n in range(middle, tail, BLOCK_K):
        acc, top, total, page = _key_block(
            acc, top, total, page, query, pool, table, n, low, last, position, newest, scale, window, pool_page,
            D, PAGE_TOKENS, TOKEN, BLOCK_K, FP8, False,
        )  # fmt: skip
    for n in range(tail, last + 1, BLOCK_K):
        acc, top, total, page = _key_block(
            acc, top, total, page, query, pool, table, n, low, last, position, newest, scale, window, pool_page,
            D, PAGE_TOKENS, TOKEN, BLOCK_K, FP8, True,
        )  # fmt: skip
    result = acc / total[:, None] * factor
    if SPLITS > 1:
        result = tl.where(total[:, None] == 0.0, 0.0, result)  # a row that sees none of these keys
    if SEGMENTED or SPLITS > 1:
        tl.store(
            lse + (begin + token) * (KV_HEADS * REPEAT) + head, (top * scale + tl.log2(total)) / LOG2_E, token < length
        )
    tl.store(to, result.to(out.dtype.element_ty), live)
