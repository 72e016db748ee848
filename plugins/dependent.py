"""Lists kernels that may be launched before the one in front of them has ended, and explains why no result changes.

This is programmatic dependent launch, which GPUs have from sm90 on. Plain data; knows functions by name, neither Triton
nor CUDA. Invariants, of every kernel launched so:

1. Every program waits (griddepcontrol.wait) before it reads anything that a kernel writes, and before its first write.
   Before the wait it may read only what was written in front of the chain: weights, their scales and norm weights, and
   the step's geometry (lengths, page tables), whose upload the chain's first kernel follows.
2. The wait is unconditional: nothing can skip it, so no early return lies before it.

Then a chain of such kernels is ordered as if each began after the one in front had ended. The wait returns when the
kernel in front has ended and its writes are visible. That kernel ended only after all of its programs had waited; so
the one before it had ended, and so on to the first kernel. That one was launched ordinarily, after all that its stream
held. After the wait, every write of every kernel in front is therefore visible. None of them still reads what is about
to be overwritten, however far back it lies, shared scratch included. The moment at which a kernel releases its
dependents changes when they become resident, not what they wait for.

Ends of a chain: an ordinary launch that follows (a copy, an event, cuBLAS, a kernel of torch) begins after the chain's
last kernel, so after all of it. A dependent kernel behind one that releases nothing (torch, a copy) is launched when
that has ended; a library's kernel that releases early waited itself if it was launched early. The first kernel of a
step, the embedding, is launched ordinarily: uploads, copies and the step before, the same graph's last replay too, lie
behind it as a whole. No cycle can form: a kernel is launched when all programs of the one in front run or have ended,
so waiting programs never take the place of what they wait for.
"""

from __future__ import annotations

ORDINARY, IN_TURN, ALONE = 0, 1, 2
"""Modes of a kernel. IN_TURN: it is launched before the kernel in front has ended, and its own dependents may be
launched when its wait is over, so when nothing else runs any more; that takes place when all of its programs are
resident, so dependents only take room that it has no use for. To let them in before the wait would suit short kernels,
but a linear behind one would then become resident while the linear in front still runs: its programs crowd where the
GPU is free first, and the fullest multiprocessor sets the time (on an H100 5 % to 19 % of a step at 8 to 32 rows).

ALONE: launched ordinarily, and its own dependents as above. For a linear behind a kernel that fills the GPU itself,
where crowding would be the same, and for one link of the longest chain, gate and up of E4M3 rows: with it in turn a
step of 32 rows over FP8 KV took 13.8 ms on an H200, alone 12.9, and no step of 12 to 128 rows got slower."""

IN_CHAINS = (
    *("add_norm", "qk_norm_rope_write", "quantize_rows", "quantize_parts", "linear_vector", "linear_matrix"),
    *("linear_q4", "linear_q4_groups", "order_rows", "meet", "gather_columns"),
    *("split_decode", "combine_splits", "paged_prefill", "add_splits", "scan", "choose", "collect", "draw_filtered"),
)
"""Functions of kernels that take turns; all others are ORDINARY, `embed_norm` on purpose."""

FIRST_ARCHITECTURE = 90


def launches_dependents(target: str) -> bool:
    return int(target.removeprefix("sm")) >= FIRST_ARCHITECTURE


def find_mode(function: str, target: str, *, crowds: bool = False) -> int:
    """Choose the mode of a kernel by its function's name; `crowds`: it lies behind a kernel that fills the GPU."""
    if function not in IN_CHAINS or not launches_dependents(target):
        return ORDINARY
    return ALONE if crowds else IN_TURN
