"""Watches whether a learnt policy is doing worse than LRU would, and if so says to use LRU for a while.

It replays the tier's own traffic through a shadow LRU cache of the same capacity that holds keys only. It must not
know how the policy decides. Invariant: the verdict rests on paired outcomes (both caches see the same requests), so
the noise of the traffic cancels, and a policy that keeps losing is tried ever more rarely.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

_SIGMAS = 1.0
_MIN_EVIDENCE = 16
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
_MEMORY = 8
"""Pauses and memory are in cache-fulls of touched pages."""


class LRUGuard:
    """Shadow LRU of `capacity` pages. `use_lru` is the verdict."""

    def __init__(self, capacity: int) -> None:
        self.use_lru = False
        self._capacity = capacity
        self._held: OrderedDict[Hashable, None] = OrderedDict()
        self._clock = 0
        self._resume_at = 0
        self._fade_at = _MEMORY * capacity
        self._pause = _FIRST_PAUSE
        self._lead = self._spread = 0.0
        self._evidence = 0

    def observe(self, keys: Sequence[Hashable], hits: int) -> bool:
        """One request of which the policy's tier held the first `hits` pages; returns whether the verdict changed."""
        lead = self._replay(keys) - hits
        self._clock += len(keys)
        if self.use_lru:
            if self._clock < self._resume_at:
                return False
            self._lead = self._spread = 0.0
            self._evidence = 0
            self.use_lru = False
            return True
        if lead:
            self._lead += lead
            self._spread += lead * lead
            self._evidence += 1
        if self._clock >= self._fade_at:
            self._fade_at = self._clock + _MEMORY * self._capacity
            self._lead *= 0.5
            self._spread *= 0.5
        return self._judge()

    def _judge(self) -> bool:
        if self._evidence < _MIN_EVIDENCE or self._lead * self._lead < _SIGMAS * _SIGMAS * self._spread:
            return False
        if self._lead < 0:
            self._pause = _FIRST_PAUSE
            return False
        self.use_lru = True
        self._resume_at = self._clock + self._pause * self._capacity
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return True

    def _replay(self, keys: Sequence[Hashable]) -> int:
        held = self._held
        hits = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._capacity:
            held.popitem(last=False)
        return hits
