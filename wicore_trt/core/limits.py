"""How long requests may wait and run, and what those are told that would wait too long.

Times are seconds, stamps those of the engine's clock. It must not know requests or queues. Invariant: a refusal says
when to ask again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from wicore_trt.errors import UNAVAILABLE_RETRY_S, QueueFullError

MARGIN = 0.75
"""Part of a target that a wait may be expected to take: estimates are not exact, and the way here takes its time."""
HOLD_RATE = 0.1
"""Weight of the last sequence in the mean time that one runs."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None is no limit. `max_queue_s`: until the first step of a request. `target_ttft_s`: until its first token, or
    twice what its prompt takes where that is more. `timeout_s`: until its end, where it has no deadline of its own."""

    max_queue_s: float | None = None
    target_ttft_s: float | None = None
    timeout_s: float | None = None

    @property
    def bound_waits(self) -> bool:
        return self.max_queue_s is not None or self.target_ttft_s is not None

    def patience_s(self, prompt_s: float, left_s: float | None = None) -> float:
        """How long a request may wait whose prompt then takes `prompt_s`; `left_s` of its own deadline."""
        least = math.inf if left_s is None else left_s
        if self.max_queue_s is not None:
            least = min(least, self.max_queue_s)
        if self.target_ttft_s is not None:
            least = min(least, max(MARGIN * self.target_ttft_s - prompt_s, prompt_s))
        return max(0.0, least)


class Alarms(dict[str, float]):
    """Stamps by name. Asking costs nothing until one may have come."""

    def __init__(self) -> None:
        super().__init__()
        self._soonest = math.inf

    def __setitem__(self, name: str, at: float) -> None:
        super().__setitem__(name, at)
        self._soonest = min(self._soonest, at)

    def due(self, now: float) -> list[str]:
        """Names whose time has come; they stay."""
        if now < self._soonest:
            return []
        found = [name for name, at in self.items() if at <= now]
        self._soonest = min((at for at in self.values() if at > now), default=math.inf)
        return found


def too_long(wait_s: float, limit_s: float) -> QueueFullError:
    """What who would wait longer than the limit is told. How many others wait is none of its business."""
    return QueueFullError(
        "The server is too busy to begin this request in time.",
        retry_after_s=max(UNAVAILABLE_RETRY_S, wait_s - limit_s),
    )
