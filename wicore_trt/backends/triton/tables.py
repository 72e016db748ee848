"""Page tables of padded steps: on the device, a row for each sequence, and sent again only where one changed.

A sequence that decodes keeps its row from step to step. What a row holds is known by the stamp of the tables that it
was filled from (`SequenceSlice.stamp`): with the one that is wanted it is good, whoever joined, left or came back
meanwhile. Knows neither steps nor kernels. Invariant: a row is ABSENT behind its table, and as a whole if it is
nobody's.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from wicore_trt.runtime.batch import SequenceSlice
from wicore_trt.runtime.cuda_device import Device
from wicore_trt.runtime.step_inputs import ABSENT, page_table

NOBODY, EMPTY = object(), array("i")
"""Of a row of nobody: the stamp, and the table."""


@dataclass(frozen=True)
class Changes:
    """Rows to be written, and what: `tables` int32 [groups, rows, width], of width 0 for no rows."""

    rows: list[int]
    tables: np.ndarray


class HeldTables:
    """`on_device` int32 [groups, rows, pages]. Who takes `changes` is to write them there before a step reads it."""

    def __init__(self, groups: Sequence[str], rows: int, pages: int, device: Device) -> None:
        self.on_device = device.empty((len(groups), rows, pages), torch.int32).fill_(ABSENT)
        self.pages, self._groups = pages, tuple(groups)
        self._stamps: list[object] = [NOBODY] * rows
        self._least, self._most = np.zeros(rows, np.int32), np.zeros(rows, np.int32)  # pages of a row's tables
        self._seq_ids: list[int] = []
        self._order: list[int] = []

    def forget(self) -> None:
        """What the device holds is not known."""
        self._stamps = [None] * len(self._stamps)
        self._most[:] = self.pages

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

    def changes(self, owners: Sequence[SequenceSlice | None], num_pages: Mapping[str, int]) -> Changes:
        """What is to be written so that the first rows are those of `owners`, None is nobody. The pools have
        `num_pages`."""
        held, wanted = self._stamps, [NOBODY if piece is None else piece.stamp for piece in owners]
        changed = [row for row, stamp in enumerate(wanted) if stamp is not held[row] or stamp is None]
        if not changed:
            return Changes([], np.zeros((len(self._groups), 0, 0), np.int32))
        pieces, count = [owners[row] for row in changed], len(changed)
        tables = [EMPTY if piece is None else piece.pages[g] for g in self._groups for piece in pieces]
        lengths = np.minimum([*map(len, tables)], self.pages)
        each = lengths.reshape(-1, count)
        most = each.max(0)
        inside = np.arange(max(most.max(), self._most[changed].max())) < lengths[:, None]
        found = page_table(tables, lengths, inside, max(num_pages.values())).reshape(len(self._groups), count, -1)
        for group, part in zip(self._groups, found, strict=True):
            assert not part.size or part.max() < num_pages[group], "a page is outside its pool"
        held[: len(wanted)] = wanted
        self._least[changed], self._most[changed] = each.min(0), most
        return Changes(changed, found)

    def lengths(self, count: int) -> np.ndarray:
        """How many pages each of the first rows has, at least."""
        return self._least[:count]
