"""Linear layers of Q4_0 for some tens of rows (sm90): as `kernels.linear_q4`, by products of warp groups.

Knows pointers, types and block sizes; neither models nor GPUs. Weights, scales and x come to shared memory by tensor
copies, which take no thread's time. A warp widens its own strip of 32 rows in registers, the M-side operand of wgmma; x
is read from shared memory by all warps. `linear_q4` keeps x in registers instead, at 32 rows 255 of a thread.

Gluon is Triton's language of explicit layouts; `assert_trivial` says that no value crosses lanes. Weights lie in
`linear_q4`'s order, of which lane t of four has columns 8 t to 8 t + 7 of a block. Of 16 columns wgmma takes 2 t, 2 t +
1, 2 t + 8 and 2 t + 9 from it, so x is "ordered": within 32 columns, 8 t + 4 h + 2 u + i lies at 16 h + 8 u + 2 t + i.
Kernels that write x do so (`kernels.order`). Sums are `linear_q4`'s: of a block in float32, then times its scale.

Row 16 W r2 + 16 w + 8 rb + g of a tile is row 16 r2 + 8 rb + g of warp w's strip. Invariants: `kernels.linear`'s.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from wicore_trt.plugins.kernels.linear_q4 import BFLOAT16_NIBBLES, FLOAT16_NIBBLES
from wicore_trt.plugins.kernels.turns import take_turn

BFLOAT16_TEXT, FLOAT16_TEXT = gl.constexpr(BFLOAT16_NIBBLES.value), gl.constexpr(FLOAT16_NIBBLES.value)
BFLOAT16S, FLOAT16S = gl.constexpr((gl.bfloat16,) * 8), gl.constexpr((gl.float16,) * 8)
STEP = gl.constexpr(4)
"""Blocks of 32 columns of a step, all of a stage."""


@gluon.constexpr_function
def _along(layout, dim):
    for other in range(layout.rank - 1, -1, -1):
        layout = layout if other == dim else gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _count(size: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr):
    """0 to size - 1 along `dim` of a tensor of this layout."""
    RANK: gl.constexpr = layout.rank
    values = gl.arange(0, size, _along(layout, dim))
    for other in gl.static_range(RANK):
        if other != dim:
            values = gl.expand_dims(values, other)
    return values


@gluon.jit
def _copy_weights(w, w_scale, words, scales, bars, slot, strip, block, live, COLUMNS: gl.constexpr, W: gl.constexpr):
    """Ask for a step's weights; the slot's barrier waits for these and x."""
    BYTES: gl.constexpr = STEP * (W * 576 + COLUMNS * 64)
    bar = bars.index(slot)
    mbarrier.expect(bar, BYTES, live)
    tma.async_copy_global_to_shared(w, [0, strip, block, 0], bar, words.index(slot), live)
    tma.async_copy_global_to_shared(w_scale, [0, strip, block * 32], bar, scales.index(slot), live)


@gluon.jit
def _widen(words, type_, operand: gl.constexpr, W: gl.constexpr):
    """q - 8 of words [W, 32, 4], in the order of x: [32 W, 16] of columns 0 to 15, and of 16 to 31."""
    text: gl.constexpr = BFLOAT16_TEXT if type_ == gl.bfloat16 else FLOAT16_TEXT
    types: gl.constexpr = BFLOAT16S if type_ == gl.bfloat16 else FLOAT16S
    q = gl.inline_asm_elementwise(text, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], types, True, 1)
    return _order(q[0], q[1], q[2], q[3], operand, W), _order(q[4], q[5], q[6], q[7], operand, W)


@gluon.jit
def _order(q0, q1, q2, q3, operand: gl.constexpr, W: gl.constexpr):
    q = gl.join(gl.join(q0, q1), gl.join(q2, q3))  # [W, 32, 4, i, u]
    q = gl.permute(gl.reshape(q, [W, 8, 4, 2, 2, 2, 2]), (3, 0, 4, 1, 6, 2, 5))  # of w, g, t, r2, rb, i, u
    return gl.convert_layout(gl.reshape(q, [32 * W, 16]), operand, assert_trivial=True)


@gluon.jit
def _multiply(words, x, zeros, operand: gl.constexpr, W: gl.constexpr):
    """Begin the product of a block [32 W, COLUMNS]; also its operands, which must outlive it."""
    low, high = _widen(words, x.dtype, operand, W)
    part = hopper.warpgroup_mma(low, x.slice(0, 16, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(high, x.slice(16, 16, 1).permute((1, 0)), part, is_async=True), low, high


@gluon.jit
def _spread_scales(scale, rows: gl.constexpr, W: gl.constexpr):
    """float32 [32 W, 1] of scales [W, 8, 4]."""
    scale = gl.permute(gl.reshape(scale.to(gl.float32), [W, 8, 2, 2]), (2, 0, 3, 1))
    return gl.expand_dims(gl.convert_layout(gl.reshape(scale, [32 * W]), rows, assert_trivial=True), 1)


@gluon.jit
def _sum_parts(acc, to, counter, part, inside, SPLITS: gl.constexpr, SIZE: gl.constexpr, AT_ONCE: gl.constexpr):
    """Sum as `linear.sum_splits`; of the parts at `to`, SIZE apart, AT_ONCE are on their way at once."""
    gl.store(to + part * SIZE, acc, mask=inside, cache_modifier=".cg")
    gl.thread_barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        gl.thread_barrier()
        acc = gl.load(to, mask=inside, other=0.0, cache_modifier=".cg")
        for first in range(1, SPLITS, AT_ONCE):
            terms = ()
            for i in gl.static_range(AT_ONCE):
                live = inside & (first + i < SPLITS)
                terms += (gl.load(to + (first + i) * SIZE, mask=live, other=0.0, cache_modifier=".cg"),)
            for i in gl.static_range(AT_ONCE):
                acc += terms[i]
        gl.store(counter, 0)
    return acc, last


@gluon.jit
def _gelu_tanh(g):
    z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
    return g / (1.0 + gl.exp(-2.0 * z))


@gluon.jit
def _store_out(acc, out, alpha, first, token, tokens, mma: gl.constexpr, N: gl.constexpr, W: gl.constexpr,
               COLUMNS: gl.constexpr, GEGLU: gl.constexpr):  # fmt: skip
    """Store strips from `first` on; of GEGLU, whose result is the next layer's x, in the order of x."""
    if GEGLU:
        S: gl.constexpr = W // 2
        pairs: gl.constexpr = gl.BlockedLayout([1, 4, 1, 2], [1, 8, 4, 1], [S, 1, W // S, 1], [3, 1, 2, 0])
        y = gl.reshape(acc, [2, 2, S, 2, 2, 2, 2, COLUMNS])  # [r2, up or not, s, rb, h, u, i, COLUMNS]; t is 2 r2 + rb
        y = gl.reshape(gl.permute(y, (2, 4, 5, 0, 3, 6, 7, 1)), [S, 32, COLUMNS, 2])
        gate, up = gl.split(gl.convert_layout(y, pairs))
        at: gl.constexpr = gl.SliceLayout(3, pairs)
        y = _gelu_tanh(gate) * up
        n = (first + _count(S, 0, at)) * 32 + _count(32, 1, at)
        m = token + _count(COLUMNS, 2, at)
    else:
        y, row = acc, _count(32 * W, 0, mma)
        n = (first + row // 16 % W) * 32 + row // (16 * W) * 16 + row % 16
        m = token + _count(COLUMNS, 1, mma)
    gl.store(out + m.to(gl.int64) * N + n, (y * alpha).to(out.dtype.element_ty), mask=(m < tokens) & (n < N))


@gluon.jit
def linear_q4_groups(
    x,
    w,
    out,
    w_scale,
    alpha,
    partials,
    counters,
    tokens,
    N: gl.constexpr,
    K: gl.constexpr,
    W: gl.constexpr,
    COLUMNS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    GEGLU: gl.constexpr,
    DEPENDENT: gl.constexpr = 0,
):
    """Multiply any number of rows of ordered x by tiles w and w_scale; all else as `kernels.linear`. K is a multiple of
    128. x, w and w_scale are tensor maps (`linear_layout.linear_launch`).

    A program of W warps (4 or 8) computes 32 W rows of weights (GEGLU: half of them gate, half up) for COLUMNS rows of
    x over one of SPLITS parts of K, STEP blocks a step. STAGES steps are on their way to shared memory, weights of the
    first ones before earlier kernels have ended. The parts of a tile are neighbours, summed in order by the one that
    ends last. Grid: (cdiv(rows of weights, 32 W) * cdiv(tokens, COLUMNS) * SPLITS).
    """
    STEPS: gl.constexpr = K // (32 * STEP)
    SIZE: gl.constexpr = 32 * W * COLUMNS
    H: gl.constexpr = 2 if GEGLU else 1
    type_: gl.constexpr = x.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 1, 32], [H, W // H, 1, 1], [3, 2, 1, 0])
    warps: gl.constexpr = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    cells: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]], [[0, 0, 0], [0, 0, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        (warps[:1] if W == 4 else warps[:2]) + [[1, 0, 0]] if H == 2 else (warps[:2] if W == 4 else warps),
        [], [H, W // H, 32],
    )  # fmt: skip
    words = gl.allocate_shared_memory(gl.int32, [STAGES, H, W // H, STEP, 128], w.layout)
    scales = gl.allocate_shared_memory(gl.float16, [STAGES, H, W // H, STEP * 32], w_scale.layout)
    xs = gl.allocate_shared_memory(type_, [STAGES, STEP // 2, COLUMNS, 64], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), 1)
    hopper.fence_async_shared()
    gl.thread_barrier()

    part, tile = gl.program_id(0) % SPLITS, gl.program_id(0) // SPLITS
    token_blocks = gl.cdiv(tokens, COLUMNS)
    first = tile // token_blocks * (W // H)  # strip of 32 outputs
    token = tile % token_blocks * COLUMNS
    begin = part * STEPS // SPLITS
    steps = (part + 1) * STEPS // SPLITS - begin
    for i in gl.static_range(STAGES):
        _copy_weights(w, w_scale, words, scales, bars, i, first, (begin + i) * STEP, i < steps, COLUMNS, W)
    take_turn(DEPENDENT)
    for i in gl.static_range(STAGES):
        at = (begin + i) * (STEP // 2)
        tma.async_copy_global_to_shared(x, [at, token, 0], bars.index(i), xs.index(i), i < steps)
    acc = gl.zeros([32 * W, COLUMNS], gl.float32, mma)
    zeros = gl.zeros([32 * W, COLUMNS], gl.float32, mma)
    slot = 0
    phase = 0
    for step in range(0, steps):
        mbarrier.wait(bars.index(slot), phase)
        w_at, d_at, x_at = words.index(slot), scales.index(slot), xs.index(slot)
        x_at = x_at.reshape([STEP // 2 * COLUMNS, 64])
        for i in gl.static_range(0, STEP, 2):  # two products that do not wait for each other
            pair = x_at.slice(i // 2 * COLUMNS, COLUMNS, 0)
            one = gl.reshape(w_at.slice(i, 1, 2).load(lanes), [W, 32, 4])
            two = gl.reshape(w_at.slice(i + 1, 1, 2).load(lanes), [W, 32, 4])
            sum1, low1, high1 = _multiply(one, pair.slice(0, 32, 1), zeros, operand, W)
            sum2, low2, high2 = _multiply(two, pair.slice(32, 32, 1), zeros, operand, W)
            scale1 = gl.reshape(d_at.slice(i * 32, 32, 2).load(cells), [W, 8, 4])
            scale2 = gl.reshape(d_at.slice(i * 32 + 32, 32, 2).load(cells), [W, 8, 4])
            scale1 = _spread_scales(scale1, gl.SliceLayout(1, mma), W)
            scale2 = _spread_scales(scale2, gl.SliceLayout(1, mma), W)
            sum1, _, _ = hopper.warpgroup_mma_wait(1, deps=[sum1, low1, high1])
            acc = gl.fma(sum1, gl.broadcast(scale1, sum1)[0], acc)
            sum2, _, _ = hopper.warpgroup_mma_wait(0, deps=[sum2, low2, high2])
            acc = gl.fma(sum2, gl.broadcast(scale2, sum2)[0], acc)
        gl.thread_barrier()
        at = begin + step + STAGES
        live = step + STAGES < steps
        _copy_weights(w, w_scale, words, scales, bars, slot, first, at * STEP, live, COLUMNS, W)
        tma.async_copy_global_to_shared(x, [at * (STEP // 2), token, 0], bars.index(slot), xs.index(slot), live)
        last_slot = slot == STAGES - 1
        phase = gl.where(last_slot, phase ^ 1, phase)
        slot = gl.where(last_slot, 0, slot + 1)
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(i))
    if SPLITS > 1:
        inside = token + _count(COLUMNS, 1, mma) < tokens
        to = partials + tile * (SPLITS * SIZE) + (_count(32 * W, 0, mma) + _count(COLUMNS, 1, mma) * (32 * W))
        acc, last = _sum_parts(acc, to, counters + tile, part, inside, SPLITS, SIZE, 64 // COLUMNS)
        if not last:
            return
    _store_out(acc, out, alpha, first, token, tokens, mma, N, W, COLUMNS, GEGLU)
