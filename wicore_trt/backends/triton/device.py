"""Finds the GPU of the triton backend. Everything that only a GPU can do is `runtime.cuda_device.CudaDevice`'s."""

from __future__ import annotations

import torch

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.runtime.cuda_device import CudaDevice


def open_device(name: str) -> CudaDevice:
    """`name`: "auto", "cuda" or "cuda:1". Raises EnvironmentUnfitError without such a GPU."""
    if name == "cpu" or not torch.cuda.is_available():
        why = "executor.device is cpu" if name == "cpu" else "PyTorch finds none"
        raise EnvironmentUnfitError(
            f"An engine of backend 'triton' runs on an NVIDIA GPU, and {why}.",
            fix="Run it where one is, or build an engine with --backend torch.",
        )
    return CudaDevice(name)
