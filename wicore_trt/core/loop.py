"""The thread that steps the engine.

Other threads put requests and aborts into an inbox, which is drained between steps. Outputs leave through one callback;
a second thread compiles constraints. It must not know text or asyncio. Invariants: every accepted request gets its
final output, also when the executor breaks (I13); what cannot be taken fails alone (I15); no tenant fills it (I18).
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from wicore_trt.core.limits import HOLD_RATE, Alarms, Limits, make_wait_error
from wicore_trt.core.shares import has_room
from wicore_trt.errors import EngineDeadError, InvalidRequestError, QueueFullError, UnavailableError, WicoreError
from wicore_trt.kv.events import EventFeed
from wicore_trt.schedule.queue import AGEING_S, Newcomers, Outlook
from wicore_trt.types import Clock, EngineStats, FinishReason, GenerateRequest, TokenOutput, Usage

log = logging.getLogger(__name__)

TIDY_S = 0.02
"""Seconds between two looks of an idle engine after KV transfers that are still under way."""
STACK = 32 << 20
"""Bytes of stack of the threads that build and use grammars, which nest as deep as the check let them."""
MAX_PIXELS = 4 << 30
"""Bytes of the images of all live requests, which keep them to the end: pages that they lose are computed again."""
Sink = Callable[[list[TokenOutput]], None]
Abort = tuple[str, int | None]
"""A request, and which of its sequences."""


class Core(ABC):
    """Steps requests for the loop: `core.engine.EngineCore` over an executor of steps, `core.request_core.RequestCore`
    over one that takes whole requests. `eos_ids` end a sequence unless it ignores them; `max_context` bounds prompt +
    output tokens. Single-threaded, except for `validate_request`, `prepare_request` and the KV events. Invariant: every
    added sequence ends with exactly one output that carries a finish reason."""

    def __init__(self, eos_ids: tuple[int, ...], max_context: int, clock: Clock) -> None:
        self.eos_ids, self.max_context = eos_ids, max_context
        self.clock, self._started = clock, clock()
        self.sequences: dict[str, dict[int, Any]] = {}
        """Live ones, by request and index."""
        self.limits = Limits()
        self._deadlines, self._start_by = Alarms(), Alarms()  # by request
        self._begun: dict[int, float] = {}  # when sequences had their first step, by identity, in order
        self._hold_s = 0.0  # mean time from the first step of a sequence to its end
        self._next_id = 0
        self.began: Sink = lambda outputs: None
        """Called with outputs without tokens of requests whose first step begins, on the engine's thread."""
        self._counts, self._finished = Counter[str](), Counter[str]()
        self.alone = 0  # steps of one sequence of a step that failed, which runs each alone; for any thread

    @property
    @abstractmethod
    def has_work(self) -> bool: ...

    @abstractmethod
    def find_feed(self, tenant: str | None) -> EventFeed:
        """Return the KV events of one tenant's pages, or (None) of all, on any thread. Raises EnvironmentUnfitError if
        the engine reports none."""

    @abstractmethod
    def validate_request(self, request: GenerateRequest) -> None:
        """Raise InvalidRequestError if this engine can never run the request. Reads constants only; for any thread."""

    def prepare_request(self, request: GenerateRequest) -> None:  # noqa: B027 -- most requests need nothing
        """Do the slow part of `add` ahead of it, on any thread. Raises InvalidRequestError."""

    def set_pace(self, *, awaited: bool) -> None:  # noqa: B027 -- not every engine makes its steps itself
        """Say whether somebody awaits each token; if not, steps get the size of the highest throughput."""

    @abstractmethod
    def add(self, request: GenerateRequest) -> None:
        """Queue a validated request whose key is not live. When it raises, nothing of the request is left."""

    def abort(
        self, request_key: str, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED
    ) -> list[TokenOutput]:
        """End a request's live sequences, or one; return their last outputs, none for unknown keys."""
        live = [s for s in self.sequences.get(request_key, {}).values() if index is None or s.index == index]
        return [self._finish_sequence(sequence, reason) for sequence in live]

    def abort_all(self) -> list[TokenOutput]:
        return [output for request_key in list(self.sequences) for output in self.abort(request_key)]

    @abstractmethod
    def step(self) -> list[TokenOutput]:
        """Run a step and return its outputs. Raises the executor's error if that broke, and loses the outputs."""

    def settle_flight(self) -> None:  # noqa: B027 -- most have nothing to land
        """Land a started step whose sequences have all ended, for callers that stop stepping."""

    def do_housekeeping(self) -> bool:
        """Do the work between requests; return True while more is under way."""
        return False

    def rest_s(self) -> float | None:
        """Return the seconds until `do_housekeeping` is due again without a request; None for never."""
        return None

    @abstractmethod
    def count_sequences(self) -> tuple[Counter[str], Counter[str]]:
        """Count running and waiting sequences, by tenant."""

    @abstractmethod
    def make_outlook(self) -> Outlook:
        """Describe the queue that a new request finds; any thread may read the result."""

    def stats(self) -> EngineStats:
        return self.defer_stats()()

    @abstractmethod
    def defer_stats(self) -> Callable[[], EngineStats]:
        """Read counters and gauges now; the returned function assembles them, on any thread."""

    @abstractmethod
    def close(self) -> None:
        """Free the device. Nothing may be called after it."""

    @abstractmethod
    def _finish_sequence(
        self, sequence: Any, reason: FinishReason, *, error: str | None = None, retry_s: float | None = None
    ) -> TokenOutput:
        """End a live sequence."""

    @abstractmethod
    def _is_waiting(self, sequence: Any) -> bool:
        """Tell whether a sequence has never had a place."""

    def _latest_start(self, request: GenerateRequest, now: float, cost_s: float) -> float:
        """Return the stamp by which a request of prefill time `cost_s` must begin. Raises QueueFullError if
        it is expected to wait longer."""
        if not self.limits.bound_waits:
            return math.inf
        outlook, left_s = self.make_outlook(), None if request.deadline is None else request.deadline - now
        limit = self.limits.patience_s(cost_s / outlook.share, left_s)
        wait = outlook.wait_s(request.tenant, now + request.priority * AGEING_S + cost_s, cost_s)
        if wait > limit:
            raise make_wait_error(wait, limit)
        return now + limit

    def _register_request(self, request: GenerateRequest, sequences: Iterable[Any], start_by: float) -> None:
        name, deadline = request.request_key, request.deadline
        self.sequences[name] = dict(enumerate(sequences))
        self._counts["prompt"] += len(request.prompt_token_ids) * request.params.n
        if deadline is None and self.limits.timeout_s is not None:
            deadline = self.clock() + self.limits.timeout_s
        if deadline is not None:
            self._deadlines[name] = deadline
        if start_by < math.inf:
            self._start_by[name] = start_by

    def _drop_sequence(self, sequence: Any, reason: FinishReason) -> None:
        name = sequence.request.request_key
        del self.sequences[name][sequence.index]
        if not self.sequences[name]:
            del self.sequences[name]
            self._deadlines.pop(name, None)
            self._start_by.pop(name, None)
        self._finished[reason.value] += 1
        if sequence.begun:
            self._begun.pop(id(sequence), None)
            held = self.clock() - sequence.begun
            self._hold_s += (held - self._hold_s) * (HOLD_RATE if self._hold_s else 1.0)

    def _begin_sequence(self, sequence: Any) -> None:
        """Record a sequence's first step. Its request has begun in time then, however long its other sequences wait."""
        self._start_by.pop(sequence.request.request_key, None)
        sequence.begun = self._begun[id(sequence)] = self.clock()
        if sequence.index == 0:
            self.began([TokenOutput(sequence.request.request_key, 0, ())])

    def _end_expired(self) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        for request_key in self._deadlines.due_names(self.clock()):
            outputs += self.abort(request_key, reason=FinishReason.DEADLINE)
        return outputs

    def _end_overdue_waits(self) -> list[TokenOutput]:
        """End requests that have waited as long as they may and still got no place."""
        outputs = []
        for name in self._start_by.due_names(self.clock()):
            del self._start_by[name]
            live = list(self.sequences[name].values())
            if all(self._is_waiting(sequence) for sequence in live):
                refusal = make_wait_error(self.make_outlook().wait_s(live[0].request.tenant, self.clock(), 0.0), 0.0)
                why, retry_s = str(refusal), refusal.retry_after_s
                outputs += [self._finish_sequence(s, FinishReason.ERROR, error=why, retry_s=retry_s) for s in live]
        return outputs


class EngineLoop:
    """Owns a Core and the thread that steps it. `sink` is called on that thread, with what a step put out and with what
    was refused or aborted before it. `max_waiting` bounds the sequences that wait for their first step. A named tenant
    may have as many waiting as there is room left, so a flooding one gets half of the queue."""

    def __init__(self, core: Core, sink: Sink, *, max_waiting: int) -> None:
        self._core = core
        self._sink = sink
        self._max_waiting = max_waiting
        self._wake = threading.Condition()
        self.ended = threading.Event()
        self.dead: str | None = None
        """Why the loop broke; None while it has not."""
        self._inbox: list[GenerateRequest | TokenOutput | Abort] = []  # in order: an abort follows its request
        self._newcomers, self._taken = Newcomers(), Newcomers()  # in the inbox; taken from it since `_outlook` was made
        self._preparing: dict[str, tuple[GenerateRequest, list[Abort]]] = {}  # with the aborts that arrived meanwhile
        self._to_prepare: queue.SimpleQueue[GenerateRequest | None] = queue.SimpleQueue()
        self._preparer: threading.Thread | None = None
        self._live: dict[str, tuple[str, int]] = {}  # tenants and bytes of images, by request
        self._waiting, self._running = Counter[str](), Counter[str]()  # sequences by tenant
        self._open = True
        self._turns, self._rests = 0, True
        self._stats, self._stats_time = core.defer_stats(), time.monotonic()
        self._outlook = core.make_outlook()
        self._thread = _DeepThread(target=self._run_loop, name="wicore-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def live_ids(self) -> list[str]:
        """List the keys of the requests accepted and not finished."""
        with self._wake:
            return list(self._live)

    @property
    def progress(self) -> int | None:
        """Return a number that changes with each step, re-run ones too; None while there is nothing to do."""
        return None if self._rests else self._turns + self._core.alone

    def add(self, request: GenerateRequest) -> None:
        """Accept a request, whose key must not be live. Raises InvalidRequestError, QueueFullError if it finds no room
        in the queue or would wait too long, UnavailableError after `stop`, EngineDeadError if the loop broke."""
        self._core.validate_request(request)
        n, tenant = request.params.n, request.tenant
        if n > self._max_waiting:
            raise InvalidRequestError(f"n must be at most {self._max_waiting}, which may wait here.", field="n")
        with self._wake:
            if self.dead is not None:
                raise EngineDeadError(f"The engine stopped: {self.dead}")
            if not self._open:
                raise UnavailableError("The engine is shutting down.")
            assert request.request_key not in self._live
            queued = self._count_queued()
            # one text for both: a tenant must not learn that others have filled the queue
            if not has_room(self._max_waiting, queued.total(), queued[tenant], n, tenant):
                # no name for a refusal here: by its traceback it would keep the request, and the file of its images
                pace_s = self._outlook.turnover_s
                raise QueueFullError("There is no room in the queue for this request now.", pace_s=pace_s)
            self._refuse_long_wait(request)
            pixels = self._count_pixels(request)
            if request.params.constraint is not None:
                if self._preparer is None:
                    preparer = _DeepThread(target=self._run_preparer, name="wicore-prepare", daemon=True)
                    preparer.start()  # raises, and nothing of the request is kept, when no thread can start
                    self._preparer = preparer
                self._preparing[request.request_key] = (request, [])
                self._to_prepare.put(request)
            else:
                self._inbox.append(request)
                self._newcomers.add_request(request)
                self._wake.notify()
            self._live[request.request_key] = tenant, pixels

    def _count_pixels(self, request: GenerateRequest) -> int:
        """Count the bytes of a request's images. Raises QueueFullError without room for them. The lock is held."""
        pixels, tenant = sum([len(span.pixels) for span in request.content]), request.tenant
        total = sum([count for _, count in self._live.values()]) if pixels else 0
        own = sum([count for name, count in self._live.values() if name == tenant]) if pixels else 0
        if not has_room(MAX_PIXELS, total, own, pixels, tenant):
            pace_s = self._outlook.turnover_s
            raise QueueFullError("There is no room for the images of this request now.", pace_s=pace_s)
        return pixels

    def _refuse_long_wait(self, request: GenerateRequest) -> None:
        """Raise QueueFullError now for a request that would wait too long, by the state after the last step. The lock
        is held. Its prefix hits are not known here, so the check favours it: it counts as a prompt that takes no time,
        and may wait as long as the better of no hit and a full hit allows."""
        limits, now = self._core.limits, self._core.clock()
        if not limits.bound_waits:
            return
        outlook, tenant = self._outlook, request.tenant
        left_s = None if request.deadline is None else request.deadline - now
        own_s = len(request.prompt_token_ids) * outlook.token_s / outlook.share
        limit = max(limits.patience_s(0.0, left_s), limits.patience_s(own_s, left_s))
        more, tokens = map(
            sum, zip(self._newcomers.count_before(request), self._taken.count_before(request), strict=True)
        )
        wait = outlook.wait_s(tenant, now + request.priority * AGEING_S, 0.0, more, tokens * outlook.token_s)
        if wait > limit:
            raise make_wait_error(wait, limit, outlook.turnover_s)

    def _count_queued(self) -> Counter[str]:
        """Count sequences that wait for their first step, by tenant. The lock is held."""
        queued = self._waiting + self._newcomers.count_by_tenant()
        for request, _ in self._preparing.values():
            queued[request.tenant] += request.params.n
        return queued

    def _run_preparer(self) -> None:
        while (request := self._to_prepare.get()) is not None:
            item: GenerateRequest | TokenOutput = request
            try:
                self._core.prepare_request(request)
            except Exception as error:
                item = _refusal_output(request, error)
            with self._wake:
                found = self._preparing.pop(request.request_key, None)
                if found is not None:  # the loop has not ended
                    self._inbox += [item, *found[1]]
                    self._newcomers.add_request(request)
                    self._wake.notify()

    def abort(self, request_key: str, index: int | None = None) -> bool:
        """Ask for the end of a request, or of one of its sequences; return False when it is not live."""
        with self._wake:
            if request_key not in self._live:
                return False
            if request_key in self._preparing:
                self._preparing[request_key][1].append((request_key, index))
                return True
            self._inbox.append((request_key, index))
            self._wake.notify()
            return True

    def stop(self, timeout_s: float | None = None) -> None:
        """Cancel live requests and end the thread; wait for that at most `timeout_s` seconds."""
        with self._wake:
            self._open = False
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def stats(self, tenant: str | None = None) -> EngineStats:
        """Return counters of the last step; uptime and waiting sequences of now. `tenant`: only its uptime and load."""
        with self._wake:
            stats = self._stats()
            uptime_s = stats.uptime_s + time.monotonic() - self._stats_time
            if tenant is None:
                return replace(stats, uptime_s=uptime_s, requests_waiting=self._count_queued().total())
            waiting = self._count_queued()[tenant]
            return EngineStats(uptime_s, self._running[tenant], waiting, {}, 0, 0, 0)

    def _run_loop(self) -> None:
        try:
            while self._take_inbox():
                self._emit_outputs(self._core.step())
                self._turns += 1
            with self._wake:
                preparing, self._preparing = self._preparing, {}
            outputs = self._core.abort_all()
            for name, (request, _) in preparing.items():
                usage = Usage(len(request.prompt_token_ids), 0)
                for i in range(request.params.n):
                    outputs.append(TokenOutput(name, i, (), (), FinishReason.CANCELLED, None, usage))
            self._emit_outputs(outputs)
            self._core.close()
        except Exception as error:  # the executor broke, or we have a bug: tell every waiter, then end
            log.exception("engine loop ended")
            with self._wake:
                self.dead = dead = f"{type(error).__name__}: {error}"
                self._open = False
                live, self._live = self._live, {}
                self._preparing.clear()
            # made without the core, whose state may be half changed
            self._sink([TokenOutput(name, 0, (), finish_reason=FinishReason.ERROR, error=dead) for name in live])
            with suppress(Exception):  # frees device, threads and the disk's lock; the first error is logged
                self._core.close()
        finally:
            self._to_prepare.put(None)
            self.ended.set()

    def _take_inbox(self) -> bool:
        """Apply what other threads asked for; sleep while there is nothing to do. Return False when asked to stop."""
        with self._wake:
            while self._open and not self._inbox and not self._core.has_work:
                timeout_s = TIDY_S if self._core.do_housekeeping() else self._core.rest_s()
                self._note_state()  # before it sleeps for long: what ended just now is told
                self._rests = True
                self._wake.wait(timeout_s)
                self._turns, self._rests = self._turns + 1, False
            # swap it even when empty: later additions belong to the next turn
            keep_on, inbox, self._inbox = self._open, self._inbox, []
            if inbox:  # else there are no newcomers
                self._waiting += self._newcomers.count_by_tenant()
                self._newcomers, self._taken = self._taken, self._newcomers
        outputs: list[TokenOutput] = []
        for item in inbox:
            if isinstance(item, GenerateRequest):
                try:
                    self._core.add(item)
                except Exception as error:  # the engine goes on without it
                    outputs.append(_refusal_output(item, error))
            elif isinstance(item, TokenOutput):
                outputs.append(item)
            else:
                outputs += self._core.abort(*item)
        if outputs:
            self._emit_outputs(outputs)
        return keep_on

    def _note_state(self) -> None:
        """Publish the engine's state to other threads. The lock is held."""
        self._running, self._waiting = self._core.count_sequences()
        self._stats, self._stats_time = self._core.defer_stats(), time.monotonic()
        self._outlook = self._core.make_outlook()
        self._taken = Newcomers()

    def _emit_outputs(self, outputs: list[TokenOutput]) -> None:
        with self._wake:
            for output in outputs:
                if output.finish_reason is not None and output.request_key not in self._core.sequences:
                    self._live.pop(output.request_key, None)
            self._note_state()
        if outputs:
            self._sink(outputs)


class _DeepThread(threading.Thread):
    def start(self) -> None:
        former = threading.stack_size(STACK)
        try:
            super().start()
        finally:
            threading.stack_size(former)


def _refusal_output(request: GenerateRequest, error: Exception) -> TokenOutput:
    """Make the last output of a request that the engine could not take; call it while `error` is being handled."""
    facts = {"facts": {"id": request.log_id}}
    retry_s = error.retry_after_s if isinstance(error, QueueFullError) else None
    if isinstance(error, (InvalidRequestError, QueueFullError)):
        why, field = str(error), error.field if isinstance(error, InvalidRequestError) else None
        log.info("a request was refused", extra=facts)
    else:
        log.exception("a request could not be queued", extra=facts)
        why, field = str(error) if isinstance(error, WicoreError) else "The request could not be queued.", None
    return TokenOutput(
        request.request_key, 0, (), finish_reason=FinishReason.ERROR, error=why, field=field, retry_s=retry_s
    )
