"""How many calls may be open at the same time, in all and by tenant.

Knows names and numbers; it must not know calls. Invariant: a tenant has no more than its share (`core.shares`), and
what a refusal says tells nothing of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from wicore_trt.core.shares import fits
from wicore_trt.errors import QueueFullError


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
    def place(self, tenant: str = "") -> Iterator[None]:
        """Hold a place. Raises QueueFullError when there is none for this tenant; "" is not limited to a share."""
        taken, own = self._taken.total(), self._taken[tenant]
        # One text for both: that the others have filled the places is none of a tenant's business.
        if taken >= self._places or (tenant and not fits(self._places, taken - own, own)):
            raise QueueFullError(f"There is no room for more {self._what} of yours now.")
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
