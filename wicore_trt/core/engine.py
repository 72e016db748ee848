"""The engine core: requests in, one step at a time, token outputs out.

Joins scheduler and executor; single-threaded and synchronous, so that every state can be tested step by step. It must
not know text, threads or transports. Invariant: every sequence that was added ends with exactly one output
that carries a finish reason, whatever happens to it.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b

from wicore_trt.errors import InvalidRequestError
from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.runtime.batch import SampledToken, SequenceSlice, StepBatch
from wicore_trt.runtime.executor import Executor
from wicore_trt.schedule.scheduler import Plan, Scheduler
from wicore_trt.schedule.sequence import Sequence
from wicore_trt.types import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    KVStats,
    PoolStats,
    TierStats,
    TokenLogprob,
    TokenOutput,
    Usage,
)

LOAD_WAIT_S = 0.005
"""How long a step that has nothing to compute waits for transfers; new requests wait as long at most."""
CLOSE_S = 4.0
"""How long pages that are still to be written to disk may hold up a shutdown."""
ATTENTION_STEPS = 32
"""Attention mass is measured on one step in so many, where a policy wants it."""


def sequence_seed(seed: int | None, index: int) -> int:
    """64-bit seed of the index-th sequence of a request; random when the request names none."""
    if seed is None:
        return secrets.randbits(64)
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


class EngineCore:
    """Runs requests on one executor.

    `eos_ids` end a sequence unless it ignores them; `max_context` bounds prompt + output tokens.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        eos_ids: tuple[int, ...],
        max_context: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.eos_ids = eos_ids
        self.max_context = max_context
        self._clock = clock
        self._started = clock()
        self._sequences: dict[str, list[Sequence]] = {}
        self._deadlines: dict[str, float] = {}
        self._next_id = 0
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def validate(self, request: GenerateRequest) -> None:
        """Raise InvalidRequestError when this engine can never run the request. Reads only constants, so any
        thread may call it."""
        prompt, params = request.prompt_token_ids, request.params
        if not prompt:
            raise InvalidRequestError("The prompt is empty.", field="prompt")
        if len(prompt) >= self.max_context:
            raise InvalidRequestError(
                f"The prompt has {len(prompt)} tokens; this engine takes at most {self.max_context - 1}.",
                field="prompt",
                fix="Shorten it, or serve with a larger scheduler.max_context.",
            )
        vocab = self.executor.spec.vocab_size
        for name, ids in (
            ("prompt_token_ids", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
        ):
            bad = next((token for token in ids if not 0 <= token < vocab), None)
            if bad is not None:
                raise InvalidRequestError(f"Token id {bad} is outside the vocabulary of {vocab}.", field=name)

    def add(self, request: GenerateRequest) -> None:
        """Queue a validated request with an id that is not live."""
        assert request.request_id not in self._sequences
        arrival = self._clock()
        params = request.params
        stop_ids = params.stop_token_ids if params.ignore_eos else (*self.eos_ids, *params.stop_token_ids)
        sequences = []
        for index in range(params.n):
            sequence = Sequence(
                seq_id=self._next_id,
                request=request,
                index=index,
                seed=sequence_seed(params.seed, index),
                tokens=list(request.prompt_token_ids),
                arrival=arrival,
                pages=SequencePages(request.cache_salt, request.cache),
                stop_ids=stop_ids,
            )
            self._next_id += 1
            sequences.append(sequence)
            self.scheduler.add(sequence)
        self._sequences[request.request_id] = sequences
        self._counts["prompt"] += len(request.prompt_token_ids) * params.n
        if request.deadline is not None:
            self._deadlines[request.request_id] = request.deadline

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED
    ) -> list[TokenOutput]:
        """End the live sequences of a request (or one of them); returns their last outputs. Unknown ids: none."""
        live = [s for s in self._sequences.get(request_id, ()) if index is None or s.index == index]
        return [self._finish(sequence, reason) for sequence in live]

    def step(self) -> list[TokenOutput]:
        """Run one step. Raises what the executor raises; outputs of this step are then lost."""
        outputs, manager = self._expire(), self.scheduler.manager
        plan = self.scheduler.schedule()
        for sequence in plan.preempted:
            self.executor.release(sequence.seq_id)
        if not plan.slices:
            return outputs + self._idle(plan)
        started = time.perf_counter()
        batch = self._batch(plan)
        result = self.executor.execute(batch)
        seconds = time.perf_counter() - started
        self._step_seconds += seconds
        self._counts["steps"] += 1
        self.scheduler.prefill.observe([(s.start, len(s.token_ids)) for s in batch.slices], seconds)
        tokens = {token.seq_id: token for token in result.tokens}
        for sequence, count in plan.slices:
            error = result.failed.get(sequence.seq_id)
            if error is not None:
                outputs.append(self._finish(sequence, FinishReason.ERROR, error=error))
                continue
            self.scheduler.computed(sequence, count)
            if sequence.seq_id in tokens:
                outputs.append(self._append(sequence, tokens[sequence.seq_id]))
            mass = result.attention.get(sequence.seq_id)
            if mass is not None and manager.attention is not None:
                manager.attention.measured(sequence.pages.keys, mass)
        manager.events.publish()
        return outputs

    def tidy(self) -> bool:
        """Between requests: apply finished transfers and publish KV events. True while more is under way."""
        manager = self.scheduler.manager
        manager.housekeep()
        manager.events.publish()
        return manager.tiers is not None and manager.tiers.transfers.busy

    def _idle(self, plan: Plan) -> list[TokenOutput]:
        """Nothing to compute: wait a moment for the pages that are being loaded, else somebody is stuck."""
        manager = self.scheduler.manager
        if manager.tiers is not None and self.scheduler.loading:
            manager.tiers.transfers.wait(LOAD_WAIT_S)
            return []
        return self._unstick(plan)

    def _expire(self) -> list[TokenOutput]:
        now = self._clock()
        late = [request_id for request_id, deadline in self._deadlines.items() if deadline <= now]
        return [output for request_id in late for output in self.abort(request_id, reason=FinishReason.DEADLINE)]

    def _unstick(self, plan: Plan) -> list[TokenOutput]:
        """Nothing can run: if someone waits while the pools are empty, it never will, so it ends with an error."""
        if plan.preempted or self.scheduler.running or not len(self.scheduler.waiting):
            return []
        sequence = self.scheduler.waiting.pop()
        assert sequence is not None
        self.scheduler.waiting.push(sequence)
        return [self._finish(sequence, FinishReason.ERROR, error="The KV pool is too small for this request.")]

    def _batch(self, plan: Plan) -> StepBatch:
        slices = []
        for sequence, count in plan.slices:
            end = sequence.computed + count
            piece = SequenceSlice(
                seq_id=sequence.seq_id,
                token_ids=sequence.tokens[sequence.computed : end],
                start=sequence.computed,
                pages=sequence.pages.tables,
            )
            if end == len(sequence.tokens):
                piece.sample = True
                piece.params = sequence.params
                piece.history = sequence.tokens
                piece.prompt_len = sequence.prompt_len
                piece.seed = sequence.seed
                piece.suppress_eos = sequence.output_len < sequence.params.min_tokens
                piece.stop_ids = sequence.stop_ids
            slices.append(piece)
        attention = self.scheduler.manager.attention is not None and self._counts["steps"] % ATTENTION_STEPS == 0
        return StepBatch(slices, measure_attention=attention)

    def _append(self, sequence: Sequence, token: SampledToken) -> TokenOutput:
        """Add a sampled token and end the sequence if that token, or its number, ends it."""
        sequence.tokens.append(token.token_id)
        self._counts["generated"] += 1
        logprobs = (token.logprob,) if token.logprob is not None else ()
        limit = sequence.params.max_tokens
        if token.token_id in sequence.stop_ids and sequence.output_len >= sequence.params.min_tokens:
            sequence.stop_reason = token.token_id if token.token_id in sequence.params.stop_token_ids else None
            return self._finish(sequence, FinishReason.STOP, last=(token.token_id,), logprobs=logprobs)
        if sequence.output_len == limit or len(sequence.tokens) >= self.max_context:
            return self._finish(sequence, FinishReason.LENGTH, last=(token.token_id,), logprobs=logprobs)
        return self._output(sequence, (token.token_id,), logprobs)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        last: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str | None = None,
    ) -> TokenOutput:
        """End a live sequence; `last` and `logprobs` are the tokens it gained in this step."""
        sequence.finish_reason = reason
        # KV values that led to bad logits would make every later request with this prefix fail too.
        self.scheduler.finish(sequence, keep=reason is not FinishReason.ERROR)
        self.executor.release(sequence.seq_id)
        siblings = self._sequences[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences[sequence.request.request_id]
            self._deadlines.pop(sequence.request.request_id, None)
        self._finished[reason.value] += 1
        self._counts["cached"] += sequence.cached or 0
        return self._output(sequence, last, logprobs, error)

    def _output(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        error: str | None = None,
    ) -> TokenOutput:
        return TokenOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            usage=Usage(sequence.prompt_len, sequence.output_len, sequence.cached or 0),
            error=error,
        )

    def abort_all(self) -> list[TokenOutput]:
        """End every live sequence, for shutdown."""
        return [output for request_id in list(self._sequences) for output in self.abort(request_id)]

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let writes to the KV tiers end, for at most `timeout_s` seconds, then free the device. The end of it."""
        tiers = self.scheduler.manager.tiers
        if tiers is not None:
            tiers.transfers.close(timeout_s)
        self.executor.close()

    def is_live(self, request_id: str) -> bool:
        """Whether any sequence of the request still runs or waits."""
        return request_id in self._sequences

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        layout = self.executor.layout
        pools = tuple(
            PoolStats(group, pool.num_pages, pool.used, pool.cached, layout.page_bytes[group])
            for group, pool in self.scheduler.manager.pools.items()
        )
        return EngineStats(
            uptime_s=self._clock() - self._started,
            requests_running=len(self.scheduler.running),
            requests_waiting=len(self.scheduler.waiting),
            requests_finished=dict(self._finished),
            prompt_tokens=self._counts["prompt"],
            cached_prompt_tokens=self._counts["cached"],
            generated_tokens=self._counts["generated"],
            steps=self._counts["steps"],
            step_seconds=self._step_seconds,
            preemptions=self.scheduler.preemptions,
            pools=pools,
            kv=self._kv_stats(pools),
        )

    def _kv_stats(self, pools: tuple[PoolStats, ...]) -> KVStats:
        manager, loader = self.scheduler.manager, self.scheduler.loader
        device = TierStats(
            tier="device",
            capacity_bytes=sum(pool.total_pages * pool.page_bytes for pool in pools),
            used_bytes=sum((pool.used_pages + pool.cached_pages) * pool.page_bytes for pool in pools),
            pinned_bytes=sum(pool.used_pages * pool.page_bytes for pool in pools),
            pages={pool.group: pool.used_pages + pool.cached_pages for pool in pools},
            hit_tokens=manager.hit_tokens,
            read_bytes=0,
            read_seconds=0.0,
            write_bytes=0,
            write_seconds=0.0,
            evictions={"capacity": sum(pool.evictions for pool in manager.pools.values())},
            failures={},
            queue_depth=0,
        )
        return KVStats(
            tiers=(device, *(manager.tiers.stats() if manager.tiers is not None else ())),
            decisions=dict(loader.decisions) if loader is not None else {},
            parked=loader.parked if loader is not None else 0,
            resumed=loader.resumed if loader is not None else 0,
            event_sequence=manager.events.sequence,
        )
