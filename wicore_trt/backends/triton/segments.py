"""Attention of long slices: keys that all rows of a slice see go to cuDNN, the rest to the kernel that knows pages.

Knows a layer's queries and pages and where a step's slices lie; neither models nor requests. Invariants:
`plugins.decode_layout.Segments`, which the kernel uses too, divides a row's keys between both without overlap; an
absent page makes every row that sees it NaN; each process compares cuDNN with plain operators before using it, because
no interface promises the meaning of the sums that it returns.

Pages of a segment are gathered side by side in the queries' type. For 27B that moves 16 KB a token and layer twice, a
few percent of the product's time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from wicore_trt.backends.triton import products
from wicore_trt.backends.triton.memory import Allocator, StepLimits
from wicore_trt.backends.triton.roles import ADD_SEGMENT, GATHER, SEGMENT_ROLES
from wicore_trt.backends.triton.table import EngineShape, KernelTable
from wicore_trt.model.spec import GROUPS
from wicore_trt.plugins.decode_layout import MEASURED_SEGMENTS, Segments, add_segment_launch, gather_launch
from wicore_trt.plugins.launch import Launcher
from wicore_trt.plugins.layout import Pool, Tables
from wicore_trt.runtime.dtypes import TORCH_DTYPES

log = logging.getLogger(__name__)

CHECKED_ROWS = 16
TOLERANCE = 0.02
"""Largest error of a result's norm and of its sums of exponentials: 16-bit products err by a tenth of it."""


class LongSlice(NamedTuple):
    """Tokens of one sequence in a step: `row` of the first, `length`, `first` position, and row of the page tables.
    Both rows count from the first of all such slices."""

    row: int
    length: int
    first: int
    table: int


class SegmentAttention:
    """Attention of `segments` with its memory: `lse` float32 [tokens, heads], keys and values of one product."""

    def __init__(
        self, shape: EngineShape, table: KernelTable, limits: StepLimits, segments: Segments, empty: Allocator
    ) -> None:
        pool, self._heads = shape.pool_shapes[GROUPS[0]], shape.spec.num_heads
        self.segments, self._table = segments, table
        most = segments.most if limits.positions > segments.most * segments.tokens else 1
        self._dense = empty((2, most * segments.tokens, pool.kv_heads, pool.head_dim), TORCH_DTYPES[shape.dtype])
        self.lse = empty((limits.tokens, self._heads), torch.float32)
        self._scale = shape.spec.query_pre_attn_scalar**-0.5
        self._checked: set[int] = set()  # threads: torch keeps what it prepares for cuDNN for each of them
        self.wanted = False
        """True once cuDNN's attention was found to be right."""

    def find_long_slices(self, slices: Sequence[LongSlice]) -> list[tuple[LongSlice, int]]:
        """List slices with segments, and how many of their rows take part."""
        found = [(piece, self.segments.dense_rows(piece.first, piece.length)) for piece in slices]
        return [(piece, rows) for piece, rows in found if rows and self.wanted]

    def add_segments(
        self,
        launcher: tuple[Launcher, int],
        q: torch.Tensor,
        sums: torch.Tensor,
        out: torch.Tensor,
        pool: Pool,
        tables: Tables,
        slices: Sequence[LongSlice],
    ) -> None:
        """Complete `out` [tokens, heads * D] from `sums` (float32, same shape) and `lse`, which the kernel left. q has
        `segments.rows` rows more than there are tokens, of any content."""
        start, take, heads, dim = 0, self.segments.rows, self._heads, pool.shape.head_dim
        for piece, rows in self.find_long_slices(slices):
            out[start : piece.row].copy_(sums[start : piece.row])
            start = piece.row + rows
            gather, adding = (self._table.find_entry(role, rows).kernel for role in (GATHER, ADD_SEGMENT))
            table = tables.pointer + 4 * piece.table * tables.length, tables.length
            spans = list(self.segments.spans(piece.first))
            for span in spans:
                dense = self._dense[:, : span[1]]
                to = (dense.data_ptr(), self._dense.stride(0))
                launcher[0].launch(gather, gather_launch(gather.constants, pool, table, span, to), launcher[1])
                for row in range(piece.row, start, take):
                    queries = q[row : row + take].view(take, heads, dim)
                    part, lse = products.full_attention(queries, dense[0], dense[1], self._scale)
                    call = add_segment_launch(
                        adding.constants, (sums[row:].data_ptr(), self.lse[row:].data_ptr()),
                        (part.data_ptr(), lse.data_ptr()), (part.stride(0), part.stride(1)), take,
                        min(take, start - row), out[row:].data_ptr(), last=span == spans[-1],
                    )  # fmt: skip
                    launcher[0].launch(adding, call, launcher[1])
        out[start:].copy_(sums[start:])

    def check_library(self, q: torch.Tensor) -> None:
        """Prepare this thread's products and compare a few rows; a library that computes something else is not used. q:
        memory of `segments.rows` rows of queries, which are overwritten."""
        if threading.get_ident() in self._checked:
            return
        self._checked.add(threading.get_ident())
        self.wanted = False
        rows = q[: self.segments.rows].view(-1, self._heads, self._dense.shape[3]).normal_()
        for keys in sorted({self.segments.tokens, self._dense.shape[1]}):
            k, v = self._dense[:, :keys].normal_()
            try:
                part, lse = products.full_attention(rows, k, v, self._scale)
                want, sums = _attend_plainly(rows[:CHECKED_ROWS], k, v, self._scale)
            except RuntimeError as error:  # out of memory, too
                log.warning("cuDNN has no attention for long prompts here: %s", error)
                return
            worst = float((part[:CHECKED_ROWS].float() - want).norm() / want.norm())
            off = float((lse[:, :CHECKED_ROWS] - sums).abs().max())
            if not (worst < TOLERANCE and off < TOLERANCE and lse.is_contiguous()):
                log.warning("cuDNN's attention is not used: its results err by %.2g, their sums by %.2g", worst, off)
                return
        self.wanted = True


def make_segment_attention(
    shape: EngineShape, table: KernelTable, limits: StepLimits, empty: Allocator
) -> SegmentAttention | None:
    """Make a SegmentAttention. Returns None where no step or sequence can be long enough, where a page is longer than a
    segment, and where kernels lack segments."""
    segments = MEASURED_SEGMENTS.get((table.target, shape.spec.head_dim))
    if segments is None or not all(map(table.role_entries, SEGMENT_ROLES)) or segments.tokens % shape.page_tokens:
        return None
    if limits.tokens < segments.least or limits.positions <= segments.tokens:
        return None
    return SegmentAttention(shape, table, limits, segments, empty)


def _attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    repeat, out, sums = q.shape[1] // k.shape[1], [], []
    for head in range(k.shape[1]):
        rows = q[:, head * repeat : (head + 1) * repeat].float()
        scores = torch.einsum("rhd,kd->rhk", rows, k[:, head].float()) * scale
        out.append(torch.einsum("rhk,kd->rhd", scores.softmax(2), v[:, head].float()))
        sums.append(scores.logsumexp(2))
    return torch.cat(out, 1), torch.cat(sums, 1).T
