"""Requests of a load test as data: sessions of one turn or several, made up from lengths or read from a trace.

Standard library only; must not know targets, clocks or token ids. Invariants: equal arguments give equal plans; prompts
share a beginning where their pieces have the same names, and plans of different `run` share none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from wicore_trt.arithmetic import div_ceil
from wicore_trt.bench.workload import PromptPart, draw_arrivals
from wicore_trt.errors import ConfigError
from wicore_trt.kv.study.trace import BLOCK_TOKENS, TraceRequest

TYPICAL_OUTPUT = 128
"""Output tokens of a trace's request that names none."""

Lengths = Sequence[int]
"""Lengths to draw from, each as likely as the others."""


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """Pieces that a turn adds to the conversation, and the number of tokens of the answer."""

    pieces: tuple[PromptPart, ...]
    output_tokens: int

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Session:
    """Conversation whose first turn is due `at_s` seconds after the start, each other one after the answer before.
    `name` is unique in the plan."""

    name: str
    at_s: float
    turns: tuple[PlannedTurn, ...]

    @property
    def context_tokens(self) -> int:
        return sum(turn.tokens + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Lengths of made-up sessions in tokens. A first turn has `input_tokens`, of which the first `shared_prefix` are
    those of one of `prefixes` system prompts; further turns add `turn_tokens`."""

    input_tokens: Lengths
    output_tokens: Lengths
    turns: int = 1
    turn_tokens: Lengths = (1,)
    shared_prefix: int = 0
    prefixes: int = 1

    def __post_init__(self) -> None:
        if self.shared_prefix >= min(self.input_tokens):
            raise ConfigError("Each prompt must be longer than the prefix that it shares.")


def parse_lengths(text: str) -> Lengths:
    """Parse "128", "64,128,128" (one of these) or "256..2048" (any from the first to the last). Raises ValueError."""
    low, dots, high = text.partition("..")
    found: Lengths = range(int(low), int(high) + 1) if dots else tuple(int(part) for part in text.split(","))
    if not found or min(found) < 1:
        raise ValueError(f"{text!r} has no length of a token or more")
    return found


def sessions_of(shape: LoadShape, moments: Iterable[float], *, seed: int, run: str) -> list[Session]:
    """Make a session for each of `moments`, in seconds. Lengths depend on the seed alone, so that runs compare."""
    rng = random.Random(seed)

    def one(of: Lengths) -> int:
        return of[int(rng.random() * len(of))]

    found = []
    for number, at_s in enumerate(moments):
        name = f"{run}/{number}"
        prefix = PromptPart(f"{run}/prefix/{one(range(shape.prefixes))}", shape.shared_prefix)
        turns = []
        for turn in range(shape.turns):
            asks = one(shape.turn_tokens) if turn else one(shape.input_tokens) - shape.shared_prefix
            asked = PromptPart(f"{name}/{turn}", asks)
            turns.append(
                PlannedTurn((asked,) if turn or not prefix.tokens else (prefix, asked), one(shape.output_tokens))
            )
        found.append(Session(name, at_s, tuple(turns)))
    return found


def made_up(
    shape: LoadShape, rate: float, *, burstiness: float, requests: int, duration_s: float | None, seed: int, run: str
) -> list[Session]:
    """Make sessions that bring `rate` requests a second on average, turns included: as many as have `requests` turns,
    or with `duration_s` those that begin within it. Raises ConfigError when there are none."""
    moments = draw_arrivals(rate / shape.turns, burstiness=burstiness, seed=seed)
    chosen: Iterable[float] = islice(moments, div_ceil(requests, shape.turns))
    if duration_s is not None and not math.isinf(rate):
        chosen = takewhile(lambda at: at < duration_s, moments)
    found = sessions_of(shape, chosen, seed=seed, run=run)
    if not found:
        raise ConfigError(f"No request comes within {duration_s:g} s.", fix="Raise the duration or the rate.")
    return found


def replay_trace(
    trace: Sequence[TraceRequest], *, rate: float | None, requests: int | None, duration_s: float | None, run: str
) -> list[Session]:
    """Make a session of one turn from each request of the trace, at its own times or stretched to `rate` requests a
    second. Blocks of one id have the same tokens. Raises ConfigError when nothing is left."""
    chosen = trace[:requests]
    first, span_s = chosen[0].at_s, chosen[-1].at_s - chosen[0].at_s
    if rate is None:
        stretch = 1.0
    elif math.isinf(rate) or len(chosen) == 1:
        stretch = 0.0
    elif not span_s:
        raise ConfigError("The trace has no times to stretch to a rate.", fix="Give --rate inf.")
    else:
        stretch = (len(chosen) - 1) / span_s / rate
    found = []
    for number, request in enumerate(chosen):
        at_s = (request.at_s - first) * stretch
        if duration_s is not None and at_s >= duration_s:
            break
        name = f"{run}/{number}"
        full, rest = [PromptPart(f"{run}/block/{block}", BLOCK_TOKENS) for block in request.blocks], request.tokens
        if not full:
            full = [PromptPart(name, request.tokens)]
        pieces = []
        for piece in full:
            pieces.append(PromptPart(piece.name, rest if piece is full[-1] else min(piece.tokens, rest)))
            rest -= pieces[-1].tokens
        output = TYPICAL_OUTPUT if request.answer is None else request.answer
        found.append(Session(name, at_s, (PlannedTurn(tuple(p for p in pieces if p.tokens), max(1, output)),)))
    if not found:
        raise ConfigError("No request of the trace is left.")
    return found
