"""Python time of putting a step with a prompt on a stream; needs no GPU.

    python -m benchmarks.gpu.launches ENGINE [--tokens 64,256] [--singles 0]

ENGINE is a triton engine, with or without weights. The driver is not there: a call of it costs nothing, and weights are
addresses of memory that nobody reads. Prints the launches of a step, the median and the least milliseconds of the
thread's CPU time, and microseconds a launch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import say
from wicore_trt.backends.triton import ops, products
from wicore_trt.backends.triton.index import load_table
from wicore_trt.backends.triton.memory import StepLimits, StepMemory
from wicore_trt.backends.triton.rows import make_plan
from wicore_trt.backends.triton.weights import engine_shape
from wicore_trt.checkpoint.names import Role, run_weights, weight_scale_name
from wicore_trt.engine.directory import open_engine
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD, forward
from wicore_trt.plugins.launch import CudaLauncher

POSITIONS, ROWS, REPEATS = 16384, 64, 30
GIB = 1 << 30


class NoDriver:
    """Stands in for `cuda.bindings.driver`: whatever is called succeeds. Counts launches."""

    def __init__(self) -> None:
        self.launches = 0

    def __getattr__(self, name: str) -> Any:
        return self._call if name.startswith("cu") else self

    def __call__(self) -> Any:
        return NoDriver()

    def _call(self, *arguments: object) -> tuple[int, int]:
        return 0, 1

    def cuLaunchKernel(self, *arguments: object) -> tuple[int]:
        self.launches += 1
        return (0,)

    cuLaunchKernelEx = cuLaunchKernel


def step_model(path: Path, target: str) -> tuple[ops.TritonModel, NoDriver]:
    """An engine whose tensors share memory that is never touched."""
    engine = open_engine(path, verify=False)
    kernels, driver = engine_shape(engine), NoDriver()
    spec, nobody = kernels.spec, torch.empty(8 * GIB, dtype=torch.uint8)

    def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = prod(shape) * dtype.itemsize
        return torch.empty(tuple(shape), dtype=dtype) if nbytes < 1 << 20 else nobody[:nbytes].view(dtype).view(*shape)

    weights = {}
    for name, (tensor, *more) in run_weights(spec).items():
        rows = tensor.shape[0] * (1 + len(more))
        fp8 = kernels.weights.fp8 and tensor.role is Role.LINEAR
        norm = tensor.role is Role.NORM
        dtype = torch.float32 if norm else torch.float8_e4m3fn if fp8 else torch.bfloat16
        weights[name] = empty((rows, *tensor.shape[1:]), dtype)
        if fp8:
            weights[weight_scale_name(name)] = empty((rows,), torch.float32)
    weights.setdefault(LM_HEAD, weights[EMBEDDING])
    table = load_table(engine, kernels, target)
    memory = StepMemory(kernels, table, StepLimits(8192, ROWS, POSITIONS), empty, invariant=False)
    rope = dict.fromkeys(spec.groups, (empty((POSITIONS, spec.head_dim // 2), torch.float32),) * 2)
    pools = {group: empty((16,), torch.uint8) for group in spec.groups}
    launcher = CudaLauncher(driver)
    return ops.TritonModel(kernels, table, weights, rope, pools, memory, launcher, 0), driver


def measure(model: ops.TritonModel, driver: NoDriver, tokens: int, singles: int) -> str:
    """A step of `singles` sequences that decode and a prompt of `tokens`."""
    tables = dict.fromkeys(model.pools, (16, POSITIONS // model.shape.page_tokens))
    sampled = torch.zeros(singles + 1, dtype=torch.int32)
    step = ops.StepArrays(
        make_plan(singles + tokens, singles, 1, singles + 1), *(16,) * 8, tables=tables, sampled=sampled
    )
    products.float_mm = products.scaled_mm = torch.index_select = lambda *_, **__: None  # type: ignore[assignment]
    taken = []
    for _ in range(REPEATS):
        driver.launches, began = 0, time.thread_time()
        step_ops = ops.TritonOps(model, step)
        step_ops.choose_greedy(forward(step_ops, model.shape.spec))
        taken.append(time.thread_time() - began)
    least, median = min(taken), statistics.median(taken)
    each = 1e6 * least / max(driver.launches, 1)
    times = f"{1e3 * median:.1f} ms, least {1e3 * least:.1f} ({each:.1f} us a launch)"
    return f"{singles} + {tokens} tokens: {driver.launches} launches, {times}"


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", default="64,128")
    parser.add_argument("--singles", type=int, default=0)
    parser.add_argument("--target", default="sm90")
    options = parser.parse_args()
    model, driver = step_model(options.engine, options.target)
    for tokens in options.tokens.split(","):
        say(measure(model, driver, int(tokens), options.singles))


if __name__ == "__main__":
    main()
