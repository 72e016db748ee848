"""Compute the part of each unified tensor that a tensor-parallel rank holds.

Knows neither files nor values. Invariant: for every tensor the ranks' parts, put back by these ranges, are the
whole, with KV heads repeated when there are fewer of them than ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from wicore_trt.checkpoint.names import Split, UnifiedTensor
from wicore_trt.model.spec import Gemma3Spec


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of one rank: a range of rows for each stacked source, and a range of columns (None: all)."""

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None
    shape: tuple[int, ...]


def shard_of(tensor: UnifiedTensor, spec: Gemma3Spec, rank: int, tp_size: int) -> Shard:
    """Compute the part of `tensor` on `rank` of `tp_size`. Raises what `Gemma3Spec.shard` raises."""
    part, (rows, *rest) = spec.shard(rank, tp_size), tensor.shape
    if tensor.split is Split.QKV:
        size = rows // (spec.num_heads + 2 * spec.num_kv_heads)
        q, kv = ((heads.start * size, heads.stop * size) for heads in (part.heads, part.kv_heads))
        return Shard((q, kv, kv), None, (q[1] - q[0] + 2 * (kv[1] - kv[0]), *rest))
    if tp_size == 1 or tensor.split is Split.NONE:
        return Shard(((0, rows),), None, tensor.shape)
    if tensor.split is Split.ROWS:
        span = _divide_evenly(rows, rank, tp_size)
        return Shard((span,), None, (span[1] - span[0], *rest))
    span = _divide_evenly(rest[0], rank, tp_size)
    return Shard(((0, rows),), span, (rows, span[1] - span[0]))


def _divide_evenly(size: int, rank: int, tp_size: int) -> tuple[int, int]:
    part = size // tp_size
    return rank * part, (rank + 1) * part
