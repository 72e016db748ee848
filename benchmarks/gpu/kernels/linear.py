"""Linear layers on a GPU: are the kernels right, which configuration is fastest, and does cuBLAS beat it?

    python -m benchmarks.gpu.kernels.linear [--quick] [--small] [--ranks 2] [--kinds w4,w8] [--seconds 110] [--out FILE]

Checks every variant against float64 (exit status 1 on a mismatch), then times configurations for the layers of Gemma 3
27B (`--small`: 270M) with CUDA graphs over cold weights, and prints per layer and number of rows the best one beside
its bound (bytes of weights / 3.0 TB/s), cuBLAS, and the lines of `plugins.linear_configs`. What fails to
compile or run is reported and left out; a configuration whose result is wrong makes the status 1.

Needs a GPU from sm89 on, torch, triton and cuda-bindings. Invariant: every figure printed belongs to a launch whose
result was compared.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.kernels.linear_cases import check_case, draw
from benchmarks.gpu.kernels.linear_sweep import (
    PEAK_BYTES_PER_S,
    ConfigTiming,
    LinearProblem,
    Weights,
    candidates,
    compile_linear,
)
from wicore_trt.plugins.aot import CompiledKernel, KernelSpec
from wicore_trt.plugins.launch import SHARED_LAUNCHER
from wicore_trt.plugins.layout import Launch
from wicore_trt.plugins.linear_configs import config_key, find_bucket, linear_config
from wicore_trt.plugins.linear_layout import LinearConfig, LinearShape
from wicore_trt.weight_format import BF16, FP8, PLAIN, Q4_0

LAYERS = {
    # name: (n, k, geglu, how many of a model)
    "27b": {
        "qkv": (8192, 5376, False, 62),
        "o": (5376, 4096, False, 62),
        "gate_up": (21504, 5376, True, 62),
        "down": (5376, 21504, False, 62),
        "head": (262208, 5376, False, 1),
    },
    "270m": {
        "qkv": (1536, 640, False, 18),
        "o": (640, 1024, False, 18),
        "gate_up": (2048, 640, True, 18),
        "down": (640, 2048, False, 18),
        "head": (262144, 640, False, 1),
    },
}
ROWS = {"w16": (1, 8, 16, 32, 64), "w8": (1, 8, 16, 32, 64), "w8x8": (16, 32, 64, 128), "w4": (1, 8, 16, 32, 64)}
MORE_ROWS = {"w16": (2, 4, 128, 512, 1024), "w8": (2, 4), "w8x8": (1, 2, 4, 8, 512, 1024), "w4": (128, 256, 512, 1024)}
"""Timed with the best configuration of their bucket, or the library alone where there is none."""
WORKERS = 20
Row = tuple[str, str, int]
"""(kind, layer, rows)."""


@dataclass
class Sweep:
    """Measurements so far."""

    target: str
    quick: bool
    deadline: float
    best: dict[Row, ConfigTiming] = field(default_factory=dict)
    library: dict[Row, float] = field(default_factory=dict)
    all: list[dict[str, Any]] = field(default_factory=list)
    kernels: dict[tuple[LinearShape, LinearConfig], CompiledKernel] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def late(self) -> bool:
        return time.monotonic() > self.deadline


def linear_shape(layer: str, kind: str, size: tuple[int, int, bool, int]) -> LinearShape:
    """bfloat16 activations; 16-bit results between gate_up and down, float32 elsewhere."""
    n, k, geglu, _ = size
    weights = {"w16": BF16, "w4": Q4_0}.get(kind, FP8)
    out = "bfloat16" if geglu else "float32"
    return LinearShape(n, k, "bfloat16", weights, out, kind == "w8x8", geglu)


def check_variants(pool: ProcessPoolExecutor, target: str) -> list[str]:
    """Every variant at small shapes against float64; the failures."""
    vector, matrix = LinearConfig("vector", 4, 512, unroll=2), LinearConfig("matrix", 64, 128, 16, 1, 4, 3)
    split = LinearConfig("matrix", 32, 64, 8, 3, 4, 4)
    wide = LinearConfig("matrix", 128, 64, 64, 2, 8, 3, 1, False)
    base = [LinearShape(1000, 1424, d, w, "float32") for d in ("bfloat16", "float16") for w in (PLAIN[d], FP8)]
    cases = [(s, c, t) for s in base for c, t in ((vector, 1), (matrix, 1), (matrix, 21), (split, 7), (wide, 130))]
    for shape in base:
        geglu = replace(shape, geglu=True, out=shape.dtype)
        cases += [(geglu, vector, 1), (geglu, matrix, 17)]
    fp8 = LinearShape(1000, 1424, "bfloat16", FP8, "float32", fp8_input=True)
    cases += [(fp8, matrix, 33), (fp8, split, 9), (fp8, wide, 100), (replace(fp8, geglu=True), matrix, 16)]
    cases.append((replace(fp8, geglu=True, out="bfloat16", largest=True), matrix, 35))
    tiles, split = LinearConfig("tiles", 32, 128, 8, 1, 4, 1, 4), LinearConfig("tiles", 64, 64, 32, 2, 4, 2, 3)
    for dtype in ("bfloat16", "float16"):
        for kinds in ((), ("mlp.proj",)):
            q4 = LinearShape(992, 1440, dtype, replace(Q4_0, minimums=kinds), "float32")
            geglu = replace(q4, geglu=True, out=dtype)
            cases += [(q4, tiles, 1), (q4, tiles, 19), (q4, split, 40), (geglu, tiles, 7), (geglu, split, 35)]
    return _check(pool, target, cases)


def _check(pool: ProcessPoolExecutor, target: str, cases: list[tuple[LinearShape, LinearConfig, int]]) -> list[str]:
    """Failures of these cases against float64; prints one line each."""
    import torch

    from wicore_trt.plugins.kernels.linear_specs import linear_spec

    built = {(s, c): pool.submit(compile_linear, s, c, target) for s, c, _ in cases}
    failed = []
    for shape, config, tokens in cases:
        spec, kernel = linear_spec(shape, config, target), built[shape, config].result()

        def run(spec: KernelSpec, call: Launch, kernel: CompiledKernel | str = kernel) -> None:
            assert not isinstance(kernel, str), kernel
            at = {n: a.data_ptr() if isinstance(a, torch.Tensor) else a for n, a in call.arguments.items()}
            SHARED_LAUNCHER.launch(kernel, Launch(call.grid, at), torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()

        try:
            share = check_case(draw(shape, tokens, "cuda"), config, spec, run)
            print(f"ok    {spec.name}, {tokens} rows: error {share:.2f} of what is allowed")
        except Exception as error:
            failed.append(f"{spec.name}, {tokens} rows: {error}")
            print(f"FAIL  {failed[-1]}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
    return failed


def sweep_layer(
    sweep: Sweep, pool: ProcessPoolExecutor, weights: Weights, work: Iterator[tuple[Row, LinearShape]]
) -> None:
    """Time today's configuration and all candidates of each (kind, layer, rows); compile those of the next one
    meanwhile."""
    queue: list[tuple[Row, LinearShape, dict[LinearConfig, Future[CompiledKernel | str]]]] = []
    built: dict[tuple[LinearShape, LinearConfig], Future[CompiledKernel | str]] = {}
    for row, shape in work:
        today = linear_config(sweep.target, shape, row[2])
        configs = dict.fromkeys([today, *candidates(shape, row[2], sweep.quick)])
        for c in configs:
            if (shape, c) not in built:
                built[shape, c] = pool.submit(compile_linear, shape, c, sweep.target)
        queue.append((row, shape, {c: built[shape, c] for c in configs}))
    for row, shape, futures in queue:
        if sweep.late():
            print(f"out of time: {row} and what follows is left out")
            for future in (f for _, _, rest in queue for f in rest.values()):
                future.cancel()
            return
        problem = LinearProblem(shape, row[2], weights)
        for config, future in futures.items():
            _time_one(sweep, row, problem, config, future.result())
        sweep.library[row] = problem.library_microseconds()
        if row in sweep.best:
            print(_line(row, shape, sweep), flush=True)


def _time_one(
    sweep: Sweep, row: Row, problem: LinearProblem, config: LinearConfig, kernel: CompiledKernel | str
) -> None:
    if isinstance(kernel, str):
        timing = ConfigTiming(config, error=kernel)
    else:
        try:
            timing = problem.time(config, kernel)
            sweep.kernels[problem.shape, config] = kernel
        except AssertionError as error:
            timing = ConfigTiming(config, error=f"WRONG: {error}")
            sweep.wrong.append(f"{row} {config.short_name()}: {error}")
        except RuntimeError as error:
            timing = ConfigTiming(config, error=str(error)[:200])
    if timing.error:
        print(f"  left out: {row} {config.short_name()}: {timing.error}")
    sweep.all.append({"row": row, "config": asdict(config), "us": timing.microseconds, "error": timing.error})
    if timing.microseconds < sweep.best.get(row, ConfigTiming(config)).microseconds:
        sweep.best[row] = timing


def _line(row: Row, shape: LinearShape, sweep: Sweep) -> str:
    kind, layer, rows = row
    best, library = sweep.best.get(row), sweep.library.get(row, math.nan)
    bound = shape.weight_bytes / PEAK_BYTES_PER_S * 1e6
    took = best.microseconds if best else math.nan
    name = best.config.short_name() if best else "-"
    flops = 2e-6 * rows * shape.weight_rows * shape.k / took
    rate = shape.weight_bytes / took * 1e-6
    return (
        f"{kind:5} {layer:8} {rows:5} {name:24} {took:9.1f} us {rate:6.2f} TB/s {flops:7.1f} TFLOP/s"
        f"  bound {bound:8.1f} us ({bound / took:4.0%})  cuBLAS {library:9.1f} us"
    )


def more_rows(sweep: Sweep, weights: Weights, shapes: dict[tuple[str, str], LinearShape]) -> None:
    """Other numbers of rows, by the best configuration of their bucket."""
    for (kind, layer), shape in shapes.items():
        for rows in () if layer == "head" else MORE_ROWS[kind]:
            bucket = max(find_bucket(rows), min(ROWS[kind]))
            known, row = sweep.best.get((kind, layer, bucket)), (kind, layer, rows)
            if sweep.late() or (known is None and kind in ("w8", "w4")):
                continue
            problem = LinearProblem(shape, rows, weights)
            if known is not None:
                _time_one(sweep, row, problem, known.config, sweep.kernels[shape, known.config])
            sweep.library[row] = problem.library_microseconds()
    print("\nRows by the configuration of their bucket")
    for (kind, layer), shape in shapes.items():
        for rows in MORE_ROWS[kind]:
            if (kind, layer, rows) in sweep.library:
                print(_line((kind, layer, rows), shape, sweep))


def print_summary(sweep: Sweep, shapes: dict[tuple[str, str], LinearShape], counts: dict[str, int]) -> None:
    print("\nSummary (our best; cuBLAS of gate_up leaves GEGLU out)")
    for row in sorted(sweep.best, key=lambda r: (r[0], r[1], r[2])):
        print(_line(row, shapes[row[:2]], sweep))
    print("\nFastest way per layer and rows, microseconds (cuBLAS w8x8 and w16 gate_up leave GEGLU out)")
    for layer in counts:
        for rows in sorted({r[2] for r in sweep.library if r[1] == layer}):
            ways = {f"{k} triton": t.microseconds for (k, at, r), t in sweep.best.items() if (at, r) == (layer, rows)}
            for (kind, at, r), took in sweep.library.items():
                if (at, r) == (layer, rows) and not math.isnan(took):
                    ways[f"{kind} cuBLAS"] = took
            text = "  ".join(f"{way} {took:.1f}" for way, took in sorted(ways.items(), key=lambda w: w[1]))
            print(f"{layer:8} {rows:5}: {text}")
    print("\nAll layers of a step without its head, milliseconds")
    for kind in ROWS:
        for rows in sorted({r[2] for r in sweep.best if r[0] == kind}):
            times = {layer: sweep.best.get((kind, layer, rows)) for layer in counts if layer != "head"}
            if all(times.values()):
                total = sum(counts[layer] * t.microseconds for layer, t in times.items() if t) / 1000
                least = sum(c * shapes[kind, y].weight_bytes for y, c in counts.items() if y != "head")
                print(f"{kind:5} {rows:5} rows: {total:7.2f} ms, bound {least / PEAK_BYTES_PER_S * 1e3:.2f} ms")
    print("\nFor the table of plugins/linear_configs.py:")
    table: dict[Any, list[tuple[int, ...]]] = {}
    for row in sorted(row for row in sweep.best if row[2] in ROWS[row[0]]):
        key, c = config_key(sweep.target, shapes[row[:2]], row[2]), sweep.best[row].config
        sizes = (c.block_n, c.block_k, c.columns, c.splits, c.num_warps, c.num_stages, c.unroll)
        table.setdefault(key[1:5], []).append((key[5], *sizes))
        if (c.kind == "vector") != (key[5] == 1) and row[0] != "w4":
            print(f"    no line can say that {row} is {c.kind}")
    for layer, found in table.items():
        print(f"    {layer}: {(*found,)},")


def measure_linears(options: argparse.Namespace, pool: ProcessPoolExecutor) -> int:
    import torch

    major, minor = torch.cuda.get_device_capability()
    target = f"sm{major}{minor}"
    print(f"{torch.cuda.get_device_name()}, {target}, torch {torch.__version__}", flush=True)
    sweep = Sweep(target, options.quick, time.monotonic() + options.seconds)
    failed = check_variants(pool, target)
    layers = {
        name: (n, k // options.ranks, *rest) if name in ("o", "down") else (n // options.ranks, k, *rest)
        for name, (n, k, *rest) in LAYERS["270m" if options.small else "27b"].items()
    }
    kinds = ("w16", "w4") if options.small else tuple(options.kinds.split(","))
    shapes = {(k, y): linear_shape(y, k, layers[y]) for k in kinds for y in layers if y != "head" or k == "w16"}
    sizes = {
        pool: sorted(s.weight_rows * s.k for (k, _), s in shapes.items() if k.removesuffix("x8") == pool)
        for pool in ("w16", "w8", "w4")
    }
    weights = Weights(
        "cuda", {k: max(2 * v[-1], 8 * v[-2], (800 if k == "w4" else 400) << 20) for k, v in sizes.items() if v}
    )
    work = ((k, y, r) for k in kinds for y in layers for r in ROWS[k] if (k, y) in shapes)
    try:
        sweep_layer(sweep, pool, weights, (((k, y, r), shapes[k, y]) for k, y, r in work))
        more_rows(sweep, weights, shapes)
        del weights
        torch.cuda.empty_cache()
        print("\nThe best and the rule's configurations against float64")
        bests = [(shapes[r[:2]], t.config, r[2]) for r, t in sweep.best.items() if r[1] != "head" and r[2] <= 64]
        ruled = [(s, linear_config(target, s, r), r) for s in shapes.values() for r in (1, 8) if s.n < 1 << 16]
        failed += _check(pool, target, list(dict.fromkeys([*bests[:: 3 if options.quick else 1], *ruled])))
    finally:
        print_summary(sweep, shapes, {y: size[3] for y, size in layers.items()})
        if options.out:
            library = [{"row": row, "us": took} for row, took in sweep.library.items()]
            options.out.write_text(json.dumps({"target": target, "timings": sweep.all, "library": library}, indent=1))
    for problem in (*failed, *sweep.wrong):
        print(f"FAIL  {problem}")
    print("all results are right" if not (failed or sweep.wrong) else "SOME RESULTS ARE WRONG")
    return 1 if failed or sweep.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks and times linear layers on a GPU.")
    parser.add_argument("--quick", action="store_true", help="fewer configurations")
    parser.add_argument("--small", action="store_true", help="the layers of Gemma 3 270M")
    parser.add_argument("--ranks", type=int, default=1, help="the layers' parts on one of so many ranks")
    parser.add_argument("--kinds", default="w8,w16,w8x8,w4", help="weights and rows to time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=110, help="start nothing new after this time")
    parser.add_argument("--out", type=Path, help="all timings as JSON")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("torch is not installed")
        return 2
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print("needs a GPU from sm89 on: nothing was checked")
        return 2
    workers = max(1, min(WORKERS, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return measure_linears(options, pool)


if __name__ == "__main__":
    sys.exit(main())
