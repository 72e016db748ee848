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
from itertools import compress
from operator import le, ne

import numpy as np
import torch

from wicore_trt.runtime.batch import SequenceSlice
from wicore_trt.runtime.cuda_device import Device
from wicore_trt.runtime.step_inputs import ABSENT

NOBODY, EMPTY = object(), array("i")
"""Of a row of nobody: the stamp, and the table."""


@dataclass(frozen=True)
class Changes:
    """Rows to be written, and what: `tables` int32 [groups, rows, width], of width 0 for no rows."""

    rows: list[int]
    tables: np.ndarray


class HeldTables:
    """`on_device` int32 [groups, rows, pages]. Who takes `changes` is to write them there before a step reads it.
    `tokens`: for how many each row has pages, at least."""

    def __init__(self, groups: Sequence[str], rows: int, pages: int, page_tokens: int, device: Device) -> None:
        self.on_device = device.empty((len(groups), rows, pages), torch.int32).fill_(ABSENT)
        self.tokens = [0] * rows
        self.pages, self._page_tokens, self._groups = pages, page_tokens, tuple(groups)
        self._stamps: list[object] = [NOBODY] * rows
        self._most = [0] * rows  # pages of a row's tables
        self._seq_ids: list[int] = []
        self._order: list[int] = []

    def forget(self) -> None:
        """What the device holds is not known."""
        self._stamps = [object()] * len(self._stamps)
        self._most = [self.pages] * len(self._most)

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
        wanted = [NOBODY if piece is None else piece.stamp or object() for piece in owners]
        changed = [*compress(range(len(wanted)), map(ne, wanted, self._stamps))]
        if not changed:
            return NO_CHANGES
        width = 0
        tables: list[list[Sequence[int]]] = []
        for row in changed:
            piece = owners[row]
            tables.append([EMPTY if piece is None else piece.pages[g] for g in self._groups])
            lengths = [min(len(table), self.pages) for table in tables[-1]]
            width = max(width, self._most[row], *lengths)
            self.tokens[row], self._most[row] = min(lengths) * self._page_tokens, max(lengths)
        by_group = [table for some in zip(*tables, strict=True) for table in some]
        found = np.frombuffer(b"".join([_row(table, width) for table in by_group]), np.int32)
        found = found.reshape(len(self._groups), len(changed), width)
        if width:  # kernels index the pools with these unchecked, so a bad page must stop here
            most = (found - ABSENT).view(np.uint32).reshape(len(self._groups), -1).max(1).tolist()
            assert all(map(le, most, [num_pages[g] for g in self._groups])), "a page is outside its pool"
        self._stamps[: len(wanted)] = wanted
        return Changes(changed, found)


NO_CHANGES = Changes([], np.zeros((0, 0, 0), np.int32))


def _row(table: Sequence[int], width: int) -> bytes:
    """The first `width` pages of a table, and ABSENT behind it."""
    pages = table if isinstance(table, array) else array("i", table)
    return pages.tobytes()[: 4 * width].ljust(4 * width, b"\xff")
