"""A2CR: the order is the formula's, at any time; attention counts when measured; the decay rate adapts."""

from __future__ import annotations

import math
import random

import pytest

from wicore_trt.kv.policy.a2cr import RATES, A2CRPolicy, compute_score


@pytest.mark.parametrize("seed", range(5))
def test_victims_follow_the_formula_at_any_later_time(seed: int) -> None:
    """Independent pages with random attention, frequency and age, against the score computed from scratch."""
    rng = random.Random(seed)
    rate = 10 ** rng.uniform(-3, -1)
    policy = A2CRPolicy(1000, 1000 * rate)
    attention: dict[int, float] = {}
    frequency: dict[int, int] = {}
    last: dict[int, int] = {}
    clock = 0
    for _ in range(400):
        page, signal = rng.randrange(80), math.exp(rng.gauss(0, 1))
        clock += 1
        policy.touch_chain([page], [signal])
        policy.add_pages([page])
        attention[page] = signal if page not in attention else 0.5 * (attention[page] + signal)
        frequency[page] = frequency.get(page, 0) + 1
        last[page] = clock
    for later in (0, 10_000):
        now = clock + later

        def score(page: int, now: int = now) -> float:
            return math.log(attention[page]) + math.log(frequency[page]) - rate * (now - last[page])

        assert policy.choose_victims(len(last)) == sorted(last, key=score)


def test_attention_orders_otherwise_equal_pages() -> None:
    policy = A2CRPolicy(10, 1e-2)
    for page, mass in (("low", 0.2), ("high", 3.0), ("unseen", None)):
        policy.touch_chain([page], None if mass is None else [mass])
        policy.add_pages([page])
    assert policy.choose_victims(3) == ["low", "unseen", "high"]


def test_an_unmeasured_page_is_neutral_and_zero_is_finite() -> None:
    assert compute_score(1.0, 4, 0, 0.1) == pytest.approx(math.log(4))
    assert math.isfinite(compute_score(0.0, 1, 0, 0.1))


def replay(policy: A2CRPolicy, capacity: int, pages: list[int]) -> int:
    hits = 0
    for page in pages:
        hits += page in policy
        policy.touch_chain([page])
        if page not in policy:
            policy.add_pages([page])
        if len(policy) > capacity:
            for victim in policy.choose_victims(len(policy) - capacity) or []:
                policy.remove_page(victim)
    return hits


@pytest.mark.parametrize("kind", ["popular", pytest.param("recent", marks=pytest.mark.long)])
def test_the_rate_adapts_to_the_traffic(kind: str) -> None:
    """A fixed popularity wants slow decay; a working set that moves on wants fast decay."""
    rng, capacity = random.Random(3), 100
    if kind == "popular":
        pages = rng.choices(range(2000), [(i + 1) ** -0.8 for i in range(2000)], k=20_000)
    else:
        pages = [i // 10 - int(rng.expovariate(1 / 40)) for i in range(20_000)]
    policy = A2CRPolicy(capacity)
    hits = replay(policy, capacity, pages)
    fixed = {rate: replay(A2CRPolicy(capacity, rate), capacity, pages) for rate in RATES}
    assert hits >= 0.97 * max(fixed.values())
    assert min(fixed.values()) < 0.97 * max(fixed.values()), "the workload does not tell the rates apart"
