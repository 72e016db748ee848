"""Geometry of a step on the device: one upload of one block of int32 from pinned memory.

Knows batches and page tables; neither weights nor kernels. Invariants: rows lie as `rows.RowPlan` says. A padded step's
block lies at addresses that its plan fixes, so a CUDA graph may read it. Padding is rows of nobody: token -1, position
-1, length 0, pages -1, and chunks of no tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import le, lt, ne
from typing import Any

import numpy as np
import torch

from wicore_trt.arithmetic import div_ceil
from wicore_trt.backends.triton.memory import StepLimits
from wicore_trt.backends.triton.ops import StepArrays
from wicore_trt.backends.triton.rows import DECODE_ROWS, RowGroup, RowPlan, plan_rows
from wicore_trt.backends.triton.segments import LongSlice
from wicore_trt.runtime.batch import SequenceSlice
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.step_inputs import ABSENT, StepInputs

ALIGNMENT = 4  # int32s: 16 bytes
SENT = 1024
"""The block is sent in parts of so many int32s, so that there are few tensors that stand for what is sent."""

CHANGED = 64
"""Most tensors that are kept for changes of tables."""


def array_sizes(plan: RowPlan, groups: Sequence[str], pages: int = 0) -> dict[str, int]:
    """Count int32s of each array of a step, in the order of the block; tables of `pages` for each sequence come last.
    Only steps with images have key ends."""
    return {
        **dict.fromkeys(("token_ids", "positions", "sequences"), plan.tokens), "sample_rows": plan.sampled,
        "kv_lengths": plan.decode.sequences, "sources": plan.decode.rows, "cu_seqlens": plan.prefill.sequences + 1,
        "first_positions": plan.prefill.sequences, "key_ends": plan.tokens if plan.images else 0,
        **dict.fromkeys(groups, plan.sequences * pages),
    }  # fmt: skip


def array_offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Compute offsets of the arrays in the block, in int32s, and the end of the block."""
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = at
        at += div_ceil(size, ALIGNMENT) * ALIGNMENT
    return found, at


@dataclass(frozen=True)
class Unread:
    """Token ids that the step before sampled and left on the device: those of `rows` of `tokens` (int32). Sequences of
    the step have one token each."""

    tokens: torch.Tensor
    rows: Sequence[int]


@dataclass(frozen=True)
class Padding:
    """Padding for steps of one plan: a `blank` block with rows of nobody, and arrays and bounds in both host blocks."""

    blank: np.ndarray
    arrays: Sequence[Mapping[str, np.ndarray]]
    offsets: Mapping[str, int]
    end: int


NOBODY, EMPTY = object(), array("i")
"""Stamp and table of a row of nobody."""


@dataclass(frozen=True)
class TableUpdate:
    """Rows to be written and their `tables` int32 [groups, rows, width]; width 0 for no rows."""

    rows: list[int]
    tables: np.ndarray


class HeldTables:
    """Page tables of padded steps on the device, a row for each sequence, sent again only where one changed.

    A sequence that decodes keeps its row from step to step. A row is valid if the stamp of the tables that filled it
    (`SequenceSlice.stamp`) is the wanted one, whoever joined, left or came back meanwhile (I7). Invariant: a row is
    ABSENT behind its table, and as a whole if it is nobody's. `on_device` is int32 [groups, rows, pages]; the caller
    of `find_changes` writes the changes there before a step reads it. `tokens`: for how many each row has pages, at
    least."""

    def __init__(self, groups: Sequence[str], rows: int, pages: int, page_tokens: int, device: CudaDevice) -> None:
        self.on_device = device.empty((len(groups), rows, pages), torch.int32).fill_(ABSENT)
        self.tokens = [0] * rows
        self.pages, self._page_tokens, self._groups = pages, page_tokens, tuple(groups)
        self._stamps: list[object] = [NOBODY] * rows
        self._most = [0] * rows  # pages of a row's tables
        self._seq_ids: list[int] = []
        self._order: list[int] = []

    def forget_rows(self) -> None:
        """Forget page tables on the device after a step failed to reach the stream whole."""
        self._stamps = [object()] * len(self._stamps)
        self._most = [self.pages] * len(self._most)

    def assign_rows(self, seq_ids: list[int]) -> list[int]:
        """Assign a sequence (by index) to each of the first rows. Sequences keep their rows; others fill gaps."""
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

    def find_changes(self, owners: Sequence[SequenceSlice | None], num_pages: Mapping[str, int]) -> TableUpdate:
        """Find the update that makes the first rows those of `owners` (None: nobody). Pools have `num_pages`."""
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
        found = np.frombuffer(b"".join([_pad_row(table, width) for table in by_group]), np.int32)
        found = found.reshape(len(self._groups), len(changed), width)
        if width:  # kernels index the pools with these unchecked, so a bad page must stop here
            most = (found - ABSENT).view(np.uint32).reshape(len(self._groups), -1).max(1).tolist()
            assert all(map(le, most, [num_pages[g] for g in self._groups])), "a page is outside its pool"
        self._stamps[: len(wanted)] = wanted
        return TableUpdate(changed, found)


NO_CHANGES = TableUpdate([], np.zeros((0, 0, 0), np.int32))


def _pad_row(table: Sequence[int], width: int) -> bytes:
    pages = table if isinstance(table, array) else array("i", table)
    return pages.tobytes()[: 4 * width].ljust(4 * width, b"\xff")


class StepBlock:
    """Block of a step on host and device, and for graphs page tables of full length, whose rows do not move. The host
    has two blocks, used in turn: a step may be submitted while the device still reads the one before."""

    def __init__(
        self,
        limits: StepLimits,
        groups: Sequence[str],
        page_tokens: int,
        padded: int,
        device: CudaDevice,
        vocab: int = 0,
    ) -> None:
        """Allocate; `padded` is the most sequences, and sampled rows, of a padded step, 0 for none. Ids from `vocab` on
        name rows of images' features."""
        self._groups, self._page_tokens, self._vocab = tuple(groups), page_tokens, vocab
        pages = div_ceil(limits.positions, page_tokens)
        tokens = max(limits.tokens, padded)
        # However the rows are divided, this holds them.
        largest = RowPlan(tokens, max(limits.rows, padded), RowGroup(tokens, tokens), RowGroup(tokens, 0), True)
        tables = max(limits.rows, padded) * (len(groups) * pages + 2) + len(groups) * ALIGNMENT + ALIGNMENT
        end = array_offsets(array_sizes(largest, groups))[1]
        self._hosts = [device.staging((end + tables,)) for _ in range(2)]
        self._turn, self._host = 0, [host.numpy() for host in self._hosts]
        self._block = device.empty(tuple(self._hosts[0].shape), torch.int32)
        self.held = HeldTables(self._groups, padded, pages, page_tokens, device)
        self._paddings: dict[RowPlan, Padding] = {}
        self._sent: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}
        self._reads: tuple[tuple[int, int, int], Sequence[torch.Tensor]] | None = None
        self._changed: dict[tuple[int, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def upload_step(self, inputs: StepInputs, plan: RowPlan, unread: Unread | None = None) -> StepArrays:
        """Upload a step unpadded; its slices lie as in `plan`. Nothing waits."""
        assert plan.images == bool(inputs.images), "a plan of another step"
        lengths, starts = inputs.cu_seqlens.diff().numpy(), inputs.cu_seqlens.numpy()
        pages, first = next(iter(inputs.page_tables.values())).shape[1], plan.decode.sequences
        plan = plan._replace(sampled=len(inputs.sample_rows))
        sizes = array_sizes(plan, self._groups, pages)
        offsets, end = array_offsets(sizes)
        assert end <= len(self._block), "the step is larger than the executor's limits"
        arrays = self._view_arrays(self._next_host(), sizes, offsets)
        arrays["token_ids"][:] = inputs.token_ids.numpy()
        arrays["positions"][:] = inputs.positions.numpy()
        arrays["sequences"][:] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        arrays["sample_rows"][:] = inputs.sample_rows.numpy()
        arrays["kv_lengths"][:] = inputs.positions.numpy()[:first] + 1
        arrays["cu_seqlens"][:] = starts[first:] - starts[first]
        arrays["first_positions"][:] = inputs.positions.numpy()[starts[first:-1]]
        self._place_images(arrays, inputs.images)
        for group in self._groups:
            arrays[group][:] = inputs.page_tables[group].numpy().ravel()
        arrays["sources"][:] = 0 if unread is None else unread.rows
        self._send_block(end)
        self._copy_unread(unread, offsets)
        base = self._block.data_ptr()
        step = self._place_arrays(plan, offsets, {g: (base + 4 * offsets[g], pages) for g in self._groups})
        rows, tables = starts[first:-1] - starts[first], range(plan.prefill.sequences)
        places = zip(rows, lengths[first:], arrays["first_positions"], tables, strict=True)
        found = tuple(LongSlice(*map(int, place)) for place in places)
        return replace(step, slices=found)

    def upload_padded(
        self,
        slices: Sequence[SequenceSlice],
        plan: RowPlan,
        size: RowPlan,
        num_pages: Mapping[str, int],
        unread: Unread | None = None,
    ) -> None:
        """Upload slices that lie as in `plan`, padded behind the rows of each group for the graph of
        `padded_arrays(size)`. Logits have rows for sequences that decode, then the last row of each other sequence.
        Pools have `num_pages`."""
        host, padding = self._next_host(), self._find_padding(size)
        arrays, begin, first = padding.arrays[self._turn], size.decode.sequences, plan.decode.sequences
        decoding, others, positions = slices[:first], slices[first:], arrays["positions"]
        host[: padding.end] = padding.blank
        if unread is None:
            arrays["token_ids"][:first] = [s.token_ids[0] for s in decoding]
        else:
            arrays["sources"][:first] = array("i", unread.rows)
        starts = [s.start for s in decoding]
        positions[:first], arrays["kv_lengths"][:first] = array("i", starts), array("i", [n + 1 for n in starts])
        owners: list[SequenceSlice | None] = [*decoding, *[None] * (begin - first)]
        lasts = starts + [-1] * (begin - first)
        if size.prefill.sequences:
            self._fill_prefill(arrays, others, begin)
            owners += [*others, *[None] * (size.prefill.sequences - len(others))]
            lasts += [s.start + len(s.token_ids) - 1 for s in others]
        changes = self.held.find_changes(owners, num_pages)
        assert all(map(lt, lasts, self.held.tokens)), "a page is missing"
        tables, last = self._write_update(host, changes, padding.end)
        self._send_block(last)
        self._copy_unread(unread, padding.offsets)
        self._apply_update(changes, padding.end, tables)

    def _fill_prefill(self, arrays: Mapping[str, np.ndarray], chunks: Sequence[SequenceSlice], begin: int) -> None:
        """Write the prefill rows of a padded step, the first of which is row `begin`. No two logits are of one row:
        `kernels.norm.add_norm` would add to its residual twice, at any time."""
        count, bounds = len(chunks), np.cumsum([0, *(len(s.token_ids) for s in chunks)])
        lengths, end, starts = np.diff(bounds), begin + bounds[-1], np.array([s.start for s in chunks], np.int32)
        sampled = (begin + bounds[1:] - 1).tolist()
        sampled += [row for row in range(begin, len(arrays["sample_rows"])) if row not in sampled]
        arrays["sample_rows"][begin:] = sampled[: len(arrays["sample_rows"]) - begin]
        if count:
            arrays["token_ids"][begin:end] = [token for s in chunks for token in s.token_ids]
            arrays["positions"][begin:end] = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths)
            arrays["sequences"][begin:end] = begin + np.repeat(np.arange(count), lengths)
            arrays["first_positions"][:count] = starts
        places = zip((begin + bounds).tolist(), chunks, strict=False)
        self._place_images(arrays, [(row + first, n, slot) for row, s in places for first, n, slot in s.images])
        arrays["cu_seqlens"][: count + 1] = bounds
        arrays["cu_seqlens"][count + 1 :] = bounds[-1]

    def _place_images(self, arrays: Mapping[str, np.ndarray], images: Iterable[tuple[int, int, int]]) -> None:
        """Let rows of images (first row, count, slot) read features and see one another; text sees what is before it.
        Positions and token ids are there."""
        if not len(arrays["key_ends"]):
            return
        arrays["key_ends"][:] = arrays["positions"] + 1
        for first, count, slot in images:
            rows = slice(first, first + count)
            arrays["token_ids"][rows] = np.arange(count) + (self._vocab + slot * count)
            arrays["key_ends"][rows] = arrays["positions"][first] + count

    def _write_update(self, host: np.ndarray, changes: TableUpdate, at: int) -> tuple[int, int]:
        """Write changes to the host's block from `at` on, rows as int64; returns where the tables lie, and the end."""
        if not changes.rows:
            return at, at
        rows, values = np.array(changes.rows, np.int64), changes.tables.ravel()
        tables = at + div_ceil(2 * len(rows), ALIGNMENT) * ALIGNMENT
        end = tables + div_ceil(values.size, ALIGNMENT) * ALIGNMENT
        assert end <= len(host), "the step is larger than the executor's limits"
        host[at : at + 2 * len(rows)], host[tables : tables + values.size] = rows.view(np.int32), values
        return tables, end

    def _apply_update(self, changes: TableUpdate, at: int, tables: int) -> None:
        if not changes.rows:
            return
        where = at, changes.tables.shape
        if where not in self._changed:  # to make tensors takes longer than to use them
            rows = self._block[at : at + 2 * len(changes.rows)].view(torch.int64)
            new = self._block[tables : tables + changes.tables.size].view(changes.tables.shape)
            if len(self._changed) >= CHANGED:
                self._changed.clear()
            self._changed[where] = self.held.on_device.narrow(2, 0, new.shape[2]), rows, new
        table, rows, new = self._changed[where]
        table.index_copy_(1, rows, new)

    def arrange_slices(self, slices: Sequence[SequenceSlice]) -> tuple[list[SequenceSlice], RowPlan]:
        """Order the slices as their rows lie, and make the plan. Slices that decode keep the row of their page table if
        possible."""
        counts = [len(s.token_ids) for s in slices]
        plan = plan_rows(counts)._replace(images=any(s.images for s in slices))
        if not plan.prefill.sequences:
            return [slices[i] for i in self.held.assign_rows([s.seq_id for s in slices])], plan
        decoding = [s for s, count in zip(slices, counts, strict=True) if count <= DECODE_ROWS]
        places = self.held.assign_rows([s.seq_id for s in decoding])
        others = [s for s, count in zip(slices, counts, strict=True) if count > DECODE_ROWS]
        return [*(decoding[i] for i in places), *others], plan

    def padded_arrays(self, size: RowPlan) -> StepArrays:
        held = zip(self._groups, self.held.on_device, strict=True)
        tables = {group: (table.data_ptr(), self.held.pages) for group, table in held}
        return self._place_arrays(size, array_offsets(array_sizes(size, self._groups))[0], tables)

    def _next_host(self) -> np.ndarray:
        self._turn ^= 1
        return self._host[self._turn]

    @staticmethod
    def _view_arrays(host: np.ndarray, sizes: Mapping[str, int], offsets: Mapping[str, int]) -> dict[str, np.ndarray]:
        return {name: host[offsets[name] : offsets[name] + size] for name, size in sizes.items()}

    def _find_padding(self, size: RowPlan) -> Padding:
        found = self._paddings.get(size)
        if found is None:
            sizes = array_sizes(size, self._groups)
            offsets, end = array_offsets(sizes)
            assert end <= len(self._block), "the step is larger than the executor's limits"
            blank, begin = np.zeros(end, np.int32), size.decode.sequences
            arrays = self._view_arrays(blank, sizes, offsets)
            arrays["token_ids"][:] = arrays["positions"][:] = arrays["sequences"][:] = -1
            arrays["sequences"][:begin] = arrays["sample_rows"][:begin] = np.arange(begin)
            views = [self._view_arrays(host, sizes, offsets) for host in self._host]
            found = self._paddings[size] = Padding(blank, views, offsets, end)
        return found

    def _send_block(self, end: int) -> None:
        """Send the block up to `end`, rounded up to whole parts."""
        end = min(div_ceil(end, SENT) * SENT, len(self._host[0]))
        if (parts := self._sent.get(end)) is None:
            parts = self._sent[end] = self._block[:end], [host[:end] for host in self._hosts]
        parts[0].copy_(parts[1][self._turn], non_blocking=True)

    def _place_arrays(
        self, plan: RowPlan, offsets: Mapping[str, int], tables: Mapping[str, tuple[int, int]]
    ) -> StepArrays:
        base, others = self._block.data_ptr(), {*tables, "sources"}
        at: dict[str, Any] = {name: base + 4 * offset for name, offset in offsets.items() if name not in others}
        sampled = self._block[offsets["sample_rows"] :][: plan.sampled] if plan.sampled < plan.tokens else None
        return StepArrays(plan, **at, tables=tables, sampled=sampled)

    def _copy_unread(self, unread: Unread | None, offsets: Mapping[str, int]) -> None:
        if unread is None:
            return
        count, at, to = len(unread.rows), offsets["sources"], offsets["token_ids"]
        if self._reads is None or self._reads[0] != (count, at, to) or self._reads[1][0] is not unread.tokens:
            parts = self._block[at : at + count], self._block[to : to + count], unread.tokens[:count]
            self._reads = (count, at, to), (unread.tokens, *parts)
        tokens, sources, token_ids, first = self._reads[1]
        if unread.rows == [*range(count)]:  # nearly always
            token_ids.copy_(first)
        else:
            torch.index_select(tokens, 0, sources, out=token_ids)
