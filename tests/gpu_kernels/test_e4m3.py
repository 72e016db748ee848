"""The conversions of kernels to and from E4M3 against torch's, in the interpreter and on a GPU."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import torch
import triton
import triton.language as tl
from kernel_checks import E4M3, Runner, same_bits, same_numbers, to_e4m3
from step_runners import RUNNERS

from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.kernels.e4m3 import decode, quantize
from wicore_trt.plugins.layout import Launch

BLOCK = 1024


@triton.jit
def convert(codes, values, decoded, quantized, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(decoded + at, decode(tl.load(codes + at)) * scale)
    tl.store(quantized + at, quantize(tl.load(values + at), scale))


SPEC = KernelSpec(
    "convert",
    convert,
    {"codes": "*u8", "values": "*fp32", "decoded": "*fp32", "quantized": "*u8", "scale": "fp32"},
    {"BLOCK": BLOCK},
    frozenset(),
)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("run", RUNNERS)
def test_all_codes_and_the_values_around_them(run: Runner, scale: float) -> None:
    """All codes one way; ties, neighbours of ties, limits, infinities and NaN the other way."""
    finite = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    ties = (finite[1:] + finite[:-1]) / 2
    near = [ties, finite, torch.tensor([448, 464, 1e9, math.inf, math.nan, 0, 1e-30, 2**-10, 2**-11, 2**-9])]
    near += [torch.nextafter(t, torch.tensor(x)) for t in (ties, finite) for x in (-math.inf, math.inf)]
    drawn = torch.randn(4 * BLOCK) * torch.exp2(torch.randint(-12, 10, (4 * BLOCK,)))
    values = torch.cat([*near, drawn])[: 4 * BLOCK]
    values = torch.cat([values, -values])
    codes = torch.arange(256, dtype=torch.uint8).repeat(len(values) // 256)
    decoded, quantized = run.put(torch.zeros_like(values)), run.put(torch.zeros_like(codes))
    arguments = {"codes": run.put(codes), "values": run.put(values), "decoded": decoded, "quantized": quantized}
    run.launch(SPEC, Launch((len(values) // BLOCK, 1, 1), {**arguments, "scale": scale}))
    same_numbers(decoded, codes.view(E4M3).float() * torch.tensor(scale))
    got, want = quantized.cpu(), to_e4m3(values / torch.tensor(scale))
    not_a_number = (want & 0x7F) == 0x7F
    assert torch.equal((got & 0x7F) == 0x7F, not_a_number)
    same_bits(got[~not_a_number], want[~not_a_number])
