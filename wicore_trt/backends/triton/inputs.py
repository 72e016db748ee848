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
from wicore_trt.backends.triton.table import PROMPT_BUCKETS, PROMPT_CHUNKS
from wicore_trt.backends.triton.tables import Changes, HeldTables
from wicore_trt.runtime.batch import UNREAD, SequenceSlice
from wicore_trt.runtime.cuda_device import Device
from wicore_trt.runtime.step_inputs import StepInputs

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


def prompt_sizes(tokens: int, rows: int) -> list[StepSizes]:
    """Padded steps with prompts, those of the fewest tokens first: of so many tokens at most, of which so many
    sequences at most decode one each."""
    found = [
        StepSizes(count, singles + PROMPT_CHUNKS, singles, PROMPT_CHUNKS, 0)
        for singles, counts in PROMPT_BUCKETS.items()
        for count in counts
        if count <= tokens and singles <= rows
    ]
    return sorted(found, key=lambda size: (size.tokens, size.singles))


def prompts_held(sizes: Sequence[StepSizes]) -> dict[int, tuple[int, ...]]:
    """Tokens of prompts that padded steps have room for, by how many sequences decode beside them
    (`Executor.graph_sizes`)."""
    rows = sorted({size.singles for size in sizes})
    return {n: tuple(sorted({size.tokens - size.singles for size in sizes if size.singles >= n})) for n in rows}


class StepBlock:
    """The block on both sides, and for graphs page tables of full length, whose rows do not move. The host has two, in
    turn: a step may be put on the stream while the device still reads what the one before it sent, and no more."""

    def __init__(
        self, limits: StepLimits, groups: Sequence[str], page_tokens: int, padded: int, device: Device
    ) -> None:
        """`padded`: the most sequences, and sampled rows, of a padded step, 0 for none."""
        self._groups, self._page_tokens = tuple(groups), page_tokens
        pages = div_ceil(limits.positions, page_tokens)
        tokens = max(limits.tokens, padded)
        # Whatever divides the sequences into singles and chunks, this holds it.
        largest = StepSizes(tokens, max(limits.rows, padded), tokens, tokens, 0)
        tables = max(limits.rows, padded) * (len(groups) * pages + 2) + len(groups) * ALIGNMENT + ALIGNMENT
        self._hosts = [device.staging((largest.offsets(groups)[1] + tables,)) for _ in range(2)]
        self._block = device.empty(tuple(self._hosts[0].shape), torch.int32)
        self._held = HeldTables(self._groups, padded, pages, device)

    def upload(self, inputs: StepInputs, singles: int, unread: Unread | None = None) -> StepArrays:
        """A step as it is; its first `singles` slices have one token. Nothing waits."""
        lengths = inputs.cu_seqlens.diff().numpy()
        pages = next(iter(inputs.page_tables.values())).shape[1]
        shape = StepSizes(len(inputs.token_ids), len(inputs.sample_rows), singles, len(lengths) - singles, pages)
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

    def upload_padded(
        self,
        slices: Sequence[SequenceSlice],
        size: StepSizes,
        num_pages: Mapping[str, int],
        unread: Unread | None = None,
    ) -> None:
        """A step whose first slices have one token, padded for the graph of `padded(size)`: behind those, and behind
        the tokens of the others. Rows of logits are those of the singles, then of the chunks; a chunk's are its last
        token's. The pools have `num_pages`."""
        arrays, (offsets, end) = self._fill(size)
        singles, begin = len(slices) if not size.chunks else [len(s.token_ids) for s in slices].count(1), size.singles
        alone, chunks, starts = slices[:singles], slices[singles:], np.array([s.start for s in slices], np.int32)
        assert starts.min() >= 0, "a step has slices"
        tokens, positions = arrays["token_ids"], arrays["positions"]
        tokens[singles:] = positions[singles:] = -1
        tokens[:singles] = UNREAD if unread is not None else [s.token_ids[0] for s in alone]
        positions[:singles] = starts[:singles]
        arrays["sequences"][:begin] = arrays["sample_rows"][:begin] = np.arange(begin, dtype=np.int32)
        arrays["kv_lengths"][:] = positions[:begin] + 1
        arrays["sources"][:singles] = 0 if unread is None else unread.rows
        arrays["cu_seqlens"][:] = 0
        if size.chunks:
            self._fill_chunks(arrays, chunks, starts[singles:], size)
        owners = [*alone, *[None] * (begin - singles), *chunks, *[None] * (size.chunks - len(chunks))]
        changes = self._held.changes(owners, num_pages)
        lasts = np.append(positions[:begin], [s.start + len(s.token_ids) - 1 for s in chunks]).astype(np.int32)
        assert (self._held.lengths(len(lasts)) > lasts // self._page_tokens).all(), "a page is missing"
        tables, last = self._put(changes, end)
        self._send(last)
        self._read(unread, offsets)
        self._take(changes, end, tables)

    def _fill_chunks(
        self, arrays: dict[str, np.ndarray], chunks: Sequence[SequenceSlice], starts: np.ndarray, size: StepSizes
    ) -> None:
        """What a padded step has of sequences with several tokens."""
        begin, count, bounds = size.singles, len(chunks), np.cumsum([0, *(len(s.token_ids) for s in chunks)])
        lengths, end = np.diff(bounds), begin + bounds[-1]
        if count:
            arrays["token_ids"][begin:end] = [token for s in chunks for token in s.token_ids]
            arrays["positions"][begin:end] = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths)
            arrays["sequences"][begin:end] = begin + np.repeat(np.arange(count), lengths)
            arrays["sample_rows"][begin : begin + count] = begin + bounds[1:] - 1
            arrays["first_positions"][:count] = starts
        arrays["sequences"][end:] = -1
        arrays["sample_rows"][begin + count :] = 0  # anyone's: nobody reads what is sampled there
        arrays["first_positions"][count:] = 0
        arrays["cu_seqlens"][: count + 1] = bounds
        arrays["cu_seqlens"][count + 1 :] = bounds[-1]

    def _put(self, changes: Changes, at: int) -> tuple[int, int]:
        """Write changes to the host's block from `at` on, their rows as int64: where the tables lie, and the end."""
        host, rows, values = self._hosts[0].numpy(), np.array(changes.rows, np.int64), changes.tables.ravel()
        tables = at + div_ceil(2 * len(rows), ALIGNMENT) * ALIGNMENT
        end = tables + div_ceil(values.size, ALIGNMENT) * ALIGNMENT
        assert end <= len(host), "the step is larger than the executor's limits"
        host[at : at + 2 * len(rows)], host[tables : tables + values.size] = rows.view(np.int32), values
        return tables, end

    def _take(self, changes: Changes, at: int, tables: int) -> None:
        """Put changes from the device's block where the kernels read them."""
        if changes.rows:
            rows = self._block[at:][: 2 * len(changes.rows)].view(torch.int64)
            new = self._block[tables:][: changes.tables.size].view(changes.tables.shape)
            self._held.on_device[:, :, : new.shape[2]].index_copy_(1, rows, new)

    def forget(self) -> None:
        """A step did not get on the stream as a whole: the device may lack tables that it was to be sent."""
        self._held.forget()

    def order(self, slices: Sequence[SequenceSlice]) -> list[int]:
        """Indices of `slices` with those of one token first, each in the row where its tables are, if it can be."""
        counts = [len(s.token_ids) for s in slices]
        if counts.count(1) == len(counts):
            return self._held.places([s.seq_id for s in slices])
        alone = [i for i, count in enumerate(counts) if count == 1]
        places = self._held.places([slices[i].seq_id for i in alone])
        return [*(alone[i] for i in places), *(i for i, count in enumerate(counts) if count > 1)]

    def padded(self, size: StepSizes) -> StepArrays:
        """Where `upload_padded` puts a step of this size."""
        held = zip(self._groups, self._held.on_device, strict=True)
        tables = {group: (table.data_ptr(), self._held.pages) for group, table in held}
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
