"""Assigns sequences to the linear KV slots of a TensorRT engine, and plans how a step runs on them: plain data.

A slot is a cache of KV pages. After every part of a step its new entries are stored to their pages, so a slot can be
taken from a sequence at any time and filled again. Must not know torch, TensorRT or devices. Invariants:
- when a row runs, its slot holds exactly what the pages hold of all positions that the row sees;
- a slot is cleared before another sequence uses it, and never taken from a sequence of the same round;
- a slot without work writes to its scratch entry and nowhere else, and its row sees finite values.

Entry e of a slot's cache in a group is position base + e. Global layers keep every position (base 0); local layers keep
at least the window, and move it to the front when the next tokens do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wicore_trt.arithmetic import div_ceil, first_visible
from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.plan_io import DECODE, PREFILL
from wicore_trt.runtime.batch import SequenceSlice


@dataclass(frozen=True, slots=True)
class GroupSlots:
    """Cache of a layer group in each slot: entries [0, `usable`) hold tokens and entry `usable` is scratch. A token
    sees the last `window` positions, its own included; None: all."""

    usable: int
    window: int | None

    def first_visible(self, position: int) -> int:
        return 0 if self.window is None else first_visible(position, self.window)


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy of `tokens` tokens between entries `entry`, entry + 1, ... of `slot` and the page slots `pages`, from token
    `offset` of pages[0] on."""

    slot: int
    entry: int
    tokens: int
    pages: Sequence[int]
    offset: int


@dataclass(frozen=True, slots=True)
class Slide:
    """Move of entries [first, first + keep) of `slot` to its front."""

    slot: int
    first: int
    keep: int


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of slice `index` of the batch, the first at `position`; `entries[group]` is its cache entry.
    `last`: the slice ends with this row."""

    index: int
    slot: int
    token_ids: Sequence[int]
    position: int
    entries: Mapping[str, int]
    last: bool


@dataclass(slots=True)
class Part:
    """Run of a plan with its copies, in this order: clear slots, load from pages, slide, run, store to pages. A prefill
    part has one row; a decode part has rows of one token."""

    phase: str
    rows: list[Row] = field(default_factory=list)
    clears: list[int] = field(default_factory=list)
    loads: dict[str, list[PageCopy]] = field(default_factory=dict)
    slides: dict[str, list[Slide]] = field(default_factory=dict)
    stores: dict[str, list[PageCopy]] = field(default_factory=dict)


@dataclass(slots=True)
class _Occupant:
    """Sequence in a slot, whose next position is `length`. `pages[group]` are the page slots of the positions that the
    next token sees. `admitted`: the slot must be cleared and loaded before use."""

    slot: int
    length: int
    base: dict[str, int]
    pages: dict[str, Sequence[int]]
    stepped: int
    admitted: bool = True


class SlotTable:
    """Table of `slots` KV slots over `groups`; pages hold `page_tokens` tokens, a prefill runs at most `max_chunk`."""

    def __init__(self, slots: int, groups: Mapping[str, GroupSlots], *, page_tokens: int, max_chunk: int) -> None:
        self.slots, self.groups = slots, groups
        self._page_tokens, self._max_chunk = page_tokens, max_chunk
        self._occupants: dict[int, _Occupant] = {}  # by seq_id
        self._clock = 0

    def plan(self, slices: Sequence[SequenceSlice]) -> list[Part]:
        """Plan what runs a batch, in order. The table then stands as after the step, so the parts must be run.
        Sequences already in slots go first; more sequences than slots take several rounds."""
        assert len({s.seq_id for s in slices}) == len(slices), "a sequence has two slices in one step"
        self._clock += 1
        order = sorted(range(len(slices)), key=lambda i: not self._is_current(slices[i]))
        for i in order:
            if not self._is_current(slices[i]):
                self.release(slices[i].seq_id)
        waiting = {s.seq_id for s in slices}
        parts: list[Part] = []
        for first in range(0, len(order), self.slots):
            parts += self._plan_round([(i, slices[i]) for i in order[first : first + self.slots]], waiting)
        return parts

    def release(self, seq_id: int) -> None:
        self._occupants.pop(seq_id, None)

    def _is_current(self, piece: SequenceSlice) -> bool:
        """Tell whether the sequence's slot holds what the slice's pages hold. Exchanged pages, and positions computed
        or dropped elsewhere, must be loaded again."""
        occupant = self._occupants.get(piece.seq_id)
        if occupant is None or occupant.length != piece.start:
            return False
        return all(occupant.pages[g] == self._visible_pages(piece, g, piece.start) for g in self.groups)

    def _visible_pages(self, piece: SequenceSlice, group: str, position: int) -> Sequence[int]:
        """Copy the page slots that the token at `position` sees before itself; the scheduler changes its tables."""
        first = self.groups[group].first_visible(position) // self._page_tokens
        return piece.pages[group][first : div_ceil(position, self._page_tokens)]

    def _plan_round(self, members: list[tuple[int, SequenceSlice]], waiting: set[int]) -> list[Part]:
        """Plan parts for at most as many sequences as slots. `waiting` are the sequences of the whole step."""
        staying = {piece.seq_id for _, piece in members}
        for _, piece in members:
            if piece.seq_id not in self._occupants:
                self._admit_sequence(piece, staying, waiting)
        parts, decode = [], Part(DECODE)
        for index, piece in members:
            for first in range(0, len(piece.token_ids), self._max_chunk):
                count = min(self._max_chunk, len(piece.token_ids) - first)
                last = first + count == len(piece.token_ids)
                part = decode if count == 1 and last else Part(PREFILL)
                self._append_tokens(part, index, piece, first, count)
                if part is not decode:
                    parts.append(part)
        return [*parts, decode] if decode.rows else parts

    def _admit_sequence(self, piece: SequenceSlice, staying: set[int], waiting: set[int]) -> None:
        """Give the sequence the lowest free slot, else that of the sequence whose last step is longest ago."""
        taken = {occupant.slot for occupant in self._occupants.values()}
        slot = next((s for s in range(self.slots) if s not in taken), None)
        if slot is None:
            others = [seq_id for seq_id in self._occupants if seq_id not in staying]
            victim = min(others, key=lambda seq_id: (seq_id in waiting, self._occupants[seq_id].stepped))
            slot = self._occupants.pop(victim).slot
        base = {name: group.first_visible(piece.start) for name, group in self.groups.items()}
        self._occupants[piece.seq_id] = _Occupant(slot, piece.start, base, {}, self._clock)

    def _append_tokens(self, part: Part, index: int, piece: SequenceSlice, first: int, count: int) -> None:
        occupant, start = self._occupants[piece.seq_id], piece.start + first
        assert occupant.length == start
        end = start + count
        if occupant.admitted:
            part.clears.append(occupant.slot)
        entries = {}
        for name, group in self.groups.items():
            held = start - occupant.base[name]
            if occupant.admitted and held:
                loads = part.loads.setdefault(name, [])
                loads.append(self._make_copy(piece, name, occupant.slot, 0, occupant.base[name], start))
            if held + count > group.usable:
                assert group.window is not None, f"sequence {piece.seq_id} is longer than the engine's max_context"
                keep = min(held, group.window - 1)
                part.slides.setdefault(name, []).append(Slide(occupant.slot, held - keep, keep))
                occupant.base[name], held = start - keep, keep
                assert held + count <= group.usable
            entries[name] = held
            part.stores.setdefault(name, []).append(self._make_copy(piece, name, occupant.slot, held, start, end))
            occupant.pages[name] = self._visible_pages(piece, name, end)
        occupant.length, occupant.stepped, occupant.admitted = end, self._clock, False
        token_ids = piece.token_ids[first : first + count]
        part.rows.append(Row(index, occupant.slot, token_ids, start, entries, first + count == len(piece.token_ids)))

    def _make_copy(self, piece: SequenceSlice, group: str, slot: int, entry: int, start: int, end: int) -> PageCopy:
        """Copy positions [start, end), of which `start` is at `entry`."""
        size = self._page_tokens
        pages = piece.pages[group][start // size : div_ceil(end, size)]
        assert len(pages) == div_ceil(end, size) - start // size and min(pages) >= 0, (
            f"sequence {piece.seq_id} lacks {group} pages of positions [{start}, {end})"
        )
        return PageCopy(slot, entry, end - start, pages, start % size)


def decode_slots(highest_slot: int, slots: int) -> int:
    """Round the slots of a decode step up to a power of two, or all of them, so that `highest_slot` is among them. So
    few shapes occur that each can keep an execution context and a CUDA graph."""
    return min(slots, 1 << highest_slot.bit_length())


def part_batch(part: Part, slots: int) -> int:
    return 1 if part.phase == PREFILL else decode_slots(max(row.slot for row in part.rows), slots)


def step_inputs(part: Part, batch: int, groups: Mapping[str, GroupSlots]) -> dict[str, np.ndarray]:
    """Make all inputs of kind "step", int32. Logits row b is that after slot b's last token; prefill has row 0 alone.
    An idle slot has token 0 at position 0. Its global row sees entry 0 alone, because a row costs as much as it sees;
    its local row sees the window that ends at the scratch entry."""
    tokens = len(part.rows[0].token_ids)
    assert all(len(row.token_ids) == tokens for row in part.rows)
    ids, positions = np.zeros((batch, tokens), np.int32), np.zeros((batch, tokens), np.int32)
    first: dict[str, np.ndarray] = {}
    lengths: dict[str, np.ndarray] = {}
    for name, group in groups.items():
        first[name] = np.full(batch, group.usable, np.int32)
        lengths[name] = np.full(batch, 1 if group.window is None else group.usable + 1, np.int32)
    for row in part.rows:
        b = 0 if part.phase == PREFILL else row.slot
        ids[b] = row.token_ids
        positions[b] = np.arange(row.position, row.position + tokens)
        for name, entry in row.entries.items():
            first[name][b], lengths[name][b] = entry, entry + tokens
    arrays: dict[str, np.ndarray] = {plan_io.TOKEN_IDS: ids, plan_io.POSITIONS: positions}
    arrays[plan_io.SAMPLE_ROWS] = np.arange(tokens - 1, batch * tokens, tokens, dtype=np.int32)
    for name in groups:
        arrays[plan_io.write_indices(name)], arrays[plan_io.kv_lengths(name)] = first[name], lengths[name]
    return arrays
