"""The slot table against a model of pages and slots: whatever the schedule, a row sees what its pages hold.

The model runs the table's parts on dictionaries. A token's value is (sequence, position, version), so that an entry of
another sequence, of another position or from before pages were exchanged is wrong; scratch and cleared entries are
values of their own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wicore_trt.backends.tensorrt.plan_io import DECODE, PREFILL, PlanLimits
from wicore_trt.backends.tensorrt.slots import (
    GroupSlots,
    PageCopy,
    Part,
    SlotTable,
    decode_slots,
    part_batch,
    step_inputs,
)
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SequenceSlice

CLEARED, SCRATCH = "cleared", "scratch"


@dataclass
class Sequence:
    """`versions[p]` changes when the value of position p does, as when other pages are loaded."""

    seq_id: int
    length: int = 0
    versions: list[int] = field(default_factory=list)
    pages: dict[str, list[int]] = field(default_factory=lambda: {GLOBAL: [], LOCAL: []})


class Model:
    """Pages and slots as dictionaries, and a scheduler that hands out pages."""

    def __init__(self, slots: int, window: int, chunk: int, spare: int, page_tokens: int, context: int = 2000) -> None:
        self.size, self.window, self.count = page_tokens, window, 0
        usable = {GLOBAL: context, LOCAL: window - 1 + max(chunk, window) + spare}
        self.groups = {GLOBAL: GroupSlots(usable[GLOBAL], None), LOCAL: GroupSlots(usable[LOCAL], window)}
        self.table = SlotTable(slots, self.groups, page_tokens=page_tokens, max_chunk=chunk)
        self.pages: dict[tuple[str, int], list[Any]] = {}
        self.slots = {g: [["never"] * (usable[g] + 1) for _ in range(slots)] for g in usable}
        self.chunk, self.runs = chunk, 0

    def value(self, sequence: Sequence, position: int) -> tuple[int, int, int]:
        return sequence.seq_id, position, sequence.versions[position]

    def new_page(self, group: str) -> int:
        self.count += 1
        self.pages[group, self.count] = ["unwritten"] * self.size
        return self.count

    def visible(self, group: str, position: int) -> range:
        return range(self.groups[group].first_visible(position), position)

    def slice_of(self, sequence: Sequence, count: int) -> SequenceSlice:
        for group, pages in sequence.pages.items():
            while len(pages) * self.size < sequence.length + count:
                pages.append(self.new_page(group))
        sequence.versions += [0] * count
        return SequenceSlice(sequence.seq_id, [7] * count, sequence.length, sequence.pages)

    def step(self, work: list[tuple[Sequence, int]]) -> None:
        slices = [self.slice_of(sequence, count) for sequence, count in work]
        left = {s.seq_id: n for s, n in work}
        for part in self.table.plan(slices):
            for row in part.rows:
                sequence = work[row.index][0]
                assert row.position == sequence.length + work[row.index][1] - left[sequence.seq_id]
                left[sequence.seq_id] -= len(row.token_ids)
                assert row.last == (left[sequence.seq_id] == 0)
            self.run(part, {row.slot: work[row.index][0] for row in part.rows})
        assert not any(left.values())
        for sequence, count in work:
            sequence.length += count
            for group in self.groups:
                for position in self.visible(group, sequence.length):
                    page = sequence.pages[group][position // self.size]
                    assert self.pages[group, page][position % self.size] == self.value(sequence, position)
            first = self.groups[LOCAL].first_visible(sequence.length) // self.size
            for j in range(first):  # the scheduler takes pages that slid out of the window
                if sequence.pages[LOCAL][j] >= 0:
                    self.pages[LOCAL, sequence.pages[LOCAL][j]] = ["freed"] * self.size
                    sequence.pages[LOCAL][j] = -1

    def run(self, part: Part, owners: dict[int, Sequence]) -> None:
        self.runs += 1
        assert len(owners) == len(part.rows), "a slot has two rows"
        assert len(part.rows) == 1 if part.phase == PREFILL else all(len(r.token_ids) == 1 for r in part.rows)
        for slot in part.clears:
            for caches in self.slots.values():
                caches[slot] = [CLEARED] * len(caches[slot])
        for group, copies in part.loads.items():
            for copy, entry, page, token in self.tokens(copies):
                self.slots[group][copy.slot][entry] = self.pages[group, page][token]
        for group, moves in part.slides.items():
            for move in moves:
                cache = self.slots[group][move.slot]
                cache[: move.keep] = cache[move.first : move.first + move.keep]
        self.compute(part, owners)
        for group, copies in part.stores.items():
            for copy, entry, page, token in self.tokens(copies):
                self.pages[group, page][token] = self.slots[group][copy.slot][entry]

    def tokens(self, copies: list[PageCopy]) -> Any:
        for copy in copies:
            for t in range(copy.tokens):
                at = copy.offset + t
                yield copy, copy.entry + t, copy.pages[at // self.size], at % self.size

    def compute(self, part: Part, owners: dict[int, Sequence]) -> None:
        """What a plan does with the step inputs: writes, then looks. Every slot of the batch is checked."""
        batch = part_batch(part, self.table.slots)
        inputs = step_inputs(part, batch, self.groups)
        tokens = inputs["token_ids"].shape[1]
        assert inputs["sample_rows"].tolist() == [b * tokens + tokens - 1 for b in range(batch)]
        for b in range(batch):
            slot = part.rows[0].slot if part.phase == PREFILL else b
            sequence, position = owners.get(slot), int(inputs["positions"][b, 0])
            for group, geometry in self.groups.items():
                first, length = int(inputs[f"write_indices.{group}"][b]), int(inputs[f"kv_lengths.{group}"][b])
                cache = self.slots[group][slot]
                if sequence is None:
                    assert first == geometry.usable and tokens == 1 and 1 <= length <= geometry.usable + 1
                    cache[first] = SCRATCH
                    continue
                assert first + tokens == length <= geometry.usable
                for t in range(tokens):
                    cache[first + t] = self.value(sequence, position + t)
                for t in range(tokens):
                    seen = range(first + t + 1)[-geometry.window :] if geometry.window else range(first + t + 1)
                    expected = [*self.visible(group, position + t), position + t]
                    assert [cache[j] for j in seen] == [self.value(sequence, p) for p in expected]

    def exchange(self, rng: random.Random, sequence: Sequence) -> None:
        """Other pages with new values take the place of all that is visible, as after a load from another tier."""
        for position in range(sequence.length):
            sequence.versions[position] += 1
        for group in self.groups:
            for position in self.visible(group, sequence.length):
                j = position // self.size
                if position % self.size == 0 or position == self.visible(group, sequence.length)[0]:
                    sequence.pages[group][j] = self.new_page(group)
                self.pages[group, sequence.pages[group][j]][position % self.size] = self.value(sequence, position)

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Go on from an earlier position with other tokens."""
        sequence.length, sequence.versions = length, [v + 1 for v in sequence.versions[:length]]
        for group in self.groups:
            del sequence.pages[group][-(-length // self.size) :]
            for position in self.visible(group, length):
                j = position // self.size
                if sequence.pages[group][j] < 0:
                    sequence.pages[group][j] = self.new_page(group)
                self.pages[group, sequence.pages[group][j]][position % self.size] = self.value(sequence, position)

    def jump(self, sequence: Sequence, count: int) -> None:
        """Positions that a tier delivered: they appear in the pages and were never computed here. A page that was begun
        becomes another one: after a rewind its old values must not pass for the delivered ones."""
        for group, pages in sequence.pages.items():
            if sequence.length % self.size and pages[-1] >= 0:
                begun, pages[-1] = pages[-1], self.new_page(group)
                self.pages[group, pages[-1]] = list(self.pages[group, begun])
        self.slice_of(sequence, count)
        sequence.length += count
        for group in self.groups:
            for position in self.visible(group, sequence.length):
                page = sequence.pages[group][position // self.size]
                self.pages[group, page][position % self.size] = self.value(sequence, position)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**64))
def test_a_row_sees_what_its_pages_hold_after_any_schedule(steps: int, seed: int) -> None:
    """Steps are drawn from the seed: Hypothesis's own randomness favours schedules in which nothing happens."""
    rng = random.Random(seed)
    slots, window, chunk = rng.randint(1, 4), rng.randint(2, 9), rng.randint(1, 7)
    model = Model(slots, window, chunk, rng.choice((0, 0, 1, 5)), rng.randint(1, 6))
    alive: list[Sequence] = []
    made = 0
    for _ in range(steps):
        while len(alive) < rng.randint(1, slots + 3):
            made += 1
            alive.append(Sequence(made))
        event, one = rng.random(), rng.choice(alive)
        if event < 0.08:
            model.table.release(one.seq_id)
            alive.remove(one)
            continue
        if event < 0.14 and one.length:
            model.table.release(one.seq_id)  # preempted; its pages come back later
        elif event < 0.2 and one.length:
            model.exchange(rng, one)
        elif event < 0.25 and one.length > 1:
            model.rewind(one, rng.randint(1, one.length - 1))
        elif event < 0.3:
            model.jump(one, rng.randint(1, 2 * window))
        members = rng.sample(alive, rng.randint(1, len(alive)))
        work = [(s, rng.choice((1, 1, rng.randint(1, 3 * chunk + 2)))) for s in members]
        model.step(work)


def test_slots_stay_with_their_sequences_and_the_one_that_rested_longest_goes() -> None:
    model = Model(slots=2, window=4, chunk=8, spare=0, page_tokens=4)
    a, b, c = Sequence(1), Sequence(2), Sequence(3)
    model.step([(a, 5), (b, 5)])
    first = model.table.plan([model.slice_of(a, 1)])
    a.length += 1
    assert [(p.phase, p.clears, p.loads) for p in first] == [(DECODE, [], {})], "a sequence in its slot copies nothing"
    model.step([(c, 5)])
    assert model.table.plan([model.slice_of(a, 1)])[0].loads == {}, "b had rested longer than a"
    part = model.table.plan([model.slice_of(b, 1)])[0]
    assert {g: [(x.entry, x.tokens) for x in copies] for g, copies in part.loads.items()} == {
        GLOBAL: [(0, 5)],
        LOCAL: [(0, 3)],
    }


def test_one_decode_run_for_all_single_tokens_and_prefill_in_chunks() -> None:
    model = Model(slots=4, window=4, chunk=8, spare=0, page_tokens=4)
    sequences = [Sequence(i) for i in range(4)]
    slices = [model.slice_of(s, n) for s, n in zip(sequences, (20, 1, 17, 1), strict=True)]
    parts = model.table.plan(slices)
    assert [(p.phase, [(r.index, len(r.token_ids), r.last) for r in p.rows]) for p in parts] == [
        (PREFILL, [(0, 8, False)]),
        (PREFILL, [(0, 8, False)]),
        (PREFILL, [(0, 4, True)]),
        (PREFILL, [(2, 8, False)]),
        (PREFILL, [(2, 8, False)]),
        (DECODE, [(1, 1, True), (2, 1, True), (3, 1, True)]),
    ]


def test_a_local_cache_slides_only_when_the_next_tokens_do_not_fit() -> None:
    """With the entries that plan_io gives, decode moves entries once in a window's length at most."""
    window, limits = 16, PlanLimits(max_batch=1, max_chunk=8, max_context=4000)
    model = Model(slots=1, window=window, chunk=8, spare=limits.max_batch - 1, page_tokens=8, context=4000)
    sequence = Sequence(1)
    model.step([(sequence, 8)])
    slides = 0
    for _ in range(200):
        part = model.table.plan([model.slice_of(sequence, 1)])[0]
        model.run(part, {0: sequence})
        sequence.length += 1
        slides += len(part.slides.get(LOCAL, ()))
        assert all(move.keep == window - 1 for moves in part.slides.values() for move in moves)
    assert 1 < slides <= 200 // window + 1


@pytest.mark.parametrize("missing", [GLOBAL, LOCAL])
def test_a_batch_without_the_pages_that_a_row_sees_is_refused(missing: str) -> None:
    model = Model(slots=1, window=4, chunk=8, spare=0, page_tokens=4)
    sequence = Sequence(1)
    model.step([(sequence, 6)])
    model.table.release(1)
    piece = model.slice_of(sequence, 1)
    piece.pages[missing][1] = -1  # type: ignore[index]
    with pytest.raises(AssertionError, match=f"lacks {missing} pages"):
        model.table.plan([piece])


def test_a_sequence_beyond_the_slots_length_is_refused() -> None:
    model = Model(slots=1, window=4, chunk=8, spare=0, page_tokens=4, context=20)
    with pytest.raises(AssertionError, match="longer than the engine's max_context"):
        model.step([(Sequence(1), 21)])


def test_decode_runs_few_sizes_that_hold_the_highest_slot() -> None:
    for slots in (1, 3, 8, 13):
        sizes = [decode_slots(highest, slots) for highest in range(slots)]
        assert all(size > highest for highest, size in enumerate(sizes)) and max(sizes) == slots
        assert len(set(sizes)) <= slots.bit_length() + 1
