"""Policy `a2cr`: attention x frequency x exponential decay, with a decay rate that adapts to the traffic.

score = attention^a * frequency^b * exp(-rate * age). Must not know tiers or a clock: age counts touched pages.
Invariant: a change of the rate is the only event that recomputes keys. With one rate the logarithm is a ln(attention) +
b ln(frequency) + rate * last - rate * now, whose last term all pages share: a heap of keys computed at the touch is
exact.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from zlib import crc32

from wicore_trt.kv.policy.policy import NEUTRAL_SIGNAL, ChainPolicy, Key, Node, ghost_limit

ATTENTION = FREQUENCY = 1.0  # the exponents a and b of the score
RATES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 64.0)  # candidate decay rates, each in 1 / cache-full of touched pages
_SHADOW_PAGES = 1024
_BETTER = 1.01
_MIN_SIGNAL, _MAX_SIGNALS = 1e-3, 1 << 18


def compute_score(attention: float, frequency: int, last: int, rate: float) -> float:
    """Compute the score's logarithm, without the term that all pages share. Floors measured attention at 0.001."""
    worth = FREQUENCY * math.log(frequency)
    if attention != NEUTRAL_SIGNAL:
        worth += ATTENTION * math.log(max(attention, _MIN_SIGNAL))
    return worth + rate * last


def _attention_of(node: Node) -> float:
    return node.learnt if isinstance(node.learnt, float) else NEUTRAL_SIGNAL


class A2CRPolicy(ChainPolicy):
    """Policy of one tier. A page's attention is the running mean (half new, half old) of the measured signals. The rate
    is chosen among fixed multiples of 1 / capacity by replaying a sample of the keys through one small shadow cache per
    rate, as Waldspurger et al. do for miss ratios (SHARDS, FAST 2015). The fastest rate is LRU in effect. `decay`, in
    powers of e per cache-full of touched pages, turns this off."""

    def __init__(self, capacity: int, decay: float | None = None) -> None:
        super().__init__(capacity, ghosts=ghost_limit(capacity))
        self._stride = max(1, capacity // _SHADOW_PAGES)
        size = max(1, capacity // self._stride)
        self._shadows = [_Shadow(size, r / max(capacity, 1)) for r in RATES] if decay is None else []
        self.rate = self._shadows[-1].rate if decay is None else decay / max(capacity, 1)
        self._memory = 8 * max(capacity, 1)
        self._review_at = self.capacity

    def _score_node(self, node: Node) -> float:
        return compute_score(_attention_of(node), node.uses + 1, node.last, self.rate)

    def _learn_touch(self, path: list[Node], seen: int, signal: Sequence[float] | None) -> None:
        for node in path[:seen]:
            node.uses += 1
        if signal is not None:
            for node, value in zip(path, signal, strict=True):
                before = _attention_of(node)
                node.learnt = float(value if before == NEUTRAL_SIGNAL else 0.5 * (before + value))
        if not self._shadows:
            return
        # Deepest first: pages of one request tie but for their frequency, and the parent must be the later one.
        for node in reversed(path):
            name = node.key if isinstance(node.key, bytes) else str(node.key).encode()
            if crc32(name) % self._stride == 0:
                for shadow in self._shadows:
                    shadow.touch_page(node, self._clock)
        if self._clock >= self._review_at:
            self._review_rate()

    def _review_rate(self) -> None:
        self._review_at = self._clock + max(64, self.capacity // 4)
        keep = 0.5 ** (max(64, self.capacity // 4) / self._memory)
        current = next(shadow for shadow in self._shadows if shadow.rate == self.rate)
        best = max(self._shadows, key=lambda shadow: shadow.hits)
        if best.hits > _BETTER * current.hits:
            self.rate = best.rate
            self.rebuild_heap()
        for shadow in self._shadows:
            shadow.hits *= keep


class _Shadow:
    """Cache of sampled keys under one decay rate; counts its (fading) hits."""

    __slots__ = ("_heap", "_held", "_size", "hits", "rate")

    def __init__(self, size: int, rate: float) -> None:
        self._size = size
        self.rate = rate
        self.hits = 0.0
        self._held: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], Key]] = []

    def touch_page(self, node: Node, now: int) -> None:
        if node.key in self._held:
            self.hits += 1
        # The depth breaks ties and makes entries of one page at one time equal, so keys are never compared.
        entry = (compute_score(_attention_of(node), node.uses + 1, now, self.rate), -node.depth)
        self._held[node.key] = entry
        heapq.heappush(self._heap, (entry, node.key))
        while len(self._held) > self._size:
            oldest, key = heapq.heappop(self._heap)
            if self._held.get(key) == oldest:
                del self._held[key]
        if len(self._heap) > 4 * self._size + 64:
            self._heap = [(entry, key) for key, entry in self._held.items()]
            heapq.heapify(self._heap)


class AttentionSignals:
    """Running mean per page key of its attention mass relative to an average page (1.0). Executors measure it on
    sampled steps; the policy wants it at the next look-up of the chain. The longest unmeasured keys go first."""

    def __init__(self) -> None:
        self._mass: OrderedDict[bytes, float] = OrderedDict()

    def add_measurement(self, keys: Sequence[bytes], mass: Sequence[float]) -> None:
        """Add a measurement of a sequence whose first pages are `keys`; a partly filled last page has no key."""
        for key, value in zip(keys, mass, strict=False):
            old = self._mass.pop(key, None)
            self._mass[key] = value if old is None else 0.5 * (old + value)
        while len(self._mass) > _MAX_SIGNALS:
            self._mass.popitem(last=False)

    def take_signal(self, keys: Sequence[bytes]) -> list[float] | None:
        """Take the signal for `ChainPolicy.touch_chain` and forget it; None when none of the pages was measured."""
        if not any(key in self._mass for key in keys):
            return None
        return [self._mass.pop(key, NEUTRAL_SIGNAL) for key in keys]
