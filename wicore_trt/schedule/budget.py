"""What is left of a step while it is made up: tokens, and time for those of prompts.

Must not know sequences. Invariants: the tokens given never pass the tokens that there were; prompts are given no more
than the step's time allows, but always `least` tokens in all, so that they get on however slow the step is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from wicore_trt.schedule.step_time import StepLoad, StepTime

FEW_MORE = 2
"""Times the tokens of the largest graph. 27B on an H200: to launch the kernels of a larger step takes the host 28 ms
and more, in part of which the device waits: steps that were to take 38 ms took 53 under load."""


class Budget:
    """`tokens` that the step may still compute. Prompts may have them all until `pace` says what time they have."""

    __slots__ = ("_ends", "_least", "_limit_s", "_load", "_rest", "_sizes", "_slice", "_time", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._load, self._least, self._limit_s = StepLoad(), 0, math.inf
        self._time: StepTime | None = None
        self._sizes: tuple[int, ...] = ()
        self._slice, self._rest, self._ends = 1 << 30, 0, False

    def pace(self, time: StepTime, decoding: StepLoad, least: int, sizes: Sequence[int] = ()) -> None:
        """From now on prompts have the time that a step in which these decode has for them, with the tokens that pad it
        to one of `sizes` (`Executor.graph_sizes`). Of a larger one, launches take as long as FEW_MORE times as many."""
        self._time, self._load, self._limit_s = time, decoding, time.limit_s(decoding)
        self._sizes = (*sizes, FEW_MORE * sizes[-1]) if sizes else ()
        self._least = self._padded(least)  # the step takes as long with fewer

    def shorten(self, tokens: int, slice_tokens: int) -> None:
        """The step is to have no more than so many tokens more. A prompt that would leave less than a slice for the
        next step has the rest as well; and where one ends, the others have no more than what makes it a slice, as it
        would wait for them."""
        self._slice, before = slice_tokens, self.tokens
        self.tokens = min(before, tokens)
        self._rest = max(self._rest, min(slice_tokens, before - self.tokens))
        self._end()

    def _end(self) -> None:
        if self._ends:
            self.tokens, self._rest = min(self.tokens, max(0, self._slice - self._load.tokens)), 0

    @property
    def open(self) -> bool:
        """Whether a prompt gets a token yet."""
        return self.fits(0, 1) > 0

    def fits(self, start: int, count: int) -> int:
        """As many of `count` tokens of a prompt, from `start` on, as the step has room for."""
        count = count if count <= self.tokens + self._rest and self.tokens else min(count, self.tokens)
        if self._time is None or math.isinf(self._limit_s):
            return count
        low, high = min(count, self._least), count
        while low < high:
            middle = (low + high + 1) // 2
            if self._in_time(start, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _in_time(self, start: int, count: int) -> bool:
        assert self._time is not None, "nothing was said of time"
        given = self._load.tokens
        padded = self._padded(given + count) - given
        return self._time.step_s(self._load.plus(start, padded)) <= self._limit_s

    def _padded(self, tokens: int) -> int:
        at = bisect_left(self._sizes, tokens)
        return self._sizes[at] if at < len(self._sizes) else tokens

    def take(self, start: int, count: int, *, prompt: bool, ends: bool) -> None:
        """So many tokens were given, with which a prompt `ends` or goes on."""
        self._rest = max(0, self._rest - max(0, count - self.tokens))  # once, also when a prompt gives back what it had
        self.tokens = max(0, self.tokens - count)
        if prompt:
            self._load = self._load.plus(start, count)
            self._least = max(0, self._least - count)
            self._ends = self._ends or ends
            self._end()
