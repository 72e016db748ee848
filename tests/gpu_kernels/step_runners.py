"""What runs the step's kernels in tests: the interpreter always, and this machine's GPU if there is one."""

from __future__ import annotations

from typing import Any

import interpreted
import pytest
import torch
from kernel_checks import Runner

from wicore_trt.plugins.aot import CompiledKernel, KernelSpec, compile_kernel
from wicore_trt.plugins.launch import SHARED_LAUNCHER
from wicore_trt.plugins.layout import Launch, TensorMap

_compiled: dict[str, CompiledKernel] = {}


def compiled(spec: KernelSpec) -> CompiledKernel:
    """`spec` for this machine's GPU, compiled once."""
    if spec.name not in _compiled:
        major, minor = torch.cuda.get_device_capability()
        _compiled[spec.name] = compile_kernel(spec, f"sm{major}{minor}")
    return _compiled[spec.name]


def pointers_of(call: Launch) -> dict[str, Any]:
    """Arguments with addresses in place of tensors."""
    return {
        n: a.data_ptr() if isinstance(a, torch.Tensor)
        else TensorMap(a.address.data_ptr(), *a[1:]) if isinstance(a, TensorMap) and not isinstance(a.address, int)
        else a
        for n, a in call.arguments.items()
    }  # fmt: skip


def on_gpu(spec: KernelSpec, call: Launch) -> None:
    call = Launch(call.grid, pointers_of(call))
    SHARED_LAUNCHER.launch(compiled(spec), call, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


CPU = Runner("cpu", interpreted.launch)
GPU = Runner("cuda", on_gpu)
RUNNERS = [pytest.param(CPU, id="interpreter")]
if torch.cuda.is_available():
    RUNNERS.append(pytest.param(GPU, id="gpu"))
