"""Operators of the torch lowering by themselves: FP8 and float16 arithmetic, KV scales, absent pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity.tiny import TinyModel, tiny_model

from wicore_trt.backends.torch.ops import TorchModel, TorchOps, quantize_rows
from wicore_trt.backends.torch.weights import fuse_weights
from wicore_trt.checkpoint.names import kv_scale_name
from wicore_trt.model.gemma3 import forward
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.step_inputs import StepInputs

E4M3 = torch.float8_e4m3fn
PAGE_TOKENS, PAGES = 4, 40


def e4m3_grid() -> np.ndarray:
    """All finite E4M3 magnitudes, ascending, from the format's definition."""
    subnormal = [m * 2.0**-9 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array([*subnormal, *normal])[:-1]  # the last code is NaN


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest E4M3 value of float64 x, ties to the even code, saturating."""
    grid = e4m3_grid()
    magnitude = np.minimum(np.abs(x), grid[-1])
    above = np.searchsorted(grid, magnitude)
    below = np.maximum(above - 1, 0)
    low, high = magnitude - grid[below], grid[above] - magnitude
    code = np.where((low < high) | ((low == high) & (below % 2 == 0)), below, above)
    return np.copysign(grid[code], x)


def model_of(tiny: TinyModel, dtype: str, kv: torch.dtype, extra: dict[str, torch.Tensor]) -> TorchModel:
    spec = tiny.spec
    shape = (2, PAGE_TOKENS, spec.num_kv_heads, spec.head_dim)
    pools = {
        g: torch.full((PAGES, len(spec.layers_of(g)), *shape), torch.nan).to(kv)
        for g in ("global", "local")
        if spec.layers_of(g)
    }
    return TorchModel(spec, dtype, fuse_weights(tiny.tensors, spec) | extra, pools, torch.device("cpu"))


def ops_of(model: TorchModel, piece: SequenceSlice) -> TorchOps:
    layout = KVLayout(PAGE_TOKENS, "float32", dict.fromkeys(model.pools, PAGES), {})
    return TorchOps(model, StepInputs.from_batch(StepBatch([piece]), layout, tuple(model.pools)))


def one_slice(tokens: int = 1, start: int = 0) -> SequenceSlice:
    pages = list(range(PAGES))
    return SequenceSlice(1, [7 * i % 90 for i in range(tokens)], start, {"global": pages, "local": pages}, sample=True)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("static_scale", [None, 0.01])
def test_quantized_rows_are_the_definition_bit_for_bit(seed: int, static_scale: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(50, 130, generator=generator) * torch.randn(50, 1, generator=generator).exp() ** 3
    x[3] = 0
    x[4, :100] *= 1e-4  # subnormals of the row's scale
    x[5] = torch.arange(130) / 129 * 448  # ties
    q, scale = quantize_rows(x, static_scale)
    for i, row in enumerate(x.numpy()):
        amax = np.float32(np.abs(row).max())
        expected = np.float32(static_scale) if static_scale else (amax / np.float32(448) if amax else np.float32(1))
        assert scale[i].item() == expected
        assert np.array_equal(q[i].double().numpy(), nearest_e4m3((row / expected).astype(np.float64)))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_fp8_linear_is_exact_against_float64(seed: int) -> None:
    """Small integers and power-of-two row scales: every partial sum is exact in float32, so bits must agree."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-15, 16, (9, 64), generator=generator).float()
    x[:, 0] = 448.0
    x *= torch.ldexp(torch.ones(9, 1), torch.randint(-6, 6, (9, 1), generator=generator))
    w = torch.randint(-15, 16, (33, 64), generator=generator).float().to(E4M3)
    w_scale = torch.rand(33, generator=generator)
    extra = {"x.weight": w, "x.weights_scaling_factor": w_scale}
    actual = ops_of(model_of(tiny_model(0), "float32", torch.float32, extra), one_slice()).linear(x, "x.weight")
    scale = x.abs().amax(1, keepdim=True).double() / 448
    exact = ((x.double() / scale) @ w.double().T) * scale * w_scale.double()
    assert torch.equal(actual, exact.float())


def test_float16_operands_beyond_the_range_are_scaled_not_clipped() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 64, generator=generator) * torch.tensor([1e-3, 1, 6e4, 1e6, 1e12, 1e30])[:, None]
    w = torch.randn(33, 64, generator=generator)
    ops = ops_of(model_of(tiny_model(0), "float16", torch.float16, {"x.weight": w.half()}), one_slice())
    actual = ops.linear(x, "x.weight")
    exact = x.double() @ w.half().double().T
    assert ((actual - exact).abs().amax(1) < 1e-3 * exact.abs().amax(1)).all()
    plain = x.half().float() @ w.half().float().T
    assert torch.equal(actual[:2], plain[:2]) and not plain[3:].isfinite().any()


def test_kv_scale_of_the_checkpoint() -> None:
    """FP8 pages hold k / scale and v / scale, and attention undoes it."""
    tiny = tiny_model(3)
    scales = {kv_scale_name(i): torch.tensor([0.05 * (i + 1)]) for i in range(tiny.spec.num_layers)}
    plain = model_of(tiny, "float32", torch.float32, {})
    scaled = model_of(tiny, "float32", E4M3, scales)
    expected, actual = (forward(ops_of(m, one_slice(30)), tiny.spec) for m in (plain, scaled))
    group = tiny.spec.layer_groups[0]
    kv, stored = plain.pools[group][:7, 0], scaled.pools[group][:7, 0].float() * 0.05
    assert ((kv - stored).abs() <= kv.abs() * 2**-4 + 0.05 * 2**-10).all()
    assert (actual - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize("group", ["global", "local"])
def test_an_absent_page_that_a_query_sees_is_caught(group: str) -> None:
    """Index -1 would silently read the pool's last page."""
    tiny = tiny_model(3)
    window = tiny.spec.sliding_window
    model = model_of(tiny, "float32", torch.float32, {})
    forward(ops_of(model, one_slice(60)), tiny.spec)
    piece = one_slice(1, start=60)
    outside = (60 - window + 1) // PAGE_TOKENS
    piece.pages["local"] = [-1] * outside + list(range(outside, PAGES))
    assert forward(ops_of(model, piece), tiny.spec).isfinite().all()
    piece.pages[group] = [-1] * (outside + 1) + list(range(outside + 1, PAGES))
    with pytest.raises(AssertionError, match="absent"):
        forward(ops_of(model, piece), tiny.spec)
