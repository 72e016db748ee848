"""Attention masses of pages: what measuring them costs, and what they add to the A2CR policy, on a real model.

`python -m benchmarks.kv.attention --cost` and `--ablation`. Prints tables as Markdown and says on which machine; the
default engine is built from Gemma 3 270M. Invariant: contestants take turns within one run and differ in one thing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.common import measured_engine, note
from benchmarks.kv.attention_trace import MeasuringExecutor, QuestionSessions, TouchedChain, record, replay_policy
from wicore_trt.arithmetic import div_ceil
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.bench.report import describe_machine, list_versions
from wicore_trt.config import load_settings
from wicore_trt.core.assemble import load_engine
from wicore_trt.engine.directory import EngineDir
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.types import SamplingParams

INTERVAL = 32
"""Steps from one measured step to the next."""
COST_GOAL = 0.01
BATCHES, CONTEXTS = (1, 8), (2048, 4096, 8000)
GREEDY = SamplingParams(temperature=0.0)
CAPACITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
CONTESTANTS: dict[str, tuple[str, int | None]] = {
    "lru": ("lru", None),
    "cost": ("cost", None),
    "a2cr without attention": ("a2cr", None),
    f"a2cr, attention every {INTERVAL} steps": ("a2cr", INTERVAL),
    "a2cr, attention every step": ("a2cr", 1),
    "belady": ("belady", None),
}


def measure_cost(engine: EngineDir, rounds: int, threads: int) -> list[tuple[int, int, float, float]]:
    """(batch, context, seconds of a decode step, seconds of a measured one): medians of `rounds` alternating rounds.

    The KV pages hold random values: the time does not depend on them.
    """
    size, most = engine.manifest.page_tokens, max(CONTEXTS) + 1
    pages = dict.fromkeys(("global", "local"), max(BATCHES) * (div_ceil(most, size)))
    settings = ExecutorOptions(device="cpu", threads=threads, kv_pages=pages, max_context=most)
    executor = TorchExecutor(engine, settings)
    for pool in executor.pools.values():
        pool.normal_()
    results = []
    for batch in BATCHES:
        for context in CONTEXTS:
            times: dict[bool, list[float]] = {False: [], True: []}
            for number in range(rounds + 1):
                for measured in (False, True) if number % 2 else (True, False):
                    step = _decode_step(executor, batch, context, measured)
                    started = time.perf_counter()
                    executor.execute(step)
                    if number:
                        times[measured].append(time.perf_counter() - started)
            results.append((batch, context, statistics.median(times[False]), statistics.median(times[True])))
    executor.close()
    return results


def _decode_step(executor: TorchExecutor, batch: int, context: int, measured: bool) -> StepBatch:
    count = context // executor.layout.page_tokens + 1
    return StepBatch(
        [
            SequenceSlice(
                seq_id=i,
                token_ids=[5],
                start=context,
                pages={g: range(i * count, (i + 1) * count) for g in executor.layout.num_pages},
                sample=True,
                params=GREEDY,
                prompt_len=1,
            )
            for i in range(batch)
        ],
        measure_attention=measured,
    )


def cost_table(results: Sequence[tuple[int, int, float, float]]) -> tuple[str, float]:
    """The table, and the largest share of decode time."""
    rows = [("batch", "context", "step", "measured step", f"share of decode time, every {INTERVAL} steps")]
    worst = 0.0
    for batch, context, plain, measured in results:
        share = (measured - plain) / plain / INTERVAL
        worst = max(worst, share)
        rows.append(
            (str(batch), str(context), f"{plain * 1e3:.2f} ms", f"{measured * 1e3:.2f} ms", f"{100 * share:.2f} %")
        )
    return _markdown(rows), worst


def record_traces(engine: EngineDir, seeds: int, requests: int, threads: int) -> tuple[list[list[TouchedChain]], int]:
    """One trace per seed, and the tokens of a page."""
    overrides = {
        "engine": str(engine.path),
        "executor.device": "cpu",
        "executor.threads": threads,
        "kv.device_bytes": "3GiB",
        "scheduler.max_context": 8192,
    }
    loaded = load_engine(load_settings(None, overrides))
    core = loaded.engine_core
    core.executor = MeasuringExecutor(core.executor)
    traces = [
        record(
            core,
            QuestionSessions(loaded.tokenizer, seed, max_tokens=3500),
            requests=requests,
            together=8,
            output_tokens=48,
            intervals=(1, INTERVAL),
            progress=lambda done, total, seed=seed: note(f"workload {seed}: {done} of {total} requests"),  # type: ignore[misc]
        )
        for seed in range(seeds)
    ]
    page_tokens = core.executor.layout.page_tokens
    core.executor.close()
    return traces, page_tokens


def ablation_table(traces: Sequence[Sequence[TouchedChain]], page_tokens: int) -> str:
    """Token hit rates, mean over the traces, by policy and capacity; and the difference that attention makes to A2CR,
    per trace."""
    unique = [len({page for request in trace for page in request.chain}) for trace in traces]

    def rates(name: str, share: float) -> list[float]:
        policy, interval = CONTESTANTS[name]
        return [
            replay_policy(trace, policy, max(1, int(share * pages)), page_tokens, interval)
            for trace, pages in zip(traces, unique, strict=True)
        ]

    found = {name: [rates(name, share) for share in CAPACITIES] for name in CONTESTANTS}
    rows: list[tuple[str, ...]] = [("policy", *(f"{100 * share:.0f} %" for share in CAPACITIES))]
    rows += [(name, *(f"{statistics.mean(r):.4f}" for r in by_share)) for name, by_share in found.items()]
    without = found["a2cr without attention"]
    for name in (n for n, (_, interval) in CONTESTANTS.items() if interval is not None):
        differences = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(without, found[name], strict=True)]
        rows.append(
            (
                f"{name}: difference (least to most over workloads)",
                *(f"{statistics.mean(d):+.4f} ({min(d):+.4f} to {max(d):+.4f})" for d in differences),
            )
        )
    requests = sum(len(trace) for trace in traces)
    tokens = sum(request.prompt_tokens for trace in traces for request in trace)
    head = f"{len(traces)} workloads, {requests} requests, {tokens} prompt tokens, unique pages {unique}\n\n"
    return head + _markdown(rows)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when measuring costs more than the goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.attention", description=__doc__)
    parser.add_argument("--engine", type=Path, help="engine of Gemma 3 270M; built afresh when left out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cost", action="store_true", help="time measured and plain decode steps")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of --cost")
    parser.add_argument("--ablation", action="store_true", help="record real generations and replay the policies")
    parser.add_argument("--seeds", type=int, default=2, help="workloads of --ablation")
    parser.add_argument("--requests", type=int, default=240, help="requests of a workload of --ablation")
    args = parser.parse_args(argv)
    if not args.cost and not args.ablation:
        parser.error("give --cost or --ablation")
    cpu = describe_machine()
    print(f"{datetime.now(UTC).date()}, {cpu['cpu']}, {args.threads} threads, {list_versions()}\n")
    worst = 0.0
    with measured_engine(args.engine) as engine:
        if args.cost:
            table, worst = cost_table(measure_cost(engine, args.rounds, args.threads))
            print(f"{table}\n\nLargest share {100 * worst:.2f} %, goal below {100 * COST_GOAL:.0f} %.")
        if args.ablation:
            print(ablation_table(*record_traces(engine, args.seeds, args.requests, args.threads)))
    return 1 if worst >= COST_GOAL else 0


if __name__ == "__main__":
    sys.exit(main())
