"""Lists kernels that may be launched before the one in front of them has ended, and says why no result changes.

That is programmatic dependent launch, which GPUs have from sm90 on. Plain data; knows functions by name, neither Triton
nor CUDA. Invariants, of every kernel launched so:

1. Every program waits (griddepcontrol.wait) before it reads anything that a kernel writes, and before its first write.
   Only what was written in front of the chain may be read before: weights, their scales and norm weights, and the
   step's geometry (lengths, page tables), whose upload the chain's first kernel follows.
2. The wait is unconditional: nothing can skip it, so no early return lies before it.

Then a chain of such kernels is ordered as if each began after the one in front had ended. The wait returns when the
kernel in front has ended and its writes are visible. That kernel has ended only if all of its programs did, which
waited too; so the one before it had ended, and so on to the first kernel that was launched ordinarily, which began
after all that its stream held. So after the wait every write of every kernel in front is seen, and none of them still
reads what is about to be overwritten, however far back it lies (scratch that kernels share included). When a kernel
tells that its dependents may be launched changes when they become resident, not what their wait waits for.

At the ends of a chain: what follows and is launched ordinarily (a copy, an event, a product of cuBLAS, a kernel of
torch) begins after the last kernel of the chain has ended, so after all of it. A dependent kernel behind anything else
than a kernel that tells (torch, a copy) is launched when that has ended; a library's kernel that tells waited itself if
it was launched early, as everybody must. The first kernel of a step, the embedding, is launched ordinarily: uploads,
copies and the step before, the same graph's last replay too, lie behind it as a whole. No cycle can form: a kernel is
launched when all programs of the one in front run or have ended, so what waits never takes the place of what it waits
for.
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

IN_CHAINS = frozenset(
    {
        *("add_norm", "qk_norm_rope_write", "quantize_rows", "quantize_parts", "linear_vector", "linear_matrix"),
        *(
            "split_decode",
            "combine_splits",
            "paged_prefill",
            "add_splits",
            "scan",
            "choose",
            "collect",
            "draw_filtered",
        ),
    }
)
"""Functions of kernels that take turns; all others are ORDINARY, `embed_norm` on purpose."""

FIRST_ARCHITECTURE = 90


def launches_dependents(target: str) -> bool:
    """True if GPUs of `target` ("sm90") know programmatic dependent launch."""
    return int(target.removeprefix("sm")) >= FIRST_ARCHITECTURE


def find_mode(function: str, target: str, *, crowds: bool = False) -> int:
    """The mode of a kernel by the name of its function; `crowds`: it lies behind a kernel that fills the GPU."""
    if function not in IN_CHAINS or not launches_dependents(target):
        return ORDINARY
    return ALONE if crowds else IN_TURN
