"""A step's geometry on the device: one upload of one block of int32 from pinned memory.

Knows batches and page tables; neither weights nor kernels. Invariants: rows of sequences with one token come first; a
block of a padded step lies at addresses that its sizes fix, so a CUDA graph may read it; what pads it are rows of
nobody, token -1, position -1, length 0, pages -1, and chunks of no tokens.
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
from wicore_trt.backends.triton.segments import LongSlice
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

    def holds(self, tokens: int, singles: int, chunks: int) -> bool:
        """Whether a step of `tokens` tokens, of `singles` and `chunks` sequences, can be padded to this one."""
        return tokens - singles <= self.tokens - self.singles and singles <= self.singles and chunks <= self.chunks

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


def decode_size(rows: int) -> StepSizes:
    """A padded step of sequences with one token each."""
    return StepSizes(rows, rows, rows, 0, 0)


class StepBlock:
    """The block on both sides, and for graphs page tables of full length, whose rows do not move. The host has two, in
    turn: a step may be put on the stream while the device still reads what the one before it sent, and no more."""

    def __init__(
        self, limits: StepLimits, groups: Sequence[str], page_tokens: int, padded: int, device: Device
    ) -> None:
        """`padded`: the most sequences, and sampled rows, of a padded step, 0 for none."""
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
        step = self._arrays(shape, at, {g: (base + 4 * at[g], shape.pages) for g in self._groups})
        rows = starts[singles:-1] - starts[singles]
        places = zip(rows, lengths[singles:], arrays["first_positions"], range(shape.chunks), strict=True)
        return replace(step, slices=tuple(LongSlice(*map(int, place)) for place in places))

    def upload_padded(self, inputs: StepInputs, singles: int, size: StepSizes, unread: Unread | None = None) -> None:
        """A step whose first `singles` slices have one token, padded for the graph of `padded(size)`: behind those, and
        behind the tokens of the others. Rows of logits are those of the singles, then of the chunks; a chunk's are its
        last token's."""
        size, count = replace(size, pages=_pages(inputs)), len(inputs.token_ids)
        arrays, offsets = self._fill(size)
        begin, end = size.singles, size.singles + count - singles  # of the chunks' tokens
        starts = inputs.cu_seqlens.numpy()[singles:] - singles
        chunks = len(starts) - 1
        for name in ("token_ids", "positions"):
            array, given = arrays[name], getattr(inputs, name).numpy()
            array[:singles], array[begin:end] = given[:singles], given[singles:]
            array[singles:begin] = array[end:] = -1
        rows = np.arange(begin, dtype=np.int32)
        arrays["sequences"][:begin] = arrays["sample_rows"][:begin] = rows
        arrays["sequences"][begin:end] = begin + np.repeat(np.arange(chunks, dtype=np.int32), np.diff(starts))
        arrays["sequences"][end:] = -1
        arrays["sample_rows"][begin : begin + chunks] = begin + starts[1:] - 1
        arrays["sample_rows"][begin + chunks :] = 0  # anyone's: nobody reads what is sampled there
        arrays["kv_lengths"][:] = arrays["positions"][:begin] + 1
        arrays["cu_seqlens"][: chunks + 1] = starts
        arrays["cu_seqlens"][chunks + 1 :] = starts[-1]
        arrays["first_positions"][:chunks] = arrays["positions"][begin + starts[:-1]]
        arrays["first_positions"][chunks:] = 0
        for group in self._groups:
            table, given = arrays[group].reshape(-1, size.pages), inputs.page_tables[group].numpy()
            table[:singles], table[begin : begin + chunks] = given[:singles], given[singles:]
            table[singles:begin] = table[begin + chunks :] = ABSENT
        arrays["sources"][:singles] = 0 if unread is None else unread.rows
        self._send(offsets[1])
        self._read(unread, offsets[0])
        sequences = size.singles + size.chunks
        for group, full in self._full.items():
            part = self._block[offsets[0][group] :][: sequences * size.pages]
            full[:sequences, : size.pages].copy_(part.view(sequences, size.pages))

    def padded(self, size: StepSizes) -> StepArrays:
        """Where `upload_padded` puts a step of this size."""
        tables = {g: (full.data_ptr(), self._pages) for g, full in self._full.items()}
        return self._arrays(size, size.offsets(self._groups)[0], tables)

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

    def _arrays(
        self, shape: StepSizes, offsets: Mapping[str, int], tables: Mapping[str, tuple[int, int]]
    ) -> StepArrays:
        base, others = self._block.data_ptr(), {*tables, "sources"}
        at: dict[str, Any] = {name: base + 4 * offset for name, offset in offsets.items() if name not in others}
        sampled = self._block[offsets["sample_rows"] :][: shape.rows] if shape.rows < shape.tokens else None
        sizes = (shape.tokens, shape.rows, shape.singles, shape.chunks)
        return StepArrays(*sizes, **at, tables=tables, sampled=sampled)

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
