"""Load test: one plan for each rate, sent to one target or to several in turn.

Joins plans, targets and reports; must not know transports or the terminal. Invariants: all targets get requests of the
same lengths, with the same shared beginnings, at the same moments. Runs and targets share no prompt, so that no cache
is warm from an earlier run. Of two targets each goes first in every other run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wicore_trt.bench.client import Target
from wicore_trt.bench.load import LoadOptions, run_load
from wicore_trt.bench.measure import Slo
from wicore_trt.bench.plan import LoadShape, Session, made_up, replay_trace, sessions_of
from wicore_trt.bench.report import load_result
from wicore_trt.bench.workload import WordList
from wicore_trt.errors import ConfigError
from wicore_trt.kv.study.trace import TraceRequest
from wicore_trt.progress import Progress, ignore_progress


@dataclass(frozen=True, slots=True)
class Offer:
    """Source of requests: a trace, or made-up sessions of a shape."""

    shape: LoadShape
    trace: Sequence[TraceRequest] = ()
    burstiness: float = 1.0
    requests: int = 100
    duration_s: float | None = None
    seed: int = 0

    def make_sessions(self, rate: float | None, run: str) -> list[Session]:
        """Plan a run. `rate` None: a trace at its own times. Raises ConfigError for a plan without requests."""
        if self.trace:
            requests = None if self.duration_s is not None else self.requests
            return replay_trace(self.trace, rate=rate, requests=requests, duration_s=self.duration_s, run=run)
        assert rate is not None
        return made_up(
            self.shape, rate, burstiness=self.burstiness, requests=self.requests, duration_s=self.duration_s,
            seed=self.seed, run=run,
        )  # fmt: skip


async def run_sweep(
    targets: Sequence[tuple[str, Target]],
    offer: Offer,
    rates: Sequence[float | None],
    options: LoadOptions,
    *,
    warmups: int,
    slo: Slo | None,
    progress: Progress = ignore_progress,
) -> list[dict[str, Any]]:
    """Run each rate on each target; returns a `bench.report.load_result` for each. Raises ConfigError when no request
    of a run fits the context of every target."""
    context = min(target.info.max_context_tokens for _, target in targets)
    vocabulary = WordList(min(target.info.vocab_size for _, target in targets), seed=offer.seed)
    if warmups:
        for index, (name, target) in enumerate(targets):
            run = f"warm-up {index}"
            planned = sessions_of(offer.shape, [0.0] * warmups, seed=offer.seed, run=run)
            if offer.trace:
                planned = replay_trace(offer.trace, rate=float("inf"), requests=warmups, duration_s=None, run=run)
            warm = [session for session in planned if session.context_tokens <= context]
            if warm:
                await run_load(target, warm, vocabulary, options, progress=progress, phase=f"warm-up of {name}")
    results = []
    for at, rate in enumerate(rates):
        order = list(enumerate(targets))
        for index, (name, target) in order if at % 2 == 0 else reversed(order):
            planned = offer.make_sessions(rate, f"run {at} {index}")
            sessions = [session for session in planned if session.context_tokens <= context]
            if not sessions:
                raise ConfigError(f"No request fits a context of {context} tokens.", fix="Lower the lengths.")
            phase = f"{name}, {'the trace' if rate is None else f'{rate:g} requests/s'}"
            before = await target.tier_hits()
            load = await run_load(target, sessions, vocabulary, options, slo=slo, progress=progress, phase=phase)
            after = await target.tier_hits()
            hits = {tier: count - before.get(tier, 0) for tier, count in after.items()}
            result = load_result(load, target=name, rate=rate, tier_hits=hits)
            results.append({**result, "left_out": len(planned) - len(sessions)})
    return results
