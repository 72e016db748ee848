"""The GPU that `benchmarks.gpu.run` runs on: what it is, its clocks, and the rates that bounds come from.

It must not know models. Invariant: nothing here changes the GPU; rates are medians, measured in the run that uses them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

from benchmarks.gpu.cases import Rates

CLOCK_FIELDS = (
    "clocks.sm", "clocks.mem", "clocks_throttle_reasons.active", "temperature.gpu", "power.draw", "memory.used",
)  # fmt: skip
GEMM_SIZE = 8192
GEMM_REPEATS = 9


def clocks(when: str, at_s: float) -> dict[str, Any]:
    """Read the clocks of now from nvidia-smi."""
    reading: dict[str, Any] = {"when": when, "at_s": at_s}
    said = _smi(CLOCK_FIELDS)
    return reading | ({"error": said} if isinstance(said, str) else dict(zip(CLOCK_FIELDS, said, strict=False)))


def _smi(fields: Sequence[str]) -> list[str] | str:
    """Values of the first GPU, or why there are none."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return [cell.strip() for cell in said.strip().split(",")]


def describe() -> dict[str, Any]:
    """Name, memory, target and CUDA version of the GPU in use."""
    import torch

    from wicore_trt.runtime.cuda_device import CudaDevice

    known = torch.cuda.get_device_properties(torch.cuda.current_device())
    about = {"name": known.name, "memory_bytes": known.total_memory, "count": torch.cuda.device_count()}
    return about | {"target": CudaDevice().target, "cuda": torch.version.cuda}


def gpu_versions() -> dict[str, str]:
    """Of the driver and the packages that only a GPU needs."""
    found = {}
    for package in ("triton", "cuda-bindings"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    said = _smi(("driver_version",))
    return found | ({"driver": said[0]} if isinstance(said, list) else {})


def measure_gpu_rates() -> Rates:
    """Copies of 2 GiB, sums over 2 GiB, and 8192^3 products of random numbers in BF16 and, where it can, in E4M3."""
    from benchmarks.gpu.step_time import copy_rate, sum_rate

    copies, reads = copy_rate(), sum_rate()
    return Rates(copies, reads, _bf16_rate(), _fp8_rate())


def rates_json(rates: Rates) -> dict[str, Any]:
    return asdict(rates)


def _bf16_rate() -> float:
    import torch

    a = torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    out = torch.empty_like(a)
    return _flops(lambda: torch.mm(a, b, out=out))


def _fp8_rate() -> float | None:
    """None where the GPU or the library multiplies no E4M3."""
    import torch

    try:
        a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device="cuda")
        multiply: Any = torch._scaled_mm  # noqa: SLF001 -- PyTorch has no public name for it
        kind = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return _flops(lambda: multiply(a, b.t(), **kind))
    except (RuntimeError, NotImplementedError, ValueError):
        return None


def _flops(work: Callable[[], Any]) -> float:
    import torch

    event: Any = torch.cuda.Event
    times = []
    for _ in range(GEMM_REPEATS + 2):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(2 * GEMM_SIZE**3 / median(times[2:]))
