"""How many requests and tokens a tenant, or one key of it, may ask for in a minute: token buckets with refund.

Plain data under an injected clock; it must not know calls. A bucket holds a minute's worth and fills evenly. A request
reserves what it may take at most, and its grant gives back what it did not use, or takes what it used more. Invariants:
over any span a tenant starts at most one bucket more than the rate gives; what was reserved is settled once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from wicore_trt.access.keys import Identity
from wicore_trt.core.cells import Cells, Pair
from wicore_trt.errors import RateLimitError

MINUTE_S = 60.0


class Bucket:
    """`per_minute` units, full at first. It can be in debt, and then nothing is granted until that is paid."""

    def __init__(self, per_minute: int, clock: Callable[[], float], pair: Pair | None = None) -> None:
        """`pair` holds what is there and when that was so, where others fill and take, too."""
        self.capacity = per_minute
        self._per_s = per_minute / MINUTE_S
        self._clock = clock
        self._pair = pair if pair is not None else [float(per_minute), clock()]

    @property
    def level(self) -> float:
        """What is there now."""
        now = self._clock()
        level, stamp = self._pair
        self._pair[0] = level = min(float(self.capacity), level + (now - stamp) * self._per_s)
        self._pair[1] = now
        return level

    def wait_s(self, units: float) -> float:
        """Seconds until `units` are there, 0 when they are."""
        return max(0.0, units - self.level) / self._per_s

    def change(self, per_minute: int) -> None:
        """Hold and fill as much from now on; debts stay, and so does what others hold who changed before."""
        self.capacity = max(self.capacity, per_minute)
        level = self.level
        self.capacity, self._per_s = per_minute, per_minute / MINUTE_S
        self._pair[0] = min(level, float(per_minute))

    def add(self, units: float) -> None:
        """Put units in, or take them out."""
        self._pair[0] = min(float(self.capacity), self.level + units)


@dataclass(frozen=True, slots=True)
class Allowance:
    """One limit of a tenant as it stands. `reset_s` is the time until the bucket is full again."""

    limit: int
    remaining: int
    reset_s: float


class Grant:
    """What one request reserved."""

    def __init__(self, tokens: Bucket | None, reserved: int, cells: Cells) -> None:
        self._tokens, self._reserved, self._cells = tokens, reserved, cells

    def settle(self, used: int) -> None:
        """The request has ended and took `used` tokens. Only the first call counts."""
        if self._tokens is not None:
            with self._cells.held():
                self._tokens.add(self._reserved - used)
            self._tokens = None


class Rates:
    """A bucket for each tenant, and for each key that has a rate of its own; None is no limit."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        cells: Cells | None = None,
    ) -> None:
        """`cells` hold the buckets of several processes."""
        self._cells = cells or Cells()
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._clock = clock
        self._buckets: dict[tuple[str | bytes, str], Bucket] = {}

    def take(self, who: Identity, tokens: int, requests: int = 1) -> Grant:
        """Count `requests` and reserve `tokens`. What is more than a bucket holds counts as a full one.

        Raises RateLimitError, and takes nothing, when one of the two is not there.
        """
        if self._bucket(who, "requests") is None and self._bucket(who, "tokens") is None:
            return Grant(None, 0, self._cells)
        with self._cells.held():
            return self._take(who, tokens, requests)

    def _take(self, who: Identity, tokens: int, requests: int) -> Grant:
        wanted = {}
        for kind, units in (("requests", requests), ("tokens", tokens)):
            bucket = self._bucket(who, kind)
            if bucket is None:
                continue
            wanted[kind] = min(units, bucket.capacity)
            wait_s = bucket.wait_s(wanted[kind])
            if wait_s > 0:
                raise RateLimitError(f"You may send {bucket.capacity} {kind} a minute.", retry_after_s=wait_s)
        for kind, units in wanted.items():
            bucket = self._bucket(who, kind)
            assert bucket is not None
            bucket.add(-units)
        return Grant(self._bucket(who, "tokens"), wanted.get("tokens", 0), self._cells)

    def change(
        self, requests_per_minute: int | None, tokens_per_minute: int | None, own: Mapping[bytes, Identity]
    ) -> None:
        """Other limits from now on, with the `own` ones of keys, by their names; what was taken counts. All buckets
        change at once, as others change theirs now: they fill what time has passed at the pace that they know."""
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        with self._cells.held():
            for (name, kind), bucket in self._buckets.items():
                limit = self._limits[kind] if isinstance(name, str) else _own(own.get(name), kind)
                if limit is not None:
                    bucket.change(limit)

    def allowances(self, who: Identity) -> dict[str, Allowance]:
        """What is left of each limit, by "requests" and "tokens"."""
        found = {}
        for kind in self._limits:
            bucket = self._bucket(who, kind)
            if bucket is not None:
                with self._cells.held():
                    left, wait_s = max(0, int(bucket.level)), bucket.wait_s(bucket.capacity)
                found[kind] = Allowance(bucket.capacity, left, wait_s)
        return found

    def _bucket(self, who: Identity, kind: str) -> Bucket | None:
        own = _own(who, kind)
        limit, name = (own, (who.key, kind)) if own is not None else (self._limits[kind], (who.tenant, kind))
        if limit is None:
            if self._buckets.pop(name, None) is not None:
                self._cells.forget(name)
            return None
        bucket = self._buckets.get(name)
        if bucket is None:
            pair = self._cells.pair(name, float(limit), self._clock())
            bucket = self._buckets[name] = Bucket(limit, self._clock, pair)
        elif bucket.capacity != limit:  # it was changed
            with self._cells.held():
                bucket.change(limit)
        return bucket


def _own(who: Identity | None, kind: str) -> int | None:
    """The limit of a key's own."""
    limit: int | None = getattr(who, f"{kind}_per_minute", None)
    return limit
