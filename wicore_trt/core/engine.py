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
from wicore_trt.kv.manager import SequencePages
from wicore_trt.runtime.batch import SampledToken, SequenceSlice, StepBatch
from wicore_trt.runtime.executor import Executor
from wicore_trt.schedule.scheduler import Plan, Scheduler
from wicore_trt.schedule.sequence import Sequence
from wicore_trt.types import EngineStats, FinishReason, GenerateRequest, PoolStats, TokenLogprob, TokenOutput, Usage


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
                pages=SequencePages(request.cache_salt),
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
        outputs = self._expire()
        plan = self.scheduler.schedule()
        for sequence in plan.preempted:
            self.executor.release(sequence.seq_id)
        if not plan.slices:
            return outputs + self._unstick(plan)
        started = time.perf_counter()
        result = self.executor.execute(self._batch(plan))
        self._step_seconds += time.perf_counter() - started
        self._counts["steps"] += 1
        tokens = {token.seq_id: token for token in result.tokens}
        for sequence, count in plan.slices:
            error = result.failed.get(sequence.seq_id)
            if error is not None:
                outputs.append(self._finish(sequence, FinishReason.ERROR, error=error))
                continue
            self.scheduler.computed(sequence, count)
            if sequence.seq_id in tokens:
                outputs.append(self._append(sequence, tokens[sequence.seq_id]))
        return outputs

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
        return StepBatch(slices)

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
        )
