"""Attention over parts of the keys: adds up the results of parts, and gathers a part's keys side by side for a product
that knows no pages.

Knows pages and grouped queries; not models, nor who multiplies. Invariants: an absent page (-1), and one behind the
table's end, becomes NaN, as does a row that sees it; only the segment's tokens, or the rows asked for, are written.

The results of disjoint sets of keys add up by their sums of exponentials: arXiv:2205.14135, section 3.1.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.decode_attention import widen
from wicore_trt.plugins.kernels.turns import take_turn

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def gather_segment(
    pool,
    tables,
    kv_scale,
    dense,
    first,
    table_length,
    pool_page,
    values,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    """dense[0 or values + ...] = keys and values of pages tables[first], tables[first + 1], ... (int32[table_length]).

    PAGE: elements of a page's keys, and of its values, of one layer, whose part of page 0 `pool` is: [page_tokens,
    kv_heads, D], which is how they lie in `dense`, one page behind the other; its values begin `values` elements behind
    its keys. FP8 as in `split_decode`; `dense` then gets what the bytes stand for.
    Grid: (pages, 2 * cdiv(PAGE, BLOCK)).
    """
    BLOCKS: tl.constexpr = (PAGE + BLOCK - 1) // BLOCK
    number = tl.program_id(0)
    half = (tl.program_id(1) // BLOCKS).to(tl.int64)
    i = tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(tables + first + number, first + number < table_length, -1).to(tl.int64)
    there = (i < PAGE) & (page >= 0)
    value = tl.load(pool + page * pool_page + half * PAGE + i, there, 0)
    if FP8:
        value = widen(value, tl.float32, FP8) * tl.load(kv_scale)
    value = tl.where(page >= 0, value.to(tl.float32), float("nan")).to(dense.dtype.element_ty)
    tl.store(dense + half * values + number.to(tl.int64) * PAGE + i, value, i < PAGE)


@triton.jit
def add_segment(
    sums,
    lse,
    part,
    part_lse,
    out,
    rows,
    part_rows,
    last,
    part_row,
    part_head,
    out_row,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a segment's results to `sums` [rows, HEADS, D] and `lse` [rows, HEADS] (float32, as `paged_prefill` leaves
    them), or to what they become, `out`, if this is the `last` one.

    part: [rows, HEADS, D] by its strides; part_lse float32 [HEADS, part_rows]. Grid: (cdiv(rows, BLOCK), HEADS).
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    wide = row.to(tl.int64)[:, None]
    d = tl.arange(0, D)[None, :]
    at = wide * (HEADS * D) + head * D + d
    ours = tl.load(lse + row * HEADS + head, live, 0.0)
    theirs = tl.load(part_lse + head * part_rows + row, live, 0.0)
    top = tl.maximum(ours, theirs)  # of a NaN and a number the number; what is subtracted from it is NaN all the same
    a, b = tl.exp2((ours - top) * LOG2_E), tl.exp2((theirs - top) * LOG2_E)
    total = a + b
    x = tl.load(sums + at, live[:, None], 0.0)
    y = tl.load(part + wide * part_row + head * part_head + d, live[:, None], 0.0).to(tl.float32)
    result = (x * a[:, None] + y * b[:, None]) / total[:, None]
    if last:
        tl.store(out + wide * out_row + head * D + d, result.to(out.dtype.element_ty), live[:, None])
    else:
        tl.store(sums + at, result, live[:, None])
        tl.store(lse + row * HEADS + head, top + tl.log2(total) / LOG2_E, live)


@triton.jit
def add_splits(
    sums,
    lse,
    out,
    rows,
    split_rows,
    out_row,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
):
    """out [rows, HEADS, D] from sums float32 [SPLITS, split_rows, HEADS, D] and lse float32 [SPLITS, split_rows,
    HEADS], as `paged_prefill` leaves them: where lse is -inf nothing is read. Rows of nobody become anything.
    Grid: (cdiv(rows, BLOCK), HEADS).
    """
    take_turn(DEPENDENT)
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    at = row.to(tl.int64)
    d = tl.arange(0, D)[None, :]
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.load(lse + (i * split_rows + at) * HEADS + head, live, float("-inf")))
    base = tl.where(top == float("-inf"), 0.0, top)
    result = tl.zeros([BLOCK, D], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(SPLITS):
        part = i * split_rows + at
        theirs = tl.load(lse + part * HEADS + head, live, float("-inf"))
        weight = tl.exp2((theirs - base) * LOG2_E)
        there = (theirs != float("-inf"))[:, None]
        values = tl.load(sums + (part * (HEADS * D))[:, None] + head * D + d, there, 0.0)
        result += values * weight[:, None]
        total += weight
    result = result / total[:, None]
    tl.store(out + at[:, None] * out_row + head * D + d, result.to(out.dtype.element_ty), live[:, None])
