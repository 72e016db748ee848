"""What one tenant may have of places that all share.

Plain arithmetic. Invariant: a tenant gets at most as many places as it leaves free, so that one that takes all it gets
has half of them and the next one finds room; and where it is refused tells it no more of the others than in which of
STEPS equal parts the number of their places lies.
"""

from __future__ import annotations

from wicore_trt.arithmetic import div_ceil

STEPS = 16


def fits(places: int, others: int, own: int, more: int = 1) -> bool:
    """Whether a tenant with `own` places may have `more` of them while all others together have `others`.

    A tenant that has none may ask for more at once than its share, if there is room for it.
    """
    step = max(1, places // STEPS)
    room = places - div_ceil(others, step) * step
    if others + own + more > places:
        return False
    return own + more <= (room + 1) // 2 or (own == 0 and more <= max(room, 1))
