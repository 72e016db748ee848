"""Rows of a step: their order, and which kernel computes the attention of each group of them.

Plain data, no torch; must not know pages or memory. Invariant: a step's `RowPlan` alone decides what it launches and
where its arrays lie, so a CUDA graph belongs to a plan and runs any step that the plan holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from wicore_trt.backends.triton.table import KEPT_TOKENS, SPLIT_TOKENS

DECODE_ROWS = 1
"""Rows of each sequence that the decode kernel computes; sequences with more of them go to the prefill kernel."""
PROMPT_CHUNKS = 4
"""The most prompts in a graph."""
_FEW = (32, *range(64, SPLIT_TOKENS + 1, 64))
_MORE = (*_FEW, *range(SPLIT_TOKENS + 64, KEPT_TOKENS + 1, 64))
PROMPT_BUCKETS = {
    0: (*_FEW, *range(KEPT_TOKENS + 64, 1537, 64)),
    4: _FEW,
    **{decoding: tuple(tokens for tokens in _MORE if tokens >= 2 * decoding) for decoding in (16, 32, 64, 128)},
}
"""Tokens of a step with prompts in a graph, rounded up to one of these, by the number of sequences that decode beside
them, rounded up too. A larger step takes a GPU longer than the host that launches it kernel by kernel; prompts alone
run in graphs of up to 1,536, because beside threads that read a disk the host takes more than twice as long."""

_SMALL = (*range(32, 257, 32),)
IMAGE_BUCKETS = {False: (*_SMALL, 288, 336, 384, 448, 512, 640, 768), True: (*_SMALL, 384, 512, 640, 768)}
"""Tokens of a step with images in a graph, by whether products are scaled ones of E4M3 rows. An H100 is fast at
products of these sizes in a 27B model: 24.1 ms of 288 rows and 25.5 of 336, but 29.0 of 304 (BF16); 15.9 of 384 and
18.9 of 320 (FP8)."""


class RowGroup(NamedTuple):
    """Consecutive rows of a step: number of sequences, one after the other, and of rows."""

    sequences: int
    rows: int


class RowPlan(NamedTuple):
    """Plan of the `tokens` rows of a step, of which `sampled` are sampled. First come the rows of sequences that
    `decode`, DECODE_ROWS of each, for the decode kernel; then those of `prefill`, any number of each, for the prefill
    kernel. Batch-invariant engines compute both by the prefill kernel. Steps with `images` have kernels of their own.
    """

    tokens: int
    sampled: int
    decode: RowGroup
    prefill: RowGroup
    images: bool = False

    @property
    def sequences(self) -> int:
        return self.decode.sequences + self.prefill.sequences

    def holds(self, step: RowPlan) -> bool:
        """Tell whether a step can be padded to this plan."""
        return (
            step.images == self.images
            and step.prefill.rows <= self.prefill.rows
            and step.prefill.sequences <= self.prefill.sequences
            and step.decode.sequences <= self.decode.sequences
        )


def make_plan(tokens: int, decoding: int, prefilling: int, sampled: int) -> RowPlan:
    """Make a plan from numbers of rows, of sequences in each group and of sampled rows."""
    rows = decoding * DECODE_ROWS
    return RowPlan(tokens, sampled, RowGroup(decoding, rows), RowGroup(prefilling, tokens - rows))


def plan_rows(counts: Sequence[int]) -> RowPlan:
    """Plan a step by the rows of its sequences, in any order; one row of each is sampled."""
    decoding = counts.count(DECODE_ROWS)
    return make_plan(sum(counts), decoding, len(counts) - decoding, len(counts))


@cache
def decode_plan(sequences: int) -> RowPlan:
    return make_plan(sequences * DECODE_ROWS, sequences, 0, sequences)


def prompt_plans(tokens: int, sequences: int, image: int = 0, *, scaled: bool = False) -> list[RowPlan]:
    """Plan padded steps with prompts, fewest tokens first: at most `tokens`, of which at most `sequences` sequences
    decode. Also those with images of `image` tokens, if any, for products that are `scaled` or not."""
    buckets = {min(decoding, sequences): counts for decoding, counts in reversed(PROMPT_BUCKETS.items())}
    sizes = [(count, decoding, False) for decoding, counts in buckets.items() for count in counts]
    for decoding in buckets if image else ():
        sizes += [(count, decoding, True) for count in IMAGE_BUCKETS[scaled] if image + decoding <= count]
    return [
        make_plan(count, decoding, PROMPT_CHUNKS, decoding + PROMPT_CHUNKS)._replace(images=images)
        for count, decoding, images in sorted(sizes, key=lambda size: size[:2])
        if count <= tokens
    ]


def prompt_room(plans: Sequence[RowPlan]) -> dict[int, tuple[int, ...]]:
    """Count tokens of prompts that padded steps hold, by the sequences that decode beside them
    (`Executor.graph_sizes`)."""
    plans = [plan for plan in plans if not plan.images]  # others have some of these sizes
    decoding = sorted({plan.decode.sequences for plan in plans})
    return {n: tuple(sorted({p.prefill.rows for p in plans if p.decode.sequences >= n})) for n in decoding}
