"""Sessions whose pages are pinned, and times after which pages go, as clients said.

Plain data with the clock passed in; it must not know where pages are or what a request is. A session's pin is on
keys, so that a page that reaches a tier later is pinned too (`TierIndex.pin_keys`). A time to live binds what its
request made; pages that others use without one have none.
Invariant (`check_integrity`): a session pins in its tiers exactly the chain of its latest request; after `take_due`, at
most `max_keys` keys have a time to live and sessions pin at most `max_keys`: the soonest end makes room.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.types import CacheHints, CachePriority, Clock

SessionName = tuple[bytes, str | bytes]
"""Scope (`TenantNames.scope`) and session; for a request of high priority without one, the last key of its chain."""
_MAX_KEYS = 1 << 18
KEPT_AT_ONCE = 64


class Retention:
    """`pin_s` is how long a silent session is pinned when its request does not say; `clock` gives seconds and never
    goes back. `stamped(key, left)` hears of each key whose time is over in `left` seconds from now on, or never (None):
    the disk tier writes it down. A restart forgets sessions; `restore_end` brings times to live back."""

    def __init__(self, pin_s: float, clock: Clock, *, max_keys: int = _MAX_KEYS) -> None:
        self._pin_s = pin_s
        self.clock = clock
        self._max_keys = max_keys
        self._ends: _Deadlines[bytes] = _Deadlines()
        self._session_ends: _Deadlines[SessionName] = _Deadlines()
        self._pinned: dict[SessionName, tuple[Sequence[bytes], Sequence[TierIndex]]] = {}
        self._pinned_keys = 0
        self.stamped: Callable[[bytes, float | None], None] = lambda key, left: None

    def renew_ends(self, keys: Sequence[bytes], hints: CacheHints, scope: bytes) -> None:
        """Restart the times of a chain's keys and session for a new request, or end them if it has no time to live."""
        now = self.clock()
        for key in keys:
            if key in self._ends:
                if hints.ttl_s is None:
                    self._ends.pop(key, None)
                    self.stamped(key, None)
                else:
                    self._extend_end(key, now, hints.ttl_s)
        name = (scope, hints.session)
        if name in self._pinned:
            self._session_ends.extend_end(name, now, self._pin_s_of(hints))

    def end_request(
        self, keys: Sequence[bytes], hints: CacheHints, scope: bytes, tiers: Sequence[TierIndex], *, found: int = 0
    ) -> None:
        """A request ended, in whatever way, and `keys` is its whole chain. The first `found` of them were cached when
        it was admitted: those it did not make, and it gives no time to live to them."""
        self.renew_ends(keys, hints, scope)
        self.begin_ends(keys[found:], hints)
        if hints.session:
            self._replace_session((scope, hints.session), keys, tiers, self._pin_s_of(hints))
        elif hints.priority is CachePriority.HIGH and keys:
            self._replace_session((scope, keys[-1]), keys, tiers, self._pin_s_of(hints))

    def begin_ends(self, keys: Iterable[bytes], hints: CacheHints) -> None:
        """Begin the time of pages that a request made, while it runs, so that no tier keeps them longer."""
        if hints.ttl_s is not None:
            now = self.clock()
            for key in keys:
                self._extend_end(key, now, hints.ttl_s)

    def restore_end(self, key: bytes, left_s: float) -> None:
        """A page that an earlier process left on disk has so many seconds of its time left."""
        self._ends.extend_end(key, self.clock(), max(0.0, left_s))

    def seconds_left(self, key: bytes) -> float | None:
        """Seconds until a key's time is over; None when it has none."""
        found = self._ends.get(key)
        return None if found is None else found.end - self.clock()

    def rest_s(self) -> float | None:
        """Seconds until `take_due` may find something; None when nothing has an end."""
        soonest = min(self._ends.soonest, self._session_ends.soonest)
        return max(0.0, soonest - self.clock()) if soonest < math.inf else None

    def take_due(self, now: float, in_use: Callable[[bytes], bool] = lambda key: False) -> list[bytes]:
        """Let go of the sessions that are over and name the keys whose time is: the caller drops their pages in every
        tier. The time of a key that is `in_use` by a running request starts anew. O(1) when nothing is due."""
        if not self._ends and not self._session_ends:
            return []
        while (name := self._session_ends.find_first(now, force=self._pinned_keys > self._max_keys)) is not None:
            self._release_session(name)
        found: list[bytes] = []
        kept = 0
        while True:
            crowded = len(self._ends) > self._max_keys
            key = self._ends.find_first(now, force=crowded)
            if key is None:
                return found
            if in_use(key):
                self._extend_end(key, now, max(self._ends[key].span, 1.0))  # at least a second, so that it does move
                kept += 1
                if crowded and kept > KEPT_AT_ONCE:
                    return found  # all that end soonest are in use: later calls go on
            else:
                self._ends.pop(key, None)
                found.append(key)

    def _extend_end(self, key: bytes, now: float, span: float) -> None:
        if self._ends.extend_end(key, now, span):
            self.stamped(key, span)

    def _pin_s_of(self, hints: CacheHints) -> float:
        return self._pin_s if hints.ttl_s is None else hints.ttl_s

    def _replace_session(
        self, name: SessionName, keys: Sequence[bytes], tiers: Sequence[TierIndex], span: float
    ) -> None:
        self._release_session(name)
        if not keys:
            return
        for tier in tiers:
            tier.pin_keys(keys)
        self._pinned[name] = (tuple(keys), tuple(tiers))
        self._pinned_keys += len(keys)
        self._session_ends.extend_end(name, self.clock(), span)

    def _release_session(self, name: SessionName) -> None:
        keys, tiers = self._pinned.pop(name, ((), ()))
        for tier in tiers:
            tier.unpin_keys(keys)
        self._pinned_keys -= len(keys)
        self._session_ends.pop(name, None)

    def check_integrity(self) -> None:
        """Assert the invariant of this module, without the limits."""
        assert self._pinned_keys == sum(len(keys) for keys, _ in self._pinned.values()), "pinned keys are miscounted"
        assert set(self._pinned) == set(self._session_ends), "a session has no end, or an end no session"
        self._ends.check_integrity()
        self._session_ends.check_integrity()


T = TypeVar("T", bound=Hashable)


class _Deadline(NamedTuple):
    end: float
    span: float
    serial: int


class _Deadlines(dict[T, _Deadline]):
    """Items with the time at which each ends; ends only move later. An item has one heap entry, at its end or earlier,
    which moves when it is met; entries of other serial numbers are dead."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._serial = 0

    @property
    def soonest(self) -> float:
        """No item ends before this time; infinity without items."""
        return self._heap[0][0] if self else math.inf

    def extend_end(self, item: T, now: float, span: float) -> bool:
        """The item ends at now + span, or when it would have ended if that is later; whether that changed its end."""
        old = self.get(item)
        if old is None:
            self._serial += 1
            self[item] = _Deadline(now + span, span, self._serial)
            heapq.heappush(self._heap, (now + span, self._serial, item))
            if len(self._heap) > 64 + 2 * len(self):
                self._heap = [(live.end, live.serial, item) for item, live in self.items()]
                heapq.heapify(self._heap)
            return True
        if now + span > old.end:
            self[item] = _Deadline(now + span, span, old.serial)
            return True
        return False

    def find_first(self, now: float, *, force: bool = False) -> T | None:
        """The item with the soonest end if that is over, or in any case with `force`."""
        while self._heap and (self._heap[0][0] <= now or force):
            when, serial, item = self._heap[0]
            live = self.get(item)
            if live is None or live.serial != serial:
                heapq.heappop(self._heap)
            elif live.end > when:
                heapq.heapreplace(self._heap, (live.end, serial, item))
            else:
                return item
        return None

    def check_integrity(self) -> None:
        """Assert that each item can be met, not after its end, and that dead entries are few."""
        entries = {(serial, item): when for when, serial, item in self._heap}
        assert len(entries) == len(self._heap), "two entries for one item"
        for item, live in self.items():
            assert entries.get((live.serial, item), math.inf) <= live.end, "an item can never end"
