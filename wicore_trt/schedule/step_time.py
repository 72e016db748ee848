"""Time of a step, learnt from earlier steps, and the token budget of the next one.

    seconds = hypot(weights, computed * c) + rows * a + keys * b + pairs * d, no coefficient negative

Plain numbers; it must not know sequences, clocks or devices. Invariant: whatever is observed, estimates are positive
and finite. One odd step moves them by a few percent, and two in a row that are off alike bring them there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from wicore_trt.kv.prefix.rates import PositiveSum

# Coefficients of weights, rows, keys, tokens and pairs before the first step, which scales them all alike: those of
# some 10 B parameters on a GPU.
PRIOR = (5e-3, 1e-4, 1e-8, 5e-5, 3e-10)
# `PositiveSum`'s step size and clip. There are steps enough to learn slowly from each.
RATE, CLIP = 0.1, 2.0
# Seconds of steps over which `share` is averaged.
SHARE_S = 2.0
# Without a target, prompts may make a step that decodes STRETCH times as long, or FLUENT_S if that is more. 20 tokens
# a second are faster than anybody reads, and a GPU that launches kernels one by one needs twice as long for any prompt.
STRETCH, FLUENT_S = 1.6, 0.05
# A step beyond the largest graph is expected to take as long as FEW_MORE times that graph's tokens. Launching its
# kernels takes the host 28 ms and more (27B, H200), while the device waits: steps planned for 38 ms took 53 under load.
FEW_MORE = 2


class StepLoad(NamedTuple):
    """Work of a step: `rows` decode over `keys` of context; `tokens` of prompts form `pairs` with keys."""

    rows: int = 0
    keys: int = 0
    tokens: int = 0
    pairs: float = 0.0

    def with_prompt(self, start: int, count: int) -> StepLoad:
        """Return the load plus tokens [start, start + count) of a prompt."""
        return StepLoad(self.rows, self.keys, self.tokens + count, self.pairs + count * (start + count / 2))


def sum_load(slices: Sequence[tuple[int, int]]) -> StepLoad:
    """Sum the load of a step that computes (start, count) of each sequence. One token counts as decoded."""
    rows, keys, tokens, pairs = 0, 0, 0, 0.0
    for start, count in slices:
        if count == 1:
            rows, keys = rows + 1, keys + start
        else:
            tokens, pairs = tokens + count, pairs + count * (start + count / 2)
    return StepLoad(rows, keys, tokens, pairs)


class StepTime:
    """Estimates of step times in seconds.

    The formula is a roofline with a round corner. `weights` are read once a step. The arithmetic of computed tokens (c
    each) hides behind that, or that behind it. A row that decodes costs its sampling (a) and reads its context (b a
    key); prompt tokens attend to the keys before them (d a pair).

    `target_s` bounds a step that decodes, prompts included. None means FLUENT_S or, if more, STRETCH times the step's
    time without prompts; and no bound while no token is `awaited`. `share` of such steps was the prompts' time."""

    def __init__(self, target_s: float | None = None) -> None:
        self.target_s = target_s
        self.awaited = True  # somebody waits for each token, as readers of streams do
        self.share = 0.5
        self._fit = PositiveSum(PRIOR, rate=RATE, clip=CLIP)

    def observe_step(self, load: StepLoad, seconds: float) -> None:
        if not 0 < seconds < math.inf or not load.rows + load.tokens:
            return
        self._fit.update(self._fit_terms(load), seconds)
        if load.tokens:
            seconds = min(seconds, CLIP * self.step_s(load))
            _, _, _, token, pair = self._fit.p
            part = min(1.0, (load.tokens * token + load.pairs * pair) / seconds)
            self.share += (part - self.share) * min(1.0, seconds / SHARE_S)

    def step_s(self, load: StepLoad) -> float:
        return self._fit.predict(self._fit_terms(load))

    def prompt_s(self, start: int, count: int) -> float:
        """Estimate the seconds of tokens [start, start + count) of a prompt in steps that prompts fill."""
        _, _, _, token, pair = self._fit.p
        return count * token + count * (start + count / 2) * pair

    def limit_s(self, decoding: StepLoad) -> float:
        """Return the seconds that a step with this decode load may take; infinite without one."""
        if not decoding.rows or not (self.awaited or self.target_s):
            return math.inf
        return self.target_s or max(FLUENT_S, STRETCH * self.step_s(decoding))

    def _fit_terms(self, load: StepLoad) -> tuple[float, ...]:
        """Return the terms of the coefficients. Weights and arithmetic share the hypotenuse by their squares."""
        weights, _, _, token, _ = self._fit.p
        computed = load.rows + load.tokens
        work = computed * token
        both = math.hypot(weights, work)
        return (weights / both, load.rows, load.keys, work * computed / both, load.pairs)


class Budget:
    """Budget of a step: `tokens` it may still compute. Prompts may take all until `set_time` limits their time.
    Invariants: the tokens given never exceed those there were. Prompts get no more than the step's time allows, but at
    least `least` tokens in all, however slow it is, and one image whole. `room`: tokens that the executor still
    takes."""

    __slots__ = (
        "_ends", "_least", "_limit_s", "_load", "_rest", "_sizes", "_slice", "_stretched", "_time", "room", "tokens",
    )  # fmt: skip

    def __init__(self, tokens: int) -> None:
        self.tokens = self.room = tokens
        self._stretched = False
        self._load, self._least, self._limit_s = StepLoad(), 0, math.inf
        self._time: StepTime | None = None
        self._sizes: tuple[int, ...] = ()
        self._slice, self._rest, self._ends = 1 << 30, 0, False

    def set_time(self, time: StepTime, decoding: StepLoad, least: int, sizes: Sequence[int] = ()) -> None:
        """Limit prompts to the time that a step with this decode load has for them, padded to one of `sizes`
        (`Executor.graph_sizes`). Above the largest, launches take as long as for FEW_MORE times as many tokens."""
        self._time, self._load, self._limit_s = time, decoding, time.limit_s(decoding)
        self._sizes = (*sizes, FEW_MORE * sizes[-1]) if sizes else ()
        self._least = self._pad_tokens(least)  # the step takes as long with fewer

    def shorten_step(self, tokens: int, slice_tokens: int) -> None:
        """Limit the step to `tokens` more. A prompt that would leave less than a slice for the next step gets the rest
        too. Where a prompt ends, the others get only what completes a slice, as it would wait for them."""
        self._slice, before = slice_tokens, self.tokens
        self.tokens = min(before, tokens)
        self._rest = max(self._rest, min(slice_tokens, before - self.tokens))
        self._end_prompt()

    def _end_prompt(self) -> None:
        if self._ends:
            self.tokens, self._rest = min(self.tokens, max(0, self._slice - self._load.tokens)), 0

    def fit_tokens(self, start: int, count: int) -> int:
        """Limit `count` tokens of a prompt, from `start` on, to what the step has room for."""
        count = count if count <= self.tokens + self._rest and self.tokens else min(count, self.tokens)
        if self._time is None or math.isinf(self._limit_s):
            return count
        low, high = min(count, self._least), count
        while low < high:
            middle = (low + high + 1) // 2
            padded = self._pad_tokens(self._load.tokens + middle) - self._load.tokens
            if self._time.step_s(self._load.with_prompt(start, padded)) <= self._limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def fit_image(self, count: int) -> int:
        """Return the tokens of an image at the front of a prompt, though there is no time for all; or 0, if the
        executor cannot take so many, or the step was stretched already."""
        if self._stretched or count > self.room:
            return 0
        self._stretched = True
        return count

    def give_back(self, tokens: int) -> None:
        """Take back tokens that were given to a sequence that does not compute."""
        self.tokens, self.room = self.tokens + tokens, self.room + tokens

    def _pad_tokens(self, tokens: int) -> int:
        at = bisect_left(self._sizes, tokens)
        return self._sizes[at] if at < len(self._sizes) else tokens

    def take_tokens(self, start: int, count: int, *, prompt: bool, ends: bool) -> None:
        """Take tokens that were given, with which a prompt `ends` or goes on."""
        self._rest = max(0, self._rest - max(0, count - self.tokens))  # once, also when a prompt gives back what it had
        self.tokens, self.room = max(0, self.tokens - count), self.room - count
        if prompt:
            self._load = self._load.with_prompt(start, count)
            self._least = max(0, self._least - count)
            self._ends = self._ends or ends
            self._end_prompt()
