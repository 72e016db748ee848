"""Compiles a list of kernels in several processes.

Loads Triton. Must not know where kernels are stored. Invariant: every kernel of a list is compiled once, whatever its
roles. Workers make the list anew, because Triton's functions cannot be sent.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing import active_children, get_context, parent_process

from wicore_trt.backends.triton import table as triton_table
from wicore_trt.backends.triton.kernel_list import list_kernels
from wicore_trt.backends.triton.roles import Row
from wicore_trt.backends.triton.table import EngineShape, KernelEntry, KernelTable, parse_config
from wicore_trt.cores import count_cores
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.plugins.aot import CompiledKernel, KernelSpec, compile_kernel

KERNELS_PER_WORKER = 4
"""Fewer than this, and starting a process takes longer than it saves."""


def compile_listed(
    shape: EngineShape, target: str, workers: int | None = None, report: Callable[[int, int], None] | None = None
) -> tuple[list[Row], dict[str, CompiledKernel]]:
    """Compile kernels for `target`: rows of the index, and kernels by name. `report(done, total)` counts kernels.
    Raises ConfigError for shapes or kernels that do not fit the target, EnvironmentUnfitError without Triton."""
    listed = list_kernels(shape, target)
    names = sorted({p.spec.name for p in listed})
    count = min(workers or count_cores(), len(names) // KERNELS_PER_WORKER)
    kernels: dict[str, CompiledKernel] = {}

    def report_done(kernel: CompiledKernel) -> None:
        kernels[kernel.name] = kernel
        if report:
            report(len(kernels), len(names))

    if count <= 1:
        for name in names:
            report_done(_compile_named(shape, target, name))
    else:
        context, given = get_context("spawn"), (dict(triton_table.CROSSOVER),)
        with _kill_on_failure(
            ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker, initargs=given)
        ) as pool:
            with hold_interrupts():
                futures = [pool.submit(_compile_named, shape, target, name) for name in names]
            for future in as_completed(futures):
                report_done(future.result())
    return [(p.role, p.bucket, p.spec.name, p.config) for p in listed], kernels


def compile_table(shape: EngineShape, target: str, workers: int | None = None) -> KernelTable:
    rows, kernels = compile_listed(shape, target, workers)
    return KernelTable(target, [KernelEntry(r, b, kernels[name], parse_config(r, c)) for r, b, name, c in rows])


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Hide Ctrl-C, which a terminal sends to all, from processes started meanwhile, and hold it back here. A thread
    that does not block it may get it, and the main thread would raise before a process has what it needs to start."""
    held, main = list[int](), threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if main else None  # None, too, if no code of Python has set it
    if handler is not None:
        signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _kill_on_failure(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """Kill the pool's workers when the block fails, because a kernel takes seconds."""
    others = {child.pid for child in active_children()}
    try:
        with pool:
            try:
                yield pool
            except BaseException:
                for child in active_children():
                    if child.pid not in others:
                        child.kill()
                raise
    except BrokenProcessPool as error:
        fix = "Check the machine's free memory and try again."
        raise EnvironmentUnfitError("A process that compiled kernels was killed.", fix=fix) from error


def _start_worker(crossover: dict[str, dict[str, int]]) -> None:
    """Start a worker with the parent's measurements, on which its list depends. It ends with the parent."""
    triton_table.CROSSOVER.update(crossover)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@lru_cache(maxsize=4)
def _specs_by_name(shape: EngineShape, target: str) -> dict[str, KernelSpec]:
    return {p.spec.name: p.spec for p in list_kernels(shape, target)}


def _compile_named(shape: EngineShape, target: str, name: str) -> CompiledKernel:
    return compile_kernel(_specs_by_name(shape, target)[name], target)
