"""Batches that the scheduler hands to an executor, and results: plain data, no torch.

Invariant: a batch says everything about a step. An executor keeps per sequence only what sampling needs (token
counts for penalties), created at the first slice of a `seq_id` and dropped by `Executor.release`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from wicore_trt.types import SamplingParams, TokenLogprob

UNREAD = -1
"""As a token id: a token that the step before samples for this sequence, and that nobody has read yet."""


class SequenceSlice(msgspec.Struct):
    """Consecutive tokens of one sequence to compute in this step. Plain data, so that it can cross to another process.

    `start` is the position of `token_ids[0]`; positions before it are already in the KV pages. `pages[group][j]`
    is the pool slot that holds positions [j * page_tokens, (j + 1) * page_tokens) of that layer group; -1 marks a
    local page that slid out of the window. Pages up to the slice's last position are present. Page tables of equal
    `stamp` are equal; None is no such promise.
    When `sample` is set, the token after the slice's last one is sampled with `params`; the output begins at position
    `prompt_len`. With the first such slice of a sequence since its last `Executor.release`, `earlier_ids` has all
    tokens before `start` where `params` penalize tokens: the executor counts them by `seq_id` from then on.
    `suppress_eos`: min_tokens is not reached, so eos and stop ids must not be chosen (`stop_ids` lists them).
    `mask`, where there is a constraint, has a bit for each token that may be sampled, lowest first; a text is why none
    could be made, and fails this sequence alone. With it `suppress_eos` is unset.
    `targets` are tokens of the prompt that follow the slice's first tokens: their log-probabilities are reported, with
    `params.prompt_logprobs` alternatives each.
    For an executor that runs ahead `token_ids` may be [UNREAD].
    A step makes one slice for each sequence, so this class is the fastest to make.
    """

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


@dataclass(slots=True)
class StepBatch:
    """Work of a step: slices in any order; results must not depend on the order nor on who else is there.

    `measure_attention` asks for `StepResult.attention`. It costs time, so set it on one step in many.
    """

    slices: list[SequenceSlice]
    measure_attention: bool = False
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = sum([len(s.token_ids) for s in self.slices])


class SampledTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens sampled for `seq_id`, in order; `logprobs` has an entry for each of them where `params` ask for it."""

    seq_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens by sequence, in the order of the batch's sampling slices. A sequence whose logits are not finite,
    or whose constraint leaves none of them, is reported in `failed` with the reason and has no sampled tokens.
    `prompt_logprobs` has an entry for each target of a slice that has any and did not fail.

    `attention`, on steps that measure it, has for each seq_id and each of its global pages, first page first, the
    softmax mass that the slice's last query gives to the page, mean over the heads of one global layer, relative to
    the mean over pages (1.0 is an average page). The layer changes from one measured step to the next. Sequences are
    absent where nothing could be measured, and all of them on executors that cannot measure."""

    sampled: list[SampledTokens]
    failed: dict[int, str] = field(default_factory=dict)
    attention: dict[int, list[float]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
