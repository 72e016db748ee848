"""Native products and look-ups of weights in groups (Q4_0, Q4_1, Q8_0, Q6_K) and of float16 heads: against float64 of
the formats' own definition, and the same bits whatever the batch.

Invariants: I21.
"""

from __future__ import annotations

import pytest
import torch

from wicore_trt.backends.torch import native_args
from wicore_trt.backends.torch.native import NativeLibrary
from wicore_trt.backends.torch.native_args import OPERANDS, PackedWeight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = ["q4_0", "q4_1", "q8_0", "q6_k", "float16"]
Parts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def make_parts(format_: str, n: int, k: int, rng: torch.Generator) -> Parts:
    """Codes, scales and minimums of every bit pattern of codes; scales of both signs, float16's subnormals included."""
    size, scale_dtype = (16, torch.float32) if format_ == "q6_k" else (32, torch.float16)
    scales = torch.randn(n, k // size, generator=rng) * torch.logspace(-7, 0, n)[:, None]
    if format_ == "float16":
        return torch.randn(n, k, generator=rng).half(), None, None
    if format_ in ("q4_0", "q4_1"):
        codes = torch.randint(0, 256, (n, k // 2), generator=rng, dtype=torch.uint8)
        minimums = torch.randn(n, k // size, generator=rng).half() if format_ == "q4_1" else None
        return codes, scales.half(), minimums
    low = -32 if format_ == "q6_k" else -128
    return torch.randint(low, -low, (n, k), generator=rng, dtype=torch.int8), scales.to(scale_dtype), None


def widen_parts(parts: Parts) -> torch.Tensor:
    """The weights [n, k] float64 by GGUF's definition: byte j of a block has weight j below and weight j + 16 above."""
    codes, scales, minimums = parts
    if scales is None:
        return codes.double()
    if codes.dtype == torch.uint8:
        blocks = codes.view(len(codes), -1, 16)
        codes = torch.cat((blocks & 15, blocks >> 4), dim=2).flatten(1)
    values = codes.double().view(*scales.shape, -1)
    if parts[0].dtype == torch.uint8 and minimums is None:
        values = values - 8
    values = values * scales.double()[:, :, None]
    return (values if minimums is None else values + minimums.double()[:, :, None]).flatten(1)


def product(lib: NativeLibrary, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.n), torch.nan)
    lib.run([native_args.make_linear(x, weight, out)])
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 32), (5, 65, 96), (2, 1, 64), (7, 130, 288), (103, 100, 640)])
def test_product_matches_float64(
    lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype, format_: str, rows: int, n: int, k: int
) -> None:
    x = torch.randn(rows, k, generator=rng).to(dtype)
    parts = make_parts(format_, n, k, rng)
    out = product(lib, x.to(OPERANDS[dtype]), lib.pack(*parts, dtype=dtype)).double()
    w = widen_parts(parts)
    size = w.abs()
    if parts[2] is not None:  # a sum of (q - 8) scale and (minimum + 8 scale), which may cancel
        size = size + 16 * parts[1].double().abs().repeat_interleave(32, 1)  # type: ignore[union-attr]
    assert ((out - x.double() @ w.T).abs() <= 1e-6 * (x.double().abs() @ size.T) + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format_", FORMATS)
def test_a_row_has_the_same_bits_in_any_batch(
    lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype, format_: str
) -> None:
    x = torch.randn(110, 544, generator=rng).to(dtype).to(OPERANDS[dtype])
    packed = lib.pack(*make_parts(format_, 200, 544, rng), dtype=dtype)
    lib.set_threads(1)
    alone = torch.cat([product(lib, x[i : i + 1], packed) for i in range(len(x))])
    for threads in (1, 3):
        lib.set_threads(threads)
        for rows in [2, 3, 4, 5, 6, 7, 13, 96, 97, 110]:
            subset = torch.randperm(len(x), generator=rng)[:rows]
            assert torch.equal(product(lib, x[subset].contiguous(), packed), alone[subset])


def test_q4_1_of_q4_0_has_the_bits_of_q4_0(lib: NativeLibrary, rng: torch.Generator) -> None:
    """A kind of linear has minimums in every layer if one layer has them: those of a Q4_0 layer are -8 scales."""
    x = torch.randn(9, 256, generator=rng).bfloat16()
    codes, scales, _ = make_parts("q4_0", 70, 256, rng)
    assert scales is not None
    scales = scales * 64  # 8 scales is exact in float16 unless it overflows
    plain = product(lib, x, lib.pack(codes, scales, dtype=torch.bfloat16))
    assert torch.equal(product(lib, x, lib.pack(codes, scales, -8 * scales, dtype=torch.bfloat16)), plain)


def test_each_code_is_itself(lib: NativeLibrary) -> None:
    """A unit row picks one weight: d * (q - 8) has 15 bits, so it comes out exact."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.linspace(-2, 3, 16).half()[:, None]
    out = product(lib, torch.eye(32).bfloat16(), lib.pack(codes, scales, dtype=torch.bfloat16))
    assert torch.equal(out.T.double(), widen_parts((codes, scales, None)))


@pytest.mark.parametrize("format_", ["q8_0", "q6_k", "float16"])
def test_embedding_rows_are_exact(lib: NativeLibrary, rng: torch.Generator, format_: str) -> None:
    parts = make_parts(format_, 130, 96, rng)
    ids = torch.randint(0, 130, (77,), generator=rng)
    out = torch.full((77, 96), torch.nan)
    lib.run([native_args.make_embed(ids, lib.pack(*parts, dtype=torch.bfloat16), 25.25, out)])
    assert torch.equal(out, widen_parts(parts)[ids].float() * 25.25)


def test_a_row_that_is_not_finite_stays_alone(lib: NativeLibrary, rng: torch.Generator) -> None:
    x = torch.randn(8, 64, generator=rng).bfloat16()
    packed = lib.pack(*make_parts("q4_1", 64, 64, rng), dtype=torch.bfloat16)
    clean = product(lib, x, packed)
    x[3, 7] = torch.nan
    dirty = product(lib, x, packed)
    keep = torch.arange(8) != 3
    assert dirty[3].isnan().all() and torch.equal(dirty[keep], clean[keep])


def test_a_matrix_of_parts_that_do_not_fit_is_refused(lib: NativeLibrary) -> None:
    codes = torch.zeros(4, 32, dtype=torch.uint8)
    for wrong in (torch.ones(4, 2), torch.ones(4, 1).half(), torch.ones(3, 2).half()):
        with pytest.raises(AssertionError):
            lib.pack(codes, wrong)
