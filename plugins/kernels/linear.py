"""Linear layers of few rows: y = x W^T with the weights read once, as fast as memory gives them.

Knows pointers, types and block sizes; neither models nor GPUs. x [tokens, K], W [N, K], y [tokens, N] are contiguous.
Products are exact (operands of 16 bits or E4M3, widened in registers); sums are float32. The float32 sum s becomes

    y[m, n] = s * x_scale[m] * w_scale[n] * alpha

where x_scale belongs to E4M3 rows, w_scale to E4M3 weights, and alpha is a power of two (so that it rounds nothing).
GEGLU: W is [2 N, K], rows [gate; up], and y = gelu_tanh(gate) * up * alpha, gate and up being the scaled sums.

Invariants: nothing beyond row `tokens` of x and y is touched; N, K and the constants fix the order of every output's
sum, so a row's result depends neither on other rows nor on the order of programs (I21); NaN and infinity in x or W
reach every output that they are a part of. Two exceptions to float32 sums, both of the hardware: sm90 sums E4M3 times
E4M3 in about 14 bits, here at most 128 products before a float32 addition (EXACT_EVERY); and a matrix unit aligns the
products of one instruction to the largest and cuts off what lies below.

Weights stream through once: loads say evict_first where only one program reads a weight (EVICT_FIRST), so that
activations stay in L2. On sm90 a tile of weights is the M-side operand, because a matrix unit takes at least 64 rows
there and pads columns only to 8: with tokens on that side 15 of 16 products of a small batch would be zeros.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.e4m3 import decode, magnitude_bits
from wicore_trt.plugins.kernels.turns import take_turn


@triton.jit
def _operand(w, like):
    """Weights in the type of `like`; exact. Bytes are E4M3 for GPUs without that type."""
    if w.dtype == tl.uint8 or (w.dtype != like.dtype and like.dtype == tl.bfloat16):
        # By float32, although E4M3 -> bfloat16 is one conversion to Triton: its last step is a scalar instruction of a
        # quarter of the rate, and would take as long as the weights take to come.
        return _float32(w).to(like.dtype)
    return w.to(like.dtype)


@triton.jit
def _float32(w):
    """Weights in float32; exact."""
    if w.dtype == tl.uint8:
        return decode(w)
    if w.dtype == tl.float8e4nv:
        return w.to(tl.float16).to(tl.float32)
    return w.to(tl.float32)


@triton.jit
def _add_products(acc, w, value, EXACT_EVERY: tl.constexpr):
    """acc plus w times value. float16 weights beside bfloat16 rows are two terms, which hold their 11 bits exactly."""
    if w.dtype == tl.float16 and value.dtype == tl.bfloat16:
        high = w.to(tl.float32).to(tl.bfloat16)
        low = (w.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(low, value, tl.dot(high, value, acc))
    return tl.dot(_operand(w, value), value, acc, max_num_imprecise_acc=EXACT_EVERY)


@triton.jit
def _load_weights(w, rows, k, K: tl.constexpr, BLOCK_K: tl.constexpr, EVICT_FIRST: tl.constexpr):
    """W[rows, k]; 0 beyond column K."""
    at = w + rows.to(tl.int64)[:, None] * K + k[None, :]
    policy: tl.constexpr = "evict_first" if EVICT_FIRST else ""
    if K % BLOCK_K == 0:
        return tl.load(at, eviction_policy=policy)
    return tl.load(at, mask=(k < K)[None, :], other=0.0, eviction_policy=policy)


@triton.jit
def gelu_tanh(g):
    """gelu(g) with tanh: 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)), which cancels nothing."""
    z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
    return g / (1.0 + tl.exp(-2.0 * z))


@triton.jit
def _scaled_rows(acc, w_scale, rows, W8: tl.constexpr):
    """acc [rows, ...] times the scale of each of its weight rows."""
    if W8:
        scale = tl.load(w_scale + rows)
        if len(acc.shape) == 2:
            scale = scale[:, None]
        acc = acc * scale
    return acc


@triton.jit
def linear_vector(
    x,
    w,
    out,
    w_scale,
    alpha,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    EVICT_FIRST: tl.constexpr,
    W8: tl.constexpr,
    GEGLU: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
):
    """One row of x, without matrix units: each lane sums its own columns, lanes are added at the end.

    Program p computes columns [p BLOCK_N, (p + 1) BLOCK_N) of y. Loads go to registers, UNROLL blocks at a time, or
    through STAGES blocks of shared memory. Grid: (cdiv(N, BLOCK_N)).
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(rows, N - 1)  # of the last program: it reads a row twice rather than mask every load
    take_turn(DEPENDENT)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
        k = start + tl.arange(0, BLOCK_K)
        # Read once per row of the block: from L1, and in the layout of the weights, which costs no barrier.
        columns = x + tl.broadcast_to(k[None, :], [BLOCK_N, BLOCK_K])
        value = tl.load(columns, mask=(k < K)[None, :], other=0.0).to(tl.float32)
        weights = _float32(_load_weights(w, inside, k, K, BLOCK_K, EVICT_FIRST))
        acc = tl.fma(weights, value, acc)
        if GEGLU:
            weights_up = _float32(_load_weights(w, inside + N, k, K, BLOCK_K, EVICT_FIRST))
            acc_up = tl.fma(weights_up, value, acc_up)
    y = _scaled_rows(tl.sum(acc, axis=1), w_scale, inside, W8)
    if GEGLU:
        y = gelu_tanh(y) * _scaled_rows(tl.sum(acc_up, axis=1), w_scale, inside + N, W8)
    y = y * alpha
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < N)


@triton.jit
def sum_splits(acc, partials, counters, tile, tiles, live, SPLITS: tl.constexpr):
    """Leave `acc` [BLOCK_N, COLUMNS] for the program of this tile that comes last; it gets the sum in order of the
    splits, and `True`. The counter is 0 before and after a launch.

    A program's stores lie before its addition to the counter (the barrier orders its threads, acq_rel the programs),
    so who reads SPLITS - 1 sees them all; .cg because another SM wrote them.
    """
    BLOCK_N: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    cell = tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, COLUMNS)[None, :] * BLOCK_N
    at = partials + tile.to(tl.int64) * (BLOCK_N * COLUMNS) + cell
    step = tiles.to(tl.int64) * (BLOCK_N * COLUMNS)
    tl.store(at + tl.program_id(1) * step, acc, mask=live, cache_modifier=".cg")
    tl.debug_barrier()
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        tl.debug_barrier()
        acc = tl.load(at, mask=live, other=0.0, cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            acc += tl.load(at + split * step, mask=live, other=0.0, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return acc, last


@triton.jit
def linear_matrix(
    x,
    w,
    out,
    w_scale,
    alpha,
    x_scale,
    partials,
    counters,
    largest,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT_EVERY: tl.constexpr,
    EVICT_FIRST: tl.constexpr,
    W8: tl.constexpr,
    X8: tl.constexpr,
    GEGLU: tl.constexpr,
    LARGEST: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
):
    """Any number of rows, by matrix units: a program computes BLOCK_N columns of y for COLUMNS rows of x, over one of
    SPLITS parts of K.

    Tiles of the same weights are neighbours, so that the weights come from L2 for all but one. SPLITS > 1: partials
    float32 [SPLITS, tiles, COLUMNS, BLOCK_N] and counters int32[tiles], zeros, belong to this launch alone. X8: x is
    E4M3 like W, with x_scale float32[tokens]. LARGEST: largest int32[tokens] becomes the maximum of itself and the
    `e4m3.magnitude_bits` of each row of out; of integers that is the same in any order.
    Grid: (cdiv(N, BLOCK_N) * cdiv(tokens, COLUMNS), SPLITS).
    """
    PART: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS * BLOCK_K
    token_blocks = tl.cdiv(tokens, COLUMNS)
    block_n = tl.program_id(0) // token_blocks
    rows = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(rows, N - 1)
    m = (tl.program_id(0) % token_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    live = (m < tokens)[None, :]
    acc = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    acc_up = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    begin = tl.program_id(1) * PART
    take_turn(DEPENDENT)
    for start in range(begin, tl.minimum(begin + PART, K), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        columns = x + m.to(tl.int64)[None, :] * K + k[:, None]
        value = tl.load(columns, mask=live & (k < K)[:, None], other=0.0)
        acc = _add_products(acc, _load_weights(w, inside, k, K, BLOCK_K, EVICT_FIRST), value, EXACT_EVERY)
        if GEGLU:
            weights_up = _load_weights(w, inside + N, k, K, BLOCK_K, EVICT_FIRST)
            acc_up = _add_products(acc_up, weights_up, value, EXACT_EVERY)
    if SPLITS > 1:
        acc, last = sum_splits(acc, partials, counters, tl.program_id(0), tl.num_programs(0), live, SPLITS)
        if not last:
            return
    if X8:
        unit = tl.load(x_scale + m, mask=m < tokens, other=0.0)[None, :]
        acc, acc_up = acc * unit, acc_up * unit
    y = _scaled_rows(acc, w_scale, inside, W8)
    if GEGLU:
        y = gelu_tanh(y) * _scaled_rows(acc_up, w_scale, inside + N, W8)
    y = y * alpha
    at = out + m.to(tl.int64)[None, :] * N + rows[:, None]
    stored = y.to(out.dtype.element_ty)
    tl.store(at, stored, mask=live & (rows < N)[:, None])
    if LARGEST:
        bits = tl.max(magnitude_bits(stored.to(tl.float32)), axis=0)  # rows beyond the last repeat it
        tl.atomic_max(largest + m, bits, mask=m < tokens, sem="relaxed")
