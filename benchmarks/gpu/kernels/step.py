"""The small kernels of a step on a GPU: are they right, and which launch shape is fastest?

    python -m benchmarks.gpu.kernels.step [--quick] [--seconds 110] [--out FILE.json]

Checks every variant against float64 (sampling: against the host's sampler); the exit status is 1 if one differs. Then
times the variants for the shapes of Gemma 3 27B and 270M by CUDA graphs and prints, per kernel and number of rows,
microseconds of the best ones beside the bound and torch's operators (also in a graph). What does not compile or run is
reported and left out. Two times are given: "warm" repeats one launch, so that its data lies in L2, as what the kernel
before has just written does; "cold" has 256 MB read between launches, and the time of that taken off, as weights'
streams do between layers. A kernel in a step lies between the two. Bound: bytes / 3.0 TB/s, at least 1.3 us.

Needs a GPU, torch, triton, numpy and cuda-bindings. Invariant: every time printed is of a variant that was checked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.kernels.step_cases import (
    LARGE,
    SMALL,
    AddNormProblem,
    Calls,
    EmbedNormProblem,
    ModelSizes,
    RopeProblem,
    SampleProblem,
    launch_all,
)
from wicore_trt.plugins.aot import CompiledKernel, KernelSpec, compile_kernel
from wicore_trt.plugins.kernels import step_specs
from wicore_trt.plugins.kernels.e4m3 import has_conversions
from wicore_trt.plugins.kernels.step_specs import NormShape, StepConfig
from wicore_trt.plugins.launch import SHARED_LAUNCHER
from wicore_trt.plugins.layout import Launch

BYTES_PER_S, FLOOR_US = 3.0e12, 1.3
ROWS, QUICK_ROWS = (1, 8, 32, 64, 128, 1024), (1, 8, 64)
WARM_LAUNCHES, COLD_LAUNCHES, REPEATS = 64, 10, 9
FILTERED = (0.8, 64, 0.95, 0.0)  # temperature, top_k, top_p, min_p


@dataclass(frozen=True)
class Work:
    """One kernel of one model. `make(rows, device)` gives a problem, a variant the specs that it is solved with."""

    kernel: str
    model: str
    rows: tuple[int, ...]
    make: Callable[[int, str], Any]
    variants: dict[str, Callable[[Any], Any]]
    check_rows: int = 5


@dataclass
class VariantTiming:
    kernel: str
    model: str
    rows: int
    variant: str
    warm_us: float
    cold_us: float
    bound_us: float


@dataclass
class Results:
    timings: list[VariantTiming] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def build_scan(problem: Any, chunk: int, warps: int) -> Any:
    """Specify sampling with this chunk, whatever the table says."""
    with mock.patch.dict(step_specs.DEFAULTS, scan=((1 << 31, StepConfig(warps, chunk)),)):
        return problem.specs()


def norm_work(model: ModelSizes, rows: tuple[int, ...], target: str) -> list[Work]:
    found: list[Work] = []
    warps = (8, 16, 32) if model.hidden > 1024 else (1, 2, 4, 8)
    variants: dict[str, Callable[[Any], Any]] = {f"w{n}": partial(lambda p, n: p.spec(n), n=n) for n in warps}
    for fp8 in (False, True):
        shape = NormShape(model.hidden, "bfloat16", fp8, fp8 and has_conversions(target))
        add = partial(lambda r, device, s: AddNormProblem(model, s, r, device), s=shape)
        found.append(Work(f"add_norm{' fp8' if fp8 else ''}", model.name, rows, add, variants))
    shape = NormShape(model.hidden, "bfloat16")
    embed = partial(lambda r, device, s: EmbedNormProblem(model, s, r, device), s=shape)
    found.append(Work("embed_norm", model.name, rows, embed, variants))
    return found


def rope_work(model: ModelSizes, rows: tuple[int, ...]) -> list[Work]:
    found = []
    shapes = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)]
    variants: dict[str, Callable[[Any], Any]] = {
        f"b{b} w{w}": partial(lambda p, c: p.spec(c), c=StepConfig(w, b)) for b, w in shapes
    }
    for kv in ("bfloat16", "fp8"):
        some = rows if kv == "bfloat16" else rows[::2]
        make = partial(lambda r, device, kv: RopeProblem(model, r, "bfloat16", kv, device), kv=kv)
        found.append(Work(f"qk_rope {kv}", model.name, some, make, variants, check_rows=9))
    return found


def sample_work(model: ModelSizes, rows: tuple[int, ...]) -> list[Work]:
    sizes = ((1024, 4), (2048, 4), (2048, 8), (4096, 8))
    scans: dict[str, Callable[[Any], Any]] = {f"c{c} w{w}": partial(build_scan, chunk=c, warps=w) for c, w in sizes}
    some = tuple(r for r in rows if r <= 128)
    found = []
    for name, parameters, candidates in (
        ("greedy", None, 1024),
        ("temperature", (0.8, 0, 1.0, 0.0), 1024),
        ("top-k top-p", FILTERED, 1024),
        ("top-k top-p, 128", FILTERED, 128),
    ):
        make = partial(lambda r, device, p, n: SampleProblem(model, r, p, n, device), p=parameters, n=candidates)
        chosen = scans if parameters is None else {"c2048 w4": scans["c2048 w4"]}
        found.append(Work(f"sample {name}", model.name, some, make, chosen, check_rows=3))
    return found


def all_work(rows: tuple[int, ...], target: str) -> list[Work]:
    found = []
    for model in (LARGE, SMALL):
        found += norm_work(model, rows, target) + rope_work(model, rows)
    return found + sample_work(LARGE, rows)


def specs_of(built: Any) -> list[KernelSpec]:
    return [built] if isinstance(built, KernelSpec) else [s for s in vars(built).values() if s is not None]


_specs: list[KernelSpec] = []  # for the workers, which are forked: a kernel's function cannot be sent to them


def _compile(index: int, target: str) -> CompiledKernel | str:
    try:
        return compile_kernel(_specs[index], target)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def compile_all(work: Sequence[Work], target: str, results: Results) -> dict[str, CompiledKernel]:
    """All variants' kernels by name. Must come before CUDA is initialised, because the workers are forked."""
    found: dict[str, KernelSpec] = {}
    for one in work:
        problem = one.make(2, "cpu")
        for build in one.variants.values():
            found.update({s.name: s for s in specs_of(build(problem))})
    _specs[:] = found.values()
    begin = time.monotonic()
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("fork")) as pool:
        built = list(pool.map(_compile, range(len(_specs)), [target] * len(_specs)))
    kernels = {}
    for spec, kernel in zip(_specs, built, strict=True):
        if isinstance(kernel, str):
            results.left_out.append(f"{spec.name} does not compile: {kernel}")
        else:
            kernels[spec.name] = kernel
    print(f"{len(kernels)} kernels compiled for {target} in {time.monotonic() - begin:.1f} s", flush=True)
    return kernels


class Gpu:
    """Launches compiled kernels on torch's current stream, and times graphs."""

    def __init__(self, kernels: dict[str, CompiledKernel]) -> None:
        self._kernels = kernels
        self._flush = torch.zeros(64 * 2**20, device="cuda")
        self._sum = torch.zeros((), device="cuda")
        self._flush_us = self._time([self.flush] * COLD_LAUNCHES)

    def flush(self) -> None:
        torch.sum(self._flush, dim=0, out=self._sum)

    def launch(self, spec: KernelSpec, call: Launch) -> None:
        pointers = {n: a.data_ptr() if isinstance(a, torch.Tensor) else a for n, a in call.arguments.items()}
        stream = torch.cuda.current_stream().cuda_stream
        SHARED_LAUNCHER.launch(self._kernels[spec.name], Launch(call.grid, pointers), stream)

    def has(self, specs: Sequence[KernelSpec]) -> bool:
        return all(spec.name in self._kernels for spec in specs)

    def times(self, work: Callable[[], None]) -> tuple[float, float]:
        """Microseconds of `work`, warm and cold."""
        warm = self._time([work] * WARM_LAUNCHES) / WARM_LAUNCHES
        cold = self._time([w for _ in range(COLD_LAUNCHES) for w in (self.flush, work)])
        return warm, (cold - self._flush_us) / COLD_LAUNCHES

    def _time(self, work: Sequence[Callable[[], None]]) -> float:
        """Microseconds of all of `work` in one graph: median of REPEATS."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # loads modules and libraries' workspaces, which a capture must not
            for one in dict.fromkeys(work):
                one()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for one in work:
                one()
        found: list[float] = []
        for i in range(REPEATS + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if i >= 2:
                found.append(start.elapsed_time(end) * 1e3)
        return statistics.median(found)


def attempt(results: Results, name: str, what: Callable[[], Any]) -> Any:
    """`what`'s value; a failure is reported and None."""
    try:
        return what()
    except AssertionError as error:
        results.wrong.append(f"{name}: {error}")
        print(f"WRONG {name}: {str(error)[:400]}", flush=True)
    except Exception:
        results.left_out.append(f"{name}: {traceback.format_exc(limit=3)}")
        print(f"left out: {name}: {traceback.format_exc(limit=3)}", flush=True)
    return None


def variants_that_hold(gpu: Gpu, one: Work, results: Results) -> dict[str, Callable[[Any], Any]]:
    """The variants that compile and are right."""

    def check(build: Callable[[Any], Any]) -> bool:
        problem = one.make(one.check_rows, "cuda")
        built = build(problem)
        if not gpu.has(specs_of(built)):
            return False
        problem.check(gpu.launch, built)
        torch.cuda.synchronize()
        return True

    names = {v: f"{one.kernel} {one.model} {v}" for v in one.variants}
    return {v: b for v, b in one.variants.items() if attempt(results, names[v], partial(check, b))}


def timed(gpu: Gpu, one: Work, variants: dict[str, Callable[[Any], Any]], results: Results, rows: int) -> None:
    problem = one.make(rows, "cuda")
    bound = max(FLOOR_US, problem.nbytes / BYTES_PER_S * 1e6)
    contestants: dict[str, Callable[[], None]] = {"torch": problem.torch_way}
    for name, build in variants.items():
        calls: Calls = problem.calls(build(problem))
        contestants[name] = partial(launch_all, gpu.launch, calls)
    for name, work in contestants.items():
        times = attempt(results, f"{one.kernel} {one.model} {rows} rows {name}", partial(gpu.times, work))
        if times is not None:
            warm, cold = times
            results.timings.append(VariantTiming(one.kernel, one.model, rows, name, warm, cold, bound))


def print_timings(results: Results) -> None:
    """Per kernel, model and rows: the three best variants by cold time, then torch."""
    print(f"\n{'kernel':<25}{'model':<6}{'rows':>5}{'bound':>8}  warm/cold us of the best three | torch")
    groups: dict[tuple[str, str, int], list[VariantTiming]] = {}
    for t in results.timings:
        groups.setdefault((t.kernel, t.model, t.rows), []).append(t)
    for (kernel, model, rows), found in groups.items():
        ours = sorted((t for t in found if t.variant != "torch"), key=lambda t: t.warm_us + t.cold_us)
        best = "   ".join(f"{t.variant}: {t.warm_us:.2f}/{t.cold_us:.2f}" for t in ours[:3])
        other = "".join(f" | {t.warm_us:.1f}/{t.cold_us:.1f}" for t in found if t.variant == "torch")
        print(f"{kernel:<25}{model:<6}{rows:>5}{found[0].bound_us:>8.2f}  {best}{other}")
    for title, lines in (("left out", results.left_out), ("WRONG", results.wrong)):
        for line in lines:
            print(f"{title}: {line}")


def target_of_gpu() -> str:
    """ "sm90", without initialising CUDA."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    return "sm" + done.stdout.split()[0].replace(".", "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels.step", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROWS} rows instead of {ROWS}")
    parser.add_argument("--seconds", type=float, default=110, help="no new timing begins after this")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args(arguments)
    begin, results = time.monotonic(), Results()
    try:
        target = target_of_gpu()
    except (OSError, subprocess.CalledProcessError, IndexError):
        print("no GPU: nothing was checked")
        return 2
    work = all_work(QUICK_ROWS if options.quick else ROWS, target)
    gpu = Gpu(compile_all(work, target, results))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    right = [(one, variants_that_hold(gpu, one, results)) for one in work]
    total = sum(len(one.variants) for one in work)
    print(
        f"{sum(len(v) for _, v in right)} of {total} variants are right; {time.monotonic() - begin:.1f} s", flush=True
    )
    for one, variants in right:
        for rows in one.rows:
            name = f"{one.kernel} {one.model} {rows} rows"
            if time.monotonic() - begin > options.seconds:
                results.left_out.append(f"{name}: out of time")
                continue
            attempt(results, name, partial(timed, gpu, one, variants, results, rows))
    print_timings(results)
    if options.out:
        options.out.write_text(json.dumps(asdict(results), indent=1) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - begin:.1f} s in all; {len(results.wrong)} wrong")
    return 1 if results.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
