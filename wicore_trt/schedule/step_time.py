"""How long a step takes, learnt from those that were made, and what part of one prompts may have.

    seconds = fixed + rows * a + keys * b + tokens * c + pairs * d, no term negative

`rows` decode a token each and read `keys` tokens of context; `tokens` of prompts are computed, and `pairs` of them and
a key before are attended to. This is a roofline with its corner cut: weights are read once a step, which is `fixed`,
the context of a row once a token, and prompts cost arithmetic, a product for each token and one for each pair. Plain
numbers; it must not know sequences, clocks or devices. Invariant: whatever is observed, estimates are positive and
finite, one odd step moves them by a few percent, and two in a row that are off alike bring them there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from wicore_trt.kv.prefix.rates import PositiveSum

PRIOR = (5e-3, 1e-4, 1e-8, 1e-4, 3e-10)
"""Before the first step, whose measure scales all of it: a model of some 10 B parameters on a GPU."""
RATE, CLIP = 0.1, 2.0
"""There are steps enough to learn slowly from each."""
SHARE_S = 2.0
"""Of how many seconds of steps `share` is the mean, roughly."""
STRETCH = 1.75
"""A step that decodes takes at most so many times as long with prompts in it as without, where no target is set. Less
than 2, so that twice the time between tokens is kept when a step in a hundred takes an eighth longer than expected."""


class StepLoad(NamedTuple):
    """What a step does; see the module."""

    rows: int = 0
    keys: int = 0
    tokens: int = 0
    pairs: float = 0.0


def load_of(slices: Iterable[tuple[int, int]]) -> StepLoad:
    """The load of a step that computes (start, count) of each sequence. One token counts as decoded."""
    rows = keys = tokens = 0
    pairs = 0.0
    for start, count in slices:
        if count == 1:
            rows += 1
            keys += start
        else:
            tokens += count
            pairs += count * (start + count / 2)
    return StepLoad(rows, keys, tokens, pairs)


class StepTime:
    """Times are seconds. `target_s` is how long a step may take that decodes, prompts included; None is STRETCH times
    what it takes without them. `share` of the steps with prompts in them was the prompts' time."""

    def __init__(self, target_s: float | None = None) -> None:
        self.target_s = target_s
        self.share = 0.5
        self._fit = PositiveSum(PRIOR, rate=RATE, clip=CLIP)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step took so long."""
        if seconds > 0 and load.rows + load.tokens:
            self._fit.update((1.0, *load), seconds)
        if seconds > 0 and load.tokens:
            _, _, _, token, pair = self._fit.p
            part = min(1.0, (load.tokens * token + load.pairs * pair) / seconds)
            self.share += (part - self.share) * min(1.0, seconds / SHARE_S)

    def step_s(self, load: StepLoad) -> float:
        """How long such a step takes."""
        return self._fit.predict((1.0, *load))

    def prompt_s(self, start: int, count: int) -> float:
        """What computing tokens [start, start + count) of a prompt adds to steps."""
        _, _, _, token, pair = self._fit.p
        return count * (token + pair * (start + count / 2))

    def room_s(self, rows: int, keys: int) -> float:
        """What prompts may add to a step that decodes; no end of it where none does."""
        if not rows:
            return math.inf
        alone = self.step_s(StepLoad(rows, keys))
        return (self.target_s or STRETCH * alone) - alone

    def fitting(self, start: int, seconds: float) -> int:
        """Tokens of a prompt from `start` on that add so many seconds: the root of prompt_s(start, n) = seconds."""
        _, _, _, token, pair = self._fit.p
        first = token + pair * start
        return int(2 * max(0.0, seconds) / (first + math.sqrt(first * first + 2 * pair * max(0.0, seconds))))

    def holds(self, rows: int, keys: int, tokens: int) -> bool:
        """Whether so many rows, and so many tokens of a prompt with them, keep the target, where there is one."""
        return self.target_s is None or self.step_s(StepLoad(rows, keys, tokens)) <= self.target_s
