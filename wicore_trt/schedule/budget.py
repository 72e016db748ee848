"""What is left of a step while it is made up: tokens, and seconds for those of prompts.

Must not know sequences. Invariants: the tokens given never pass the tokens that there were; prompts are given no more
than fits the seconds, but always `least` tokens in all, so that a step with a prompt in it gets on however slow it is.
"""

from __future__ import annotations

import math

from wicore_trt.schedule.step_time import StepTime


class Budget:
    """`tokens` that the step may still compute. Prompts have them all until `pace` says what time they have."""

    __slots__ = ("_least", "_seconds", "_time", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._seconds, self._least = math.inf, 0
        self._time: StepTime | None = None

    def pace(self, time: StepTime, rows: int, keys: int, least: int) -> None:
        """From now on prompts have the time that a step with `rows` over `keys` of context leaves them."""
        self._time, self._seconds, self._least = time, time.room_s(rows, keys), least

    @property
    def open(self) -> bool:
        """Whether a prompt gets a token yet."""
        return self.tokens > 0 and self.fits(0, 1) > 0

    def fits(self, start: int, count: int) -> int:
        """As many of `count` tokens of a prompt, from `start` on, as the step has room for."""
        count = min(count, self.tokens)
        if self._time is None or math.isinf(self._seconds):
            return count
        return min(count, max(self._least, self._time.fitting(start, self._seconds)))

    def take(self, start: int, count: int, *, prompt: bool) -> None:
        """So many tokens were given."""
        self.tokens -= count
        if prompt and self._time is not None:
            self._seconds -= self._time.prompt_s(start, count)
            self._least = max(0, self._least - count)
