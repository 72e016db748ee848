"""A step's geometry on the device: one upload of one block of int32 from pinned memory.

Knows batches and page tables; neither weights nor kernels. Invariants: rows of sequences with one token come first; a
block of a padded decode step lies at addresses that its number of rows fixes, so a CUDA graph may read it; what pads it
is a row of nobody: token -1, position -1, length 0, pages -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from wicore_trt.arithmetic import div_ceil
from wicore_trt.backends.triton.memory import StepLimits
from wicore_trt.backends.triton.ops import StepArrays
from wicore_trt.runtime.batch import SequenceSlice
from wicore_trt.runtime.cuda_device import Device
from wicore_trt.runtime.step_inputs import ABSENT, StepInputs

ALIGNMENT = 4  # int32s: 16 bytes


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a step: `tokens`, sampled `rows`, sequences with one token (`singles`) and with several (`chunks`), and
    the `pages` of its tables."""

    tokens: int
    rows: int
    singles: int
    chunks: int
    pages: int

    def sizes(self, groups: Sequence[str]) -> dict[str, int]:
        """int32s of each array, in the order of the block. Tables come last."""
        return {
            **dict.fromkeys(("token_ids", "positions", "sequences"), self.tokens),
            "sample_rows": self.rows,
            "kv_lengths": self.singles,
            "sources": self.singles,
            "cu_seqlens": self.chunks + 1,
            "first_positions": self.chunks,
            **dict.fromkeys(groups, (self.singles + self.chunks) * self.pages),
        }

    def offsets(self, groups: Sequence[str]) -> tuple[dict[str, int], int]:
        """Where each array begins in the block, in int32s, and where the block ends."""
        found, at = {}, 0
        for name, size in self.sizes(groups).items():
            found[name] = at
            at += div_ceil(size, ALIGNMENT) * ALIGNMENT
        return found, at


@dataclass(frozen=True)
class Unread:
    """The token ids of a step of sequences with one token each are on the device: those of `rows` of `tokens` (int32),
    which the step before sampled."""

    tokens: torch.Tensor
    rows: Sequence[int]


class StepBlock:
    """The block on both sides, and for graphs page tables of full length, whose rows do not move. The host has two, in
    turn: a step may be put on the stream while the device still reads what the one before it sent, and no more."""

    def __init__(
        self, limits: StepLimits, groups: Sequence[str], page_tokens: int, padded: int, device: Device
    ) -> None:
        """`padded`: the most rows of a padded step, 0 for none."""
        self._groups, self._pages = tuple(groups), div_ceil(limits.positions, page_tokens)
        tokens = max(limits.tokens, padded)
        # Whatever divides the sequences into singles and chunks, this holds it.
        largest = StepSizes(tokens, max(limits.rows, padded), tokens, tokens, 0)
        tables = len(groups) * max(limits.rows, padded) * self._pages + len(groups) * ALIGNMENT
        self._hosts = [device.staging((largest.offsets(groups)[1] + tables,)) for _ in range(2)]
        self._block = device.empty(tuple(self._hosts[0].shape), torch.int32)
        self._full = {g: device.empty((padded, self._pages), torch.int32).fill_(ABSENT) for g in groups if padded}

    def upload(self, inputs: StepInputs, singles: int, unread: Unread | None = None) -> StepArrays:
        """A step as it is; its first `singles` slices have one token. Nothing waits."""
        lengths = inputs.cu_seqlens.diff().numpy()
        shape = StepSizes(
            len(inputs.token_ids), len(inputs.sample_rows), singles, len(lengths) - singles, _pages(inputs)
        )
        arrays, offsets = self._fill(shape)
        starts = inputs.cu_seqlens.numpy()
        arrays["token_ids"][:] = inputs.token_ids.numpy()
        arrays["positions"][:] = inputs.positions.numpy()
        arrays["sequences"][:] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        arrays["sample_rows"][:] = inputs.sample_rows.numpy()
        arrays["kv_lengths"][:] = inputs.positions.numpy()[:singles] + 1
        arrays["cu_seqlens"][:] = starts[singles:] - starts[singles]
        arrays["first_positions"][:] = inputs.positions.numpy()[starts[singles:-1]]
        for group in self._groups:
            arrays[group][:] = inputs.page_tables[group].numpy().ravel()
        arrays["sources"][:] = 0 if unread is None else unread.rows
        self._send(offsets[1])
        self._read(unread, offsets[0])
        base, at = self._block.data_ptr(), offsets[0]
        step = _arrays(shape, base, at, {g: (base + 4 * at[g], shape.pages) for g in self._groups})
        if shape.rows < shape.tokens:
            step = replace(step, sampled=self._block[at["sample_rows"] :][: shape.rows])
        return step

    def upload_padded(self, inputs: StepInputs, rows: int, unread: Unread | None = None) -> None:
        """A step of sequences with one token each, padded to `rows` rows, for the graph of `padded(rows)`."""
        count, shape = len(inputs.token_ids), self._padded_shape(rows, _pages(inputs))
        arrays, offsets = self._fill(shape)
        for name in ("token_ids", "positions"):
            arrays[name][count:] = -1
        arrays["token_ids"][:count] = inputs.token_ids.numpy()
        arrays["positions"][:count] = inputs.positions.numpy()
        arrays["sequences"][:] = arrays["sample_rows"][:] = np.arange(rows, dtype=np.int32)
        arrays["kv_lengths"][:] = arrays["positions"] + 1
        arrays["cu_seqlens"][:] = 0
        for group in self._groups:
            table = arrays[group].reshape(rows, shape.pages)
            table[:count] = inputs.page_tables[group].numpy()
            table[count:] = ABSENT
        arrays["sources"][:count] = 0 if unread is None else unread.rows
        self._send(offsets[1])
        self._read(unread, offsets[0])
        for group, full in self._full.items():
            part = self._block[offsets[0][group] :][: rows * shape.pages]
            full[:rows, : shape.pages].copy_(part.view(rows, shape.pages))

    def padded(self, rows: int) -> StepArrays:
        """Where `upload_padded` puts a step of `rows` rows."""
        shape = self._padded_shape(rows, 0)
        tables = {g: (full.data_ptr(), self._pages) for g, full in self._full.items()}
        return _arrays(shape, self._block.data_ptr(), shape.offsets(self._groups)[0], tables)

    @staticmethod
    def _padded_shape(rows: int, pages: int) -> StepSizes:
        return StepSizes(rows, rows, rows, 0, pages)

    def _fill(self, shape: StepSizes) -> tuple[dict[str, np.ndarray], tuple[dict[str, int], int]]:
        """The host's arrays by name, as views, and the offsets."""
        offsets, end = shape.offsets(self._groups)
        assert end <= len(self._block), "the step is larger than the executor's limits"
        self._hosts.reverse()
        host = self._hosts[0].numpy()
        sizes = shape.sizes(self._groups)
        return {name: host[offsets[name] : offsets[name] + size] for name, size in sizes.items()}, (offsets, end)

    def _send(self, end: int) -> None:
        self._block[:end].copy_(self._hosts[0][:end], non_blocking=True)

    def _read(self, unread: Unread | None, offsets: Mapping[str, int]) -> None:
        """Put the tokens that the step before sampled where this one takes its token ids from."""
        if unread is not None:
            count, at, to = len(unread.rows), offsets["sources"], offsets["token_ids"]
            torch.index_select(unread.tokens, 0, self._block[at : at + count], out=self._block[to : to + count])


def ordered(slices: Sequence[SequenceSlice]) -> list[int]:
    """Indices of `slices` with those of one token first."""
    return sorted(range(len(slices)), key=lambda i: len(slices[i].token_ids) > 1)


def _pages(inputs: StepInputs) -> int:
    return next(iter(inputs.page_tables.values())).shape[1]


def _arrays(
    shape: StepSizes, base: int, offsets: Mapping[str, int], tables: Mapping[str, tuple[int, int]]
) -> StepArrays:
    at: dict[str, Any] = {n: base + 4 * offset for n, offset in offsets.items() if n not in {*tables, "sources"}}
    return StepArrays(shape.tokens, shape.rows, shape.singles, shape.chunks, **at, tables=tables)
