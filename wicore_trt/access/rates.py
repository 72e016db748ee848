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
from wicore_trt.errors import RateLimitError

MINUTE_S = 60.0


class Bucket:
    """`per_minute` units, full at first. It can be in debt, and then nothing is granted until that is paid."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.capacity = per_minute
        self._per_s = per_minute / MINUTE_S
        self._clock = clock
        self._level, self._stamp = float(per_minute), clock()

    @property
    def level(self) -> float:
        """What is there now."""
        now = self._clock()
        self._level = min(float(self.capacity), self._level + (now - self._stamp) * self._per_s)
        self._stamp = now
        return self._level

    def wait_s(self, units: float) -> float:
        """Seconds until `units` are there, 0 when they are."""
        return max(0.0, units - self.level) / self._per_s

    def change(self, per_minute: int) -> None:
        """Hold and fill `per_minute` units from now on; a debt stays."""
        level = self.level
        self.capacity, self._per_s = per_minute, per_minute / MINUTE_S
        self._level = min(level, float(per_minute))

    def add(self, units: float) -> None:
        """Put units in, or take them out."""
        self._level = min(float(self.capacity), self.level + units)


@dataclass(frozen=True, slots=True)
class Allowance:
    """One limit of a tenant as it stands. `reset_s` is the time until the bucket is full again."""

    limit: int
    remaining: int
    reset_s: float


class Grant:
    """What one request reserved."""

    def __init__(self, tokens: Bucket | None, reserved: int) -> None:
        self._tokens, self._reserved = tokens, reserved

    def settle(self, used: int) -> None:
        """The request has ended and took `used` tokens. Only the first call counts."""
        if self._tokens is not None:
            self._tokens.add(self._reserved - used)
            self._tokens = None


class Rates:
    """A bucket for each tenant, and for each key that has a rate of its own; None is no limit."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._clock = clock
        self._buckets: dict[tuple[str | bytes, str], Bucket] = {}

    def take(self, who: Identity, tokens: int, requests: int = 1) -> Grant:
        """Count `requests` and reserve `tokens`. What is more than a bucket holds counts as a full one.

        Raises RateLimitError, and takes nothing, when one of the two is not there.
        """
        taken: list[tuple[Bucket, int]] = []
        grant = Grant(None, 0)
        for kind, units in (("requests", requests), ("tokens", tokens)):
            bucket = self._find_bucket(who, kind)
            if bucket is None:
                continue
            units = min(units, bucket.capacity)
            wait_s = bucket.wait_s(units)
            if wait_s > 0:
                raise RateLimitError(f"You may send {bucket.capacity} {kind} a minute.", retry_after_s=wait_s)
            taken.append((bucket, units))
            if kind == "tokens":
                grant = Grant(bucket, units)
        for bucket, units in taken:
            bucket.add(-units)
        return grant

    def change(
        self, requests_per_minute: int | None, tokens_per_minute: int | None, own: Mapping[bytes, Identity]
    ) -> None:
        """Apply other limits from now on, with the `own` ones of keys, by their names. What was taken counts, and for
        the time that has passed buckets fill at their former pace."""
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        for (name, kind), bucket in self._buckets.items():
            limit = self._limits[kind] if isinstance(name, str) else _own(own.get(name), kind)
            if limit is not None:
                bucket.change(limit)

    def allowances(self, who: Identity) -> dict[str, Allowance]:
        """What is left of each limit, by "requests" and "tokens"."""
        found = {}
        for kind in self._limits:
            bucket = self._find_bucket(who, kind)
            if bucket is not None:
                left = max(0, int(bucket.level))
                found[kind] = Allowance(bucket.capacity, left, bucket.wait_s(bucket.capacity))
        return found

    def _find_bucket(self, who: Identity, kind: str) -> Bucket | None:
        own = _own(who, kind)
        limit, name = (own, (who.key, kind)) if own is not None else (self._limits[kind], (who.tenant, kind))
        if limit is None:
            self._buckets.pop(name, None)
            return None
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = Bucket(limit, self._clock)
        elif bucket.capacity != limit:  # it was changed
            bucket.change(limit)
        return bucket


def _own(who: Identity | None, kind: str) -> int | None:
    """The limit of a key's own."""
    limit: int | None = getattr(who, f"{kind}_per_minute", None)
    return limit
