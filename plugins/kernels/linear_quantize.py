"""Rows of 16-bit activations to E4M3, one float32 scale per row, as operands of an FP8 product.

Knows nothing of models. Invariant: scale and bytes are those of `backends.torch.ops.quantize_rows`, bit by bit: scale =
max(abs(row)) / 448 (1 for a row of zeros), value / scale rounded to nearest even; a NaN makes the row NaN, and so does
an infinity (there the oracle's bytes differ, and its products are NaN as well).

Short rows are read by one program each (`quantize_rows`). Long ones of few tokens would leave most of a GPU idle, so
the kernel that wrote them has found their largest values (`largest`: `e4m3.magnitude_bits`), and many programs share a
row (`quantize_parts`). `quantize_rows` sets `largest` to zeros for the launches that follow: one that comes between two
uses of it in the stream.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.e4m3 import magnitude_bits, quantize_row, row_scale
from wicore_trt.plugins.kernels.turns import take_turn


@triton.jit
def quantize_rows(
    x, out, x_scale, largest, K: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr, DEPENDENT: tl.constexpr = 0
):
    """x [tokens, K] to out (uint8 [tokens, K]) and x_scale float32[tokens]; largest int32[tokens] becomes
    zeros. BLOCK >= K. Grid: (tokens)."""
    take_turn(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    k = tl.max_contiguous(tl.arange(0, BLOCK), 8)
    value = tl.load(x + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = row_scale(tl.max(magnitude_bits(value), axis=0))
    tl.store(x_scale + token, scale)
    tl.store(largest + token, 0)
    tl.store(out + token * K + k, quantize_row(value, scale, NATIVE), mask=k < K)


@triton.jit
def quantize_parts(
    x, out, x_scale, largest, K: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr, DEPENDENT: tl.constexpr = 0
):
    """`quantize_rows` of rows whose largest `magnitude_bits` are in `largest` already, BLOCK columns to a program.
    Grid: (tokens, cdiv(K, BLOCK))."""
    take_turn(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.max_contiguous(tl.arange(0, BLOCK), 8)
    value = tl.load(x + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = row_scale(tl.load(largest + token))
    if tl.program_id(1) == 0:
        tl.store(x_scale + token, scale)
    tl.store(out + token * K + k, quantize_row(value, scale, NATIVE), mask=k < K)
