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

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.linear import gelu_tanh, sum_splits
from wicore_trt.plugins.kernels.turns import take_turn

# A 16-bit float with these high bits and q as its low ones is 128 + q (bfloat16) or 1024 + q (float16): exact.
_NIBBLES = """{{
.reg .b32 first, second, one, less, pair<4>;
mov.b32 one, {one};
mov.b32 less, {less};
prmt.b32 first, $8, 0, 0x4140;
prmt.b32 second, $8, 0, 0x4342;
lop3.b32 pair0, first, 0x000f000f, {magic}, 0xea;
lop3.b32 pair1, second, 0x000f000f, {magic}, 0xea;
shr.u32 first, first, 4;
shr.u32 second, second, 4;
lop3.b32 pair2, first, 0x000f000f, {magic}, 0xea;
lop3.b32 pair3, second, 0x000f000f, {magic}, 0xea;
fma.rn.{type} pair0, pair0, one, less;
fma.rn.{type} pair1, pair1, one, less;
fma.rn.{type} pair2, pair2, one, less;
fma.rn.{type} pair3, pair3, one, less;
mov.b32 {{$0, $1}}, pair0;
mov.b32 {{$2, $3}}, pair1;
mov.b32 {{$4, $5}}, pair2;
mov.b32 {{$6, $7}}, pair3;
}}"""
BFLOAT16_NIBBLES = tl.constexpr(_NIBBLES.format(type="bf16x2", magic="0x43004300", one="0x3f803f80", less="0xc308c308"))
FLOAT16_NIBBLES = tl.constexpr(_NIBBLES.format(type="f16x2", magic="0x64006400", one="0x3c003c00", less="0xe408e408"))
BFLOAT16S, FLOAT16S = tl.constexpr((tl.bfloat16,) * 8), tl.constexpr((tl.float16,) * 8)


@triton.jit
def _load_tiles(w, at, live, EVICT_FIRST: tl.constexpr):
    """Words [32 lanes, W, T, r] of the tiles `at` [W, T]; any where not `live` [W]."""
    word = tl.arange(0, 32)[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    policy: tl.constexpr = "evict_first" if EVICT_FIRST else ""
    at = w.to(tl.pointer_type(tl.int32)) + at.to(tl.int64)[None, :, :, None] * 128 + word
    return tl.load(at, mask=live[None, :, None, None], eviction_policy=policy)


@triton.jit
def _widen(packed, to: tl.constexpr):
    """q - 8 of words [32, W, T, r], in type `to`: [W, 32 T, 16] of columns 8 t + j and of columns 8 t + 4 + j, at
    index 4 t + j."""
    text: tl.constexpr = BFLOAT16_NIBBLES if to == tl.bfloat16 else FLOAT16_NIBBLES
    types: tl.constexpr = BFLOAT16S if to == tl.bfloat16 else FLOAT16S
    q = tl.inline_asm_elementwise(text, "=h,=h,=h,=h,=h,=h,=h,=h,r", [packed], types, True, 1)
    return _order(q[0], q[1], q[2], q[3]), _order(q[4], q[5], q[6], q[7])


@triton.jit
def _order(q0, q1, q2, q3):
    """[W, 32 T, 16] of the values j = 0..3 [32, W, T, r]."""
    W: tl.constexpr = q0.shape[1]
    T: tl.constexpr = q0.shape[2]
    q = tl.reshape(tl.join(tl.join(q0, q2), tl.join(q1, q3)), [8, 4, W, T, 4, 4])  # [g, t, W, T, r, j]
    return tl.reshape(tl.permute(q, (2, 3, 4, 0, 1, 5)), [W, T * 32, 16])


@triton.jit
def _load_scales(d, at, live):
    """float16 scales of the tiles `at` [W, T], 0 where not `live` [W]: [t, g, W, T, r], all t alike."""
    g, t, r = tl.arange(0, 8), tl.arange(0, 4), tl.arange(0, 4)
    cell = (g[None, :, None] * 4 + r[None, None, :] + t[:, None, None] * 0)[:, :, None, None, :]
    return tl.load(d + at[None, None, :, :, None] * 32 + cell, mask=live[None, None, :, None, None], other=0.0)


@triton.jit
def _spread_scales(scale):
    """float32 [W, T, r, g, 1, t, 1] of `_load_scales`."""
    return tl.permute(scale.to(tl.float32), (2, 3, 4, 1, 0))[:, :, :, :, None, :, None]


@triton.jit
def _load_blocks(w, d, c, tile, block, live, EVICT_FIRST: tl.constexpr, MINIMUMS: tl.constexpr):
    """(Bytes, scales, minimums) of column block `block` [W] of the tiles that begin at `tile` [W, T]."""
    at = tile + block[:, None]
    scale = _load_scales(d, at, live)
    least = scale
    if MINIMUMS:
        least = _load_scales(c, at, live)
    return _load_tiles(w, at, live, EVICT_FIRST), scale, least


@triton.jit
def _split_rows(value):
    """x [t, g, W, COLUMNS / 8, j of 8] as two [W, 16, COLUMNS] in `_widen`'s order of columns."""
    W: tl.constexpr = value.shape[2]
    M8: tl.constexpr = value.shape[3]
    low, high = tl.split(tl.permute(tl.reshape(value, [4, 8, W, M8, 2, 4]), (0, 1, 2, 3, 5, 4)))
    low = tl.reshape(tl.permute(low, (2, 0, 4, 3, 1)), [W, 16, M8 * 8])
    return low, tl.reshape(tl.permute(high, (2, 0, 4, 3, 1)), [W, 16, M8 * 8])


@triton.jit
def _add_blocks(acc, packed, scale, least, value, MINIMUMS: tl.constexpr):
    """acc [W, T, r, g, COLUMNS / 8, t, 2] plus the products of blocks of weights and x."""
    W: tl.constexpr = acc.shape[0]
    M8: tl.constexpr = acc.shape[4]
    low, high = _split_rows(value)
    q_low, q_high = _widen(packed, low.dtype)
    part = tl.reshape(tl.dot(q_high, high, tl.dot(q_low, low)), acc.shape)
    scale = _spread_scales(scale)
    acc = tl.fma(part, tl.broadcast_to(scale, acc.shape), acc)
    if MINIMUMS:
        ones = tl.full([W, 16, 16], 1.0, tl.float32).to(low.dtype)
        sums = tl.reshape(tl.dot(ones, high, tl.dot(ones, low)), [W, 2, 8, M8, 4, 2])  # all 16 rows alike
        sums, _ = tl.split(tl.permute(sums, (0, 2, 3, 4, 5, 1)))
        rest = tl.fma(scale, 8.0, _spread_scales(least))  # of Q4_0's d and -8 d: 0
        acc = tl.fma(tl.broadcast_to(sums[:, None, None], acc.shape), tl.broadcast_to(rest, acc.shape), acc)
    return acc


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
    UNROLL: tl.constexpr,
    X_AHEAD: tl.constexpr,
    EVICT_FIRST: tl.constexpr,
    MINIMUMS: tl.constexpr,
    GEGLU: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
):
    """Multiply any number of rows of x by tiles w, w_scale and w_minimum (see above); all else as `kernels.linear`.

    A program computes 32 T WN columns of y for COLUMNS rows of x over one of SPLITS parts of K; each of its WN WK warps
    takes T tiles (with GEGLU of gate, and T of up) of every WK-th block of columns. UNROLL blocks of weights and
    X_AHEAD of x are on their way to registers; the first weights before earlier kernels have ended.
    Grid: (cdiv(N, 32 T WN) * cdiv(tokens, COLUMNS), SPLITS).
    """
    W: tl.constexpr = WN * WK
    M8: tl.constexpr = COLUMNS // 8
    ROWS: tl.constexpr = 32 * T * WN
    BLOCKS: tl.constexpr = K // 32
    STEPS: tl.constexpr = (BLOCKS + WK - 1) // WK
    PART: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    HALVES: tl.constexpr = 2 if GEGLU else 1
    token_blocks = tl.cdiv(tokens, COLUMNS)
    first = tl.program_id(0) // token_blocks * ROWS
    warp = tl.arange(0, W)
    tile = first // 32 + (warp // WK)[:, None] * T + (tl.arange(0, T * HALVES) % T)[None, :]
    tile = tl.minimum(tile, N // 32 - 1) + (tl.arange(0, T * HALVES) // T)[None, :] * (N // 32)
    tile *= BLOCKS
    g, t = tl.arange(0, 8), tl.arange(0, 4)
    token = tl.program_id(0) % token_blocks * COLUMNS
    rows = (token + g[:, None] + tl.arange(0, M8)[None, :] * 8)[None, :, None, :, None]
    columns = t[:, None, None, None, None] * 8 + tl.arange(0, 8)[None, None, None, None, :]
    from_row = x + rows.to(tl.int64) * K + columns
    acc = tl.zeros([W, T * HALVES, 4, 8, M8, 4, 2], tl.float32)
    begin = tl.program_id(1) * PART * WK
    end = tl.minimum(begin + PART * WK, BLOCKS)
    block = begin + warp % WK
    blocks = ()
    for i in tl.static_range(UNROLL):
        at = block + i * WK
        blocks += (_load_blocks(w, w_scale, w_minimum, tile, at, at < end, EVICT_FIRST, MINIMUMS),)
    take_turn(DEPENDENT)
    values = ()
    for i in tl.static_range(X_AHEAD):
        at = (block + i * WK)[None, None, :, None, None]
        values += (tl.load(from_row + at * 32, mask=(rows < tokens) & (at < end), other=0.0),)
    for step in range(0, PART, UNROLL):
        for i in tl.static_range(UNROLL):
            acc = _add_blocks(acc, blocks[0][0], blocks[0][1], blocks[0][2], values[0], MINIMUMS)
            at = block + (step + i + UNROLL) * WK
            blocks = blocks[1:] + (_load_blocks(w, w_scale, w_minimum, tile, at, at < end, EVICT_FIRST, MINIMUMS),)
            at = (block + (step + i + X_AHEAD) * WK)[None, None, :, None, None]
            values = values[1:] + (tl.load(from_row + at * 32, mask=(rows < tokens) & (at < end), other=0.0),)
    m = token + tl.arange(0, COLUMNS)
    inside = (m < tokens)[None, :]
    # Warps that share rows are added up.
    y = tl.sum(tl.reshape(acc, [WN, WK, T * HALVES * 32, COLUMNS]), axis=1)
    y = tl.reshape(y, [ROWS * HALVES, COLUMNS])
    if SPLITS > 1:
        y, last = sum_splits(y, partials, counters, tl.program_id(0), tl.num_programs(0), inside, SPLITS)
        if not last:
            return
    if GEGLU:
        gate, up = tl.split(tl.permute(tl.reshape(y, [WN, 2, T * 32, COLUMNS]), (0, 2, 3, 1)))
        y = tl.reshape(gelu_tanh(gate) * up, [ROWS, COLUMNS])
    n = first + tl.arange(0, ROWS)
    at = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, (y * alpha).to(out.dtype.element_ty), mask=inside & (n < N)[:, None])


@triton.jit
def dequantize_q4(
    w,
    out,
    w_scale,
    w_minimum,
    N: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    MINIMUMS: tl.constexpr,
):
    """out [N, K], 16 bits, of tiles w: each weight rounded once. A warp takes T tiles; a lane stores the 8 columns that
    it has of a row. Grid: (cdiv(N K / 1024, W T))."""
    TILES: tl.constexpr = N // 32 * (K // 32)
    at = (tl.program_id(0) * W + tl.arange(0, W)[:, None]) * T + tl.arange(0, T)[None, :]
    inside = at < TILES
    at = tl.minimum(at, TILES - 1)
    live = tl.full([W], True, tl.int1)
    low, high = _widen(_load_tiles(w, at, live, True), out.dtype.element_ty)
    scale = tl.permute(_load_scales(w_scale, at, live), (1, 0, 2, 3, 4)).to(tl.float32)[:, :, :, :, :, None, None]
    rest = scale * 0.0
    if MINIMUMS:
        least = tl.permute(_load_scales(w_minimum, at, live), (1, 0, 2, 3, 4)).to(tl.float32)
        rest = tl.fma(scale, 8.0, least[:, :, :, :, :, None, None])
    # [g, t, W, T, r, half, j] of each lane.
    q = tl.join(tl.reshape(low, [W, T, 4, 8, 4, 4]), tl.reshape(high, [W, T, 4, 8, 4, 4]))
    q = tl.permute(q, (3, 4, 0, 1, 2, 6, 5)).to(tl.float32)
    value = tl.fma(q, tl.broadcast_to(scale, q.shape), tl.broadcast_to(rest, q.shape)).to(out.dtype.element_ty)
    value = tl.reshape(tl.permute(value, (1, 0, 2, 3, 4, 5, 6)), [4, 8, W, T, 4, 8])
    g, t, r = tl.arange(0, 8)[None, :], tl.arange(0, 4)[:, None], tl.arange(0, 4)
    row = (at // (K // 32) * 32)[None, None, :, :, None] + (g + t * 0)[:, :, None, None, None] + r * 8
    column = (at % (K // 32) * 32)[None, None, :, :, None] + (t * 8 + g * 0)[:, :, None, None, None] + r * 0
    to = out + (row.to(tl.int64) * K + column)[:, :, :, :, :, None] + tl.arange(0, 8)
    tl.store(to, value, mask=inside[None, None, :, :, None, None])
