"""Inputs of linear layers, their float64 reference and how far a right kernel may lie from it, for any device.

Needs torch (imported inside). Invariant: inputs are drawn anew at each call, what a kernel must not read is NaN, and
what it must write starts as NaN or as an impossible index.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from wicore_trt.backends.triton.tiles import pack_scales, pack_tiles
from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.layout import Launch
from wicore_trt.plugins.linear_layout import (
    GROUPS,
    LinearArrays,
    LinearConfig,
    LinearShape,
    linear_launch,
    partials_bytes,
)

SUM_ERROR = 2.0**-18
"""Of the sum of absolute products: 64 units in the last place of float32."""
FP8_SUM_ERROR = 2.0**-12
"""The same for E4M3 times E4M3, of which sm90 sums 128 products in about 14 bits."""
ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}
SMALLEST = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}
GUARD_ROWS = 2

Run = Callable[[KernelSpec, Launch], None]


@dataclass(frozen=True)
class LinearInputs:
    """Arrays of one launch. `x` and `out` have GUARD_ROWS rows beyond `tokens`, which are not the kernel's."""

    shape: LinearShape
    tokens: int
    x: Any
    w: Any
    x_scale: Any
    w_scale: Any
    w_minimum: Any = None

    def with_x(self, x: Any) -> LinearInputs:
        return replace(self, x=x)


def torch_type(name: str) -> Any:
    import torch

    return torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)


def draw(shape: LinearShape, tokens: int, device: str = "cpu") -> LinearInputs:
    """Normal x, normal weights / sqrt(k); E4M3 ones with scales that differ by row."""
    import torch

    if shape.four_bit:
        return draw_blocks(shape, tokens, device)
    x = torch.randn(tokens + GUARD_ROWS, shape.k, device=device)
    x[tokens:] = math.nan
    x_type = torch_type("fp8" if shape.fp8_input else shape.dtype)
    w = torch.randn(shape.weight_rows, shape.k, device=device)
    if shape.weights.quantized:
        w = (w * 64).clamp(-448, 448)
        w_scale = (torch.rand(shape.weight_rows, device=device) + 0.5) / (64 * math.sqrt(shape.k))
    else:
        w, w_scale = w / math.sqrt(shape.k), None
    x_scale = torch.rand(tokens, device=device) + 0.5 if shape.fp8_input else None
    return LinearInputs(shape, tokens, x.to(x_type), w.to(torch_type(shape.weights.storage)), x_scale, w_scale)


def draw_blocks(shape: LinearShape, tokens: int, device: str = "cpu") -> LinearInputs:
    """Normal x and any bytes as weights of 4 bits, in GGUF's order; scales differ by block and sign."""
    import torch

    x = torch.randn(tokens + GUARD_ROWS, shape.k, device=device).to(torch_type(shape.dtype))
    x[tokens:] = math.nan
    w = torch.randint(0, 256, (shape.weight_rows, shape.k // 2), dtype=torch.uint8, device=device)
    d, m = torch.randn(2, shape.weight_rows, shape.k // 32, device=device) / math.sqrt(shape.k)
    return LinearInputs(shape, tokens, x, w, None, d.half(), (4 * m).half() if shape.weights.minimums else None)


def pack_case(case: LinearInputs) -> tuple[Any, Any, Any]:
    """(Weights, scales, minimums) of 4 bits in the kernels' order."""
    w, d, m = case.w.clone(), case.w_scale.clone(), case.w_minimum
    pack_tiles(w)
    pack_scales(d)
    if m is not None:
        m = m.clone()
        pack_scales(m)
    return w, d, m


def order_columns(x: Any) -> Any:
    """x with its columns in the order of `kernels.order`."""
    return x.view(len(x), -1, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(x.shape)


def unorder_columns(x: Any) -> Any:
    return x.view(len(x), -1, 2, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).reshape(x.shape)


def reference(case: LinearInputs, alpha: float = 1.0) -> tuple[Any, Any]:
    """(y, allowed error), float64 [tokens, n], on the case's device. What the operands are is taken as exact."""
    import torch

    shape = case.shape
    x, w = case.x[: case.tokens].double(), case.w.double()
    size = None
    if shape.four_bit:
        blocks = case.w.view(len(w), -1, 16)
        q = torch.cat([blocks & 15, blocks >> 4], 2).double()
        d = case.w_scale.double()[:, :, None]
        m = -8 * d if case.w_minimum is None else case.w_minimum.double()[:, :, None]
        w, size = (d * q + m).flatten(1), ((d * (q - 8)).abs() + (8 * d + m).abs()).flatten(1)
    if case.x_scale is not None:
        x = x * case.x_scale.double()[:, None]
    if case.w_scale is not None and not shape.four_bit:
        w = w * case.w_scale.double()[:, None]
    y, size = x @ w.T, x.abs() @ (w.abs() if size is None else size).T
    error = size * (FP8_SUM_ERROR if shape.fp8_input and x.is_cuda else SUM_ERROR)
    if shape.geglu:
        (gate, up), (d_gate, d_up) = y.chunk(2, dim=1), error.chunk(2, dim=1)
        gelu = torch.nn.functional.gelu(gate, approximate="tanh")
        # |gelu'| < 1.13; the exponential is good to 2**-18 for every argument that leaves a value to speak of.
        y, error = gelu * up, 1.13 * d_gate * (up.abs() + d_up) + gelu.abs() * d_up + (gelu * up).abs() * SUM_ERROR
    y, error = y * alpha, error * alpha
    return y, error + y.abs() * ROUNDING[shape.out] + SMALLEST[shape.out]


def run_case(
    case: LinearInputs, config: LinearConfig, spec: KernelSpec, run: Run, *, alpha: float = 1.0, launches: int = 1
) -> Any:
    """out with its guard rows, after `launches` of them over the same counters.

    `spec` takes E4M3 bytes ("*u8") or Triton's type. AssertionError where a counter is not left at 0.
    """
    import torch

    shape, device = case.shape, case.x.device
    out = torch.full((case.tokens + GUARD_ROWS, shape.n), math.nan, dtype=torch_type(shape.out), device=device)
    scratch = partials_bytes(shape, config, case.tokens) // 4
    partials = torch.full((scratch,), math.nan, device=device)
    counters = torch.zeros(config.count_tiles(shape, case.tokens), dtype=torch.int32, device=device)
    largest = torch.empty(case.tokens, dtype=torch.int32, device=device)
    w = case.w.view(torch.uint8) if spec.signature["w"] == "*u8" else case.w
    w_scale, w_minimum = case.w_scale, case.w_minimum
    if shape.four_bit:
        w, w_scale, w_minimum = pack_case(case)
    arrays = LinearArrays(
        order_columns(case.x) if config.kind == GROUPS else case.x,
        w,
        out,
        0 if w_scale is None else w_scale,
        0 if case.x_scale is None else case.x_scale,
        partials if scratch else 0,
        counters if scratch else 0,
        largest if shape.largest else 0,
        0 if w_minimum is None else w_minimum,
    )
    for _ in range(launches):
        out.fill_(math.nan)
        largest.zero_()
        run(spec, linear_launch(shape, config, arrays, case.tokens, alpha))
    assert not int(counters.abs().sum()), "a counter is not left at 0"
    if shape.largest:
        found = out[: case.tokens].float().abs().amax(1)
        assert torch.equal(largest.view(torch.float32), found), f"{spec.name}: largest values of rows"
    return unorder_columns(out) if config.kind == GROUPS and shape.geglu else out


def check_case(case: LinearInputs, config: LinearConfig, spec: KernelSpec, run: Run, *, alpha: float = 1.0) -> float:
    """Run `case` twice and compare; the largest error as a share of what is allowed. AssertionError if above 1."""

    out = run_case(case, config, spec, run, alpha=alpha, launches=2)
    want, allowed = reference(case, alpha)
    got = out[: case.tokens].double()
    assert bool(out[case.tokens :].isnan().all()), f"{spec.name}: rows beyond the last were written"
    assert bool(got.isfinite().all()), f"{spec.name}: {int((~got.isfinite()).sum())} outputs are not finite"
    share = float(((got - want).abs() / allowed).max())
    assert share <= 1, f"{spec.name}, {case.tokens} rows: an error is {share:.3g} times what is allowed"
    return share
