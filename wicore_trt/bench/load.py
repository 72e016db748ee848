"""Load test: one plan for each rate, sent to one target or to several in turn, whatever is still open.

Measures its own lateness, too; must not know transports or the terminal. Invariants: latencies count from when a
request was due, so neither a slow server nor a slow client shortens them; a prompt is made before its moment; every
request of the plan has a record, or a failed one before it in its session. All targets get requests of the same
lengths, with the same shared beginnings, at the same moments. Runs and targets share no prompt, so no cache is warm.
Of two targets each goes first in every other run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from wicore_trt.bench.client import Target
from wicore_trt.bench.measure import ClientLag, Load, RequestRecord, Slo, Summary
from wicore_trt.bench.report import load_result
from wicore_trt.bench.workload import (
    BenchRequest,
    LoadShape,
    PromptPart,
    Session,
    WordList,
    make_sessions,
    plan_sessions,
    replay_trace,
)
from wicore_trt.errors import ConfigError
from wicore_trt.kv.study.trace import TraceRequest
from wicore_trt.progress import Progress, ignore_progress

AHEAD = 512
"""Prompts made before they are due."""
BEAT_S = 0.005


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a run. At most `max_concurrency` requests are open at a time; where all of a plan is due at once, a
    request is due when it gets its place (a closed loop). `pause_s` lies between an answer and the next turn of its
    session."""

    max_concurrency: int | None = None
    pause_s: float = 0.0
    timeout_s: float | None = 600.0
    ignore_eos: bool = True


class ClientSession:
    """Prompts of a session. Made-up tokens of an answer's length stand for answers not known as tokens."""

    def __init__(self, session: Session, vocabulary: WordList, *, chat: bool, ignore_eos: bool = True) -> None:
        self._session, self._vocabulary, self._ignore_eos = session, vocabulary, ignore_eos
        self._chat = chat
        self._said: list[tuple[int, ...]] = []
        self._messages: list[dict[str, str]] = []

    def make_request(self, number: int) -> BenchRequest:
        """Make the request of a turn; each turn once and in order, the one before `answered`."""
        turn = self._session.turns[number]
        if self._chat:
            text = "".join(self._vocabulary.make_text(piece) for piece in turn.pieces)
            self._messages.append({"role": "user", "content": text})
            return BenchRequest((), turn.output_tokens, self._ignore_eos, tuple(self._messages))
        self._said += [self._vocabulary.tokens(piece) for piece in turn.pieces]
        prompt = tuple(chain.from_iterable(self._said))
        return BenchRequest(prompt, turn.output_tokens, self._ignore_eos)

    def take_answer(self, number: int, record: RequestRecord) -> None:
        if self._chat:
            self._messages.append({"role": "assistant", "content": str(record.answer)})
        elif isinstance(record.answer, tuple):
            self._said.append(record.answer)
        else:
            stand_in = PromptPart(f"{self._session.name}/{number}/answer", record.output_tokens)
            self._said.append(self._vocabulary.tokens(stand_in))


async def run_load(
    target: Target,
    sessions: Sequence[Session],
    vocabulary: WordList,
    options: LoadOptions,
    *,
    slo: Slo | None = None,
    progress: Progress = ignore_progress,
    phase: str = "requests",
) -> Load:
    """Send `sessions`, at least one, and wait for all answers."""
    last = max(session.at_s for session in sessions)
    planned = sum(len(session.turns) for session in sessions)
    run = _Run(target, options, progress, phase, planned, closed=last == 0.0)
    await run.run_sessions(sessions, vocabulary)
    late, beats, places = map(Summary.from_values, (run.late, run.beats, run.places))
    lag = ClientLag(late, beats, places if options.max_concurrency else None, run.most_open)
    offered = run.planned / last if last else math.inf
    return Load.from_records(run.records, planned=run.planned, offered_per_s=offered, slo=slo, lag=lag)


class _Run:
    def __init__(
        self, target: Target, options: LoadOptions, progress: Progress, phase: str, planned: int, *, closed: bool
    ) -> None:
        self._target, self._options, self._closed = target, options, closed
        self._progress, self._phase = progress, phase
        self.planned = planned
        self._places = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else None
        self._open = self.most_open = 0
        self.records: list[RequestRecord] = []
        self.late, self.beats, self.places = list[float](), list[float](), list[float]()

    async def run_sessions(self, sessions: Sequence[Session], vocabulary: WordList) -> None:
        prepare = partial(ClientSession, vocabulary=vocabulary, chat=self._target.chat)
        talks = (prepare(session, ignore_eos=self._options.ignore_eos) for session in sessions)
        coming = ((session, talk, talk.make_request(0)) for session, talk in zip(sessions, talks, strict=True))
        ready = deque(islice(coming, AHEAD))
        self._progress(self._phase, 0, self.planned)
        beat = asyncio.create_task(self._measure_lag())
        try:
            async with asyncio.TaskGroup() as tasks:
                origin = time.perf_counter()
                while ready:
                    session, talk, first = ready.popleft()
                    due = origin + session.at_s
                    await _sleep_until(due)
                    tasks.create_task(self._run_session(session, talk, first, due))
                    if (more := next(coming, None)) is not None:
                        ready.append(more)
        finally:
            beat.cancel()

    async def _run_session(self, session: Session, talk: ClientSession, request: BenchRequest, due: float) -> None:
        for number in range(len(session.turns)):
            if number:
                request = talk.make_request(number)
                await _sleep_until(due)
            record = await self._run_request(request, due)
            self.records.append(record)
            self._progress(self._phase, len(self.records), self.planned)
            if record.error is not None:
                return
            talk.take_answer(number, record)
            due = record.finished + self._options.pause_s

    async def _run_request(self, request: BenchRequest, due: float) -> RequestRecord:
        full = self._places is not None and self._places.locked()
        async with self._places or nullcontext():
            ready = time.perf_counter() if full else due  # where a place was free, being late is the client's own
            self.places.append(ready - due)
            due = ready if full and self._closed else due
            self._open += 1
            self.most_open = max(self.most_open, self._open)
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    record = await self._target.generate(request, started=due)
            except TimeoutError:
                error = f"TIMEOUT: no end within {self._options.timeout_s:g} s"
                record = RequestRecord(due, time.perf_counter(), error=error)
            finally:
                self._open -= 1
        if record.sent is not None:
            self.late.append(record.sent - ready)
        return record

    async def _measure_lag(self) -> None:
        """Measure again and again how late a short sleep ends."""
        while True:
            wanted = time.perf_counter() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.beats.append(time.perf_counter() - wanted)


async def _sleep_until(due: float) -> None:
    """Sleep until `due`, not less: timers of event loops fire up to a millisecond early, and latencies would seem
    shorter."""
    await asyncio.sleep(0.0)
    while (left := due - time.perf_counter()) > 0.0:
        await asyncio.sleep(left)


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
        return plan_sessions(
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
            planned = make_sessions(offer.shape, [0.0] * warmups, seed=offer.seed, run=run)
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
