"""E4M3 rows: GeGLU and quantisation in Triton's interpreter against the oracle, and compiled for every target."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import numpy as np
import torch
from gpu_kernels.targets import targets
from kernel_checks import EPSILON, TORCH, Runner
from ptx import recorded_ptx
from step_runners import RUNNERS

from wicore_trt.backends.torch.ops import quantize_rows
from wicore_trt.plugins import aot
from wicore_trt.plugins.kernels.e4m3 import has_conversions
from wicore_trt.plugins.kernels.geglu import geglu_rows_spec, geglu_spec, row_parts
from wicore_trt.plugins.kernels.linear_specs import quantize_parts_spec, quantize_rows_spec
from wicore_trt.plugins.linear_layout import quantize_launch
from wicore_trt.plugins.step_layout import geglu_launch

NATIVE = pytest.mark.parametrize("native", [False, True])
SCALES = (1e-3, 1.0, 300.0, 0.0, 7.0, 2.0**-126)


def rows_of(columns: int, dtype: str) -> torch.Tensor:
    """Rows of very different sizes, one of zeros, and many ties: multiples of powers of two."""
    x = torch.randn(len(SCALES), columns)
    x[1] = torch.randint(-448, 449, (columns,)) / 2.0 ** torch.randint(0, 12, (columns,))
    x[1, 0] = 448
    return (x * torch.tensor(SCALES)[:, None]).to(TORCH[dtype])


def signed(bits: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes with one zero."""
    return torch.where(bits == 0x80, 0, bits)


def poisoned(run: Runner, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and scales with a guard row."""
    bits = torch.full((rows + 1, columns), 0x7F, dtype=torch.uint8)
    return run.put(bits), run.put(torch.full((rows + 1,), math.nan))


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@NATIVE
def test_quantized_rows_are_the_oracles(run: Runner, dtype: str, native: bool) -> None:
    x = rows_of(4120, dtype)
    want, want_scale = quantize_rows(x)
    largest = run.put((x.float().abs().amax(1)).view(torch.int32))
    for spec in (quantize_parts_spec(4120, dtype, native=native), quantize_rows_spec(4120, dtype, native=native)):
        out, scale = poisoned(run, *x.shape)
        run.launch(spec, quantize_launch(spec.constants, run.put(x), out, scale, largest, len(x)))
        assert torch.equal(signed(out[:-1].cpu()), signed(want.view(torch.uint8)))
        assert torch.equal(scale[:-1].cpu(), want_scale[:, 0])
        assert (out[-1] == 0x7F).all() and scale[-1].isnan()
    assert not largest.any(), "the largest values are cleared for the next launch"


@pytest.mark.parametrize("run", RUNNERS)
@NATIVE
def test_what_is_not_finite_stays_so(run: Runner, native: bool) -> None:
    """Its own row is lost, and no other."""
    x = torch.randn(4, 40).bfloat16()
    x[1, 39], x[2, 0] = math.nan, -math.inf
    spec = quantize_rows_spec(40, "bfloat16", native=native)
    out, scale = poisoned(run, 4, 40)
    largest = run.put(torch.ones(4, dtype=torch.int32))
    run.launch(spec, quantize_launch(spec.constants, run.put(x), out, scale, largest, 4))
    value = out[:-1].cpu().view(torch.float8_e4m3fn).float() * scale[:-1].cpu()[:, None]
    assert value[1].isnan().all() and value[2, 0].isnan() and value[[0, 3]].isfinite().all()


@pytest.mark.parametrize("bits", [8, 11])
def test_the_short_quotient_rounds_like_the_division(bits: int) -> None:
    """`e4m3.quantize_row` in numpy, for random rows' largest values and every smaller one that is not rounded to 0.
    All of them were tried once: 0 of 128 * 128 * 22 and of 1,024 * 1,024 * 22 differ."""
    step, sizes = 1 << (bits - 1), np.exp2(-np.arange(22, dtype=np.float32))
    for largest in np.random.default_rng().integers(step, 2 * step, 24).astype(np.float32):
        scale = np.float32(largest / np.float32(448))
        inverse = np.float32(np.float32(1) / scale)
        x = (np.arange(step, 2 * step, dtype=np.float32)[None] * sizes[:, None]).ravel()
        x = x[x <= largest]
        short = x * inverse
        rest = (x - short.astype(np.float64) * scale).astype(np.float32)
        short = (rest.astype(np.float64) * inverse + short).astype(np.float32)
        assert np.array_equal(_bytes(short), _bytes(x / scale))


def _bytes(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def product(gate_up: torch.Tensor, alpha: float) -> torch.Tensor:
    """float64 gelu_tanh(gate) * up * alpha."""
    gate, up = gate_up.double().chunk(2, 1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up * alpha


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize(("width", "dtype", "x_dtype"), [(2100, "bfloat16", "bfloat16"), (96, "float16", "float32")])
def test_geglu(run: Runner, width: int, dtype: str, x_dtype: str) -> None:
    gate_up, alpha = (torch.randn(3, 2 * width) * 3).to(TORCH[x_dtype]), 2.0**-3
    want, spec = product(gate_up, alpha), geglu_spec(width, dtype, x_dtype)
    out = run.put(torch.full((4, width), math.nan, dtype=TORCH[dtype]))
    run.launch(spec, geglu_launch(spec.constants, run.put(gate_up), out, 0, 3, alpha))
    bound = want.abs() * (EPSILON[dtype] + 1e-5) + 2.0**-25
    assert ((out[:-1].cpu().double() - want).abs() <= bound).all() and out[-1].isnan().all()


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("width", [200, 21])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@NATIVE
def test_geglu_of_rows_is_quantised_like_the_oracle(run: Runner, width: int, dtype: str, native: bool) -> None:
    """Scales and bytes are those of the oracle but where float32 arithmetic rounds to the neighbouring 16-bit value."""
    gate_up, alpha = (torch.randn(4, 2 * width) * 3).bfloat16(), 0.5
    gate_up[1] = 0
    gate_up[2, 5] = math.nan
    spec = geglu_rows_spec(width, dtype, "bfloat16", native=native)
    out, scale = poisoned(run, 4, width)
    run.launch(spec, geglu_launch(spec.constants, run.put(gate_up), out, scale, 4, alpha))
    out, scale = out.cpu(), scale.cpu()
    assert (out[-1] == 0x7F).all() and scale[-1].isnan() and scale[2].isnan()
    assert ((out[2] & 0x7F) == 0x7F).all() and scale[1] == 1 / alpha and ((out[1] & 0x7F) == 0).all()
    rows = [0, 3]
    want = product(gate_up, alpha)[rows].float().to(TORCH[dtype])
    bits, want_scale = quantize_rows(want)
    torch.testing.assert_close(scale[rows] * alpha, want_scale[:, 0], rtol=EPSILON[dtype] * 2.01, atol=0)
    got = out[rows].view(torch.float8_e4m3fn).float() * scale[rows, None] * alpha
    allowed = want.float().abs() * (2.0**-4 + 4 * EPSILON[dtype]) + want_scale * 2.0**-10 * 1.02
    assert ((got - want.float()).abs() <= allowed).all()
    same = scale[rows] * alpha == want_scale[:, 0]
    assert not same.any() or (signed(out[rows]) == signed(bits.view(torch.uint8)))[same].float().mean() > 0.95


def test_parts_of_a_row() -> None:
    assert row_parts(21504) == (16384, 4096, 1024) and row_parts(2048) == (2048, 0, 0)
    for width in (1, 3, 100, 21505, 5376):
        parts = row_parts(width)
        assert sum(parts) >= width and all(p & (p - 1) == 0 for p in parts) and sum(parts) < 1.25 * width + 1


@pytest.mark.parametrize("target", targets("sm90"))
def test_compiles(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With instructions where they are: conversions in pairs, and one division a row."""
    texts = recorded_ptx(monkeypatch)
    native = has_conversions(target)
    for spec in (
        quantize_rows_spec(4096, "bfloat16", native=native),
        quantize_parts_spec(21504, "bfloat16", native=native),
        geglu_rows_spec(21504, "bfloat16", "bfloat16", native=native),
    ):
        kernel = aot.compile_kernel(spec, target)
        assert kernel.shared_bytes <= 4 * 4 * spec.num_warps, "a row does not move through shared memory"
        assert len(re.findall(r"div\.rn\.f32", texts[-1])) <= 2
        assert ("cvt.rn.satfinite.e4m3x2.f32" in texts[-1]) == native and "e4m3x2.f16x2" not in texts[-1]
    aot.compile_kernel(geglu_spec(21504, "bfloat16", "bfloat16"), target)
