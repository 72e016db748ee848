"""The core over an engine that takes whole requests: queues them, submits them and returns the engine's outputs.

The engine gets `max_sequences` sequences at most; others wait here, where tenants take turns and an abort costs
nothing. It must not know the engine's library, text or threads. Invariant: every added sequence ends with exactly one
output that carries a finish reason, whatever the engine reports.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from wicore_trt.core.loop import Core
from wicore_trt.core.request_checks import check_images, check_tokens, derive_seed, list_stop_ids
from wicore_trt.errors import EnvironmentUnfitError, InvalidRequestError, WicoreError
from wicore_trt.kv.events import EventFeed
from wicore_trt.runtime.executor import RequestExecutor
from wicore_trt.schedule.queue import Outlook, WaitingQueue
from wicore_trt.types import Clock, EngineStats, FinishReason, GenerateRequest, TokenOutput, Usage

log = logging.getLogger(__name__)

WAIT_S = 0.005
"""Seconds that a step waits for the engine; new requests and aborts wait as long at most."""


@dataclass(slots=True, eq=False)
class RequestSequence:
    """Sequence of a request. `turn`: set when the engine got it, at `begun`; `produced`: tokens that came back."""

    seq_id: int
    request: GenerateRequest
    index: int
    seed: int
    arrival: float
    turn: int | None = None
    produced: int = 0
    begun: float = 0.0
    cost_s: float = 0.0


class RequestCore(Core):
    def __init__(
        self, executor: RequestExecutor, *, eos_ids: tuple[int, ...], max_context: int, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(eos_ids, max_context, clock)
        self.executor = executor
        self._waiting: WaitingQueue[RequestSequence] = WaitingQueue()
        self._running = 0

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def find_feed(self, tenant: str | None) -> EventFeed:
        raise EnvironmentUnfitError("This server has no KV events: its engine keeps the KV cache to itself.")

    def validate_request(self, request: GenerateRequest) -> None:
        check_tokens(request, self.max_context, self.executor.spec.vocab_size)
        check_images(request, None)
        if request.content:  # its cache distinguishes prompts by their token ids alone
            raise InvalidRequestError("This engine takes token ids alone.", field="content")
        self.executor.check(request, list_stop_ids(request.params, self.eos_ids))

    def add(self, request: GenerateRequest) -> None:
        assert request.request_key not in self.sequences
        arrival, sequences = self.clock(), []
        for index in range(request.params.n):
            seed = derive_seed(request.params.seed, index)
            sequences.append(RequestSequence(self._next_id, request, index, seed, arrival))
            self._next_id += 1
        start_by = self._latest_start(request, arrival, 0.0)
        for sequence in sequences:
            self._waiting.push_sequence(sequence)
        self._register_request(request, sequences, start_by)

    def step(self) -> list[TokenOutput]:
        outputs = self._end_expired()
        while self._running < self.executor.max_sequences and (waiting := self._waiting.pop_next()) is not None:
            self._running += 1
            self._begin_sequence(waiting)
            request = waiting.request
            try:
                stop_ids = list_stop_ids(request.params, self.eos_ids)
                self.executor.submit(request, waiting.index, waiting.seed, stop_ids)
            except WicoreError as error:
                facts = {"id": request.log_id}
                log.warning("a request was not taken: %s", type(error).__name__, extra={"facts": facts})
                outputs.append(self._finish_sequence(waiting, FinishReason.ERROR, error=str(error)))
        outputs += self._end_overdue_waits()
        if self._running:
            for output in self.executor.poll(WAIT_S):
                sequence = self.sequences.get(output.request_key, {}).get(output.index)
                if sequence is None:
                    continue  # it was ended here
                if output.token_ids and not sequence.produced:
                    output = structs.replace(output, prefill_s=self.clock() - sequence.begun)
                sequence.produced += len(output.token_ids)
                self._counts["generated"] += len(output.token_ids)
                if output.finish_reason is not None:
                    self._forget_sequence(sequence, output.finish_reason)
                outputs.append(output)
        return outputs

    def count_sequences(self) -> tuple[Counter[str], Counter[str]]:
        running = (s.request.tenant for live in self.sequences.values() for s in live.values() if s.turn is not None)
        return Counter(running), Counter(self._waiting.count_by_tenant())

    def make_outlook(self) -> Outlook:
        places = self.executor.max_sequences
        return Outlook(
            queued=self._waiting.copy_entries(), free=places - self._running, begun=tuple(self._begun.values()),
            turnover_s=self._hold_s / places if places else 0.0, hold_s=self._hold_s, now=self.clock(),
        )  # fmt: skip

    def _is_waiting(self, sequence: RequestSequence) -> bool:
        return sequence.turn is None

    def defer_stats(self) -> Callable[[], EngineStats]:
        # the engine does not report its steps and pools
        stats = EngineStats(
            uptime_s=self.clock() - self._started,
            requests_running=self._running,
            requests_waiting=len(self._waiting),
            requests_finished=dict(self._finished),
            prompt_tokens=self._counts["prompt"],
            cached_prompt_tokens=0,
            generated_tokens=self._counts["generated"],
        )
        return lambda: stats

    def close(self) -> None:
        self.executor.close()

    def _finish_sequence(
        self, sequence: RequestSequence, reason: FinishReason, *, error: str | None = None, retry_s: float | None = None
    ) -> TokenOutput:
        request = sequence.request
        if sequence.turn is not None:
            self.executor.cancel(request.request_key, sequence.index)
        self._forget_sequence(sequence, reason)
        usage = Usage(len(request.prompt_token_ids), sequence.produced)
        return TokenOutput(
            request.request_key, sequence.index, (), finish_reason=reason, usage=usage, error=error, retry_s=retry_s
        )

    def _forget_sequence(self, sequence: RequestSequence, reason: FinishReason) -> None:
        if sequence.turn is None:
            self._waiting.remove_member(sequence)
        else:
            self._waiting.end_place(sequence)
            self._running -= 1
        self._drop_sequence(sequence, reason)
