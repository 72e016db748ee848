"""Histograms of request times, which a front fills as it delivers.

Must not know who reads them. Invariant: an observation costs less than a microsecond, as each output makes some.
"""

from __future__ import annotations

from bisect import bisect_left

FIRST_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
GAP_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)
STEP_TOKENS = (1.0, *(float(1 << e) for e in range(3, 15)))
"""Bounds of a step's tokens."""
TOKENS = (1.0, 2.0, 5.0, *(float(k * 10**e) for e in range(1, 5) for k in (1, 2, 5)), 100_000.0, 200_000.0)


class Histogram:
    """Observations by upper bound; the last bucket has none. `counts` are not cumulative."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Times:
    """Histograms of a front's requests. `now`: time.monotonic() of the outputs that are being delivered."""

    __slots__ = ("decode", "first", "gap", "generated", "longest", "now", "prefill", "prompt", "queue", "whole")

    def __init__(self) -> None:
        self.now = 0.0
        self.first = Histogram(FIRST_S)
        self.queue = Histogram(FIRST_S)
        self.prefill = Histogram(FIRST_S)
        self.gap = Histogram(GAP_S)
        self.decode = Histogram(WHOLE_S)
        self.whole = Histogram(WHOLE_S)
        self.prompt = Histogram(TOKENS)
        self.generated = Histogram(TOKENS)
        self.longest = Histogram(TOKENS)  # of the sequences of a request
