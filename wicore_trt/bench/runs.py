"""The latency benchmark: fixed batches of fixed lengths.

Decides what is sent and how often; must not know transports or machines. Invariants: every measured prompt is new to
the target; a latency figure stands on requests that all succeeded.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import count

from wicore_trt.bench.client import Target
from wicore_trt.bench.measure import LatencyCase, LatencyPoint, RequestRecord, summarize_latencies
from wicore_trt.bench.workload import BenchRequest, PromptPart, WordList
from wicore_trt.errors import ConfigError, WicoreError
from wicore_trt.progress import Progress


def list_cases(batches: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]) -> list[LatencyCase]:
    """List every combination, batch varying fastest."""
    return [LatencyCase(b, i, o) for o in outputs for i in inputs for b in batches]


async def run_latency(
    target: Target, cases: Sequence[LatencyCase], *, repeats: int, warmups: int, seed: int, progress: Progress
) -> list[LatencyPoint]:
    """Measure each case `repeats` times after `warmups` runs. Raises ConfigError for a case beyond the target's
    context, WicoreError when a request fails."""
    limit = target.info.max_context_tokens
    for case in cases:
        if case.input_tokens + case.output_tokens > limit:
            problem = f"{case.input_tokens} + {case.output_tokens} tokens exceed the model's context of {limit}."
            raise ConfigError(problem, fix="Lower --input-tokens or --output-tokens.")
    vocabulary, names = WordList(target.info.vocab_size, seed=seed), map(str, count())
    points = []
    for case in cases:
        phase = f"batch {case.batch}, {case.input_tokens} + {case.output_tokens} tokens"
        progress(phase, 0, 1)
        points.append(await _measure_latency(target, case, vocabulary, names, repeats, warmups))
        progress(phase, 1, 1)
    return points


async def _measure_latency(
    target: Target, case: LatencyCase, vocabulary: WordList, names: Iterator[str], repeats: int, warmups: int
) -> LatencyPoint:
    def take(output_tokens: int) -> list[BenchRequest]:
        prompts = [vocabulary.tokens(PromptPart(next(names), case.input_tokens)) for _ in range(case.batch)]
        return [BenchRequest(prompt, output_tokens) for prompt in prompts]

    prefills, totals, records = [], [], []
    for repeat in range(-warmups, repeats):
        prefill, first = await _run_together(target, take(1))
        total, all_tokens = prefill, first
        if case.output_tokens > 1:
            total, all_tokens = await _run_together(target, take(case.output_tokens))
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
    records = await asyncio.gather(*(target.generate(request) for request in requests))
    seconds = max(r.finished for r in records) - started
    failed = next((r.error for r in records if r.error), None)
    if failed:
        raise WicoreError(f"A request failed: {failed}.", fix="Look into the server's log.")
    return seconds, records
