"""LayerNorm of an image encoder's residual stream, which adds the last product first.

One program per row, the whole row in registers. Knows neither layers nor weights' names. Invariants: the residual and
all sums are float32; a result is rounded once, to bfloat16. NaN and infinities are carried on.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.step_layout import LAYER_NORM_COLUMNS


@triton.jit
def add_layer_norm(residual, added, weight, bias, out, columns, eps, BLOCK: tl.constexpr):
    """residual[r] += added[r] in place; out[r] = LayerNorm(residual[r]) * weight + bias. `added` and `out` are bfloat16
    [rows, columns], the others float32. Grid: (rows,)."""
    first, column = tl.program_id(0) * columns, tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(residual + first + column, mask=inside, other=0.0)
    value += tl.load(added + first + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + first + column, value, mask=inside)
    centred = tl.where(inside, value - tl.sum(value, 0) / columns, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / columns + eps)
    normed = normed * tl.load(weight + column, mask=inside, other=0.0) + tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + first + column, normed.to(tl.bfloat16), mask=inside)


def add_layer_norm_spec() -> KernelSpec:
    signature = dict.fromkeys(("residual", "weight", "bias"), "*fp32") | dict.fromkeys(("added", "out"), "*bf16")
    signature = {n: signature.get(n, "i32") for n in add_layer_norm.arg_names[:6]} | {"eps": "fp32"}
    aligned = frozenset(set(signature) - {"eps"})
    return KernelSpec("add_layer_norm", add_layer_norm, signature, {"BLOCK": LAYER_NORM_COLUMNS}, aligned, 4, 1)
