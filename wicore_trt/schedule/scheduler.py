"""Who computes how many tokens in the next step.

Hands out a token budget to running sequences, then admits waiting ones; preempts the one that would be admitted last
when pages run out. Decides on plain data: it never sees tensors, clocks or transports. Invariant: a plan's
slices fit the budget and their pages are reserved, and if any sequence lives, the plan is never empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import le

from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.schedule.queue import WaitingQueue, order_key
from wicore_trt.schedule.sequence import Sequence
from wicore_trt.schedule.state import SequenceState

# How many waiting sequences may be passed over in one step because another one computes their prefix.
MAX_PASSED_OVER = 64


@dataclass(slots=True)
class Plan:
    """One step: (sequence, tokens to compute) pairs and the sequences that lost their pages to make room."""

    slices: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching with chunked prefill over a KVCacheManager.

    `max_batch_tokens` bounds the tokens of a step, `max_sequences` the sequences that hold pages.
    """

    def __init__(self, manager: KVCacheManager, *, max_batch_tokens: int, max_sequences: int) -> None:
        self.manager = manager
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = 0
        # What the pools could give when the head of the queue did not fit; empty when it may fit now.
        self._too_few: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.push(sequence)
        self._too_few = []

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a waiting or running sequence and release its pages; unless `keep`, what only it used is forgotten."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        self.manager.free(sequence.pages, sequence.seq_id, keep=keep)
        self._too_few = []
        sequence.move(SequenceState.FINISHED)

    def schedule(self) -> Plan:
        """Plan the next step and reserve its pages."""
        plan = Plan()
        budget = self._schedule_running(plan)
        if not plan.preempted:
            self._admit(plan, budget)
        return plan

    def _schedule_running(self, plan: Plan) -> int:
        """Give every running sequence its tokens, single-token ones first; returns the budget that is left."""
        budget = self.max_batch_tokens
        for sequence in sorted(self.running, key=lambda s: (s.remaining > 1, order_key(s))):
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted by an earlier iteration
            count = min(sequence.remaining, budget)
            if count == 0:
                continue
            while not self.manager.reserve(sequence.pages, sequence.computed + count):
                victim = max(self.running, key=order_key)
                budget += self._preempt(victim, plan)
                if victim is sequence:
                    break
            if sequence.state is SequenceState.RUNNING:
                plan.slices.append((sequence, count))
                budget -= count
        return budget

    def _preempt(self, victim: Sequence, plan: Plan) -> int:
        """Send `victim` back to the queue; returns the tokens it had in this plan."""
        refund = sum(count for sequence, count in plan.slices if sequence is victim)
        plan.slices = [entry for entry in plan.slices if entry[0] is not victim]
        plan.preempted.append(victim)
        self.preemptions += 1
        self.manager.free(victim.pages, victim.seq_id)
        victim.computed = 0
        self.running.remove(victim)
        victim.move(SequenceState.WAITING)
        self.waiting.push(victim)
        self._too_few = []
        return refund

    def _admit(self, plan: Plan, budget: int) -> None:
        """Admit waiting sequences in order while budget, pages and places last.

        The first one that does not fit stops admission, so that a big request is not starved by small ones.
        """
        if self.running and self._too_few and all(map(le, self._available(), self._too_few)):
            return  # looking up a long prompt again at every step would cost more than the step's other decisions
        passed_over: list[Sequence] = []
        while budget > 0 and len(self.running) < self.max_sequences and len(passed_over) < MAX_PASSED_OVER:
            sequence = self.waiting.pop()
            if sequence is None:
                break
            hit = self.manager.lookup(sequence.pages, sequence.tokens)
            if hit.in_flight:
                passed_over.append(sequence)
                continue
            self.manager.attach(sequence.pages, hit, len(sequence.tokens))
            count = min(len(sequence.tokens) - hit.tokens, budget)
            # Room for one more page of each running sequence, or the newcomer would be preempted at once.
            if not self.manager.reserve(
                sequence.pages, hit.tokens + count, total=len(sequence.tokens) + 1, spare=len(self.running)
            ):
                self.manager.free(sequence.pages, sequence.seq_id)
                passed_over.append(sequence)
                self._too_few = self._available()
                break
            self.manager.announce(sequence.pages, sequence.seq_id)
            sequence.computed = hit.tokens
            if sequence.cached is None:
                sequence.cached = hit.tokens
            sequence.move(SequenceState.RUNNING)
            self.running.append(sequence)
            plan.slices.append((sequence, count))
            budget -= count
        for sequence in passed_over:
            self.waiting.push(sequence)

    def _available(self) -> list[int]:
        return [pool.available for pool in self.manager.pools.values()]

    def computed(self, sequence: Sequence, count: int) -> None:
        """Record that a step computed `count` more tokens of a running sequence."""
        sequence.computed += count
        self.manager.commit(sequence.pages, sequence.tokens, sequence.computed, sequence.seq_id)

    def check_integrity(self) -> None:
        """Assert that states, queues and pages agree."""
        assert all(s.state is SequenceState.RUNNING for s in self.running)
        assert all(s.state is SequenceState.WAITING and s.computed == 0 for s in self.waiting)
        assert len(self.running) <= self.max_sequences
        self.manager.check_integrity()
        for group, pool in self.manager.pools.items():
            held = {slot for s in self.running for slot in s.pages.tables[group] if slot >= 0}
            assert len(held) == pool.used, f"{group}: {pool.used} pages used, {len(held)} held by running sequences"
