"""Linear layers of 4-bit weights in blocks of 32 (GGUF's Q4_0 and Q4_1): y = x W^T without rounding a weight.

Knows pointers, types and block sizes; neither models nor GPUs. Weight k of row n is d (q - 8) + c, q in 0..15, with d
and c of its block b; c is 0 (Q4_0) or 8 d + m (Q4_1). A matrix unit sums exact products of q - 8 and x over a block,
in float32:

    y[n, m] = sum over b of d[n, b] (sum of (q - 8)[n, k] x[m, k] over k in b) + c[n, b] (sum of x[m, k]);

Layout: [N / 32, K / 32] tiles of 32 rows by one block, 512 bytes each. Lane l = 4 g + t of a warp loads 16 of them, its
own operands of mma.m16n8k16, so no value crosses lanes. Its byte 4 r + j is of row g + 8 r: column 8 t + j in the
low half, 8 t + j + 4 in the high one. Scales and minimums of a tile are float16 [8 (g), 4 (r)].
`backends.triton.tiles` makes this order of GGUF's.

Dimensions of a load below are in the order lanes, warps, registers: Triton hands them out so, and converts no layout
then. Invariants: those of `kernels.linear`; a row has the same bits in any launch of one configuration.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.linear import gelu_tanh, sum_splits
from wicore_trt.plugins.kernels.turns import take_turn

# A 16-bit float with these high bits and q as its low ones is 128 + q (bfloat16) or 1024 + q (float16): exact.
_NIBBLES = """{{
.reg .b32 first, second, one, less;
mov.b32 one, {one};
mov.b32 less, {less};
prmt.b32 first, $4, 0, 0x4140;
prmt.b32 second, $4, 0, 0x4342;
lop3.b32 $0, first, 0x000f000f, {magic}, 0xea;
lop3.b32 $1, second, 0x000f000f, {magic}, 0xea;
shr.u32 first, first, 4;
shr.u32 second, second, 4;
lop3.b32 $2, first, 0x000f000f, {magic}, 0xea;
lop3.b32 $3, second, 0x000f000f, {magic}, 0xea;
fma.rn.{type} $0, $0, one, less;
fma.rn.{type} $1, $1, one, less;
fma.rn.{type} $2, $2, one, less;
fma.rn.{type} $3, $3, one, less;
}}"""
BFLOAT16_NIBBLES = tl.constexpr(_NIBBLES.format(type="bf16x2", magic="0x43004300", one="0x3f803f80", less="0xc308c308"))
FLOAT16_NIBBLES = tl.constexpr(_NIBBLES.format(type="f16x2", magic="0x64006400", one="0x3c003c00", less="0xe408e408"))


@triton.jit
def _load_nibbles(w, at, to: tl.constexpr, EVICT_FIRST: tl.constexpr):
    """q - 8 of the tiles `at` [W, T], in type `to`: [W, 32 T, 16] of columns 8 t + j and of columns 8 t + 4 + j, at
    index 4 t + j."""
    W: tl.constexpr = at.shape[0]
    T: tl.constexpr = at.shape[1]
    byte = tl.arange(0, 32)[:, None, None, None] * 16 + tl.arange(0, 16)[None, None, None, :]
    policy: tl.constexpr = "evict_first" if EVICT_FIRST else ""
    packed = tl.load(w + at.to(tl.int64)[None, :, :, None] * 512 + byte, eviction_policy=policy)
    if to == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            BFLOAT16_NIBBLES, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            FLOAT16_NIBBLES, "=r,=r,=r,=r,r", [packed], (tl.float16, tl.float16), True, 4
        )
    low = tl.permute(tl.reshape(low, [8, 4, W, T, 4, 4]), (2, 3, 4, 0, 1, 5))  # from [g, t, W, T, r, j]
    high = tl.permute(tl.reshape(high, [8, 4, W, T, 4, 4]), (2, 3, 4, 0, 1, 5))
    return tl.reshape(low, [W, T * 32, 16]), tl.reshape(high, [W, T * 32, 16])


@triton.jit
def _load_rows(x, at, live, W: tl.constexpr):
    """x of a block per warp, at [t, g, W or fewer, COLUMNS / 8, j of 8]: [W, 16, COLUMNS] as `_load_nibbles` orders
    columns."""
    M8: tl.constexpr = at.shape[3]
    value = tl.load(x + at, mask=live, other=0.0)
    if at.shape[2] < W:
        value = tl.broadcast_to(value[:, :, None], [4, 8, W // at.shape[2], at.shape[2], M8, 8])
    value = tl.reshape(value, [4, 8, W, M8, 2, 4])
    low, high = tl.split(tl.permute(value, (0, 1, 2, 3, 5, 4)))
    low = tl.reshape(tl.permute(low, (2, 0, 4, 3, 1)), [W, 16, M8 * 8])
    return low, tl.reshape(tl.permute(high, (2, 0, 4, 3, 1)), [W, 16, M8 * 8])


@triton.jit
def _load_scales(d, at, live):
    """float32 scales of the tiles `at` [W, T], 0 where not `live` [W]: [W, T, r, g, 1, t, 1], all t alike."""
    g, t, r = tl.arange(0, 8), tl.arange(0, 4), tl.arange(0, 4)
    cell = (g[None, :, None] * 4 + r[None, None, :] + t[:, None, None] * 0)[:, :, None, None, :]
    scale = tl.load(d + at[None, None, :, :, None] * 32 + cell, mask=live[None, None, :, None, None], other=0.0)
    return tl.permute(scale.to(tl.float32), (2, 3, 4, 1, 0))[:, :, :, :, None, :, None]


@triton.jit
def _add_blocks(acc, w, d, c, at, live, low, high, EVICT_FIRST: tl.constexpr, MINIMUMS: tl.constexpr):
    """acc [W, T, r, g, COLUMNS / 8, t, 2] plus the products of the tiles `at` [W, T] and x."""
    W: tl.constexpr = acc.shape[0]
    M8: tl.constexpr = acc.shape[4]
    q_low, q_high = _load_nibbles(w, at, low.dtype, EVICT_FIRST)
    part = tl.reshape(tl.dot(q_high, high, tl.dot(q_low, low)), acc.shape)
    scale = _load_scales(d, at, live)
    acc = tl.fma(part, tl.broadcast_to(scale, acc.shape), acc)
    if MINIMUMS:
        ones = tl.full([W, 16, 16], 1.0, tl.float32).to(low.dtype)
        sums = tl.reshape(tl.dot(ones, high, tl.dot(ones, low)), [W, 2, 8, M8, 4, 2])  # all 16 rows alike
        sums, _ = tl.split(tl.permute(sums, (0, 2, 3, 4, 5, 1)))
        rest = tl.fma(scale, 8.0, _load_scales(c, at, live))  # of Q4_0's d and -8 d: 0
        acc = tl.fma(tl.broadcast_to(sums[:, None, None], acc.shape), tl.broadcast_to(rest, acc.shape), acc)
    return acc


@triton.jit
def _add_warps(acc, WK: tl.constexpr):
    """Sum acc [W, T, r, g, COLUMNS / 8, t, 2] over the WK warps that share rows: [rows, COLUMNS]."""
    ROWS: tl.constexpr = acc.shape[0] // WK * acc.shape[1] * 32
    COLUMNS: tl.constexpr = acc.shape[4] * 8
    acc = tl.reshape(acc, [acc.shape[0] // WK, WK, acc.shape[1] * 32, COLUMNS])
    return tl.reshape(tl.sum(acc, axis=1), [ROWS, COLUMNS])


@triton.jit
def linear_q4(
    x,
    w,
    out,
    w_scale,
    w_minimum,
    alpha,
    partials,
    counters,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    WN: tl.constexpr,
    WK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    EVICT_FIRST: tl.constexpr,
    MINIMUMS: tl.constexpr,
    GEGLU: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
):
    """Multiply any number of rows of x by tiles w, w_scale and w_minimum (see above); all else as `kernels.linear`.

    A program computes 32 T WN columns of y for COLUMNS rows of x over one of SPLITS parts of K; each of its WN WK warps
    takes T tiles of every WK-th block of columns. Loads go to registers, UNROLL blocks at a time, or through STAGES
    blocks of shared memory. Grid: (cdiv(N, 32 T WN) * cdiv(tokens, COLUMNS), SPLITS).
    """
    W: tl.constexpr = WN * WK
    M8: tl.constexpr = COLUMNS // 8
    ROWS: tl.constexpr = 32 * T * WN
    BLOCKS: tl.constexpr = K // 32
    STEPS: tl.constexpr = (BLOCKS + WK - 1) // WK
    PART: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    token_blocks = tl.cdiv(tokens, COLUMNS)
    first = tl.program_id(0) // token_blocks * ROWS
    warp = tl.arange(0, W)
    tile = first // 32 + (warp // WK)[:, None] * T + tl.arange(0, T)[None, :]
    tile = tl.minimum(tile, N // 32 - 1) * BLOCKS
    g, t = tl.arange(0, 8), tl.arange(0, 4)
    token = tl.program_id(0) % token_blocks * COLUMNS
    rows = (token + g[:, None] + tl.arange(0, M8)[None, :] * 8)[None, :, None, :, None]
    columns = t[:, None, None, None, None] * 8 + tl.arange(0, 8)[None, None, None, None, :]
    from_row = rows.to(tl.int64) * K + columns
    acc = tl.zeros([W, T, 4, 8, M8, 4, 2], tl.float32)
    acc_up = tl.zeros([W, T, 4, 8, M8, 4, 2], tl.float32)
    begin = tl.program_id(1) * PART
    end = begin + PART if STEPS % SPLITS == 0 else tl.minimum(begin + PART, STEPS)
    take_turn(DEPENDENT)
    reader = tl.arange(0, WK if STAGES > 1 else W)  # in shared memory x is there once for all warps
    for step in tl.range(begin, end, loop_unroll_factor=UNROLL, num_stages=STAGES):
        block = step * WK + warp % WK
        live = block < BLOCKS
        if BLOCKS % WK:
            block = tl.minimum(block, BLOCKS - 1)
        read = (step * WK + reader % WK)[None, None, :, None, None]
        seen = (rows < tokens) & (read < BLOCKS if BLOCKS % WK else True)
        low, high = _load_rows(x, from_row + read * 32, seen, W)
        at = tile + block[:, None]
        acc = _add_blocks(acc, w, w_scale, w_minimum, at, live, low, high, EVICT_FIRST, MINIMUMS)
        if GEGLU:
            at += N // 32 * BLOCKS
            acc_up = _add_blocks(acc_up, w, w_scale, w_minimum, at, live, low, high, EVICT_FIRST, MINIMUMS)
    m = token + tl.arange(0, COLUMNS)
    inside = (m < tokens)[None, :]
    y = _add_warps(acc, WK)
    if SPLITS > 1:
        y, last = sum_splits(y, partials, counters, tl.program_id(0), tl.num_programs(0), inside, SPLITS)
        if not last:
            return
    if GEGLU:
        y = gelu_tanh(y) * _add_warps(acc_up, WK)
    n = first + tl.arange(0, ROWS)
    at = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, (y * alpha).to(out.dtype.element_ty), mask=inside & (n < N)[:, None])


@triton.jit
def dequantize_q4(
    w, out, w_scale, w_minimum, N: tl.constexpr, K: tl.constexpr, W: tl.constexpr, MINIMUMS: tl.constexpr
):
    """out [N, K], 16 bits, of tiles w: each weight rounded once. A warp takes a tile; grid: (cdiv(N K / 1024, W))."""
    TILES: tl.constexpr = N // 32 * (K // 32)
    at = tl.program_id(0) * W + tl.arange(0, W)[:, None]
    inside = at < TILES
    at = tl.minimum(at, TILES - 1)
    low, high = _load_nibbles(w, at, out.dtype.element_ty, True)
    live = tl.full([W], True, tl.int1)
    scale = _load_scales(w_scale, at, live)
    rest = scale * 0.0
    if MINIMUMS:
        rest = tl.fma(scale, 8.0, _load_scales(w_minimum, at, live))
    # [W, 1, r, g, 1, t, 1] of every lane; its weights are [W, r, g, t, j].
    scale, rest = tl.reshape(scale, [W, 4, 8, 4, 1, 1]), tl.reshape(rest, [W, 4, 8, 4, 1, 1])
    q = tl.join(tl.reshape(low, [W, 4, 8, 4, 4]), tl.reshape(high, [W, 4, 8, 4, 4]))  # [W, r, g, t, j, half]
    value = tl.fma(q.to(tl.float32), tl.broadcast_to(scale, q.shape), tl.broadcast_to(rest, q.shape))
    value = tl.reshape(tl.permute(value.to(out.dtype.element_ty), (0, 1, 2, 3, 5, 4)), [W, 32, 32])
    row = (at // (K // 32) * 32)[:, :, None] + tl.arange(0, 32)[None, :, None]
    column = (at % (K // 32) * 32)[:, :, None] + tl.arange(0, 32)[None, None, :]
    tl.store(out + row.to(tl.int64) * K + column, value, mask=inside[:, :, None])
