"""GeGLU behind a product that some library computed: gelu_tanh(gate) * up as operands of the next product.

Knows neither layers nor weights. Invariants: arithmetic is float32; a value is rounded once, to the operand's 16-bit
type, and then, for FP8, to E4M3 with one float32 scale per row (amax of the rounded row / 448, 1 for a row of zeros;
`model.lower_torch.quantize_rows`). A row depends on that row alone. NaN and infinities are carried on.

alpha, a power of two, keeps float16 in its range (`linear_layout.geglu_exponent`): 16-bit results are multiplied by it,
and whoever reads them divides; with FP8 the scale is divided by it here, so the reader need not know.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.aot import Constant, KernelSpec
from wicore_trt.plugins.kernels.e4m3 import quantize
from wicore_trt.plugins.layout import FLOAT_TYPES

BLOCK_16BIT = 2048


@triton.jit
def geglu(
    gate_up,
    out,
    scales,
    alpha,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    HALF: tl.constexpr,
):
    """out[r, i] = gelu_tanh(gate_up[r, i]) * gate_up[r, WIDTH + i] * alpha, gate_up [rows, 2 WIDTH] of any float type.

    out is 16 bit [rows, WIDTH], or with FP8 E4M3 bytes and `scales` float32 [rows]; a program then takes a whole row,
    BLOCK >= WIDTH. Grid: (rows, cdiv(WIDTH, BLOCK)).
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.max_contiguous(tl.arange(0, BLOCK), 4)
    inside = i < WIDTH
    source = gate_up + row * (2 * WIDTH) + i
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    # gelu with tanh: 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)), which cancels nothing.
    z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    value = gate / (1.0 + tl.exp(-2.0 * z)) * up * alpha
    target = out + row * WIDTH + i
    if FP8:
        value = value.to(tl.float16).to(tl.float32) if HALF else value.to(tl.bfloat16).to(tl.float32)
        spoilt = tl.max((value != value).to(tl.int32), 0) > 0
        scale = tl.div_rn(tl.max(tl.abs(value), 0), 448.0)
        scale = tl.where(spoilt, float("nan"), tl.where(scale == 0.0, 1.0, scale))
        tl.store(scales + row, scale / alpha)
        tl.store(target, quantize(value, scale), mask=inside)
    else:
        tl.store(target, value.to(out.dtype.element_ty), mask=inside)


def geglu_spec(width: int, dtype: str, x_dtype: str, *, fp8: bool) -> KernelSpec:
    """`geglu` of gate_up of `x_dtype` to operands of `dtype`, as E4M3 if `fp8`."""
    block = 1 << (width - 1).bit_length() if fp8 else BLOCK_16BIT
    out = "u8" if fp8 else FLOAT_TYPES[dtype]
    signature = {"gate_up": f"*{FLOAT_TYPES[x_dtype]}", "out": f"*{out}", "scales": "*fp32", "alpha": "fp32"}
    constants: dict[str, Constant] = {"WIDTH": width, "BLOCK": block, "FP8": fp8, "HALF": dtype == "float16"}
    warps = min(32, max(4, block // 1024)) if fp8 else 8
    name = f"geglu_{dtype}{'_fp8' if fp8 else ''}_{x_dtype}_{width}"
    return KernelSpec(name, geglu, signature, constants, frozenset({"gate_up", "out"}), warps, 1)
