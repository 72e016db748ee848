"""Which part of each unified tensor a tensor-parallel rank holds.

Pure arithmetic on shapes; knows neither files nor values. Invariant: for every tensor the ranks' parts, put back by
these ranges, are the whole, with KV heads repeated when there are fewer of them than ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from wicore_trt.checkpoint.names import Split, UnifiedTensor
from wicore_trt.errors import CheckpointError
from wicore_trt.model.spec import Gemma3Spec

MAX_TP = 64
"""Most ranks of a model: GPUs that reach each other fast enough."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part: for each stacked source a range of its rows, and a range of columns (None: all)."""

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None
    shape: tuple[int, ...]

    @property
    def row_count(self) -> int:
        return self.shape[0]


def check_tp(spec: Gemma3Spec, tp_size: int) -> None:
    """Raise CheckpointError, naming what does not divide, when `spec` cannot be split over `tp_size` ranks."""
    if not 1 <= tp_size <= MAX_TP:
        raise CheckpointError(f"tp must be at least 1 and at most {MAX_TP}, got {tp_size}.")
    if spec.num_heads % tp_size:
        raise CheckpointError(f"{spec.num_heads} attention heads do not divide by tp {tp_size}.")
    if spec.num_kv_heads % tp_size and tp_size % spec.num_kv_heads:
        raise CheckpointError(f"{spec.num_kv_heads} KV heads can be neither split nor repeated over tp {tp_size}.")
    if spec.intermediate_size % tp_size:
        raise CheckpointError(f"intermediate_size {spec.intermediate_size} does not divide by tp {tp_size}.")
    if spec.vocab_size % tp_size:
        raise CheckpointError(
            f"vocab_size {spec.vocab_size} does not divide by tp {tp_size}, and the embedding is split by tokens.",
            fix="Use a tp that divides it.",
        )


def shard_of(tensor: UnifiedTensor, spec: Gemma3Spec, rank: int, tp_size: int) -> Shard:
    """The part of `tensor` on `rank` of `tp_size` (which check_tp has accepted)."""
    rows, rest = tensor.shape[0], tensor.shape[1:]
    if tensor.split is Split.QKV:
        q = _even(spec.q_size, rank, tp_size)
        kv = _kv_rows(spec, rank, tp_size)
        return Shard((q, kv, kv), None, (q[1] - q[0] + 2 * (kv[1] - kv[0]), *rest))
    if tp_size == 1 or tensor.split is Split.NONE:
        return Shard(((0, rows),), None, tensor.shape)
    if tensor.split is Split.ROWS:
        span = _even(rows, rank, tp_size)
        return Shard((span,), None, (span[1] - span[0], *rest))
    span = _even(rest[0], rank, tp_size)
    return Shard(((0, rows),), span, (rows, span[1] - span[0]))


def _even(size: int, rank: int, tp_size: int) -> tuple[int, int]:
    part = size // tp_size
    return rank * part, (rank + 1) * part


def _kv_rows(spec: Gemma3Spec, rank: int, tp_size: int) -> tuple[int, int]:
    """Rows of K (or V) on a rank; with fewer KV heads than ranks, neighbours share one head."""
    if spec.num_kv_heads % tp_size == 0:
        return _even(spec.kv_size, rank, tp_size)
    head = rank // (tp_size // spec.num_kv_heads)
    return head * spec.head_dim, (head + 1) * spec.head_dim
