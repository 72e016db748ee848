"""GeGLU behind a product that some library computed: gelu_tanh(gate) * up as operands of the next product.

Knows neither layers nor weights. Invariants: arithmetic is float32; a value is rounded once, to the operand's 16-bit
type. For FP8 it is then rounded to E4M3 with one float32 scale per row (amax of the rounded row / 448, 1 for a row of
zeros; `backends.torch.ops.quantize_rows`). A row depends on that row alone. NaN and infinities are carried on.

alpha, a power of two, keeps float16 in its range (`linear_layout.geglu_exponent`): 16-bit results are multiplied by it,
and their reader divides; with FP8 the scale is divided by it here, so the reader need not know.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.aot import Constant, KernelSpec
from wicore_trt.plugins.kernels.e4m3 import magnitude_bits, quantize_row, row_scale
from wicore_trt.plugins.layout import FLOAT_TYPES

BLOCK_16BIT = 2048


@triton.jit
def _columns(gate_up, first, SIZE: tl.constexpr):
    """`first` and the SIZE - 1 columns behind it, 16 bytes of gates to a thread in loads and stores alike."""
    return first + tl.max_contiguous(tl.arange(0, SIZE), 128 // gate_up.dtype.element_ty.primitive_bitwidth)


@triton.jit
def _load(source, first, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """SIZE gates and ups of a row from column `first` on; zeros beyond the last."""
    i = _columns(source, first, SIZE)
    return tl.load(source + i, mask=i < WIDTH, other=0.0), tl.load(source + WIDTH + i, mask=i < WIDTH, other=0.0)


@triton.jit
def _value(gate, up, alpha):
    """gelu_tanh(gate) * up * alpha in float32: 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)), which cancels nothing."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    square = gate * gate
    # z = sqrt(2 / pi) (gate + 0.044715 gate**3), and -2 / ln(2) of it here: exp(-2 z) = 2**(gate * slope).
    slope = tl.fma(square, tl.full(square.shape, -0.1029432396, tl.float32), -2.302208198)
    return gate / (1.0 + tl.exp2(gate * slope)) * up * alpha


@triton.jit
def _rounded(gate, up, alpha, HALF: tl.constexpr):
    value = _value(gate, up, alpha)
    return value.to(tl.float16) if HALF else value.to(tl.bfloat16)


@triton.jit
def _store8(source, out, first, value, scale, WIDTH: tl.constexpr, NATIVE: tl.constexpr):
    i = _columns(source, first, value.shape[0])
    tl.store(out + i, quantize_row(value.to(tl.float32), scale, NATIVE), mask=i < WIDTH)


@triton.jit
def geglu(gate_up, out, alpha, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out[r, i] = gelu_tanh(gate_up[r, i]) * gate_up[r, WIDTH + i] * alpha, gate_up [rows, 2 WIDTH] of any float type,
    out [rows, WIDTH] 16 bit. Grid: (rows, cdiv(WIDTH, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    gate, up = _load(gate_up + row * (2 * WIDTH), first, WIDTH, BLOCK)
    i = _columns(gate_up, first, BLOCK)
    tl.store(out + row * WIDTH + i, _value(gate, up, alpha).to(out.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def geglu_rows(
    gate_up,
    out,
    scales,
    alpha,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    HALF: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """`geglu` as E4M3 bytes [rows, WIDTH] and `scales` float32 [rows], in one pass: a program keeps a row in registers.

    A row is FIRST, SECOND (0: none) and THIRD (0: none) columns, powers of two, so that few lanes lie beyond WIDTH. All
    loads come before the first sum over the row, which is where threads wait for each other. Grid: (rows).
    """
    row = tl.program_id(0).to(tl.int64)
    source, target = gate_up + row * (2 * WIDTH), out + row * WIDTH
    gate, up = _load(source, 0, WIDTH, FIRST)
    if SECOND > 0:
        gate2, up2 = _load(source, FIRST, WIDTH, SECOND)
    if THIRD > 0:
        gate3, up3 = _load(source, FIRST + SECOND, WIDTH, THIRD)
    value = _rounded(gate, up, alpha, HALF)
    bits = tl.max(magnitude_bits(value.to(tl.float32)), 0)
    if SECOND > 0:
        value2 = _rounded(gate2, up2, alpha, HALF)
        bits = tl.maximum(bits, tl.max(magnitude_bits(value2.to(tl.float32)), 0))
    if THIRD > 0:
        value3 = _rounded(gate3, up3, alpha, HALF)
        bits = tl.maximum(bits, tl.max(magnitude_bits(value3.to(tl.float32)), 0))
    scale = row_scale(bits)
    tl.store(scales + row, scale / alpha)
    _store8(source, target, 0, value, scale, WIDTH, NATIVE)
    if SECOND > 0:
        _store8(source, target, FIRST, value2, scale, WIDTH, NATIVE)
    if THIRD > 0:
        _store8(source, target, FIRST + SECOND, value3, scale, WIDTH, NATIVE)


def geglu_spec(width: int, dtype: str, x_dtype: str) -> KernelSpec:
    """`geglu` of gate_up of `x_dtype` to operands of `dtype`."""
    signature = {"gate_up": f"*{FLOAT_TYPES[x_dtype]}", "out": f"*{FLOAT_TYPES[dtype]}", "alpha": "fp32"}
    constants: dict[str, Constant] = {"WIDTH": width, "BLOCK": BLOCK_16BIT}
    name = f"geglu_{dtype}_{x_dtype}_{width}"
    return KernelSpec(name, geglu, signature, constants, frozenset({"gate_up", "out"}), 8, 1)


def geglu_rows_spec(width: int, dtype: str, x_dtype: str, *, native: bool) -> KernelSpec:
    """`geglu_rows` of gate_up of `x_dtype`, rounded to `dtype` first; `native`: see `e4m3.has_conversions`."""
    sizes = row_parts(width)
    signature = {"gate_up": f"*{FLOAT_TYPES[x_dtype]}", "out": "*u8", "scales": "*fp32", "alpha": "fp32"}
    constants: dict[str, Constant] = {"WIDTH": width, "HALF": dtype == "float16", "NATIVE": native}
    constants |= dict(zip(("FIRST", "SECOND", "THIRD"), sizes, strict=True))
    warps = min(16, max(4, sizes[0] // 1024))
    name = f"geglu_{dtype}_fp8_{x_dtype}_{width}{'_native' if native else ''}"
    return KernelSpec(name, geglu_rows, signature, constants, frozenset({"gate_up", "out"}), warps, 1)


def row_parts(width: int) -> tuple[int, int, int]:
    """Three powers of two, or zeros behind the first, whose sum is the smallest of at least `width`."""
    parts = []
    for left in (2, 1, 0):
        size = 1 << (width - 1).bit_length() if width > 0 else 0
        if left and size > width:
            size //= 2
        parts.append(size)
        width -= size
    return parts[0], parts[1], parts[2]
