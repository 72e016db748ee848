"""Rows of 16-bit activations to E4M3, one float32 scale per row, as operands of an FP8 product.

Knows nothing of models. Invariant: scale and bytes are those of `model.lower_torch.quantize_rows`, bit by bit: scale =
max(abs(row)) / 448 (1 for a row of zeros), value / scale rounded to nearest even; a NaN makes the row NaN.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.e4m3 import quantize


@triton.jit
def quantize_rows(x, out, x_scale, K: tl.constexpr, BLOCK: tl.constexpr):
    """x [tokens, K] to out (uint8 [tokens, K]) and x_scale float32[tokens]. BLOCK >= K. Grid: (tokens)."""
    row = tl.program_id(0).to(tl.int64) * K
    k = tl.arange(0, BLOCK)
    value = tl.load(x + row + k, mask=k < K, other=0.0).to(tl.float32)
    spoilt = tl.max((value != value).to(tl.int32), axis=0) > 0
    largest = tl.max(tl.abs(value), axis=0)
    scale = tl.where(largest == 0, 1.0, tl.div_rn(largest, 448.0))
    scale = tl.where(spoilt, float("nan"), scale)
    tl.store(x_scale + tl.program_id(0), scale)
    tl.store(out + row + k, quantize(value, scale), mask=k < K)
