"""Measures how much attention a sequence's last query gives to each KV page, from the query and the pages' keys.

Knows pages and grouped queries; not models. `page_logsums` reads the keys once, `page_masses` what that left. All sums
are float32; queries and keys are operands as in `decode_attention`. Invariants: no slot behind the query is read, nor
is page -1; a page that the query sees and that is absent makes the sequence's masses NaN; a row of nobody (position -1)
reads no page and writes nothing. These kernels are ordinary in `plugins.dependent`: they wait for no kernel and none
waits for them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.decode_attention import LOG2_E, _take_scores, half_queries, widen


@triton.jit
def _last_row(positions, cu_seqlens, s, singles):
    """(row of the last token of sequence s in the step, keys that it sees)."""
    chunk = s - singles
    row = tl.where(chunk < 0, s, singles - 1 + tl.load(cu_seqlens + chunk + 1, chunk >= 0, 0))
    return row, tl.load(positions + row) + 1


@triton.jit
def page_logsums(
    q,
    pool,
    tables,
    positions,
    cu_seqlens,
    kv_scale,
    logsums,
    softmax_scale,
    first,
    singles,
    pages,
    table_length,
    q_row,
    pool_page,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    FP8: tl.constexpr,
):
    """logsums[s, h, p] = log2 of the sum of exp(q . k * softmax_scale) over the keys of page p that q sees.

    Of sequences `first` + s: float32 [sequences, heads, pages]; only pages up to the query's own are written. The first
    `singles` sequences have one token, in rows 0, 1, ...; the tokens of sequence `singles` + c end before row `singles`
    + cu_seqlens[c + 1]. positions int32 [tokens], -1 for a row of nobody. q, pool, tables, kv_scale and FP8 as in
    `split_decode`. STEP keys of a page are taken at once, in BLOCK_K rows; a program has SPAN pages.
    Grid: (cdiv(pages, SPAN), KV_HEADS, sequences).
    """
    BLOCKS: tl.constexpr = PAGE_TOKENS // STEP
    TOKEN: tl.constexpr = KV_HEADS * D
    head, s = tl.program_id(1), first + tl.program_id(2)
    row, length = _last_row(positions, cu_seqlens, s, singles)
    begin = tl.program_id(0) * (SPAN * BLOCKS)
    end = tl.minimum(begin + SPAN * BLOCKS, tl.cdiv(tl.minimum(length, pages * PAGE_TOKENS), STEP))
    if begin >= end:
        return
    i, d, r = tl.arange(0, BLOCK_K), tl.arange(0, D), tl.arange(0, ROWS)
    heads = (head * REPEAT + r) * D
    query = tl.load(q + row.to(tl.int64) * q_row + heads[:, None] + d[None, :], (r < REPEAT)[:, None], 0.0)
    if FP8:
        query, scale = half_queries(query)
        scale *= softmax_scale * LOG2_E * tl.load(kv_scale)
    else:
        scale = tl.full([ROWS], softmax_scale * LOG2_E, tl.float32)
    pool += head * D
    table = tables + s.to(tl.int64) * table_length
    to = logsums + (tl.program_id(2).to(tl.int64) * (KV_HEADS * REPEAT) + head * REPEAT + r) * pages
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    page = tl.load(table + begin // BLOCKS)
    for block in range(begin, end):
        n = block * STEP + i
        seen = (i < STEP) & (n < length)
        there = seen & (n < tl.where(page >= 0, length, 0))
        hidden = tl.where(there, 0.0, tl.where(seen, float("nan"), float("-inf")))
        keys = pool + page.to(tl.int64) * pool_page + (n % PAGE_TOKENS * TOKEN)[:, None] + d[None, :]
        k = widen(tl.load(keys, there[:, None], 0), query.dtype, FP8)
        page = tl.load(table + (block + 1) // BLOCKS, block + 1 < end, -1)
        if BLOCKS == 1 or block % BLOCKS == 0:
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
        top, total, _, _ = _take_scores(tl.dot(query, tl.trans(k)), top, total, hidden, scale)
        tl.store(to + block // BLOCKS, top + tl.log2(total), r < REPEAT)  # the page's last block is the last to write


@triton.jit
def page_masses(
    logsums,
    masses,
    positions,
    cu_seqlens,
    first,
    singles,
    pages,
    PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """masses[first + s, p] = softmax mass of page p, mean over HEADS, times the number of pages that the query sees.

    `logsums` of `page_logsums` with the same arguments; masses float32 [all sequences, pages], where only pages up to
    the query's own are written. Grid: (sequences,).
    """
    s = first + tl.program_id(0)
    _, length = _last_row(positions, cu_seqlens, s, singles)
    count = tl.minimum(tl.cdiv(length, PAGE_TOKENS), pages)
    h, p = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    live = (h < HEADS)[:, None]
    at = logsums + (tl.program_id(0).to(tl.int64) * HEADS + h)[:, None] * pages + p[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for c in range(0, count, BLOCK):
        found = tl.load(at + c, live & (c + p < count)[None, :], float("-inf"))
        new_top = tl.maximum(top, tl.max(found, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(found - base[:, None]), axis=1)
        top = new_top
    whole = top + tl.log2(total)
    for c in range(0, count, BLOCK):
        found = tl.load(at + c, live & (c + p < count)[None, :], float("-inf"))
        share = tl.where(live, tl.exp2(found - whole[:, None]), 0.0)
        tl.store(masses + s.to(tl.int64) * pages + c + p, tl.sum(share, axis=0) * (count / HEADS), c + p < count)
