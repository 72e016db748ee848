"""What runs the step's kernels in tests: the interpreter always, and this machine's GPU if there is one."""

from __future__ import annotations

import interpreted
import pytest
import torch
from kernel_checks import Runner

from wicore_trt.plugins.aot import CompiledKernel, KernelSpec, compile_kernel
from wicore_trt.plugins.launch import SHARED_LAUNCHER
from wicore_trt.plugins.layout import Launch

_compiled: dict[str, CompiledKernel] = {}


def compiled(spec: KernelSpec) -> CompiledKernel:
    """`spec` for this machine's GPU, compiled once."""
    if spec.name not in _compiled:
        major, minor = torch.cuda.get_device_capability()
        _compiled[spec.name] = compile_kernel(spec, f"sm{major}{minor}")
    return _compiled[spec.name]


def on_gpu(spec: KernelSpec, call: Launch) -> None:
    pointers = {n: a.data_ptr() if isinstance(a, torch.Tensor) else a for n, a in call.arguments.items()}
    SHARED_LAUNCHER.launch(compiled(spec), Launch(call.grid, pointers), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


CPU = Runner("cpu", interpreted.launch)
GPU = Runner("cuda", on_gpu)
RUNNERS = [pytest.param(CPU, id="interpreter")]
if torch.cuda.is_available():
    RUNNERS.append(pytest.param(GPU, id="gpu"))
