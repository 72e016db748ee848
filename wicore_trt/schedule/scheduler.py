"""Scheduler: it decides which sequences compute how many tokens in the next step.

It decides on plain data and must not know tensors or transports. Invariant: a schedule's slices fit the budget and
their pages are reserved; an image is in one slice. While a sequence lives, it is empty only beside a load or encoding.
"""

from __future__ import annotations

from collections import Counter
from operator import le

from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.kv.prefix.loader import PrefixLoader
from wicore_trt.kv.prefix.rates import PrefillMeter
from wicore_trt.kv.sequence_pages import PrefixHit
from wicore_trt.model.spec import LOCAL
from wicore_trt.schedule.estimates import LEAST, PromptEstimates
from wicore_trt.schedule.images import ImageBook
from wicore_trt.schedule.queue import Outlook, WaitingQueue, order_key
from wicore_trt.schedule.sequence import Sequence, SequenceState, StepSchedule
from wicore_trt.schedule.step_time import Budget, StepLoad, StepTime
from wicore_trt.types import FinishReason

# Waiting sequences that may be passed over in one step because another one computes their prefix.
MAX_PASSED_OVER = 64
# Steps that a sequence computes in before it may yield its place to another tenant. They double each time, so that it
# yields only a few times and always after some progress.
TURN_STEPS = 32
# Pages that a step begins to load; the load that passes this number is the last. To begin so many takes this thread
# some 4 ms and keeps the link busy longer, and sequences without a load need not wait for all others' loads.
PAGES_AT_ONCE = 512
# Fewest and most slices of prompts in a step beside loads from disk, whose next reads are asked for between steps.
# Between them a step takes DISK_SHARE of the newest load's age, as that load may end when the step has just begun. The
# fewest hide that reading threads slow launches: 1,024 tokens of 27B took an H200 67 ms, and 50 without them.
DISK_SLICES, DISK_SHARE = (6, 10), 0.15
# Only so many of the queue's first are prefetched, or their pages would drive each other out of host memory. A later
# one is prefetched when it comes first.
PREFETCHED = 4


class Scheduler:
    """Continuous batching with chunked prefill over a KVCacheManager.

    Sequences that decode go first. Prompts, running and waiting, share what the step's tokens and time leave
    (`step_time.Budget`): tenants in turn, each in the order of the queue. When pages run out, the sequence that would
    be admitted last is preempted, and parked if there is host memory. When a waiting tenant has at least two places
    fewer than another, so is the other's newest sequence. A sequence with a load idles, or computes from the front.

    `max_batch_tokens` bounds a step's tokens, `max_sequences` the sequences that hold pages. `loader` loads prefixes
    from lower tiers. Without `step_time`, time limits no step. With fewer than `slice_tokens` a step gets no shorter,
    as the device reads its weights anyway. `score_rows` bounds a step's tokens of prompts that want log-probabilities;
    those take nothing from the cache. `graph_sizes`: see `Executor`. Sequences stop before images that are not
    encoded."""

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        loader: PrefixLoader | None = None,
        slice_tokens: int = 256,
        score_rows: int = 0,
        graph_sizes: dict[int, tuple[int, ...]] | None = None,
        step_time: StepTime | None = None,
    ) -> None:
        self.images: ImageBook | None = None
        self.manager = manager
        self.loader = loader
        self.prefill = PrefillMeter()
        self.step_time = step_time
        self.estimates = PromptEstimates(manager, loader, self.prefill, step_time, max_batch_tokens, slice_tokens)
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.slice_tokens = slice_tokens
        self.least_tokens = max(1, slice_tokens // LEAST)  # that prompts get in a step, whatever the time
        self.score_rows = score_rows
        self.graph_sizes = graph_sizes or {}
        self.held_back = False  # the last step had room for more sequences, but had begun enough loads
        self._rows_left, self._load_pages = 0, 0  # of score_rows and PAGES_AT_ONCE in the step that is made up
        self.waiting: WaitingQueue[Sequence] = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = 0
        # Free counts when the head of the queue did not fit; empty when it may fit now.
        self._too_few: list[int] = []
        self._newcomers: list[Sequence] = []  # not known yet to wait
        # Prompt tokens given by tenant, above those of the tenant that was given fewest, which goes first: of two that
        # wait, one gets at most a step's tokens before the other's turn. A new tenant begins like that one.
        self._given: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def is_loading(self) -> bool:
        """True while a running sequence waits for pages from lower tiers."""
        return self.loader is not None and len([s for s in self.running if s.pages.load is not None]) > 0

    def add_sequence(self, sequence: Sequence) -> None:
        """Queue a new sequence, and prefetch from disk if it has to wait."""
        if self.loader is not None and len(self.waiting) < PREFETCHED:
            self._newcomers.append(sequence)
        blocked = self.loader is not None and bool(self.running) and self._is_blocked()
        self.waiting.push_sequence(sequence)
        self._too_few = []
        if blocked:  # else the next step tells whether it waits
            self._prefetch_waiting(None)

    def _prefetch_waiting(self, first: Sequence | None) -> None:
        """Prefetch for newcomers that wait, and for the `first` of the queue, once each. One that enters in the step
        after its arrival asks for its own pages; earlier reads would be ahead of those."""
        waiting, self._newcomers = self._newcomers, []
        if first is not None:
            waiting.append(first)
        for sequence in waiting:
            known = sequence.prefetched or sequence.scoring or sequence.pages.parked is not None
            if sequence.state is SequenceState.WAITING and not known:
                assert self.loader is not None
                sequence.prefetched = True
                hit = self.manager.find_prefix(sequence.pages, sequence.tokens)
                rate = self.estimates.rate_behind(self.running)
                self.loader.prefetch_prefix(sequence.pages, len(sequence.tokens), hit, rate)

    def make_outlook(self, begun: tuple[float, ...] = (), hold_s: float = 0.0, now: float = 0.0) -> Outlook:
        """Return the outlook of a newcomer at `now`, if places were taken at `begun` and are held for `hold_s`."""
        blocked, queued, time = bool(self.running) and self._is_blocked(), self.waiting.copy_entries(), self.step_time
        free = 0 if blocked else self.max_sequences - len(self.running)
        places = len(self.running) + max(0, free)
        known = hold_s / places if places else 0.0, begun, hold_s, now
        if time is None:
            return Outlook((), queued, 1.0, 0.0, free, *known)
        prompts = [
            (s.request.tenant, order_key(s)[0], time.prompt_s(s.computed, s.remaining_tokens))
            for s in self.running
            if len(s.tokens) - s.computed > 1 and s.pages.load is None
        ]
        return Outlook(prompts, queued, time.share, time.prompt_s(0, 1), free, *known)

    def end_sequence(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove_member(sequence)
        else:
            self.running.remove(sequence)
            self.waiting.end_place(sequence)
            if sequence.finish_reason is not FinishReason.ERROR:
                self.manager.end_request(sequence.pages, sequence.prompt_len, sequence.cached or 0)
        self._release_pages(sequence)
        if self.loader is not None:
            self.loader.parking.release_parked(sequence.pages)
            self.loader.end_prefetch(sequence.pages)
        sequence.change_state(SequenceState.FINISHED)

    def condemn_sequence(self, sequence: Sequence) -> None:
        """Let nobody find again what a sequence with bad logits read."""
        self.manager.condemn_pages(sequence.pages)
        if self.images is not None:
            self.images.forget_images(sequence.images)

    def _release_pages(self, sequence: Sequence) -> None:
        if self.loader is not None:
            self.loader.cancel_load(sequence.pages)
        self._withdraw_images(sequence)
        self.manager.free_pages(sequence.pages)
        self._too_few = []

    def _withdraw_images(self, sequence: Sequence) -> None:
        if sequence.images and self.images is not None:
            self.images.withdraw_sequence(sequence.seq_id)

    def schedule_step(self) -> StepSchedule:
        schedule, budget = StepSchedule(), Budget(self.max_batch_tokens)
        self._rows_left, self._load_pages, self.held_back = self.score_rows, PAGES_AT_ONCE, False
        self.manager.prepare_step()
        if self.images is not None:
            self.images.begin_schedule()
        decoding = [s for s in self.running if s.remaining_tokens == 1]
        if len(decoding) > budget.tokens:
            decoding.sort(key=order_key)
        for s in decoding:
            self._serve_sequence(s, schedule, budget)
        if self.step_time is not None:
            decode = StepLoad(len(schedule.slices), sum(s.computed for s, _ in schedule.slices))
            sizes = next((found for rows, found in self.graph_sizes.items() if rows >= decode.rows), ())
            budget.set_time(self.step_time, decode, self.least_tokens, sizes)
        self._shorten_beside_disk(budget)
        self._schedule_prompts(schedule, budget)
        return schedule

    def _shorten_beside_disk(self, budget: Budget) -> bool:
        """Keep a step short in which pages come from disk; return whether any do."""
        if self.loader is None or not self.loader.reads_disk:
            return False
        tokens = int(DISK_SHARE * self.loader.newest_read_s / self.prefill.compute_rate().per_token_s)
        fewest, most = (slices * self.slice_tokens for slices in DISK_SLICES)
        budget.shorten_step(max(fewest, min(most, tokens)), self.slice_tokens)
        return True

    def _schedule_prompts(self, schedule: StepSchedule, budget: Budget) -> None:
        """Give the rest of the step to running and waiting prompts. Nobody is admitted while pages are short."""
        short = bool(schedule.preempted)
        if not short and self._is_blocked() and (victim := self._find_in_the_way()) is not None:
            victim.gave_way += 1
            budget.give_back(self._preempt_sequence(victim, schedule))
        passed_over: list[Sequence] = []
        prompts = [s for s in self.running if s.remaining_tokens > 1]
        tenants, given = {s.request.tenant for s in prompts} | self.waiting.count_by_tenant().keys(), self._given
        fewest = min((given[name] for name in tenants if name in given), default=0)
        self._given = {name: given.get(name, fewest) - fewest for name in tenants}
        for sequence in sorted(prompts, key=self._prompt_order):
            if not short:
                self._admit_waiting(schedule, budget, passed_over, before=sequence)
            lost = len(schedule.preempted)
            self._serve_sequence(sequence, schedule, budget)
            short = short or len(schedule.preempted) > lost
        if not short:
            self._admit_waiting(schedule, budget, passed_over)
        self.waiting.undo_pops(passed_over)
        if self.loader is not None:
            self._prefetch_waiting(self.waiting.peek_next() if not short else None)

    def _prompt_order(self, sequence: Sequence) -> tuple[int, tuple[float, int]]:
        """Sort key of prompts: tenants by the tokens that they were given, then the order of the queue."""
        return self._given.get(sequence.request.tenant, 0), order_key(sequence)

    def schedule_ahead(self, schedule: StepSchedule) -> StepSchedule | None:
        """Make up the step after `schedule` while that one still runs: one token for each sequence that its sampled
        token cannot have ended. None when the next step should wait for this one: a sequence is not decoding and may go
        on soon, one could be admitted or would have to be preempted, or none goes on."""
        loading, given = [s for s in self.running if s.pages.load is not None], {s.seq_id for s, _ in schedule.slices}
        # an arriving page would be copied into a slot that the step under way writes and the next one reads
        if any(s.seq_id in given for s in loading):
            return None
        self.manager.prepare_step()
        decoding = [s for s, n in schedule.slices if s.finish_reason is None and n == len(s.tokens) - s.computed]
        if loading and not self._all_wait(loading, decoding):
            return None
        following = [s for s in decoding if len(s.tokens) + 1 < s.longest]
        live, stopped = [s for s in self.running if s.finish_reason is None], len(loading)
        if self.images is not None and self.images.busy:  # those that wait for it hold up nobody
            counts = {s.seq_id: n for s, n in schedule.slices}
            others = [s for s in live if s.pages.load is None]
            stopped += sum(self.images.is_stopped(s.seq_id, s.computed + counts.get(s.seq_id, 0)) for s in others)
        if len(decoding) + stopped < len(live) or not 0 < len(following) <= self.max_batch_tokens:
            return None
        everybody = len(following) + stopped == len(self.running)
        if len(self.waiting) and not (everybody and self._is_blocked() and self._find_in_the_way() is None):
            return None
        size = self.manager.page_tokens  # the next token of those whose last page is full has no page yet
        groups = self.manager.pools
        short = [
            (s.pages, dict.fromkeys(groups, len(s.tokens) // size + 1)) for s in following if not len(s.tokens) % size
        ]
        if short and not self.manager.extend_tables(short):
            return None
        return StepSchedule([(s, 1) for s in following])

    def _all_wait(self, loading: list[Sequence], decoding: list[Sequence]) -> bool:
        """Say whether sequences that load will wait for longer than a step of `decoding` takes."""
        load, time, loader = StepLoad(len(decoding), sum(s.computed for s in decoding)), self.step_time, self.loader
        seconds = time.step_s(load) if time is not None else 0.0
        return loader is not None and all(loader.is_awaited(s.pages, s.computed, seconds) for s in loading)

    def _is_full(self) -> bool:
        """Say whether one more sequence exceeds the places or the target time of a step."""
        time, running = self.step_time, len(self.running)
        if running >= self.max_sequences or time is None or time.target_s is None or not running:
            return running >= self.max_sequences
        keys = sum(len(s.tokens) for s in self.running)
        return time.step_s(StepLoad(running + 1, keys, self.least_tokens)) > time.target_s

    def _is_blocked(self) -> bool:
        """Say whether the head of the queue cannot be admitted unless a sequence leaves."""
        return self._is_full() or (bool(self._too_few) and all(map(le, self.manager.memory.free_counts, self._too_few)))

    def _find_in_the_way(self) -> Sequence | None:
        """Find the sequence that should yield its place or pages to the head of the queue, which cannot be admitted. It
        is the newest of the tenant with most places, if that tenant still has as many as the head's after the change.
        Each such change evens out the places, so no other change undoes it."""
        head = self.waiting.peek_next()
        if head is None:
            return None
        held = Counter(s.request.tenant for s in self.running)
        least = held[head.request.tenant] + 2
        return max(
            (
                s
                for s in self.running
                if held[s.request.tenant] >= least and s.ran >= TURN_STEPS << s.gave_way and s.pages.load is None
            ),
            key=lambda s: (held[s.request.tenant], order_key(s)),
            default=None,
        )

    def _serve_sequence(self, sequence: Sequence, schedule: StepSchedule, budget: Budget) -> None:
        if sequence.state is not SequenceState.RUNNING:
            return  # preempted for one that was served before
        wanted = self._advance_load(sequence)
        count = self._limit_tokens(sequence, wanted, budget)
        if wanted < sequence.remaining_tokens and self.loader is not None and self.loader.reads_disk:
            # it may go on elsewhere soon
            load = self.loader.find_begun(sequence.pages)
            before = load.choice.arrives_s / self.prefill.compute_rate().per_token_s if load is not None else 0.0
            budget.tokens = min(budget.tokens, max(count, int(before), self.slice_tokens))
        if count == 0:
            return
        while not self.manager.reserve_pages(sequence.pages, sequence.computed + count):
            if self.manager.slide_window(sequence.pages, sequence.computed):
                continue  # what was kept for later requests made room
            victim = max(self.running, key=order_key)
            if victim is sequence and sequence.pages.load is not None:
                # if preempted, it would be admitted again with the same load in the same pools, forever
                self._drop_load(sequence)
                continue
            budget.give_back(self._preempt_sequence(victim, schedule))
            if victim is sequence:
                if not self.running:  # it had all the memory, and its cached pages would lie in the same slabs again
                    self.manager.memory.evict_all()
                return
        self._add_slice(sequence, count, schedule, budget)

    def _add_slice(self, sequence: Sequence, count: int, schedule: StepSchedule, budget: Budget) -> None:
        """Put tokens of a sequence, whose pages are reserved, into the step."""
        prompt = sequence.remaining_tokens > 1
        schedule.slices.append((sequence, count))
        budget.take_tokens(sequence.computed, count, prompt=prompt, ends=count == sequence.remaining_tokens)
        self._rows_left -= count * sequence.scoring
        if prompt:
            self._given[sequence.request.tenant] = self._given.get(sequence.request.tenant, 0) + count

    def _limit_tokens(self, sequence: Sequence, count: int, budget: Budget) -> int:
        """Limit tokens to what the step has room for, and to whole images that are ready."""
        start, images = sequence.computed, sequence.images
        if sequence.scoring:
            count = min(count, self._rows_left)
        if images and self.images is not None:
            count = self.images.limit_tokens(sequence.seq_id, images, start, count)
        count = budget.fit_tokens(start, count) if sequence.remaining_tokens > 1 else min(count, budget.tokens)
        for image in images:
            if image.begin < start + count < image.end:
                return image.begin - start if image.begin > start else budget.fit_image(image.end - start)
        return count

    def _advance_load(self, sequence: Sequence) -> int:
        """Return the tokens that a running sequence should compute now, budget aside."""
        if sequence.pages.load is None:
            return sequence.remaining_tokens
        assert self.loader is not None
        parked, computed = sequence.pages.parked is not None, sequence.computed
        rate = self.estimates.rate_beside(self.running)
        step = self.loader.next_move(sequence.pages, computed, compute=rate)
        self.estimates.raise_cost(sequence)
        if step.action == "compute":
            return min(sequence.remaining_tokens, step.max_tokens)
        if step.action == "jump":
            sequence.computed = self.loader.end_load(sequence.pages, computed)
            if parked and sequence.pages.parked is not None:
                return self._start_over(sequence)  # what was parked does not fit together
            if not parked and sequence.computed > computed:
                self.estimates.lower_cost(sequence, computed)
                if not sequence.requeued:  # later it finds what it has computed itself
                    sequence.cached = (sequence.cached or 0) + sequence.computed - computed
                # a later resume point may be worth a load of its own
                here = PrefixHit(sequence.computed, 0, in_flight=False)
                rate = self.estimates.rate_behind(self.running, sequence)
                chosen = self.loader.choose_load(sequence.pages, len(sequence.tokens), here, rate, trials=True)
                if chosen is not None and chosen.stop:
                    self.loader.begin_load(sequence.pages, chosen, spare=self._spare_for_load(sequence))
        elif step.action == "drop":
            if parked:
                return self._start_over(sequence)
            self._drop_load(sequence)
        return 0 if sequence.pages.load is not None else sequence.remaining_tokens

    def _start_over(self, sequence: Sequence) -> int:
        """Requeue a sequence whose parked pages are lost."""
        assert self.loader is not None
        self._release_pages(sequence)
        self.loader.parking.release_parked(sequence.pages)
        self._requeue_sequence(sequence)
        return 0

    def _drop_load(self, sequence: Sequence) -> None:
        assert self.loader is not None
        self.loader.cancel_load(sequence.pages)
        self._too_few = []

    def _spare_for_load(self, sequence: Sequence) -> int:
        """Count local pages to leave beside a load's window: for a chunk, and one per running sequence."""
        chunk = min(sequence.remaining_tokens, self.max_batch_tokens)
        return self.manager.count_pages(chunk) + 1 + len(self.running)

    def _preempt_sequence(self, victim: Sequence, schedule: StepSchedule) -> int:
        """Send `victim` back to the queue; return the tokens it had in this step."""
        refund = sum(count for sequence, count in schedule.slices if sequence is victim)
        schedule.slices = [entry for entry in schedule.slices if entry[0] is not victim]
        schedule.preempted.append(victim)
        self.preemptions += 1
        pages = victim.pages
        if self.loader is not None and pages.load is None and victim.computed:
            self.loader.parking.park_sequence(pages, victim.computed)
        self._release_pages(victim)
        self._requeue_sequence(victim)
        return refund

    def _requeue_sequence(self, sequence: Sequence) -> None:
        sequence.computed = 0
        sequence.ran = 0
        sequence.requeued = True
        self.running.remove(sequence)
        sequence.change_state(SequenceState.WAITING)
        self.waiting.push_sequence(sequence)

    def _admit_waiting(
        self, schedule: StepSchedule, budget: Budget, passed_over: list[Sequence], before: Sequence | None = None
    ) -> None:
        """Admit waiting sequences in order while budget, pages and places last, up to the running prompt `before`,
        whose pages stay free. The caller puts `passed_over` back. The first misfit stops admission, lest it starve."""
        if self.running and self._is_blocked():
            return  # looking up a long prompt again at every step would cost more than the step's other decisions
        while (
            budget.fit_tokens(0, 1)
            and self._load_pages > 0
            and len(passed_over) < MAX_PASSED_OVER
            and not self._is_full()
        ):
            if before is not None and (head := self.waiting.peek_next()) is not None:
                if self._prompt_order(head) > self._prompt_order(before):
                    break
                both = self.manager.count_pages(len(head.tokens) + 1) + self.manager.count_pages(budget.tokens)
                need = dict.fromkeys(self.manager.pools, both + 1 + len(self.running))
                if not self.manager.memory.can_allocate(need):
                    break
            sequence = self.waiting.pop_next()
            if sequence is None:
                break
            hit = self._find_prefix(sequence) if sequence.pages.parked is None else None
            if hit is not None and hit.in_flight:
                passed_over.append(sequence)
                continue
            count = self._give_pages(sequence, hit, budget)
            if count is None and not self.running and self.manager.memory.evict_all():
                hit = self._find_prefix(sequence) if hit is not None else None
                count = self._give_pages(sequence, hit, budget)
            if count is None:
                if not passed_over:  # then it is the head that does not fit
                    self._too_few = self.manager.memory.free_counts
                passed_over.append(sequence)
                break
            sequence.change_state(SequenceState.RUNNING)
            self.running.append(sequence)
            if count:
                self._add_slice(sequence, count, schedule, budget)
            if sequence.pages.load is not None:
                self._load_pages -= sum(map(len, sequence.pages.load.missing.values()))
                self.held_back = self._load_pages <= 0 and len(self.waiting) > 0
                if hit is not None and self._shorten_beside_disk(budget):
                    self._serve_sequence(sequence, schedule, budget)
                    if schedule.preempted:
                        break

    def _find_prefix(self, sequence: Sequence) -> PrefixHit:
        hit = self.manager.find_prefix(sequence.pages, sequence.tokens)
        return PrefixHit(0, 0, in_flight=False) if sequence.scoring else hit

    def _give_pages(self, sequence: Sequence, hit: PrefixHit | None, budget: Budget) -> int | None:
        """Give a waiting sequence its cached prefix and pages, or a parked one (`hit` is None) those it had. Return the
        tokens to compute in this step. None, and no change, without room for it and a page of each running one."""
        pages, total, running = sequence.pages, len(sequence.tokens), len(self.running)
        if hit is None:
            assert self.loader is not None and pages.parked is not None
            need = {group: len(parked) + running for group, parked in pages.parked.pages.items()}
            room = not running or self.manager.memory.can_allocate(need)
            return 0 if room and self.loader.parking.resume_sequence(pages) else None
        chosen = None
        if self.loader is not None and not sequence.scoring:
            rate = self.estimates.rate_behind(self.running)
            chosen = self.loader.choose_load(pages, total, hit, rate, trials=True)
        load = chosen if chosen is not None and chosen.stop else None
        self.manager.attach_prefix(pages, hit, total)
        sequence.computed = hit.tokens
        count = self._limit_tokens(sequence, total - hit.tokens, budget) if load is None else 0
        if not self.manager.reserve_pages(pages, hit.tokens + count, total=total + 1, spare=running):
            self._withdraw_images(sequence)
            self.manager.free_pages(pages)
            sequence.computed = 0
            return None
        self.manager.announce_pages(pages)
        if sequence.cached is None:
            sequence.cached = hit.tokens
            self.manager.touch_chain(pages, hit.tokens)
        if self.loader is not None:
            if chosen is not None:
                begun = load is not None and self.loader.begin_load(pages, load, spare=self._spare_for_load(sequence))
                self.loader.decisions[chosen.decision if begun else "compute"] += 1
            self.loader.end_prefetch(pages)
        return count

    def check_integrity(self) -> None:
        assert all(s.state is SequenceState.RUNNING for s in self.running)
        assert all(s.state is SequenceState.WAITING and s.computed == 0 for s in self.waiting)
        assert len(self.running) <= self.max_sequences
        self.manager.check_integrity()
        for group, pool in self.manager.pools.items():
            held = {slot for s in self.running for slot in s.pages.tables[group] if slot >= 0}
            for load in [s.pages.load for s in self.running if s.pages.load is not None]:
                held |= set(load.window if group == LOCAL else load.found.values())
            assert len(held) == pool.used_slots, (
                f"{group}: {pool.used_slots} pages used, {len(held)} held by running sequences"
            )
