"""Two benchmarks: fixed batches of fixed lengths (latency), and a fixed number of open requests (throughput).

Decides what is sent and how often; must not know transports or machines. Invariants: every measured prompt is new to
the target; a latency figure stands on requests that all succeeded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from wicore_trt.bench.client import Target, closed_loop
from wicore_trt.bench.measure import RequestRecord, Summary, Throughput, summarize_latencies
from wicore_trt.bench.workload import BenchRequest, Workload
from wicore_trt.errors import ConfigError, WicoreError
from wicore_trt.progress import Progress, ignore_progress


@dataclass(frozen=True, slots=True)
class LatencyCase:
    """Point of a sweep: `batch` requests sent together."""

    batch: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LatencyPoint:
    """Medians over the repetitions of one case. `prefill_s` is the time until all requests of a run with one output
    token are done, `total_s` that of a run with all of them; `step_s` = (total - prefill) / (output_tokens - 1) is one
    decode step, None for one output token."""

    case: LatencyCase
    prefill_s: float
    total_s: float
    step_s: float | None
    latencies: dict[str, Summary | None]


def list_cases(batches: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]) -> list[LatencyCase]:
    """List every combination, batch varying fastest."""
    return [LatencyCase(b, i, o) for o in outputs for i in inputs for b in batches]


async def run_latency(
    target: Target, cases: Sequence[LatencyCase], *, repeats: int, warmups: int, seed: int, progress: Progress
) -> list[LatencyPoint]:
    """Measure each case `repeats` times after `warmups` runs. Raises ConfigError for a case beyond the target's
    context, WicoreError when a request fails."""
    for case in cases:
        check_context(target, case.input_tokens, case.output_tokens)
    workload = Workload(target.info.vocab_size, seed=seed)
    points = []
    for case in cases:
        phase = f"batch {case.batch}, {case.input_tokens} + {case.output_tokens} tokens"
        progress(phase, 0, 1)
        points.append(await _measure_latency(target, case, workload, repeats, warmups))
        progress(phase, 1, 1)
    return points


async def _measure_latency(
    target: Target, case: LatencyCase, workload: Workload, repeats: int, warmups: int
) -> LatencyPoint:
    prefills, totals, records = [], [], []
    for repeat in range(-warmups, repeats):
        prefill, first = await _run_together(target, workload.take(case.batch, case.input_tokens, 1))
        total, all_tokens = prefill, first
        if case.output_tokens > 1:
            total, all_tokens = await _run_together(
                target, workload.take(case.batch, case.input_tokens, case.output_tokens)
            )
        if repeat >= 0:
            prefills.append(prefill)
            totals.append(total)
            records += all_tokens
    prefill, total = statistics.median(prefills), statistics.median(totals)
    steps = case.output_tokens - 1
    step = (total - prefill) / steps if steps else None
    return LatencyPoint(case, prefill, total, step, summarize_latencies(records))


async def _run_together(target: Target, requests: Sequence[BenchRequest]) -> tuple[float, list[RequestRecord]]:
    started = time.perf_counter()
    records = await closed_loop(target, requests, len(requests))
    seconds = max(r.finished for r in records) - started
    failed = next((r.error for r in records if r.error), None)
    if failed:
        raise WicoreError(f"A request failed: {failed}.", fix="Look into the server's log.")
    return seconds, records


@dataclass(frozen=True, slots=True)
class ThroughputCase:
    """`requests` of equal lengths, `concurrency` at a time."""

    requests: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    shared_prefix: int = 0
    seed: int = 0


async def run_throughput(
    target: Target, case: ThroughputCase, *, warmups: int, progress: Progress = ignore_progress
) -> Throughput:
    """Send the case's requests after `warmups` that are not counted. Raises ConfigError for lengths beyond the target's
    context, WicoreError when not one request succeeds."""
    check_context(target, case.input_tokens, case.output_tokens)
    progress("measuring requests", 0, 1)
    workload = Workload(target.info.vocab_size, seed=case.seed, shared_prefix=case.shared_prefix)
    warm = workload.take(warmups, case.input_tokens, case.output_tokens)
    await closed_loop(target, warm, case.concurrency)
    requests = workload.take(case.requests, case.input_tokens, case.output_tokens)
    records = await closed_loop(target, requests, case.concurrency)
    progress("measuring requests", 1, 1)
    result = Throughput.from_records(records)
    if not result.completed:
        raise WicoreError(f"All {len(records)} requests failed: {records[0].error}.")
    return result


def check_context(target: Target, input_tokens: int, output_tokens: int) -> None:
    limit = target.info.max_context_tokens
    if input_tokens + output_tokens > limit:
        raise ConfigError(
            f"{input_tokens} + {output_tokens} tokens exceed the model's context of {limit}.",
            fix="Lower --input-tokens or --output-tokens.",
        )
