"""Times whole steps of the triton backend on a GPU, with made-up weights: python -m benchmarks.gpu.step_time

    --model gemma3-27b --dtype bfloat16 --batch 1,8,32 --context 1024 [--kv-dtype fp8] [--out FILE.json]

Per batch size: milliseconds of a decode step in its CUDA graph (median by events), beside it those of a graph whose
launches do not overlap, and whether replays of both give the same bits; steps one after the other, by what lies
between the graphs; the step with uploads and the host's work (wall
clock), the bytes that the step must read over the copy bandwidth of the same run, and the time of
each kernel role in a graph of its own. Then prefill of one prompt. `--check` first compares a small random model with
the torch operators on the CPU and exits 1 on disagreement. Prints as it goes. Needs a GPU, Triton, torch and
cuda-bindings.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import say
from benchmarks.gpu import step_overlap as gpu_step_overlap
from benchmarks.gpu.step_between import between
from benchmarks.gpu.step_roles import role_times
from wicore_trt.arithmetic import div_ceil, first_visible_page
from wicore_trt.backends.triton import products as triton_products
from wicore_trt.backends.triton import table as triton_table
from wicore_trt.backends.triton.executor import Loading, TritonExecutor
from wicore_trt.backends.triton.roles import LINEARS
from wicore_trt.backends.triton.rows import decode_plan, plan_rows
from wicore_trt.backends.triton.table import DECODE_BUCKETS, EngineShape, KernelTable
from wicore_trt.backends.triton.weights import finish_constants, make_dummy_weights
from wicore_trt.kv.sizing import MODELS, builtin_spec
from wicore_trt.model.spec import GLOBAL, LOCAL, Gemma3Spec
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.dtypes import E4M3, TORCH_DTYPES
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.runtime.step_inputs import StepInputs
from wicore_trt.types import SamplingParams
from wicore_trt.weight_format import PLAIN, QUANTIZED

PAGE_TOKENS = 32
EVENT: Any = torch.cuda.Event
GREEDY = SamplingParams(temperature=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3-27b", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "fp8", "q4_0"))
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--batch", default="1,8,32", help="sequences of a decode step")
    parser.add_argument("--context", type=int, default=1024, help="tokens before a decode step")
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the prompt; 0: none")
    parser.add_argument("--layers", type=int, help="only the first layers of the model")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--crossover", type=int, help="most rows of a product by Triton's kernels of 16-bit rows")
    parser.add_argument("--crossover8", type=int, help="most rows of a product by Triton's kernels of E4M3 rows")
    parser.add_argument("--replays", type=int, default=20, help="decode steps to compare with ordered launches")
    parser.add_argument("--ordered", help="regular expressions, with commas: kernels to launch one by one, by name")
    parser.add_argument("--fast-sums", type=int, help="longest sum of FP8 products in the matrix units' precision")
    parser.add_argument("--invariant", action="store_true", help="batch-invariant kernels")
    parser.add_argument("--no-roles", action="store_true", help="leave the time by role out")
    parser.add_argument("--workers", type=int, help="processes that compile; default: all cores")
    parser.add_argument("--check", action="store_true", help="compare a small model with the CPU first")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        say("There is no GPU.")
        return 2
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    failed = False
    if args.check or args.check_only:
        failed = not agrees_with_cpu()
    if not args.check_only:
        report = Measurement(args).run()
        failed |= any(row["problems"] for row in report["decode"])
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(failed)


def agrees_with_cpu() -> bool:
    """True when every case agrees with the CPU."""
    from benchmarks.gpu.step_check import CASES, check_step

    problems = []
    for case in CASES:
        try:
            problems += check_step(case, say)
        except Exception:
            problems.append(f"{case.name}: {traceback.format_exc()}")
    for problem in problems:
        say(f"WRONG: {problem}")
    say(f"check: {'ok' if not problems else f'{len(problems)} problems'}, {len(CASES)} cases")
    return not problems


class Measurement:
    """One model on one GPU."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.batches = [int(b) for b in args.batch.split(",")]
        spec = builtin_spec(args.model)
        if args.layers:
            groups = spec.layer_groups[: args.layers]
            spec = replace(spec, num_layers=args.layers, layer_groups=groups)
        dtype = args.dtype if args.dtype in PLAIN else "bfloat16"
        kv_dtype = dtype if args.kv_dtype == "auto" else args.kv_dtype
        self.shape = EngineShape(spec, dtype, QUANTIZED.get(args.dtype, PLAIN[dtype]), kv_dtype, PAGE_TOKENS)

    def run(self) -> dict[str, Any]:
        args, device = self.args, CudaDevice()
        measured = dict(triton_table.CROSSOVER.get(device.target, triton_table.DEFAULT_CROSSOVER))
        if args.crossover is not None:
            measured |= {"16-bit": args.crossover, "fp8": args.crossover, "q4_0": args.crossover}
        if args.crossover8 is not None:
            measured["fp8 rows"] = args.crossover8
        if args.fast_sums is not None:
            triton_products.FAST_SUMS = args.fast_sums
        triton_table.CROSSOVER[device.target] = measured
        say(f"crossovers {measured}")
        copies = copy_rate()
        say(f"copy bandwidth {copies / 1e12:.2f} TB/s (read and write), sum() {sum_rate() / 1e12:.2f} TB/s")
        torch.cuda.empty_cache()
        executor, weight_bytes = self.executor(device)
        report: dict[str, Any] = {
            **{k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
            **{"gpu": torch.cuda.get_device_name(), "copy_bytes_per_s": copies, "weight_bytes": weight_bytes},
            **{"kernels": executor.kernels, "decode": [], "prefill": None},
        }
        for batch in self.batches:
            try:
                report["decode"].append(self.decode(executor, batch, weight_bytes, copies))
            except Exception:
                say(f"decode of {batch} failed: {traceback.format_exc()}")
        if args.prefill:
            try:
                report["prefill"] = self.prefill(executor)
            except Exception:
                say(f"prefill failed: {traceback.format_exc()}")
        for row in report["decode"]:
            say(
                f"B={row['batch']:<4} {row['graph_ms']:.3f} ms/step in the graph ({row['ordered_ms']:.3f} without "
                f"overlap), {row['wall_ms']:.3f} ms wall; "
                f"{row['bytes'] / 1e9:.2f} GB = {row['bound_ms']:.3f} ms at copy bandwidth ({row['of_bound']:.1%})"
            )
        if report["prefill"]:
            prefill = report["prefill"]
            say(f"prefill of {args.prefill}: {prefill['wall_ms']:.2f} ms wall, {prefill['gpu_ms']:.2f} ms on the GPU")
        return report

    def executor(self, device: Any) -> tuple[TritonExecutor, int]:
        """An executor with filled pools, and the bytes of weights that a step reads."""
        args, shape = self.args, self.shape
        begun = time.monotonic()
        table = self.table(device.target)
        names = {entry.kernel.name for entry in table.all_entries()}
        say(f"{len(names)} kernels for {device.target} in {time.monotonic() - begun:.1f} s")
        longest = max(args.context + 1, args.prefill) + PAGE_TOKENS
        each = div_ceil(longest, PAGE_TOKENS)
        window = min(each, div_ceil(shape.spec.sliding_window, PAGE_TOKENS) + 1)
        most = max(self.batches)
        settings = ExecutorOptions(
            page_tokens=PAGE_TOKENS,
            kv_pages={GLOBAL: most * each, LOCAL: max(most * window, each)},
            max_batch_tokens=max(args.prefill, most, 16),
            max_sequences=most,
            max_context=each * PAGE_TOKENS,
            batch_invariant=args.invariant,
        )
        read = 0

        def constants(positions: int) -> Any:
            nonlocal read
            begun = time.monotonic()
            weights = make_dummy_weights(shape, device.torch_device)
            made = finish_constants(shape, weights, positions, device)
            unique = {t.data_ptr(): t.nbytes for t in weights.values()}
            read = sum(unique.values())  # a tied embedding is the head; its few embedded rows do not count
            device.synchronize()
            say(f"weights {read / 1e9:.2f} GB made in {time.monotonic() - begun:.1f} s")
            return made

        begun = time.monotonic()
        executor = TritonExecutor(Loading(shape, table, each * PAGE_TOKENS, constants, dummy=True), settings, device)
        say(f"executor {executor.kernels} with graphs of {list(executor.graphs)} in {time.monotonic() - begun:.1f} s")
        for pool in executor.pools.values():
            fill(pool)
        torch.cuda.synchronize()
        say(f"pools filled; {torch.cuda.memory_allocated() / 1e9:.1f} GB of the GPU's memory in use")
        return executor, read

    def table(self, target: str) -> KernelTable:
        from wicore_trt.backends.triton.compile import compile_table

        return compile_table(self.shape, target, self.args.workers)

    def batch(self, executor: TritonExecutor, count: int, tokens: int, start: int) -> StepBatch:
        """`count` sequences of `tokens` new tokens behind `start` ones, on pages of their own."""
        rng, window = random.Random(count), self.shape.spec.sliding_window
        slots = {g: rng.sample(range(n), n) for g, n in executor.layout.num_pages.items()}
        slices = []
        for i in range(count):
            whole = div_ceil(start + tokens, PAGE_TOKENS)
            low = first_visible_page(start, window, PAGE_TOKENS)
            pages = {}
            for group, free in slots.items():
                gone = low if group == LOCAL else 0
                pages[group] = [-1] * gone + [free.pop() for _ in range(whole - gone)]
            token_ids = [rng.randrange(self.shape.spec.vocab_size) for _ in range(tokens)]
            slices.append(SequenceSlice(i, token_ids, start, pages, sample=True, params=GREEDY))
        return StepBatch(slices)

    def decode(self, executor: TritonExecutor, count: int, weight_bytes: int, copies: float) -> dict[str, Any]:
        args, batch = self.args, self.batch(executor, count, 1, self.args.context)
        wall = []
        for _ in range(args.repeats):
            begun = time.monotonic()
            result = executor.execute(batch)
            wall.append(time.monotonic() - begun)
        bucket = next(b for b in DECODE_BUCKETS if b >= count)
        graph = events(executor, executor.graphs[bucket], args.repeats)
        compared = self.overlap(executor, batch, bucket)
        moved = weight_bytes + kv_bytes(self.shape, count, args.context + 1)
        row: dict[str, Any] = {
            **{"batch": count, "bucket": bucket, "graph_ms": graph, "wall_ms": 1e3 * median(wall), "bytes": moved},
            **{"bound_ms": 1e3 * moved / copies, "of_bound": 1e3 * moved / copies / graph, **compared},
            "failed": len(result.failed),
        }
        say(
            f"B={count}: {graph:.3f} ms in the graph, {row['ordered_ms']:.3f} ms without overlapping launches, "
            f"{row['wall_ms']:.3f} ms wall, bound {row['bound_ms']:.3f} ms"
        )
        parts = between(executor, batch, decode_plan(bucket), args.repeats, lambda work: elapsed_s(executor, work))
        say(f"  B={count} ms a step, one after the other: {', '.join(f'{k} {v:.3f}' for k, v in parts.items())}")
        row["between_ms"] = parts
        if result.failed:
            say(f"B={count}: {len(result.failed)} sequences have logits that are not finite")
        if not args.no_roles:
            row["roles"] = role_times(executor, executor.block.padded_arrays(decode_plan(bucket)), args.repeats, say)
        return row

    def overlap(self, executor: TritonExecutor, batch: StepBatch, bucket: int) -> dict[str, Any]:
        """Times of the decode graph with other launches, and whether its results are theirs."""
        args, found = self.args, dict[str, Any]()
        found["ordered_ms"] = events(executor, gpu_step_overlap.captured(executor, decode_plan(bucket)), args.repeats)
        for pattern in args.ordered.split(",") if args.ordered else ():
            launcher = gpu_step_overlap.OneByOne(executor.model.launcher, pattern)
            times = events(executor, gpu_step_overlap.captured(executor, decode_plan(bucket), launcher), args.repeats)
            found[f"ordered_ms {pattern}"] = times
            say(f"  B={bucket} {times:.3f} ms with {pattern} one by one")
        found["problems"] = []
        if args.replays and gpu_step_overlap.overlapping(executor):
            found["problems"] = gpu_step_overlap.replay_problems(executor, batch.slices, args.replays)
            said = "; ".join(found["problems"]) or "bit-identical to one kernel after the other"
            say(f"  {args.replays} replays of {bucket} rows with overlapping launches: {said}")
        return found

    def prefill(self, executor: TritonExecutor) -> dict[str, Any]:
        batch = self.batch(executor, 1, self.args.prefill, 0)
        executor.execute(batch)
        wall = []
        for _ in range(7):
            begun = time.monotonic()
            executor.execute(batch)
            wall.append(time.monotonic() - begun)
        device = executor.device
        with device.active(), torch.inference_mode():
            inputs = StepInputs.from_batch(batch, executor.layout, tuple(executor.layout.num_pages))
            arrays = executor.block.upload_step(inputs, plan_rows([self.args.prefill]))
            graph = device.capture(lambda: executor.run(arrays))
        captured = events(executor, graph, 7)
        spec = self.shape.spec
        per_token = sum(self.shape.linear_shape(r).weight_rows * self.shape.linear_shape(r).k for r in LINEARS[:4])
        flops = 2 * per_token * spec.num_layers * self.args.prefill
        say(
            f"prefill of {self.args.prefill}: {1e3 * median(wall):.2f} ms wall, {captured:.2f} ms on the GPU alone, "
            f"{flops / captured / 1e9:.0f} TFLOP/s in the linears if they took all of it"
        )
        report: dict[str, Any] = {"tokens": self.args.prefill, "wall_ms": 1e3 * median(wall), "gpu_ms": captured}
        if not self.args.no_roles:
            report["roles"] = role_times(executor, arrays, 5, say)
        return report


def fill(pool: torch.Tensor) -> None:
    """Random keys and values, a page at a time for E4M3, which has no generator."""
    if pool.dtype != E4M3:
        pool.normal_()
        return
    page = torch.empty(pool.shape[1:], dtype=TORCH_DTYPES["bfloat16"], device=pool.device).normal_()
    pool[:] = page.to(E4M3)


def kv_bytes(shape: EngineShape, count: int, keys: int) -> int:
    """Of keys and values that `count` decode rows over `keys` keys read."""
    spec: Gemma3Spec = shape.spec
    row = 2 * spec.layer_group(GLOBAL).kv_size * (1 if shape.kv_dtype == "fp8" else 2)
    seen = {GLOBAL: keys, LOCAL: min(keys, spec.sliding_window)}
    return count * row * sum(seen[group] for group in spec.layer_groups)


def events(executor: TritonExecutor, work: Callable[[], None], repeats: int) -> float:
    """Median milliseconds of `work` on the executor's stream."""
    with executor.device.active():
        for _ in range(3):
            work()
        pairs = [[EVENT(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in pairs:
            begin.record()
            work()
            end.record()
        executor.device.synchronize()
    return float(median(begin.elapsed_time(end) for begin, end in pairs))


def elapsed_s(executor: TritonExecutor, work: Callable[[], None]) -> float:
    """Seconds until all that `work` puts on the executor's stream is done, its beginning being there."""
    with executor.device.active():
        begin, end = EVENT(enable_timing=True), EVENT(enable_timing=True)
        executor.device.synchronize()
        begin.record()
        work()
        end.record()
        executor.device.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def copy_rate() -> float:
    """Bytes read and written per second by copies of 2 GiB."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").zero_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def sum_rate() -> float:
    """Bytes read per second by a sum over 2 GiB."""
    values = torch.empty(1 << 29, dtype=torch.float32, device="cuda").zero_()
    return values.nbytes / _seconds(values.sum)


def _seconds(work: Callable[[], Any], repeats: int = 9) -> float:
    times: list[float] = []
    for _ in range(repeats + 2):
        begin, end = EVENT(enable_timing=True), EVENT(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times[2:])


if __name__ == "__main__":
    sys.exit(main())
