"""Shares of one tenant in places that all tenants use, and a gate for concurrent calls.

Must not know calls. Invariants: a tenant gets at most as many places as it leaves free, so a greedy one gets half and
the next one finds room. A refusal reveals only in which of STEPS equal parts the others' places lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import QueueFullError

STEPS = 16


def has_room(places: int, taken: int, own: int, more: int, tenant: str) -> bool:
    """Tell whether a tenant with `own` of the `taken` places may have `more`. The tenant "" is not limited to a share;
    one without a place may exceed its share at once if there is room."""
    if taken + more > places or not tenant:
        return taken + more <= places
    step = max(1, places // STEPS)
    room = places - div_ceil(taken - own, step) * step
    return own + more <= (room + 1) // 2 or (own == 0 and more <= max(room, 1))


class Gate:
    """Limits what is held at a time, such as concurrent calls, to `places`. `what` names it in errors."""

    def __init__(self, places: int, what: str) -> None:
        self._places = places
        self._what = what
        self._taken: Counter[str] = Counter()

    @property
    def taken_places(self) -> int:
        return self._taken.total()

    def take_places(self, tenant: str, count: int) -> None:
        """Take places. Raises QueueFullError when there are none for this tenant; "" is not limited to a share."""
        # one text for both: a tenant must not learn that others have filled the places
        if not has_room(self._places, self._taken.total(), self._taken[tenant], count, tenant):
            raise QueueFullError(f"There is no room for more {self._what} of yours now.")
        self._taken[tenant] += count

    def give_back(self, tenant: str, count: int) -> None:
        self._taken[tenant] -= count
        if not self._taken[tenant]:
            del self._taken[tenant]

    @contextmanager
    def hold_place(self, tenant: str) -> Iterator[None]:
        """Hold a place. Raises QueueFullError as `take_places` does."""
        self.take_places(tenant, 1)
        try:
            yield
        finally:
            self.give_back(tenant, 1)
