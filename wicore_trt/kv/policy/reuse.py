"""Learn, while serving, how soon a page of a given class is used again.

It must not know keys, tiers or evictions: it sees ages and outcomes only. Invariant: open evidence (pages neither
reused nor forgotten) counts as survival to its present age, so that young data does not look better than it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from operator import mul
from typing import NamedTuple

_BINS = 32
# Pseudo-observations: how much evidence moves a bin, a coarse class and a fine class half-way from its parent.
_BIN_PRIOR, _CLASS_PRIOR, _FINE_PRIOR = 50.0, 10.0, 50.0


class PageClass(NamedTuple):
    """Class of a page: everything about it but its age."""

    coarse: int
    fine: int


class TouchGroup:
    """Pages of one class that one request touched: one observation of weight sqrt(pages). Pages of a request live and
    die together, so they are not independent evidence; `weight` is each page's share."""

    __slots__ = ("last", "open", "page_class", "weight")

    def __init__(self, page_class: PageClass, last: int) -> None:
        self.page_class = page_class
        self.last = last
        self.open = 0
        self.weight = 1.0


class _Table:
    __slots__ = ("ended", "reused")

    def __init__(self) -> None:
        self.reused = [0.0] * _BINS
        self.ended = [0.0] * _BINS


class ReuseModel:
    """Reuse statistics over age bins of half an octave.

    Each class counts reused pages and pages at risk per age. From these come the reuse hazard and, for every age, the
    best reuse rate that waiting longer can bring. A coarse class has its own shape over age; a fine class scales it by
    one factor. Both are shrunk towards the level above, so with little evidence a class behaves like its parent. The
    index is the largest ratio of expected reuses to expected waiting time over all horizons (the Gittins index of
    keeping the page; "hit density" in Beckmann et al., LHD, NSDI 2018, with the horizon left free).

    `unit` is the width of the first bin on the caller's clock; after `memory` observations old evidence counts half."""

    def __init__(self, unit: float, memory: float) -> None:
        self._unit = unit
        self._memory = memory
        self._edges = [0.0] + [unit * 2 ** (b / 2) for b in range(_BINS)]
        self._all = _Table()
        self._coarse = defaultdict[int, _Table](_Table)
        self._fine: dict[PageClass, list[float]] = {}
        self._hazard: dict[int, list[float]] = {}
        self._cumulative: dict[int, list[float]] = {}
        self._index: dict[PageClass, list[float]] = {}
        self._factor: dict[PageClass, float] = {}
        self._default: list[float] = []
        self.observed = 0
        self.is_ready = False  # `rank_index` is meaningful

    def end_wait(self, group: TouchGroup, pages: int, age: float, *, reused: bool) -> None:
        """Count pages of `group` that were reused, or forgotten unused, `age` after their last touch."""
        bin_, weight, kind = self._find_bin(age), pages * group.weight, group.page_class
        fine = self._fine.setdefault(kind, [0.0, 0.0])
        for table in (self._all, self._coarse[kind.coarse]):
            table.ended[bin_] += weight
            if reused:
                table.reused[bin_] += weight
        expected = self._cumulative.get(kind.coarse)
        if expected is not None:
            fine[0] += weight if reused else 0.0
            fine[1] += weight * expected[bin_]
        self.observed += pages

    def rank_index(self, kind: PageClass, age: float) -> float:
        """Rank keeping a page of this class and age: expected reuses per unit of clock, up to a factor of two."""
        table = self._index.get(kind)
        if table is None:
            hazard = self._hazard.get(kind.coarse)
            if hazard is None:
                table = self._default
            else:
                factor = self._factor.get(kind, 1.0)
                table = self._best_rates(_smooth_values([min(0.9, h * factor) for h in hazard]))
            self._index[kind] = table
        x = age / self._unit
        if x < 1.0:
            return table[0]
        x = 0.5 + 2.0 * math.log2(x)  # table[b] stands at the middle of bin b
        low = int(x)
        if low >= _BINS - 1:
            return table[_BINS - 1]
        return table[low] + (table[low + 1] - table[low]) * (x - low)

    def refresh_estimates(self, groups: Iterable[TouchGroup], now: int) -> None:
        """Estimate anew. `groups` are all groups with open pages."""
        nothing = [0.0] * _BINS
        waiting = defaultdict[int, list[float]](nothing.copy)
        fine_waiting = defaultdict[PageClass, list[float]](nothing.copy)
        for group in groups:
            bin_, weight = self._find_bin(now - group.last), group.open * group.weight
            waiting[group.page_class.coarse][bin_] += weight
            fine_waiting[group.page_class][bin_] += weight
        total = [sum(counts) for counts in zip(*waiting.values(), strict=True)] or nothing
        risk = _at_risk(self._all, total)
        base = [(r + 0.01) / (n + 1.0) for r, n in zip(self._all.reused, risk, strict=True)]
        self._default, self.is_ready = self._best_rates(_smooth_values(base)), True
        self._hazard = {key: _shrunk_hazard(table, waiting[key], base) for key, table in self._coarse.items()}
        self._cumulative = {key: list(accumulate(hazard)) for key, hazard in self._hazard.items()}
        self._factor = {}
        for kind, (reused, expected) in self._fine.items():
            if kind in fine_waiting:
                expected += sum(map(mul, fine_waiting[kind], self._cumulative[kind.coarse]))
            self._factor[kind] = (reused + _FINE_PRIOR) / (expected + _FINE_PRIOR)
        self._index = {}
        keep = 0.5 ** (self.observed / self._memory)  # old evidence fades
        for table in (self._all, *self._coarse.values()):
            table.reused = [x * keep for x in table.reused]
            table.ended = [x * keep for x in table.ended]
        self._fine = {k: [r * keep, e * keep] for k, (r, e) in self._fine.items() if r + e > 1e-3}
        self.observed = 0

    def _find_bin(self, age: float) -> int:
        x = age / self._unit
        return 0 if x < 1.0 else min(_BINS - 1, 1 + int(2.0 * math.log2(x)))

    def _best_rates(self, hazard: list[float]) -> list[float]:
        """Find, for the middle of each bin, the largest reuses per time of keeping until any later bin's end. Backwards
        over bins. `stretches` holds what follows a bin, cut into pieces of falling rate: a piece absorbs the next one
        while that raises its rate (pool adjacent violators), so a horizon ends where a piece ends. The first bin counts
        with half its time and all its chance, which favours pages that are nearly due."""
        rates = [0.0] * _BINS
        stretches: list[tuple[float, float, float]] = []
        for b in range(_BINS - 1, -1, -1):
            h, width = hazard[b], self._edges[b + 1] - self._edges[b]
            chance, time, left = h, 0.5 * width * (1 - h / 2), 1 - h
            for more, longer, rest in reversed(stretches):
                if more * time <= chance * longer:
                    break
                chance, time, left = chance + left * more, time + left * longer, left * rest
            rates[b] = chance / time
            chance, time, left = h, width * (1 - h / 2), 1 - h
            while stretches and stretches[-1][0] * time > chance * stretches[-1][1]:
                more, longer, rest = stretches.pop()
                chance, time, left = chance + left * more, time + left * longer, left * rest
            stretches.append((chance, time, left))
        return rates


def _at_risk(table: _Table, waiting: list[float]) -> list[float]:
    """Count how many entered each bin; those still waiting inside it count half."""
    risk, older = [0.0] * _BINS, 0.0
    for b in range(_BINS - 1, -1, -1):
        risk[b] = older + table.ended[b] + 0.5 * waiting[b]
        older += table.ended[b] + waiting[b]
    return risk


def _shrunk_hazard(table: _Table, waiting: list[float], base: list[float]) -> list[float]:
    """Hazard of a class: `base` scaled to the class, then moved towards the class's own bins by their evidence."""
    risk = _at_risk(table, waiting)
    expected = sum(n * h for n, h in zip(risk, base, strict=True))
    factor = (sum(table.reused) + _CLASS_PRIOR) / (expected + _CLASS_PRIOR)
    return [
        min(0.95, (r + _BIN_PRIOR * min(0.9, factor * h)) / (n + _BIN_PRIOR))
        for r, n, h in zip(table.reused, risk, base, strict=True)
    ]


def _smooth_values(values: list[float]) -> list[float]:
    """Smooth by three passes of a (1, 2, 1) / 4 filter; the ends stay."""
    for _ in range(3):
        inner = [0.25 * values[b - 1] + 0.5 * values[b] + 0.25 * values[b + 1] for b in range(1, _BINS - 1)]
        values = [values[0], *inner, values[-1]]
    return values
