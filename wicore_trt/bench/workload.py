"""Requests of benchmarks: prompts of made-up tokens or words, in pieces that prompts can share, and when to send them.

Standard library only; must not know targets or results. Invariants: equal arguments give equal requests on every
machine; pieces of one name begin alike and pieces of different names do not, so that prefix caches help only on
purpose.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_128
from typing import NamedTuple

SPECIAL_SHARE = 16  # special tokens live at both ends of a vocabulary; 1/16 of it is left out at either end
_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by but not what all
were we when your can said there use an each which she do how their if will up other about out many then them these so
some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part over new sound take only little work know place
year live me back give most very after thing our just name good man think say great where help
"""
WORDS = _TEXT.split()
"""Each is one token after a blank in the vocabularies of today, so that a text has about as many tokens as words."""


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


class Workload:
    """Endless supply of requests. The first `shared_prefix` tokens of all prompts are the same."""

    def __init__(self, vocab_size: int, *, seed: int, shared_prefix: int = 0) -> None:
        self._vocabulary = WordList(vocab_size, seed=seed)
        self._prefix = self._vocabulary.tokens(PromptPart("shared", shared_prefix))
        self._taken = 0

    def take(self, count: int, input_tokens: int, output_tokens: int) -> list[BenchRequest]:
        """Take the next `count` requests. `input_tokens` counts the shared prefix, which it must exceed."""
        own = input_tokens - len(self._prefix)
        assert own > 0, "a prompt has a token of its own"
        names = range(self._taken, self._taken + count)
        self._taken += count
        prompts = [self._prefix + self._vocabulary.tokens(PromptPart(str(name), own)) for name in names]
        return [BenchRequest(prompt, output_tokens) for prompt in prompts]


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
