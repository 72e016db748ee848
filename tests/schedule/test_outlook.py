"""When a newcomer finds a place."""

from __future__ import annotations

import random

import pytest

from wicore_trt.schedule.queue import Outlook


def test_places_that_were_taken_at_once_become_free_at_once():
    """Not evenly: who comes right behind a burst waits for as long as a sequence holds its place."""
    found = Outlook(free=0, turnover_s=0.05, begun=(10.0,) * 20, hold_s=1.0, now=10.1)
    assert found.wait_s("", 0.0, 0.0) == pytest.approx(0.9)
    assert found.wait_s("", 0.0, 0.0, more=19) == pytest.approx(1.0)  # 20 places, evenly
    assert found.wait_s("", 0.0, 0.0, more=20) == pytest.approx(1.9)
    free = Outlook(free=20, turnover_s=0.05, begun=(), hold_s=1.0, now=10.0)
    assert free.wait_s("", 0.0, 0.0, more=19) == 0.0
    assert free.wait_s("", 0.0, 0.0, more=20) == pytest.approx(1.0), "behind those that take the free ones now"
    unknown = Outlook(free=0, turnover_s=0.0, begun=(1.0,), hold_s=0.0, now=1.0)
    assert unknown.wait_s("", 0.0, 0.0, more=9) == 0.0


def test_it_is_what_happens_where_all_hold_their_places_for_as_long():
    rng = random.Random(4)
    for _ in range(200):
        places, hold_s, now = rng.randint(1, 12), rng.uniform(0.1, 9.0), 100.0
        ends = sorted(now + rng.uniform(0.0, hold_s) for _ in range(places))
        begun = tuple(end - hold_s for end in ends)
        outlook = Outlook(free=0, turnover_s=hold_s / places, begun=begun, hold_s=hold_s, now=now)
        for more in range(3 * places):
            at = ends.pop(0)
            ends.append(at + hold_s)
            found = outlook.wait_s("", 0.0, 0.0, more=more)
            assert found >= at - now - 1e-9
            assert found == pytest.approx(max(at - now, (more + 1) * hold_s / places))
