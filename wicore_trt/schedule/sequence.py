"""Sequence of a request as the scheduler sees it: its state, tokens, how many are computed, its pages.

There is no prefill or decode phase: a step computes some of the tokens that are not computed yet. Invariant: computed <
len(tokens) while the sequence lives, so there is always a next token to compute.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.schedule.images import PromptImage
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams


class SequenceState(enum.Enum):
    """WAITING holds no pages; RUNNING does; FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# A preempted sequence goes back to WAITING with its tokens and is computed again, or found in the cache.
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Sequence with its state, tokens and pages.

    - `tokens`: prompt + output; `computed` of them are in the KV pages
    - `cached`: prompt tokens found in the cache until it is `requeued`, i.e. lost its pages; None before admission
    - `arrival`, `begun`: seconds of the engine's clock, at arrival and at the first step that computed for it
    - `prefetched`: its pages on disk were asked for
    - `turn`: places its tenant had been given before the one it holds; None without one
    - `ran`: steps that computed for it since its last admission; `gave_way`: times it left its place to another tenant
    - `scored`: prompt tokens whose log-probabilities were put out; `scoring`: some are wanted, so all is computed
    - `cost_s`: expected seconds to compute its prompt, at arrival or by what a load brought since
    - `images` of its prompt, each of which a step computes whole
    - `longest`: tokens that it ends with at the latest"""

    seq_id: int
    request: GenerateRequest
    index: int
    seed: int
    tokens: list[int]
    arrival: float
    pages: SequencePages
    computed: int = 0
    cached: int | None = None
    state: SequenceState = SequenceState.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    stop_ids: tuple[int, ...] = field(default=())
    prefetched: bool = False
    turn: int | None = None
    requeued: bool = False
    ran: int = 0
    gave_way: int = 0
    scored: int = 0
    begun: float | None = None
    cost_s: float = 0.0
    longest: int = 1 << 62
    images: tuple[PromptImage, ...] = ()
    # Of the request, kept here because each step asks for them several times.
    request_key: str = field(init=False)
    tenant: str = field(init=False)
    params: SamplingParams = field(init=False)
    prompt_len: int = field(init=False)
    scoring: bool = field(init=False)
    stop_set: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.request_key, self.tenant = self.request.request_key, self.request.tenant
        self.params, self.prompt_len = self.request.params, len(self.request.prompt_token_ids)
        self.scoring, self.stop_set = self.params.prompt_logprobs is not None, frozenset(self.stop_ids)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def change_state(self, state: SequenceState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state


@dataclass(slots=True)
class StepSchedule:
    """Schedule of one step: (sequence, tokens to compute) pairs, and the sequences preempted to make room."""

    slices: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
