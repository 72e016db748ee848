"""Decode and prefill attention on a GPU: checks every configuration, then times them at the models' shapes.

    python -m benchmarks.gpu.kernels.attention [--quick] [--out FILE.json] [--budget SECONDS]
    python -m benchmarks.gpu.kernels.attention --decode 16x8192,16x8192x1024 --kv fp8    27B: rows, keys, window

Exits with 1 if a kernel differs from float64 by more than its operands' rounding. A configuration that does not
compile, run or hold is named and left out; what the budget does not reach is named too. Kernels are compiled ahead of
time in a pool of processes and launched by raw pointers inside CUDA graphs, as engines do. Layers of one pool take
turns, so that L2 holds nothing. TB/s counts the keys and values that are seen, TFLOP/s two products per visible pair;
`bound` is that over 3.0 TB/s or 800 TFLOP/s. Needs torch with CUDA, triton, cuda-bindings; nothing when imported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.kernels.attention_problem import AttentionProblem, AttentionSizes, Point, pointer
from wicore_trt.arithmetic import div_ceil

BANDWIDTH, FLOPS = 3.0e12, 800e12
POOL_BYTES = 6 << 30
WORKERS = 12


LARGE, SMALL = AttentionSizes("27B", 32, 16, 128, 32, 62), AttentionSizes("270M", 4, 1, 256, 32, 18)


def points(quick: bool) -> list[Point]:
    """In order of importance."""
    found = [Point(LARGE, b, 1024) for b in (1, 8, 32, 64)]
    found += [Point(LARGE, b, 1024, kv="fp8") for b in (1, 32, 128)]
    found += [Point(SMALL, 1, 1024), Point(SMALL, 1, 1500, 512), Point(LARGE, 1, 1024, tokens=1024)]
    found += [Point(LARGE, 4, 1024, tokens=1024), Point(LARGE, 1, 8192, tokens=1024)]
    found += [Point(LARGE, 1, 8192, 1024, tokens=1024), Point(SMALL, 1, 1024, tokens=1024)]
    if not quick:
        found += [Point(LARGE, b, 1537, 1024) for b in (1, 32)] + [Point(LARGE, b, 8192) for b in (1, 8)]
        found += [Point(LARGE, b, 32768) for b in (1, 8)] + [Point(LARGE, 1, 1024, kv="fp8", tokens=1024)]
        found += [Point(LARGE, 128, 1024), Point(LARGE, 8, 1024, kv="fp8"), Point(LARGE, 64, 1024, kv="fp8")]
        found += [Point(LARGE, 8, 32768, kv="fp8"), Point(LARGE, 1, 8192, kv="fp8"), Point(SMALL, 32, 1024)]
    return found


def kernels_of(model: AttentionSizes, kv: str, prefill: bool) -> list[dict[str, Any]]:
    """Fields of DecodeConfig (without splits) or PrefillConfig to compile."""
    if prefill:
        names: tuple[str, ...] = ("block_m", "block_k", "num_warps", "num_stages")
        large = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2)]
        small = [(64, 32, 4, 2), (64, 64, 4, 2), (32, 32, 4, 2), (16, 64, 4, 2), (64, 64, 8, 2)]
        return [dict(zip(names, c, strict=True)) for c in (large if model is LARGE else small)]
    names = ("heads", "block_k", "fused", "num_warps", "num_stages")
    wide = [(1, 64, True, 4, 2), (1, 64, True, 4, 3), (1, 64, False, 4, 3), (1, 32, True, 4, 3), (1, 128, True, 4, 2)]
    if model is SMALL:
        wide += [(1, 32, True, 4, 2), (1, 32, False, 4, 3)]
    else:
        wide += [(2, 32, True, 4, 3), (2, 64, True, 8, 2), (1, 64, True, 2, 3), (4, 32, True, 8, 2)]
        wide += [(1, 64, True, 4, 4), (1, 128, True, 8, 2), (1, 32, True, 4, 4), (1, 32, True, 2, 4)]
        if kv == "fp8":
            wide += [(1, 64, True, 2, 2), (2, 64, False, 4, 3), (2, 32, True, 2, 3), (2, 32, True, 4, 4)]
            wide += [(1, 128, True, 4, 3), (2, 64, True, 4, 2), (4, 32, True, 4, 3)]
    return [dict(zip(names, c, strict=True)) for c in wide]


def compile_attention(job: tuple[str, AttentionSizes, str, bool, dict[str, Any]]) -> Any:
    """In a worker: {role: CompiledKernel} of one configuration, or the error's text."""
    from wicore_trt.plugins.aot import compile_kernel
    from wicore_trt.plugins.decode_layout import DecodeConfig, PrefillConfig
    from wicore_trt.plugins.kernels import fast_attention_specs as specs
    from wicore_trt.plugins.layout import PoolShape

    target, model, kv, prefill, fields = job
    pool = PoolShape(2, model.page_tokens, model.kv_heads, model.head_dim, kv)
    try:
        if prefill:
            config = PrefillConfig(**fields)
            made = {"main": specs.prefill_spec(pool, "bfloat16", model.heads, target, config)}
        else:
            decode = DecodeConfig(splits=2, **fields)
            made = {"main": specs.decode_spec(pool, "bfloat16", model.heads, target, decode)}
            made["combine"] = specs.combine_spec(pool, "bfloat16", decode)
        return {role: compile_kernel(spec, target) for role, spec in made.items()}
    except Exception as error:  # a configuration that does not fit is no failure of the others
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class Kernel:
    """A compiled configuration and how to run it on a problem."""

    def __init__(self, fields: dict[str, Any], roles: dict[str, Any], launch: Callable[[Any, Any], None]) -> None:
        self.fields, self.roles, self._launch = fields, roles, launch

    def __str__(self) -> str:
        return " ".join(f"{k}={int(v)}" for k, v in self.fields.items())

    def prepared(self, p: AttentionProblem, splits: int) -> Callable[[int], None]:
        """A function that runs layer i; launches are made once."""
        import torch

        from wicore_trt.plugins import decode_layout as layout
        from wicore_trt.plugins.layout import Slices

        m, scale = p.point.model, p.point.model.head_dim**-0.5
        slices = Slices(pointer(p.cu), pointer(p.first), p.bounds[-1])
        constants, window = self.roles["main"].constants, p.point.window
        q, out = pointer(p.q), pointer(p.out)
        if p.point.tokens:
            calls = [
                [("main", layout.prefill_launch(constants, (q, out), x, p.table, slices, scale, window))]
                for x in p.pools
            ]
        else:
            config = layout.DecodeConfig(splits=splits, **self.fields)
            n = len(p.lengths)
            sizes = layout.workspace_elements(config, p.shape, m.heads, n)
            buffers = [torch.full((max(x, 4),), torch.nan, device=p.device) for x in sizes[:2]]
            buffers.append(torch.zeros(max(sizes[2], 4), dtype=torch.int32, device=p.device))
            p.keep = buffers
            work = layout.Workspace(*map(pointer, buffers))
            rows = layout.DecodeRows(q, out, pointer(p.kv_lengths), m.heads, scale, window)
            calls = [
                [
                    ("main", layout.decode_launch(config, rows, x, p.table, work)),
                    ("combine", layout.combine_launch(config, rows, x, n, work)),
                ]
                for x in p.pools
            ]

        def run(layer: int) -> None:
            for role, call in calls[layer]:
                if 0 not in call.grid:
                    self._launch(self.roles[role], call)

        return run

    def check(self, model: AttentionSizes, kv: str, prefill: bool, device: str) -> str:
        """Return the faults, if any."""
        import torch

        lengths = [700, 1, 130, 1000] if prefill else [0, 1, 33, 700, 1024, 1500]
        for window in (0, 512 if prefill else 1024):
            p = AttentionProblem(
                Point(model, len(lengths), 0, window, kv, 300 if prefill else 0), lengths, 2, device, True
            )
            for splits in (1,) if prefill else (1, 3, 16):
                p.out.fill_(torch.nan)
                run = self.prepared(p, splits)
                run(1)
                first = p.out.clone()
                if (worst := p.worst(1)) > 1:
                    return f"window {window}, {splits} splits: {worst:.2f} times the error that rounding allows"
                run(1)
                if not torch.equal(first, p.out):
                    return f"window {window}, {splits} splits: two runs differ"
        return ""


def microseconds(run: Callable[[int], None], layers: int) -> float:
    """Per layer: a CUDA graph of all layers in turn, median of 7 replays after 2."""
    import torch

    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)
    event: Any = torch.cuda.Event
    marks = [event(enable_timing=True) for _ in range(10)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    times = [float(a.elapsed_time(b)) for a, b in zip(marks[2:], marks[3:], strict=False)]
    return statistics.median(times) / layers * 1e3


def sdpa(p: AttentionProblem) -> float:
    """Microseconds of torch's scaled_dot_product_attention on contiguous keys and values, window by a mask."""
    import torch
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    m, point, n = p.point.model, p.point, len(p.lengths)
    copies = []
    for layer in range(min(len(p.pools), 8)):
        pages = p.kv[p.tables.long().clamp(min=0), layer].to(torch.bfloat16)  # [S, columns, 2, tokens, heads, D]
        kv = pages.permute(2, 0, 4, 1, 3, 5).flatten(3, 4)[:, :, :, : point.context]
        copies.append((kv[0].contiguous(), kv[1].contiguous()))
    q = p.q.view(n, -1, m.heads, m.head_dim).transpose(1, 2).contiguous()
    mask: Any = None
    if point.tokens:
        mask = causal_lower_right(point.tokens, point.context)
    if point.window and point.window < point.context:
        at = torch.arange(point.context, device=p.device)
        behind = at[-max(point.tokens, 1) :, None] - at
        mask = (behind >= 0) & (behind < point.window)
    square = point.tokens == point.context and not isinstance(mask, torch.Tensor)

    def run(layer: int) -> None:
        more: dict[str, Any] = {"is_causal": True} if square else {"attn_mask": mask}
        scaled_dot_product_attention(q, *copies[layer], enable_gqa=True, **more)

    return microseconds(run, len(copies))


def sweep_point(point: Point, kernels: list[Kernel], until: float, sms: int) -> dict[str, Any]:
    """Times of all configurations that there is time for, best first."""
    item = 1 if point.kv == "fp8" else 2
    layer = point.rows * point.context * point.model.kv_heads * point.model.head_dim * 2 * item
    p = AttentionProblem(
        point, [point.context] * point.rows, min(point.model.layers, max(2, POOL_BYTES // layer)), "cuda"
    )
    times: list[tuple[float, str, dict[str, Any], int]] = []
    for kernel in kernels:
        groups = point.model.kv_heads // kernel.fields.get("heads", 1) * point.rows
        blocks = div_ceil(point.seen, kernel.fields["block_k"])
        options = {min(blocks, max(1, round(waves * sms / groups))) for waves in (1, 2, 3, 6, 12)}
        for splits in sorted({1} if point.tokens else options):
            if time.monotonic() > until:
                break
            try:
                took = microseconds(kernel.prepared(p, splits), len(p.pools))
                times.append((took, f"{kernel} splits={splits}", kernel.fields, splits))
            except Exception as error:
                print(f"  left out: {kernel} splits={splits}: {type(error).__name__}: {error}"[:300])
    times.sort(key=lambda x: x[0])
    try:
        beside = sdpa(p)
    except Exception as error:
        print(f"  no torch figure: {type(error).__name__}: {error}"[:300])
        beside = float("nan")
    return {"point": str(point), "times": times, "sdpa_us": beside}


def report(found: dict[str, Any], point: Point) -> str:
    size, flops = point.cost()
    if not found["times"]:
        return f"{point}: nothing ran"
    us, name, *_ = found["times"][0]
    bound = max(size / BANDWIDTH, flops / FLOPS) * 1e6
    rate = f"{flops / us / 1e6:6.0f} TFLOP/s" if point.tokens else f"{size / us / 1e6:6.2f} TB/s"
    beside = f"torch {found['sdpa_us']:8.1f}"
    return (
        f"{point!s:58} {us:8.1f} us {rate} bound {bound:7.1f} us ({beside}; x{point.model.layers} layers "
        f"{us * point.model.layers / 1e3:.2f} ms)  {name}"
    )


def kernels_that_hold(
    target: str, wanted: list[tuple[AttentionSizes, str, bool]]
) -> tuple[dict[Any, list[Kernel]], int]:
    """Kernels that hold, by (model, KV type, prefill), and the number that do not."""
    import torch

    from wicore_trt.plugins.launch import SHARED_LAUNCHER

    def launch(kernel: Any, call: Any) -> None:
        SHARED_LAUNCHER.launch(kernel, call, torch.cuda.current_stream().cuda_stream)

    jobs = [(target, *w, fields) for w in wanted for fields in kernels_of(*w)]
    began = time.monotonic()
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        built = list(pool.map(compile_attention, jobs))
    print(f"{len(jobs)} configurations compiled in {time.monotonic() - began:.1f} s")
    kernels: dict[Any, list[Kernel]] = {w: [] for w in wanted}
    wrong = 0
    for (_, model, kv, prefill, fields), roles in zip(jobs, built, strict=True):
        label = f"{model.name} {kv} {'prefill' if prefill else 'decode'}"
        if isinstance(roles, str):
            print(f"left out: {label} {fields}: {roles}")
            continue
        kernel = Kernel(fields, roles, launch)
        try:
            fault = kernel.check(model, kv, prefill, "cuda")
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"[:300]
        if fault:
            wrong += 1
            print(f"WRONG: {label} {kernel}: {fault}")
        else:
            kernels[model, kv, prefill].append(kernel)
    print(f"{sum(map(len, kernels.values()))} hold, {wrong} do not ({time.monotonic() - began:.1f} s)", flush=True)
    return kernels, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the shapes that count most")
    parser.add_argument("--decode", help="ROWSxKEYS or ROWSxKEYSxWINDOW, with commas: 27B's decode at these alone")
    parser.add_argument("--kv", default="bfloat16", choices=("bfloat16", "fp8"), help="keys and values of --decode")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=110.0, help="seconds")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no GPU: nothing was checked")
        return 2
    until = time.monotonic() + arguments.budget
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, torch {torch.__version__}")
    todo = points(arguments.quick)
    if arguments.decode:
        shapes = [[int(n) for n in point.split("x")] for point in arguments.decode.split(",")]
        todo = [Point(LARGE, rows, keys, sum(window), arguments.kv) for rows, keys, *window in shapes]
    wanted = list(dict.fromkeys((p.model, p.kv, p.tokens > 0) for p in todo))
    kernels, wrong = kernels_that_hold(f"sm{properties.major}{properties.minor}", wanted)
    lines, results = [], []
    for point in todo:
        if time.monotonic() > until:
            lines.append(f"{point}: no time left")
            continue
        try:
            found = sweep_point(
                point, kernels[point.model, point.kv, point.tokens > 0], until, properties.multi_processor_count
            )
        except Exception as error:
            lines.append(f"{point}: {type(error).__name__}: {error}"[:300])
            continue
        lines.append(report(found, point))
        print(lines[-1], flush=True)
        for us, name, _, _ in found["times"][1:6]:
            print(f"    {us:8.1f} us  {name}")
        results.append({**found, "shape": asdict(point)})
    print("\nSummary, best of each shape, microseconds per layer\n" + "\n".join(lines))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
