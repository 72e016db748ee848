"""Native operators on rows (norms, gated GELU, row gather): against float64, and the same bits whatever the batch.

Invariants: I21.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from wicore_trt.backends.torch import native_args
from wicore_trt.backends.torch.native import NativeLibrary
from wicore_trt.backends.torch.native_args import OPERANDS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNIT = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # largest relative rounding error
EPS = 1e-6


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def poisoned(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, k), torch.nan, dtype=OPERANDS[dtype])


def assert_rounded(out: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """`out` is `exact` up to float32 arithmetic and one rounding to `dtype`, and lies on that grid."""
    assert ((out.double() - exact).abs() <= exact.abs() * (UNIT[dtype] + 2e-6) + 1e-7).all()
    if out.abs().max() < 2**15:
        assert torch.equal(out.float(), out.to(dtype).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 17, 64, 640, 1153])
def test_norm(lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype, k: int) -> None:
    x = torch.randn(9, k, generator=rng) * torch.logspace(-4, 6, 9)[:, None]
    weight = torch.randn(k, generator=rng) + 1
    out = poisoned(9, k, dtype)
    lib.run([native_args.make_norm(x, weight, EPS, dtype, out)])
    assert_rounded(out, rms_norm(x, weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 50, 640])
def test_add_norm(lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype, k: int) -> None:
    residual, x = (torch.randn(7, k, generator=rng) * 30 for _ in range(2))
    post, following = (torch.randn(k, generator=rng) + 1 for _ in range(2))
    expected = residual.double() + rms_norm(x, post)
    out = poisoned(7, k, dtype)
    lib.run([native_args.make_add_norm(residual, x, (post, following), EPS, dtype, out)])
    assert torch.allclose(residual.double(), expected, rtol=2e-6, atol=2e-5)
    assert_rounded(out, rms_norm(residual, following), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [3, 64, 2048])
def test_geglu(lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype, k: int) -> None:
    x = torch.randn(6, 2 * k, generator=rng) * torch.logspace(-2, 1.5, 6)[:, None]
    out = poisoned(6, k, dtype)
    lib.run([native_args.make_geglu(x, dtype, out)])
    gate, up = x.double().chunk(2, dim=1)
    assert_rounded(out, F.gelu(gate, approximate="tanh") * up, dtype)


def test_gelu_keeps_its_limits(lib: NativeLibrary) -> None:
    gate = torch.tensor([[-torch.inf, -100.0, -0.0, 0.0, 100.0, 1e30, torch.inf, torch.nan]])
    x = torch.cat((gate, torch.ones_like(gate)), dim=1)
    out = poisoned(1, 8, torch.float32)
    lib.run([native_args.make_geglu(x, torch.float32, out)])
    assert out[0, 1:6].tolist() == [0.0, 0.0, 0.0, 100.0, torch.tensor(1e30).item()]
    assert out[0, 6] == torch.inf and out[0, 7].isnan()


def test_float16_rows_beyond_its_range_are_scaled(lib: NativeLibrary) -> None:
    """As the torch operators do: a power of two brings the row below 32768 for the rounding."""
    x = torch.ones(2, 40)
    x[0, :20] = torch.linspace(100.0, 3e6, 20)
    x[1, :20] = torch.linspace(64.0, 3e4, 20)
    out = poisoned(2, 20, torch.float16)
    lib.run([native_args.make_geglu(x, torch.float16, out)])
    scale = torch.tensor([[2.0**7], [1.0]])  # 3e6 < 2^22
    assert torch.equal(out, (x[:, :20] / scale).half().float() * scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_torchs(lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype) -> None:
    """Any finite float32 bits: gelu(x) is x for large x, so up * 1 passes through the kernel's rounding alone."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=rng).to(torch.int32).view(torch.float32)
    up = bits[(bits.abs() < 3e4) & (bits.abs() > 1e-30)] / 64
    up = torch.cat((up, torch.arange(64.0) / 2**24, torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 2**-25])))
    x = torch.cat((torch.full_like(up, 64.0), up))[None].contiguous()
    out = poisoned(1, len(up), dtype)
    lib.run([native_args.make_geglu(x, dtype, out)])
    assert torch.equal(out[0].float(), (up * 64).to(dtype).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype) -> None:
    k = 200
    x, residual = torch.randn(33, 2 * k, generator=rng), torch.randn(33, k, generator=rng)
    weight = torch.randn(k, generator=rng)

    def run(rows: torch.Tensor) -> torch.Tensor:
        outs = [poisoned(len(rows), k, dtype) for _ in range(3)]
        added, gathered = residual[rows].contiguous(), x[rows].contiguous()
        lib.run(
            [
                native_args.make_norm(added.clone(), weight, EPS, dtype, outs[0]),
                native_args.make_geglu(gathered, dtype, outs[1]),
                native_args.make_add_norm(added, gathered[:, :k].contiguous(), (weight, weight), EPS, dtype, outs[2]),
            ]
        )
        return torch.cat([o.float() for o in outs] + [added], dim=1)

    lib.set_threads(1)
    alone = torch.cat([run(torch.tensor([i])) for i in range(33)])
    for threads in (1, 2):
        lib.set_threads(threads)
        for rows in (2, 5, 33):
            subset = torch.randperm(33, generator=rng)[:rows]
            assert torch.equal(run(subset), alone[subset])


def test_gather_rows(lib: NativeLibrary, rng: torch.Generator) -> None:
    x = torch.randn(20, 33, generator=rng).bfloat16()
    index = torch.tensor([19, 0, 7])
    out = torch.full((3, 33), torch.nan, dtype=torch.bfloat16)
    lib.run([native_args.make_gather(x, index, out)])
    assert torch.equal(out, x[index])
