"""Which kernels may be launched before the one in front of them has ended, and why that changes no result.

That is programmatic dependent launch, which GPUs have from sm90 on. Plain data; knows functions by name, neither Triton
nor CUDA. Invariants, of every kernel launched so:

1. Every program waits (griddepcontrol.wait) before it reads anything that a kernel writes, and before its first write.
   Only weights, their scales and norm weights may be read before: nothing writes them after they were loaded, and a
   chain begins behind whatever loaded them.
2. The wait is unconditional and comes first in the program: no early return lies before it.

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

from collections.abc import Mapping
from types import MappingProxyType

ORDINARY, EARLY, LATE, ALONE = 0, 1, 2, 3
"""Modes of a kernel. EARLY: its own dependents may be launched at once; LATE: when its wait is over. In both cases that
takes place when all of its programs are resident, so that dependents only take room that it has no use for.

EARLY suits kernels that are short and small (a norm: a row to a program, few registers, next to no shared memory):
a linear behind them becomes resident while the kernel in front of them runs, and fetches weights meanwhile. LATE suits
those that fill the GPU themselves: behind an EARLY linear a whole layer could pile up, each kernel fetching weights
that are read much later and holding shared memory meanwhile.

ALONE: launched ordinarily, and its own dependents as behind LATE. For kernels whose programs fit several to an SM and
all have as much to do: launched early they crowd where the kernel in front has ended first, and the fullest SM sets the
time. On an H100 `linear_matrix` took 5 % (32 rows, bfloat16) to 19 % (8 rows, FP8) longer per step that way."""

MODES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("add_norm", "qk_norm_rope_write", "combine_splits"), EARLY),
        **dict.fromkeys(("quantize_rows", "quantize_parts"), EARLY),
        **dict.fromkeys(("scan", "choose", "collect", "draw_filtered"), EARLY),
        **dict.fromkeys(("linear_vector", "split_decode", "paged_prefill"), LATE),
        "linear_matrix": ALONE,
    }
)
"""By the name of a kernel's function; all others are ORDINARY, `embed_norm` on purpose."""

FIRST_ARCHITECTURE = 90


def launches_dependents(target: str) -> bool:
    """Whether GPUs of `target` ("sm90") know programmatic dependent launch."""
    return int(target.removeprefix("sm")) >= FIRST_ARCHITECTURE


def mode_of(function: str, target: str) -> int:
    """The mode of a kernel by the name of its function."""
    return MODES.get(function, ORDINARY) if launches_dependents(target) else ORDINARY
