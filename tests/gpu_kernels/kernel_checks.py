"""What checks of kernels against plain references share, whatever runs them: Triton's interpreter or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.layout import Launch

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.uint8}
BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Runner:
    """Runs a launch whose pointers are tensors on `device`."""

    device: str
    launch: Callable[[KernelSpec, Launch], None]

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def noise(*shape: int, dtype: str) -> torch.Tensor:
    """Any bits, NaN included, as integers of the type's size."""
    bits = BITS[TORCH[dtype].itemsize]
    low, high = (0, 256) if bits == torch.uint8 else (torch.iinfo(bits).min, torch.iinfo(bits).max)
    return torch.randint(low, high, shape, dtype=bits)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Bytes of float32 values, saturated."""
    return x.clamp(-448, 448).to(E4M3).view(torch.uint8)


def same_numbers(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal, where one NaN equals another."""
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    got = got.cpu()
    assert got.dtype == want.dtype and torch.equal(got, want), f"{int((got != want).sum())} elements differ"
