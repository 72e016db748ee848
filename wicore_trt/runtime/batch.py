"""Batches for executors and their results: plain data, no torch.

Invariant: a batch says everything about a step; an executor keeps only token counts for penalties until `release`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from wicore_trt.types import SamplingParams, TokenLogprob

UNREAD = -1
"""Token id that stands for the token that the step before samples for this sequence, not read yet."""


class SequenceSlice(msgspec.Struct):  # the fastest class to make: a step makes one for each sequence
    """Consecutive tokens of one sequence to compute in this step. Plain data that can cross to another process.

    - `start`: position of `token_ids[0]`; earlier ones are in pages. Executors that run ahead accept [UNREAD].
    - `pages[group][j]`: pool slot of positions [j * page_tokens, (j + 1) * page_tokens) of that layer group; -1 marks a
      local page that slid out of the window. Pages up to the slice's last position are present.
    - `stamp`: page tables of equal stamps are equal, unless it is None (I7).
    - `sample`: sample the token after the slice with `params`; the output begins at position `prompt_len`.
    - `earlier_ids`: all tokens before `start`, with the first sampling slice since the last `Executor.release` where
      `params` penalize tokens. The executor counts tokens by `seq_id` from then on.
    - `suppress_eos`: min_tokens is not reached, so eos and `stop_ids` must not be chosen.
    - `mask`: a constraint's bit for each token that may be sampled, lowest first. A text is the reason why there is no
      mask, and fails this sequence alone. With `mask`, `suppress_eos` is unset.
    - `targets`: prompt tokens behind the slice's first ones, to be scored with `params.prompt_logprobs` others
    - `images`: (first, count, slot) of whole images in the slice: tokens [first, first + count) see one another, and
      have the features in that slot of `Executor.images` in place of embeddings."""

    seq_id: int
    token_ids: list[int]
    start: int
    pages: Mapping[str, Sequence[int]]
    sample: bool = False
    params: SamplingParams | None = None
    prompt_len: int = 0
    seed: int = 0
    suppress_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    mask: bytes | str | None = None
    targets: Sequence[int] = ()
    stamp: int | None = None
    earlier_ids: Sequence[int] = ()
    images: tuple[tuple[int, int, int], ...] = ()


@dataclass(slots=True)
class StepBatch:
    """Slices of a step in any order; results depend neither on the order nor on other slices, but for rounding where
    an engine is not batch-invariant (I21). `measure_attention` asks for `StepResult.attention`, which costs time."""

    slices: list[SequenceSlice]
    measure_attention: bool = False
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = sum([len(s.token_ids) for s in self.slices])


class SampledTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens sampled for `seq_id`, in order; `logprobs` has an entry for each where `params` ask for it."""

    seq_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens by sequence, in the order of the batch's sampling slices.

    `failed` has the reason for each sequence whose logits are not finite or whose constraint leaves none; it has no
    tokens. `prompt_logprobs` has an entry for each target of slices that did not fail.

    `attention` of a measured step lists, by seq_id, the softmax mass of each global page, first page first. It is the
    mass that the slice's last query gives, mean over the heads of one global layer, relative to the mean over pages
    (1.0). The layer changes from one measured step to the next. Sequences that could not be measured are absent."""

    sampled: list[SampledTokens]
    failed: dict[int, str] = field(default_factory=dict)
    attention: dict[int, list[float]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
