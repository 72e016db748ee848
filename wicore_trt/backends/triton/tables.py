"""Page tables of padded steps: on the device, a row for each sequence, and sent again only where one changed.

A sequence that decodes keeps its row from step to step. What a row holds is known by the stamp of the tables that it
was filled from (`SequenceSlice.stamp`), so it makes no difference who joins, leaves, moves or comes back: a row is good
if its stamp is the one that is wanted. Knows neither steps nor kernels. Invariant: behind its table a row is ABSENT, and
all of it is in a row of nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from wicore_trt.runtime.batch import SequenceSlice
from wicore_trt.runtime.cuda_device import Device
from wicore_trt.runtime.step_inputs import ABSENT

NOBODY = object()
"""The stamp of an empty table."""


@dataclass(frozen=True)
class Changes:
    """Rows to be written, int32 [rows, width] by group."""

    rows: list[int]
    tables: dict[str, np.ndarray]


class HeldTables:
    """`on_device[group]` int32 [rows, pages]. Whoever takes `changes` is to write them before the next step reads."""

    def __init__(self, groups: Sequence[str], rows: int, pages: int, device: Device) -> None:
        self.on_device = {g: device.empty((rows, pages), torch.int32).fill_(ABSENT) for g in groups if rows}
        self.pages = pages
        self._stamps: list[object] = [NOBODY] * rows
        self._lengths = np.zeros(rows, np.int32)
        self._seq_ids: list[int] = []
        self._order: list[int] = []

    def forget(self) -> None:
        """What the device holds is not known."""
        self._stamps = [None] * len(self._stamps)
        self._lengths[:] = self.pages

    def places(self, seq_ids: list[int]) -> list[int]:
        """Which of these sequences each row is for, from the first row on: those that have a row keep it, but for the
        last ones, which fill what others left."""
        if seq_ids != self._seq_ids:
            count = len(seq_ids)
            had = {self._seq_ids[i]: row for row, i in enumerate(self._order[:count])}
            order, others = [-1] * count, []
            for i, seq_id in enumerate(seq_ids):
                row = had.pop(seq_id, -1)
                if row < 0:
                    others.append(i)
                else:
                    order[row] = i
            new = iter(others)
            self._seq_ids, self._order = seq_ids, [next(new) if i < 0 else i for i in order]
        return self._order

    def changes(
        self, slices: Sequence[SequenceSlice], rows: Sequence[int], count: int, num_pages: Mapping[str, int]
    ) -> Changes:
        """What is to be written so that the first `count` rows are those of the slices, each in its one of `rows`, and
        of nobody. The pools have `num_pages`."""
        wanted = [NOBODY] * count
        for row, piece in zip(rows, slices, strict=True):
            wanted[row] = piece.stamp
        held = self._stamps
        changed = [row for row, stamp in enumerate(wanted) if stamp is not held[row] or stamp is None]
        if not changed:
            return Changes([], {})
        owners = dict(zip(rows, slices, strict=True))
        before = self._lengths[changed]
        filled = [self._tables(owners.get(row)) for row in changed]
        self._lengths[changed] = after = [max(map(len, tables.values()), default=0) for tables in filled]
        held[:count] = wanted
        width = max(before.max(), *after)
        arrays = {group: np.full((len(changed), width), ABSENT, np.int32) for group in self.on_device}
        for group, array in arrays.items():
            for line, tables in zip(array, filled, strict=True):
                if tables:
                    line[: len(tables[group])] = tables[group]
            # Kernels index the pool with these unchecked, so a bad page must stop here.
            assert array.min() >= ABSENT and array.max() < num_pages[group], "a page is outside its pool"
        return Changes(changed, arrays)

    def lengths(self, rows: Sequence[int]) -> np.ndarray:
        """Pages in each of these rows."""
        return self._lengths[rows]

    def _tables(self, piece: SequenceSlice | None) -> dict[str, Sequence[int]]:
        """By group; empty for nobody."""
        if piece is None:
            return {}
        return {group: piece.pages[group][: self.pages] for group in self.on_device}
