"""The engine core: requests in, one step at a time, token outputs out.

Joins scheduler and executor; single-threaded, so that every state can be tested. It must not know text, threads or
transports. Invariants: every added sequence ends with exactly one output that carries a finish reason (I13); a step
that raises fails only the sequences that fail alone (I17); no page is given back while a step that writes into it runs.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from wicore_trt.core.encodings import Encodings
from wicore_trt.core.loop import Core
from wicore_trt.core.request_checks import check_images, check_tokens, derive_seed, list_stop_ids
from wicore_trt.core.times import STEP_TOKENS, Histogram
from wicore_trt.errors import InvalidRequestError, UnwrittenPageError
from wicore_trt.grammar.matcher import Grammars, Matcher, MatcherError
from wicore_trt.kv.events import EventFeed
from wicore_trt.kv.pages.hashing import mark_content
from wicore_trt.kv.sequence_pages import SequencePages, bar_pages
from wicore_trt.kv.tiers.up import ASKED_FIRST
from wicore_trt.runtime.batch import UNREAD, SampledTokens, SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.executor import AheadExecutor, Executor, SharedCopier
from wicore_trt.schedule.images import list_images
from wicore_trt.schedule.queue import Outlook
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.schedule.sequence import Sequence, SequenceState, StepSchedule
from wicore_trt.schedule.step_time import StepLoad, sum_load
from wicore_trt.types import (
    CacheStore,
    Clock,
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

log = logging.getLogger(__name__)

LOAD_WAIT_S = 0.005
"""Seconds that a step without work waits for transfers; new requests wait as long at most."""
WATCH_S = 0.5
"""Seconds between two looks of an idle engine of several processes whether all of them run."""
CLOSE_S = 4.0
"""Seconds that pages still to be written to disk may hold up a shutdown."""
ATTENTION_STEPS = 32
"""Attention mass is measured on one step in so many, where a policy wants it."""


@dataclass(slots=True)
class Flight:
    """Started step. `started`: engine clock. `result`: set at once unless the executor runs ahead. `ended`: its
    sequences that ended before it did. `again`: its sequences ran each alone. `late`: it waits for an image."""

    schedule: StepSchedule
    batch: StepBatch
    started: float
    result: StepResult | None
    ended: list[Sequence] = field(default_factory=list)
    again: bool = False
    late: bool = False


# With an `AheadExecutor` the next decode step starts before the last one's tokens are read. A sequence that ends
# meanwhile computes one useless token and keeps its pages until that step has landed. The mask of a constrained
# sequence depends on its last token, so with one in a step the next step waits.
class EngineCore(Core):
    """Runs requests on one executor. Without `grammars` it refuses constraints."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        eos_ids: tuple[int, ...],
        max_context: int,
        clock: Clock = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(eos_ids, max_context, clock)
        self._grammars = grammars
        self._matchers: dict[int, Matcher] = {}  # of constrained sequences that live, by seq_id
        self._uncounted: set[int] = set()  # penalized sequences whose earlier tokens the executor lacks
        self.executor = executor
        self.scheduler = scheduler
        self._step_seconds, self._step_tokens = 0.0, Histogram(STEP_TOKENS)
        self._ahead = executor if isinstance(executor, AheadExecutor) else None
        self._flight: Flight | None = None
        self._landed, self._late = 0.0, False
        self._encodings = Encodings(executor.images, scheduler.slice_tokens) if executor.images is not None else None
        scheduler.images = self._encodings.book if self._encodings is not None else None
        tiers = scheduler.manager.tiers
        if tiers is not None and self._ahead is not None:
            tiers.loads.asked_first = ASKED_FIRST
        if tiers is not None and tiers.backing is not None:
            tiers.backing.working = lambda: self.has_work

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def find_feed(self, tenant: str | None) -> EventFeed:
        events, chain = self.scheduler.manager.events, self.scheduler.manager.chain
        return events if tenant is None else events.tenant_feed(chain.derive_names(tenant, "").tag)

    def count_sequences(self) -> tuple[Counter[str], Counter[str]]:
        running = [s.tenant for s in self.scheduler.running if s.finish_reason is None]
        return Counter(running), Counter(self.scheduler.waiting.count_by_tenant())

    def validate_request(self, request: GenerateRequest) -> None:
        check_tokens(request, self.max_context, self.executor.spec.vocab_size)
        check_images(request, self.executor.images)
        if request.params.constraint is not None and self._grammars is None:
            raise InvalidRequestError("This engine takes no constraint.", field="constraint", fix="Leave it out.")
        if request.params.prompt_logprobs is not None and not self.scheduler.score_rows:
            raise InvalidRequestError(
                "This engine reports no log-probabilities of prompts.",
                field="prompt_logprobs",
                fix="Leave it out, or build an engine with --backend torch.",
            )

    def prepare_request(self, request: GenerateRequest) -> None:
        if request.params.constraint is not None and self._grammars is not None:
            self._grammars.prepare(request.params.constraint)

    def set_pace(self, *, awaited: bool) -> None:
        if self.scheduler.step_time is not None:
            self.scheduler.step_time.awaited = awaited

    def add(self, request: GenerateRequest) -> None:
        assert request.request_key not in self.sequences
        arrival = self.clock()
        params = request.params
        stop_ids = list_stop_ids(params, self.eos_ids)
        names = self.scheduler.manager.chain.derive_names(request.tenant, request.cache_salt)
        content, page_tokens = request.content, self.scheduler.manager.page_tokens
        marks, barred = mark_content(content, page_tokens), bar_pages(content, page_tokens)
        own = secrets.token_bytes(16) if request.cache.store is CacheStore.NEVER else b""  # nobody else finds features
        sequences, matchers = list[Sequence](), list[Matcher]()
        if params.constraint is not None:
            assert self._grammars is not None, "a constraint was let in"
            matchers = [self._grammars.matcher(params.constraint) for _ in range(params.n)]
        most = self.max_context if params.max_tokens is None else params.max_tokens
        for index in range(params.n):
            sequence = Sequence(
                seq_id=self._next_id, request=request, index=index, seed=derive_seed(params.seed, index),
                tokens=list(request.prompt_token_ids), arrival=arrival,
                pages=SequencePages(names, request.cache, marks, barred), stop_ids=stop_ids,
                longest=min(self.max_context, len(request.prompt_token_ids) + most),
                images=list_images(content, names.scope + own),
            )  # fmt: skip
            self._next_id += 1
            sequences.append(sequence)
        cost_s = self.scheduler.estimates.estimate_prompt(sequences[0])
        start_by = self._latest_start(request, arrival, cost_s)
        try:
            for sequence in sequences:
                sequence.cost_s = cost_s
                self.scheduler.add_sequence(sequence)
        except Exception:
            for sequence in sequences:
                if sequence in self.scheduler.waiting:
                    self.scheduler.end_sequence(sequence)
            raise
        for sequence, made in zip(sequences, matchers, strict=False):
            self._matchers[sequence.seq_id] = made
        if params.penalized:
            self._uncounted |= {sequence.seq_id for sequence in sequences}
        self._register_request(request, sequences, start_by)

    def step(self) -> list[TokenOutput]:
        """Finish one step; where the executor runs ahead, the next one is then already started."""
        outputs, flight = self._end_expired() + self._take_encodings(), self._flight
        if flight is None:
            schedule = self.scheduler.schedule_step()
            if self._ahead is None or not schedule.slices:
                self._encode_beside(schedule)
            outputs += self._end_overdue_waits()
            for sequence in schedule.preempted:
                self._forget_counts(sequence)
            if not schedule.slices:
                self.scheduler.manager.work_beside_step(0)
                return outputs + self._wait_or_fail(schedule)
            flight = self._start_step(schedule)
        if self._ahead is not None:  # the device need not wait for the host's part of it
            self._encode_beside(flight.schedule)
        self._flight = self._start_next(flight)
        if self._flight is not None:  # a next step was scheduled, without those that still wait
            outputs += self._end_overdue_waits()
        try:
            self.scheduler.manager.work_beside_step(flight.batch.num_tokens)
        finally:  # also after an error this step must land before the next one
            outputs += self._land_step(flight)
        if not self.scheduler.has_work:
            self.scheduler.manager.work_beside_step(0)  # nobody waits for the device
        self.scheduler.manager.events.publish_step()
        return outputs

    def _encode_beside(self, schedule: StepSchedule) -> None:
        """Run parts of an image's encoding behind the last step, as its `schedule` allows; the next one is late."""

        def decode_s() -> float:
            time, decoding = self.scheduler.step_time, [s for s, count in schedule.slices if count == 1]
            load = StepLoad(len(decoding), sum(s.computed for s in decoding))
            return time.step_s(load) if time is not None and decoding else 0.0

        if self._encodings is not None:
            self._late = self._encodings.run_next(decode_s) or self._late

    def _take_encodings(self, timeout_s: float = 0.0) -> list[TokenOutput]:
        """Take encodings that ended, and end the sequences that wait for one that failed."""
        failed = self._encodings.take_failed(timeout_s) if self._encodings is not None else {}
        live = [s for s in self.scheduler.running if s.seq_id in failed and s.finish_reason is None]
        end = partial(self._finish_sequence, reason=FinishReason.ERROR, doubtful=False)
        return [end(s, error=failed[s.seq_id][0], field=failed[s.seq_id][1]) for s in live]

    def _start_step(self, schedule: StepSchedule, *, ahead: bool = False) -> Flight:
        batch, result = self._make_batch(schedule, ahead=ahead), None
        flight = Flight(schedule, batch, self.clock(), result, late=self._late)
        self._late = False
        try:
            if self._ahead is None:
                flight.result = self.executor.execute(batch)
            else:
                self._ahead.submit(batch)
        except Exception as error:
            if ahead:
                raise
            self._run_again(flight, error)
        self._counts["steps"] += 1
        self._step_tokens.observe(batch.num_tokens)
        return flight

    def _run_again(self, flight: Flight, failure: Exception) -> None:
        """Run the sequences of a failed step each alone, while no other step runs, and fail those that fail alone. The
        device forgets them first. Raises `failure` when the first two (or the only one) raise, too."""
        log.exception("a step failed; its sequences run again, each alone")
        flight.again, flight.result = True, StepResult([])
        flight.schedule.slices = [(s, count) for s, count in flight.schedule.slices if s.finish_reason is None]
        for sequence, _ in flight.schedule.slices:
            self._forget_counts(sequence)
        flight.batch = self._make_batch(flight.schedule, ahead=False)
        raised = 0
        for number, piece in enumerate(flight.batch.slices, 1):
            self.alone += 1
            try:
                found = self.executor.execute(StepBatch([piece]))
            except Exception as cause:
                raised += 1
                flight.result.failed[piece.seq_id] = f"The step failed: {type(cause).__name__}: {cause}"
                if raised == number == min(2, len(flight.batch.slices)):
                    raise failure from None
                continue
            flight.result.sampled.extend(found.sampled)
            flight.result.failed.update(found.failed)
            flight.result.prompt_logprobs.update(found.prompt_logprobs)

    def _start_next(self, flight: Flight) -> Flight | None:
        """Start the next step before `flight` ends, if its tokens make no difference to the schedule."""
        if self._ahead is None or flight.again or not self._ahead.leads(flight.batch):
            return None
        if self._matchers and any(s.seq_id in self._matchers for s, _ in flight.schedule.slices):
            return None
        schedule = self.scheduler.schedule_ahead(flight.schedule)
        try:
            return None if schedule is None else self._start_step(schedule, ahead=True)
        except Exception:  # tried again when this step has landed
            log.exception("a step could not be started before the last one ended")
            return None

    def _discard_next(self) -> None:
        """Wait for the step that started after a failed one and drop its result, which builds on the failure. Its
        writes do not count as written, so its sequences compute those positions again."""
        following, self._flight = self._flight, None
        if following is None:
            return
        assert self._ahead is not None
        try:
            self._ahead.collect()
        except Exception:  # running each sequence alone finds the one at fault
            log.exception("the step after a failed one failed too")

    def _land_step(self, flight: Flight) -> list[TokenOutput]:
        """Wait for a step and apply its result; `self._flight` is the next step."""
        if flight.result is None:
            assert self._ahead is not None
            try:
                flight.result = self._ahead.collect()
            except Exception as failure:
                self._discard_next()
                self._run_again(flight, failure)
        result = flight.result
        assert result is not None
        now = self.clock()
        seconds, self._landed = now - max(flight.started, self._landed), now
        self._step_seconds += seconds
        if not flight.again and not flight.late:
            slices = flight.batch.slices
            prompts = [] if flight.batch.num_tokens == len(slices) else [(s.start, len(s.token_ids)) for s in slices]
            load = sum_load(prompts) if prompts else StepLoad(len(slices), sum(map(attrgetter("start"), slices)))
            self.scheduler.estimates.learn_step(load, prompts, seconds)
        outputs = self._apply_result(flight, result)
        for sequence in flight.ended:
            self._release_sequence(sequence)
        return outputs

    def _apply_result(self, flight: Flight, result: StepResult) -> list[TokenOutput]:
        failed, attention, plain = self._explain_failures(flight, result), result.attention, 0
        manager, matchers = self.scheduler.manager, self._matchers
        sampled = {found.seq_id: found for found in result.sampled}
        outputs: list[TokenOutput] = []
        for sequence, count in flight.schedule.slices:
            if sequence.finish_reason is not None:
                continue
            seq_id, known, begin = sequence.seq_id, sequence.tokens, sequence.computed
            if failed and seq_id in failed:
                error, field = failed[seq_id]
                outputs.append(self._finish_sequence(sequence, FinishReason.ERROR, error=error, field=field))
                continue
            found = sampled.get(seq_id)
            sequence.computed, sequence.ran = begin + count, sequence.ran + 1
            try:
                manager.commit_tokens(sequence.pages, known, begin, begin + count, finite=found is not None)
            except UnwrittenPageError as unwritten:
                log.exception("a sequence read pages that nobody wrote")
                outputs.append(self._finish_sequence(sequence, FinishReason.ERROR, error=str(unwritten)))
                continue
            if sequence.scoring:
                # without those that were output before a preemption
                scores = result.prompt_logprobs.get(seq_id, [])[max(0, sequence.scored - begin - 1) :]
                if not sequence.scored:
                    scores = [TokenLogprob(known[0], 0.0), *scores]
                sequence.scored += len(scores)
                sequence.scoring = sequence.scored < sequence.prompt_len
                outputs.append(self._make_output(sequence, (), (), prompt_logprobs=tuple(scores)))
            if found is not None:
                new, prompt_len = found.token_ids, sequence.prompt_len
                length = len(known) + len(new)
                ends = length >= sequence.longest or not sequence.stop_set.isdisjoint(new)
                if ends or len(known) == prompt_len or found.logprobs or matchers:
                    outputs.append(self._append_tokens(sequence, found))
                else:  # the usual case, inlined for speed; `_append_tokens` does the rest
                    known += new
                    plain += len(new)
                    usage = Usage(prompt_len, length - prompt_len, sequence.cached or 0)
                    outputs.append(TokenOutput(sequence.request_key, sequence.index, new, (), None, None, usage))
            if attention and manager.attention is not None and seq_id in attention:
                manager.attention.add_measurement(sequence.pages.keys, attention[seq_id])
        self._counts["generated"] += plain
        return outputs

    def _explain_failures(self, flight: Flight, result: StepResult) -> dict[int, tuple[str, str | None]]:
        """Explain all failures of a step, before the first sequence to end drops an image that others read, too."""
        why, encodings = result.failed, self._encodings
        if not why or encodings is None:
            return {seq_id: (error, None) for seq_id, error in why.items()}
        ended = [s for s, _ in flight.schedule.slices if s.seq_id in why]
        return {s.seq_id: encodings.explain_failure(s.images, why[s.seq_id]) for s in ended}

    def make_outlook(self) -> Outlook:
        return self.scheduler.make_outlook(tuple(self._begun.values()), self._hold_s, self.clock())

    def _is_waiting(self, sequence: Sequence) -> bool:
        return sequence.state is SequenceState.WAITING and sequence.cached is None

    def settle_flight(self) -> None:
        flight = self._flight
        if flight is not None and all(sequence.finish_reason is not None for sequence, _ in flight.schedule.slices):
            self._flight = None
            self._land_step(flight)

    def do_housekeeping(self) -> bool:
        manager, copier = self.scheduler.manager, self.executor.copier
        if isinstance(copier, SharedCopier) and copier.broken is not None:
            raise RuntimeError(f"The engine broke while it was idle: {copier.broken}.") from copier.broken
        manager.prepare_step()
        manager.work_beside_step(0)
        if manager.tiers is not None:
            manager.tiers.poll_all()  # last: pages that came up for loads, ended ones too, are not left in hand
        manager.events.publish_step()
        return manager.tiers is not None and (manager.tiers.has_work or bool(manager.copies.due))

    def rest_s(self) -> float | None:
        rest = self.scheduler.manager.retention.rest_s()
        if isinstance(self.executor.copier, SharedCopier):  # another process can end while this one is idle
            return WATCH_S if rest is None else min(rest, WATCH_S)
        return rest

    def _wait_or_fail(self, schedule: StepSchedule) -> list[TokenOutput]:
        """Wait a moment for pages and images on their way; if nothing comes or runs, fail the next waiting sequence."""
        manager = self.scheduler.manager
        if self._encodings is not None and self._encodings.book.busy:
            return self._take_encodings(LOAD_WAIT_S / 5 if self.scheduler.is_loading else LOAD_WAIT_S)
        if manager.tiers is not None and self.scheduler.is_loading:
            manager.tiers.wait_for_report(0 if self.scheduler.held_back else LOAD_WAIT_S)
            return []
        sequence = self.scheduler.waiting.peek_next()
        if schedule.preempted or self.scheduler.running or sequence is None:
            return []
        # it waits although no other sequence holds pages, so it will never run
        return [self._finish_sequence(sequence, FinishReason.ERROR, error="The KV pool is too small for this request.")]

    def _make_batch(self, schedule: StepSchedule, *, ahead: bool) -> StepBatch:
        """Make a schedule's batch. `ahead`: each slice is the token after all known ones, which is not read yet."""
        slices, matchers, uncounted, unread = [], self._matchers, self._uncounted, [UNREAD]
        for sequence, count in schedule.slices:
            tokens, params, pages = sequence.tokens, sequence.params, sequence.pages
            if sequence.begun is None:
                self._begin_sequence(sequence)
            length, prompt_len = len(tokens), sequence.prompt_len
            start = length if ahead else sequence.computed
            ids = unread if ahead else tokens[start : start + count]
            sample, suppress_eos = ahead or start + count == length, length - prompt_len + ahead < params.min_tokens
            piece = SequenceSlice(
                sequence.seq_id, ids, start, pages.tables, sample, params, prompt_len, sequence.seed, suppress_eos,
                sequence.stop_ids, None, (), pages.stamp,
            )  # fmt: skip
            if sequence.images and self._encodings is not None and start < prompt_len:
                piece.images = self._encodings.book.find_slots(sequence.images, start, count)
            if sequence.scoring:
                piece.targets = tokens[start + 1 : min(start + count + 1, prompt_len)]
            if matchers and sample and sequence.seq_id in matchers:
                held = piece.stop_ids if suppress_eos else self.eos_ids if params.ignore_eos else ()
                try:
                    piece.mask = matchers[piece.seq_id].allowed(held)
                except Exception as error:  # fails this sequence alone
                    piece.mask = str(error)
                piece.suppress_eos = False
            if uncounted and sample and sequence.seq_id in uncounted:
                piece.earlier_ids = tokens[:start]
                uncounted.remove(sequence.seq_id)
            slices.append(piece)
        wanted = self.scheduler.manager.attention is not None and self._counts["steps"] % ATTENTION_STEPS == 0
        return StepBatch(slices, measure_attention=wanted)

    def _append_tokens(self, sequence: Sequence, found: SampledTokens) -> TokenOutput:
        """Add sampled tokens, up to one that ends the sequence; none for `max_tokens` 0."""
        if sequence.params.max_tokens == 0:
            return self._finish_sequence(sequence, FinishReason.LENGTH)
        tokens, ids, logprobs = sequence.tokens, found.token_ids, found.logprobs
        matcher = self._matchers.get(sequence.seq_id)
        for count, token in enumerate(ids, 1):
            tokens.append(token)
            self._counts["generated"] += 1
            last, theirs = ids[:count], logprobs[:count]
            if token in sequence.stop_set:
                only = matcher is not None and token in self.eos_ids  # nothing else may follow
                if only or sequence.output_len >= sequence.params.min_tokens:
                    sequence.stop_reason = token if token in sequence.params.stop_token_ids else None
                    return self._finish_sequence(sequence, FinishReason.STOP, last=last, logprobs=theirs)
            if len(tokens) >= sequence.longest:
                return self._finish_sequence(sequence, FinishReason.LENGTH, last=last, logprobs=theirs)
            if matcher is not None:
                try:
                    matcher.take(token)
                except MatcherError as error:
                    tokens.pop()  # a token that is not output does not count
                    return self._finish_sequence(sequence, FinishReason.ERROR, last=last[:-1], error=str(error))
        return self._make_output(sequence, ids, logprobs)

    def _finish_sequence(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        last: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str | None = None,
        retry_s: float | None = None,
        doubtful: bool = True,
        field: str | None = None,
    ) -> TokenOutput:
        """End a live sequence; `last` and `logprobs` are of this step. `doubtful`: its pages may be why it failed;
        `field`: the field of its request that is."""
        sequence.finish_reason = reason
        matcher = self._matchers.pop(sequence.seq_id, None)
        fault = matcher is not None and error is not None and error == matcher.broken
        if reason is FinishReason.ERROR and not fault and retry_s is None and doubtful:
            facts = {"id": sequence.request.log_id, "index": sequence.index}
            log.error("a sequence failed: %s", error, extra={"facts": facts})
            # KV values or features that led to bad logits would make every later request with this prefix fail too.
            self.scheduler.condemn_sequence(sequence)
        flight = self._flight
        if flight is not None and any(member is sequence for member, _ in flight.schedule.slices):
            flight.ended.append(sequence)  # that step still writes into its pages
        else:
            self._release_sequence(sequence)
        self._drop_sequence(sequence, reason)
        self._counts["cached"] += sequence.cached or 0
        field = "constraint" if fault else field
        return self._make_output(sequence, last, logprobs, error, field=field, retry_s=retry_s)

    def _release_sequence(self, sequence: Sequence) -> None:
        self.scheduler.end_sequence(sequence)
        self.executor.release(sequence.seq_id)
        self._uncounted.discard(sequence.seq_id)

    def _forget_counts(self, sequence: Sequence) -> None:
        """Make the executor forget a sequence that continues; if penalized, its next sample sends all tokens."""
        self.executor.release(sequence.seq_id)
        if sequence.params.penalized:
            self._uncounted.add(sequence.seq_id)

    def _make_output(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        error: str | None = None,
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
        field: str | None = None,
        retry_s: float | None = None,
    ) -> TokenOutput:
        prompt_len, length, prefill_s = sequence.prompt_len, sequence.output_len, None
        if 0 < length == len(token_ids) and sequence.begun is not None:
            prefill_s = self.clock() - sequence.begun
        return TokenOutput(
            sequence.request.request_key, sequence.index, token_ids, logprobs, sequence.finish_reason,
            sequence.stop_reason, Usage(prompt_len, length, sequence.cached or 0), error, prompt_logprobs, prefill_s,
            field, retry_s,
        )  # fmt: skip

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let writes to the KV tiers end for at most `timeout_s` seconds, then free the device for good."""
        try:
            flight, self._flight = self._flight, None
            if flight is not None:
                self._land_step(flight)
        finally:
            try:
                self.scheduler.manager.close(timeout_s)
            finally:
                self.executor.close()

    def defer_stats(self) -> Callable[[], EngineStats]:
        scheduler, layout, counts = self.scheduler, self.executor.layout, dict(self._counts)
        manager, loader, finished = scheduler.manager, scheduler.loader, dict(self._finished)
        uptime_s, step_seconds = self.clock() - self._started, self._step_seconds
        running = len([s for s in scheduler.running if s.finish_reason is None])
        pools = [
            (name, pool.num_pages, pool.used_slots, pool.cached_slots, pool.evictions)
            for name, pool in manager.pools.items()
        ]
        waiting, preemptions, hit_tokens = len(scheduler.waiting), scheduler.preemptions, manager.hit_tokens
        tiers = manager.tiers.collect_stats() if manager.tiers is not None else ()
        decisions = dict(loader.decisions) if loader is not None else {}
        parked, resumed = (loader.parking.parked, loader.parking.resumed) if loader is not None else (0, 0)
        events, step_tokens = manager.events.sequence, (*self._step_tokens.counts, int(self._step_tokens.total))

        def make_stats() -> EngineStats:
            held = [(used + cached, used, layout.page_bytes[name]) for name, _, used, cached, _ in pools]
            used_bytes = sum(pages * size for pages, _, size in held)
            device = TierStats(
                tier="device",
                capacity_bytes=layout.memory_bytes,
                used_bytes=used_bytes,
                raw_bytes=used_bytes,
                pinned_bytes=sum(used * size for _, used, size in held),
                pages={name: used + cached for name, _, used, cached, _ in pools},
                hit_tokens=hit_tokens,
                evictions={"capacity": sum(evictions for *_, evictions in pools)},
            )
            return EngineStats(
                uptime_s=uptime_s, requests_running=running, requests_waiting=waiting, requests_finished=finished,
                prompt_tokens=counts.get("prompt", 0), cached_prompt_tokens=counts.get("cached", 0),
                generated_tokens=counts.get("generated", 0), steps=counts.get("steps", 0), step_seconds=step_seconds,
                step_tokens=step_tokens, preemptions=preemptions,
                pools=tuple(PoolStats(*pool[:4], layout.page_bytes[pool[0]]) for pool in pools),
                kv=KVStats((device, *tiers), decisions, parked, resumed, events),
            )  # fmt: skip

        return make_stats
