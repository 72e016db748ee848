"""Norms of the residual stream: behind the embedding, and around the addition that ends a block.

One program per row, the whole row in registers, so that a row's result depends on that row and on the number of warps
alone, never on the other rows. Knows neither layers nor weights' names. Invariants: the residual is float32; norms and
their sums are float32; a result is rounded once, to the operand's 16-bit type. For FP8 it is then E4M3 with one float32
scale per row (amax of the rounded row / 448, 1 for a row of zeros; `backends.torch.ops.quantize_rows`). NaN and
infinities are carried on, not hidden: an E4M3 row with one of them is NaN.

float16 has no clipping here: |norm(x) * w| <= sqrt(H) * max|w|, so the loader of the weights can prove that it fits.
Norm weights are float32 and stored as 1 + w. H is a constant, so that rows need not start at multiples of BLOCK.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.e4m3 import magnitude_bits, quantize_row, row_scale
from wicore_trt.plugins.kernels.exchange import find_blocks, find_twin, push_row, sum_pulled, sum_pushed
from wicore_trt.plugins.kernels.order import order_columns
from wicore_trt.plugins.kernels.turns import take_turn


@triton.jit
def _columns(BLOCK: tl.constexpr):
    """0 .. BLOCK - 1, four to a thread in every load and store, whatever their types: 16 bytes of float32. Left to
    itself, Triton gives 16-bit and 8-bit arrays more and moves the row through shared memory between the two layouts.
    """
    return tl.max_contiguous(tl.arange(0, BLOCK), 4)


@triton.jit
def _normed(value, weight, eps, H: tl.constexpr):
    """value * rsqrt(mean(value**2) + eps) * weight of one row, zero beyond H."""
    return value * tl.rsqrt(tl.sum(value * value, 0) / H + eps) * weight


@triton.jit
def _store(
    out,
    scales,
    row,
    column,
    inside,
    value,
    H: tl.constexpr,
    FP8: tl.constexpr,
    HALF: tl.constexpr,
    NATIVE: tl.constexpr,
    ORDERED: tl.constexpr,
    peers=None,
    rank=0,
    RANKS: tl.constexpr = 1,
):
    """Row `row` of out [rows, H], and for FP8 its scale; `value` is zero where not `inside`. Of all RANKS. ORDERED: in
    the columns' order of `kernels.order`."""
    if ORDERED:
        column = tl.max_contiguous(tl.multiple_of(order_columns(column), 2), 2)
    if FP8:
        value = value.to(tl.float16).to(tl.float32) if HALF else value.to(tl.bfloat16).to(tl.float32)
        scale = row_scale(tl.max(magnitude_bits(value), 0))
        rounded = quantize_row(value, scale, NATIVE)
    else:
        rounded = value.to(out.dtype.element_ty)
    for step in tl.static_range(RANKS):
        peer = (rank + step) % RANKS
        if FP8:
            tl.store((find_twin(scales, peers, rank, peer) if RANKS > 1 else scales) + row, scale)
        target = (find_twin(out, peers, rank, peer) if RANKS > 1 else out) + row * H + column
        tl.store(target, rounded, mask=inside)


@triton.jit
def embed_norm(
    token_ids,
    embedding,
    weight,
    residual,
    out,
    scales,
    vocab,
    embedding_scale,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    HALF: tl.constexpr,
    NATIVE: tl.constexpr,
    ORDERED: tl.constexpr = False,
    features=None,
):
    """residual[i] = embedding[token_ids[i]] * embedding_scale (float32, unrounded), out[i] = its norm as in `norm`.

    `embedding` is 16 bit [vocab, H], `token_ids` int32. An id outside of [0, vocab) gives a row of zeros: a row that
    was not sampled (-1) harms no memory. With `features` (16 bit [any, H]) the id vocab + n is row n of them, unscaled.
    Grid: (tokens,).
    """
    row = tl.program_id(0).to(tl.int64)
    column = _columns(BLOCK)
    inside = column < H
    token = tl.load(token_ids + row).to(tl.int64)
    w = tl.load(weight + column, mask=inside, other=0.0)
    known = (token >= 0) & (token < vocab)
    source = embedding + tl.where(known, token, 0) * H + column
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32) * embedding_scale
    value = tl.where(known, value, 0.0)
    if features is not None:
        seen = token >= vocab
        source = features + tl.where(seen, token - vocab, 0) * H + column
        value += tl.load(source, mask=inside & seen, other=0.0).to(tl.float32)
    tl.store(residual + row * H + column, value, mask=inside)
    _store(out, scales, row, column, inside, _normed(value, w, eps, H), H, FP8, HALF, NATIVE, ORDERED)


@triton.jit
def add_norm(
    residual,
    x,
    post_weight,
    next_weight,
    out,
    scales,
    rows,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
    FP8: tl.constexpr,
    HALF: tl.constexpr,
    NATIVE: tl.constexpr,
    ORDERED: tl.constexpr = False,
    DEPENDENT: tl.constexpr = 0,
    RANKS: tl.constexpr = 1,
    PUSH: tl.constexpr = 0,
    OWNED: tl.constexpr = 0,
    peers=None,
    rank=0,
    failed=None,
):
    """residual[r] += norm(x[r]) * post_weight in place, then out[r] = norm(residual[r]) * next_weight as in `norm`.

    x is [rows, H] of any float type. GATHER: program i takes row rows[i] (int32) of residual and x and writes row i of
    out, for the sampled rows behind the last layer; rows must not repeat. Otherwise `rows` is not touched.
    Grid: (rows of out,). With several RANKS x is the sum of theirs (`kernels.exchange`): pushed, in 16 bits for PUSH 2
    and 32 for PUSH 4, or pulled, for 0, behind a meeting. OWNED: of this rank's rows alone, and out is that of all.
    """
    column = _columns(BLOCK)
    inside = column < H
    # All loads come first: for few rows this kernel is nothing but latency. No kernel writes the weights.
    post = tl.load(post_weight + column, mask=inside, other=0.0)
    following = tl.load(next_weight + column, mask=inside, other=0.0)
    if PUSH > 0:
        blocks = find_blocks(peers, rank, RANKS)
    take_turn(DEPENDENT)
    target = tl.program_id(0).to(tl.int64)
    row = target
    if GATHER:
        row = tl.load(rows + target).to(tl.int64)
    if OWNED:  # noqa: SIM102 -- one is known when compiling
        if row % RANKS != rank:
            return
    at = row * H + column
    if RANKS == 1 or PUSH > 0:
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if PUSH > 0:
        own = push_row(value, blocks, rank, tl.program_id(0), column, inside, H, RANKS, PUSH == 4)
    old = tl.load(residual + at, mask=inside, other=0.0)
    if PUSH > 0:
        value = sum_pushed(own, blocks[0], rank, failed, tl.program_id(0), column, inside, H, RANKS, PUSH == 4)
    elif RANKS > 1:
        value = sum_pulled(x, peers, rank, at, inside, RANKS)
    new = old + _normed(value, post, eps, H)
    tl.store(residual + at, new, mask=inside)
    value = _normed(new, following, eps, H)
    ranks: tl.constexpr = RANKS if OWNED else 1
    _store(out, scales, target, column, inside, value, H, FP8, HALF, NATIVE, ORDERED, peers, rank, ranks)
