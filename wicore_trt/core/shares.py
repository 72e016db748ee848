"""Shares of one tenant in places that all tenants use, and such places: calls that may be open at the same time.

Knows names and numbers; it must not know calls. Invariant: a tenant gets at most as many places as it leaves free, so
that one that takes all it gets has half of them and the next one finds room; and where it is refused tells it no more
of the others than in which of STEPS equal parts the number of their places lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import QueueFullError

STEPS = 16


def fits_share(places: int, others: int, own: int, more: int = 1) -> bool:
    """Tell whether a tenant with `own` places may have `more` of them while all others together have `others`.

    A tenant that has none may ask for more at once than its share, if there is room for it.
    """
    step = max(1, places // STEPS)
    room = places - div_ceil(others, step) * step
    if others + own + more > places:
        return False
    return own + more <= (room + 1) // 2 or (own == 0 and more <= max(room, 1))


class Gate:
    """`places` calls at a time. `what` names them in errors."""

    def __init__(self, places: int, what: str) -> None:
        self._places = places
        self._what = what
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        return self._taken.total()

    @contextmanager
    def hold_place(self, tenant: str = "") -> Iterator[None]:
        """Hold a place. Raises QueueFullError when there is none for this tenant; "" is not limited to a share."""
        taken, own = self._taken.total(), self._taken[tenant]
        # One text for both: that the others have filled the places is none of a tenant's business.
        if taken >= self._places or (tenant and not fits_share(self._places, taken - own, own)):
            raise QueueFullError(f"There is no room for more {self._what} of yours now.")
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
