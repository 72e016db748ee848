"""What a benchmark sends: prompts of random tokens with fixed lengths, and the moments to send them.

Standard library only; it must not know targets or results. Invariants: equal arguments give equal requests on every
machine, and no two requests of one `Workload` begin alike (beyond the prefix that was asked for), so that a prefix
cache helps only where it is meant to.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SPECIAL_SHARE = 16  # special tokens live at both ends of a vocabulary; 1/16 of it is left out at either end


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt and the exact number of tokens to generate after it (end-of-sequence tokens are ignored)."""

    prompt_token_ids: tuple[int, ...]
    output_tokens: int


class Workload:
    """An endless supply of requests. The first `shared_prefix` tokens of all prompts are the same."""

    def __init__(self, vocab_size: int, *, seed: int, shared_prefix: int = 0) -> None:
        self._random = random.Random(seed)
        self._low = vocab_size // SPECIAL_SHARE
        self._span = vocab_size - 2 * self._low
        self._prefix = self._tokens(shared_prefix)

    def take(self, count: int, input_tokens: int, output_tokens: int) -> list[BenchRequest]:
        """The next `count` requests. `input_tokens` counts the shared prefix, which it must exceed."""
        assert input_tokens > len(self._prefix), "a prompt has a token of its own"
        own = input_tokens - len(self._prefix)
        return [BenchRequest(self._prefix + self._tokens(own), output_tokens) for _ in range(count)]

    def _tokens(self, count: int) -> tuple[int, ...]:
        # random() is the only generator method whose values Python promises to keep
        return tuple(self._low + int(self._random.random() * self._span) for _ in range(count))


def poisson_arrivals(count: int, rate: float, *, seed: int) -> list[float]:
    """Ascending moments in seconds of a Poisson process with `rate` requests per second."""
    uniform, now, moments = random.Random(seed), 0.0, []
    for _ in range(count):
        now -= math.log(1.0 - uniform.random()) / rate
        moments.append(now)
    return moments
