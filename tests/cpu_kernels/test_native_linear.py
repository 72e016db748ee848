"""Native matrix products and embedding look-up: against float64, and the same bits whatever the batch."""

from __future__ import annotations

import pytest
import torch

from wicore_trt.backends.torch import native_args
from wicore_trt.backends.torch.native import NativeLibrary
from wicore_trt.backends.torch.native_args import OPERANDS, PackedWeight
from wicore_trt.backends.torch.ops import quantize_rows
from wicore_trt.runtime.dtypes import E4M3

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64, 32), (5, 65, 33), (2, 1, 1), (7, 130, 257), (6, 640, 96), (130, 192, 640), (97, 100, 1026)]


def product(lib: NativeLibrary, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.n), torch.nan)
    quantized = None
    if weight.scale is not None:
        quantized = (torch.full_like(x, torch.nan), torch.full((x.shape[0],), torch.nan))
    lib.run([native_args.make_linear(x, weight, out, quantized)])
    return out


def inputs(rows: int, n: int, k: int, dtype: torch.dtype, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, k, generator=rng).to(dtype)
    return x, torch.randn(n, k, generator=rng).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_product_matches_float64(
    lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    x, w = inputs(rows, n, k, dtype, rng)
    out = product(lib, x.to(OPERANDS[dtype]), lib.pack(w))
    exact = x.double() @ w.double().T
    bound = x.double().abs() @ w.double().abs().T
    assert ((out - exact).abs() <= 1e-6 * bound + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype) -> None:
    x, w = inputs(130, 200, 530, dtype, rng)
    x, packed = x.to(OPERANDS[dtype]), lib.pack(w)
    lib.set_threads(1)
    alone = torch.cat([product(lib, x[i : i + 1], packed) for i in range(len(x))])
    for threads in (1, 2, 3):
        lib.set_threads(threads)
        for rows in [2, 3, 4, 5, 6, 7, 8, 9, 13, 95, 96, 97, 130]:
            subset = torch.randperm(len(x), generator=rng)[:rows]
            assert torch.equal(product(lib, x[subset].contiguous(), packed), alone[subset])


@pytest.mark.parametrize("k", [5, 64, 257])
def test_fp8_product_quantizes_rows_as_the_oracle(lib: NativeLibrary, rng: torch.Generator, k: int) -> None:
    x = (torch.randn(9, k, generator=rng) * torch.logspace(-3, 4, 9)[:, None]).bfloat16()
    x[4] = 0
    w = (torch.randn(70, k, generator=rng) * 100).to(E4M3)
    scale = torch.rand(70, generator=rng) + 0.01
    out = product(lib, x, lib.pack(w, scale))
    quantized, row_scale = quantize_rows(x)
    exact = quantized.double() @ w.double().T * (row_scale.double() * scale)
    bound = quantized.double().abs() @ w.double().abs().T * (row_scale.double() * scale)
    rounding = (k + 8) * 2.0**-24  # a float32 sum in any order, and the scales' products
    assert ((out - exact).abs() <= rounding * bound).all()
    assert (out[4] == 0).all()


def test_every_bfloat16_quantizes_as_the_oracle(lib: NativeLibrary) -> None:
    """With 448 in the row the scale is 1: the E4M3 grid itself, ties and subnormals included."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.abs() <= 448]
    x = torch.stack((torch.full_like(values, 448.0), values), dim=1).contiguous()
    weight = lib.pack(torch.tensor([[0.0, 1.0]]).to(E4M3), torch.ones(1))
    assert torch.equal(product(lib, x, weight)[:, 0], values.float().to(E4M3).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [31, 64])
def test_embedding_rows(lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype, k: int) -> None:
    table = torch.randn(130, k, generator=rng).to(dtype)
    ids = torch.randint(0, 130, (77,), generator=rng)
    out = torch.full((77, k), torch.nan)
    lib.run([native_args.make_embed(ids, lib.pack(table), 25.25, out)])
    assert torch.equal(out, table[ids].float() * 25.25)


def test_a_row_that_is_not_finite_stays_alone(lib: NativeLibrary, rng: torch.Generator) -> None:
    x, w = inputs(8, 64, 40, torch.bfloat16, rng)
    clean = product(lib, x, lib.pack(w))
    x[3, 7] = torch.nan
    dirty = product(lib, x, lib.pack(w))
    assert dirty[3].isnan().all()
    keep = torch.arange(8) != 3
    assert torch.equal(dirty[keep], clean[keep])
