"""Bounds on how long requests wait and run, and the refusal of a request that would wait too long.

Times are seconds of the engine's clock. Must not know requests. Invariant (I16): a refusal says when to ask again.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from wicore_trt.errors import UNAVAILABLE_RETRY_S, QueueFullError

MARGIN = 0.75
"""Part of a target that a wait may be expected to take: estimates are not exact, and the way here takes its time."""
LATEST_S = 60.0
"""The longest time to retry that is told because many were refused; OpenAI's clients take a longer one for none."""
LONGEST_S = 3600.0
"""The longest time to retry that is told because others have so much to do, before it is spread."""
SPREAD = 0.25
"""Part of itself by which a time to retry is longer at random."""
HOLD_RATE = 0.1
"""Weight of the last sequence in the mean time that one runs."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds, None for none. `max_queue_s`: until a request's first step. `target_ttft_s`: until its first
    token; MARGIN of it may be planned, or twice the prefill time if longer. `timeout_s`: until its end, unless it has a
    deadline."""

    max_queue_s: float | None = None
    target_ttft_s: float | None = None
    timeout_s: float | None = None

    @property
    def bound_waits(self) -> bool:
        return self.max_queue_s is not None or self.target_ttft_s is not None

    def patience_s(self, prompt_s: float, left_s: float | None) -> float:
        """Return how long a request may wait if its prefill takes `prompt_s` and its deadline is `left_s` away."""
        least = math.inf if left_s is None else left_s
        if self.max_queue_s is not None:
            least = min(least, self.max_queue_s)
        if self.target_ttft_s is not None:
            least = min(least, max(MARGIN * self.target_ttft_s - prompt_s, prompt_s))
        return max(0.0, least)


class Alarms(dict[str, float]):
    """Stamps by name. `due_names` returns at once until the earliest stamp has come."""

    def __init__(self) -> None:
        super().__init__()
        self._soonest = math.inf

    def __setitem__(self, name: str, at: float) -> None:
        super().__setitem__(name, at)
        self._soonest = min(self._soonest, at)

    def due_names(self, now: float) -> list[str]:
        """List the names whose time has come; they stay until they are deleted."""
        if now < self._soonest:
            return []
        found = [name for name, at in self.items() if at <= now]
        self._soonest = min((at for at in self.values() if at > now), default=math.inf)
        return found


def make_wait_error(wait_s: float, limit_s: float, pace_s: float | None = None) -> QueueFullError:
    """Make the refusal of a request that would wait longer than the limit. It does not reveal how many others wait."""
    return QueueFullError(
        "The server is too busy to begin this request in time.",
        retry_after_s=max(UNAVAILABLE_RETRY_S, wait_s - limit_s),
        pace_s=pace_s,
    )


class Hints:
    """Retry times for refused requests. Each request of a tenant gets a later time than its last, by the pace at which
    places become free, so that clients do not all return at once. A time that would be too late is random instead."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}  # latest stamp given to a tenant's request
        self._pace_s = 0.0

    def retry_s(self, tenant: str, now: float, least_s: float, pace_s: float | None = None) -> float:
        """Return seconds until a retry, `least_s` to about LONGEST_S. A place becomes free every `pace_s`; None: as at
        the last call."""
        self._pace_s, least_s = pace_s or self._pace_s, min(least_s, LONGEST_S)
        at = max(now + least_s, self._last.get(tenant, 0.0) + self._pace_s)
        if (at - now) * (1 + SPREAD) > LATEST_S:
            least_s = max(least_s, LATEST_S / 2)
            return random.uniform(least_s, max(LATEST_S, least_s * (1 + SPREAD)))
        self._last[tenant] = at
        return (at - now) * random.uniform(1.0, 1 + SPREAD)
