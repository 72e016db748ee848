"""Requests of benchmarks: prompts of made-up tokens or words in pieces that prompts can share, and when to send them.

Sessions of one turn or several are made up from lengths or read from a trace. Standard library only; must not know
targets, clocks or results. Invariants: equal arguments give equal requests on every machine. Prompts share a beginning
where their pieces have the same names and nowhere else, so prefix caches help only on purpose; plans of different `run`
share none.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_128
from itertools import islice, takewhile
from typing import NamedTuple

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import ConfigError
from wicore_trt.kv.study.trace import BLOCK_TOKENS, TraceRequest

SPECIAL_SHARE = 16  # special tokens live at both ends of a vocabulary; 1/16 of it is left out at either end
_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by but not what all
were we when your can said there use an each which she do how their if will up other about out many then them these so
some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part over new sound take only little work know place
year live me back give most very after thing our just name good man think say great where help
"""
WORDS = _TEXT.split()
"""Words; each is one token after a blank in the vocabularies of today, so a text has about as many tokens."""
TYPICAL_OUTPUT = 128
"""Output tokens of a trace's request that names none."""

Lengths = Sequence[int]
"""Lengths to draw from, each as likely as the others."""


class PromptPart(NamedTuple):
    """Consecutive tokens of a prompt, which follow from the name and a seed."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Prompt, as token ids or as chat turns, and the number of tokens to generate: exactly so many, unless
    end-of-sequence tokens count too (`ignore_eos` False)."""

    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    ignore_eos: bool = True
    messages: tuple[Mapping[str, str], ...] = ()


class WordList:
    def __init__(self, size: int, *, seed: int) -> None:
        self._seed = seed
        self._low = size // SPECIAL_SHARE
        self._span = size - 2 * self._low
        self.tokens = lru_cache(4096)(self._draw_tokens)  # of a trace, prompts share most of their pieces

    def _draw_tokens(self, piece: PromptPart) -> tuple[int, ...]:
        drawn = struct.unpack(f"<{piece.tokens}I", self._draw_bytes(piece, 4))
        return tuple([self._low + number % self._span for number in drawn])

    def make_text(self, piece: PromptPart) -> str:
        """Make as many words as the piece has tokens, a blank before each."""
        numbers = struct.unpack(f"<{piece.tokens}H", self._draw_bytes(piece, 2))
        return "".join([" " + WORDS[number % len(WORDS)] for number in numbers])

    def _draw_bytes(self, piece: PromptPart, size: int) -> bytes:
        return shake_128(f"{self._seed}/{piece.name}".encode()).digest(size * piece.tokens)


def draw_arrivals(rate: float, *, burstiness: float = 1.0, seed: int) -> Iterator[float]:
    """Draw ascending moments in seconds, without end; the gaps between them are 1 / rate on average. Gaps follow a
    gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, infinity is a constant gap.
    At an infinite `rate` everything comes at once."""
    uniform, now = random.Random(seed), 0.0
    while True:
        if math.isinf(rate) or math.isinf(burstiness):
            gap = 1.0
        elif burstiness == 1.0:
            gap = -math.log(1.0 - uniform.random())
        else:
            gap = uniform.gammavariate(burstiness, 1.0 / burstiness)
        now += gap / rate
        yield now


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
    found: Lengths = ()
    with suppress(ValueError):
        found = range(int(low), int(high) + 1) if dots else tuple(int(part) for part in text.split(","))
    if not found or min(found) < 1:
        raise ValueError(f"{text!r} is not a list of positive numbers")
    return found


def make_sessions(shape: LoadShape, moments: Iterable[float], *, seed: int, run: str) -> list[Session]:
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


def plan_sessions(
    shape: LoadShape, rate: float, *, burstiness: float, requests: int, duration_s: float | None, seed: int, run: str
) -> list[Session]:
    """Make sessions that bring `rate` requests a second on average, turns included: as many as have `requests` turns,
    or with `duration_s` those that begin within it. Raises ConfigError when there are none."""
    moments = draw_arrivals(rate / shape.turns, burstiness=burstiness, seed=seed)
    chosen: Iterable[float] = islice(moments, div_ceil(requests, shape.turns))
    if duration_s is not None and not math.isinf(rate):
        chosen = takewhile(lambda at: at < duration_s, moments)
    found = make_sessions(shape, chosen, seed=seed, run=run)
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
