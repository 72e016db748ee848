"""Time of a step by kernel role: every role's launches of the step in a CUDA graph of their own.

Used by `benchmarks.gpu.step_time`. In a graph of its own a role runs back to back, so the sum over roles says what the
step takes without the gaps between different kernels; launches do not overlap there. Invariant: a role's graph holds
exactly the step's launches of it, at the step's addresses (products by cuBLAS are a role too), and of a large step the
two gathers of its sampled rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.step_overlap import OneByOne
from wicore_trt.backends.triton import products as triton_products
from wicore_trt.backends.triton.executor import TritonExecutor
from wicore_trt.backends.triton.ops import StepArrays, TritonOps
from wicore_trt.backends.triton.roles import LINEARS
from wicore_trt.model.gemma3 import forward
from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.launch import Launcher
from wicore_trt.plugins.layout import Launch

CUBLAS = "cuBLAS"
EVENT: Any = torch.cuda.Event


class _Filter:
    """`Launcher` that passes on the launches of one kernel, or counts all."""

    def __init__(self, inner: Launcher, only: str | None = None) -> None:
        self._inner, self._only, self.seen = inner, only, Counter[str]()

    def launch(self, kernel: CompiledKernel, call: Launch, stream: int) -> None:
        self.seen[kernel.name] += 0 not in call.grid
        if kernel.name == self._only:
            self._inner.launch(kernel, call, stream)


@contextmanager
def _products(run: bool) -> Iterator[Counter[str]]:
    """Inside, cuBLAS's products are counted, and done only if `run`."""
    seen: Counter[str] = Counter()
    kept = triton_products.float_mm, triton_products.scaled_mm

    def replaced(product: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            seen[CUBLAS] += 1
            if run:
                product(*arguments)

        return call

    triton_products.float_mm, triton_products.scaled_mm = replaced(kept[0]), replaced(kept[1])
    try:
        yield seen
    finally:
        triton_products.float_mm, triton_products.scaled_mm = kept


def role_times(
    executor: TritonExecutor, arrays: StepArrays, repeats: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Per kernel: launches of the step, milliseconds of all of them, and bytes of weights per second for linears.

    The step's geometry is on the device, at `arrays`, and every kernel of it has been launched before.
    """
    model, device = executor.model, executor.device

    def step(launcher: Launcher) -> Callable[[], None]:
        def run() -> None:
            ops = TritonOps(replace(model, launcher=launcher), arrays)
            ops.choose_greedy(forward(ops, executor.spec))

        return run

    one_by_one = OneByOne(model.launcher)
    counting = _Filter(one_by_one)
    names = {entry.kernel.name: str(entry.role) for entry in reversed(model.table.all_entries())}
    with device.active(), torch.inference_mode():
        with _products(run=False) as products:
            step(counting)()
        rows: list[dict[str, Any]] = []
        for name, launches in {**counting.seen, **products}.items():
            with _products(run=name == CUBLAS):
                graph = device.capture(step(_Filter(one_by_one, name)))
            rows.append(
                {"kernel": name, "role": names.get(name, CUBLAS), "launches": launches} | _timed(graph, repeats)
            )
    for row in sorted(rows, key=lambda r: -r["ms"]):
        role = row["role"].split(".")[0]
        rate = ""
        if role in LINEARS:
            row["bytes_per_s"] = model.shape.linear_shape(role).weight_bytes * row["launches"] / row["ms"] * 1e3
            rate = f"  {row['bytes_per_s'] / 1e12:.2f} TB/s"
        each = 1e3 * row["ms"] / row["launches"]
        say(f"    {row['role']:<18} {row['launches']:>3} x {each:8.2f} us = {row['ms']:7.3f} ms{rate}  {row['kernel']}")
    say(f"    {'sum of roles':<18} {sum(r['ms'] for r in rows):7.3f} ms")
    return rows


def _timed(graph: Callable[[], None], repeats: int) -> dict[str, float]:
    times = []
    for number in range(repeats + 2):
        begin, end = EVENT(enable_timing=True), EVENT(enable_timing=True)
        begin.record()
        graph()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end))
    return {"ms": float(median(times))}
