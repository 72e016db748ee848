"""How many calls may be open at the same time, in all and by tenant.

Knows names and numbers; it must not know calls. Invariant: a tenant is refused while it has as many places as are free,
so that one that takes all it gets has half of them and the next one finds room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

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
        free = self._places - self._taken.total()
        if free <= 0:
            raise QueueFullError(f"The server has {self._places} {self._what} open, which is its limit.")
        if tenant and self._taken[tenant] >= free:
            raise QueueFullError(f"You have {self._taken[tenant]} {self._what} open, which is your share now.")
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
