"""Token buckets under a clock of our own: limits, refill, refund, debt, tenants."""

from __future__ import annotations

import random

import pytest

from wicore_trt.access.admission import Meter
from wicore_trt.access.rates import Rates
from wicore_trt.errors import QueueFullError, RateLimitError
from wicore_trt.types import SamplingParams, TextOutput, TextRequest, Usage


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(rates: Rates, tenant: str, tokens: int = 0, requests: int = 1) -> float:
    with pytest.raises(RateLimitError) as caught:
        rates.take(tenant, tokens, requests)
    return caught.value.retry_after_s


def test_requests_of_a_minute():
    clock = Clock()
    rates = Rates(requests_per_minute=60, clock=clock)
    for _ in range(60):
        rates.take("a", 10**9)
    assert refused(rates, "a") == pytest.approx(1.0) and issubclass(RateLimitError, QueueFullError)
    rates.take("b", 0)
    clock.now += 0.999
    assert refused(rates, "a") == pytest.approx(0.001)
    clock.now += 0.001
    rates.take("a", 0)
    assert rates.allowances("a")["requests"].remaining == 0 and rates.allowances("b")["requests"].remaining == 60
    clock.now += 10**6
    assert rates.allowances("a")["requests"].remaining == 60, "a bucket holds a minute's worth"


def test_tokens_are_given_back_and_taken_later():
    clock = Clock()
    rates = Rates(tokens_per_minute=600, clock=clock)
    grant = rates.take("a", 500)
    assert refused(rates, "a", 200) == pytest.approx(10.0)
    grant.settle(100)
    grant.settle(100)
    assert rates.allowances("a")["tokens"].remaining == 500
    rates.take("a", 500).settle(1100)
    allowance = rates.allowances("a")["tokens"]
    assert allowance.remaining == 0 and allowance.reset_s == pytest.approx(120.0), "600 of debt, then 600"
    assert refused(rates, "a", 1) == pytest.approx(60.1)


def test_what_is_larger_than_the_bucket_takes_all_of_it():
    clock = Clock()
    rates = Rates(requests_per_minute=3, tokens_per_minute=100, clock=clock)
    rates.take("a", 10_000, 50).settle(100)
    assert refused(rates, "a", 1) == pytest.approx(20.0)
    clock.now += 60
    rates.take("a", 10_000, 50)


def test_a_refusal_takes_nothing():
    rates = Rates(requests_per_minute=10, tokens_per_minute=100, clock=Clock())
    rates.take("a", 90)
    for _ in range(20):
        refused(rates, "a", 50)
    assert rates.allowances("a")["requests"].remaining == 9
    rates.take("a", 10)


def test_no_limits_are_none():
    rates = Rates()
    for _ in range(1000):
        rates.take("a", 10**9).settle(10**9)
    assert not rates.allowances("a")


def test_no_span_gives_more_than_the_rate_and_one_bucket():
    rng, clock = random.Random(5), Clock()
    rates = Rates(tokens_per_minute=600, clock=clock)
    taken, open_grants = [], []
    for _ in range(3000):
        clock.now += rng.expovariate(5)
        if open_grants and rng.random() < 0.5:
            grant, reserved, used = open_grants.pop(rng.randrange(len(open_grants)))
            grant.settle(used)
            continue
        reserved = rng.randrange(1, 200)
        try:
            grant = rates.take("a", reserved)
        except RateLimitError:
            continue
        used = rng.randrange(0, reserved + 1)
        taken.append((clock.now, used))
        open_grants.append((grant, reserved, used))
    assert len(taken) > 100
    for start in range(0, len(taken), 7):
        total = 0
        for at, used in taken[start:]:
            total += used
            assert total <= 600 + (at - taken[start][0]) * 10 + 200, "what is under way was reserved in full"


def text_request(**kwargs) -> TextRequest:
    return TextRequest("r", SamplingParams(**kwargs), prompt_token_ids=(5,) * 40, tenant="a")


def output(tokens: int, usage: Usage | None = None) -> TextOutput:
    return TextOutput("r", 0, "x" * tokens, (5,) * tokens, usage=usage)


def test_a_meter_settles_what_was_used():
    rates = Rates(tokens_per_minute=1000, clock=Clock())

    def left() -> int:
        return rates.allowances("a")["tokens"].remaining

    meter = Meter(rates, "a")
    meter.reserve([text_request(max_tokens=100, n=2)])
    assert left() == 1000 - 240
    meter.begin()
    meter.count(output(7))
    meter.count(output(3, Usage(41, 10)))
    meter.settle()
    assert left() == 1000 - 41 - 10
    refused_later = Meter(rates, "a")
    refused_later.reserve([text_request(max_tokens=100)])
    refused_later.settle()
    assert left() == 1000 - 51, "the engine refused it"
    left_early = Meter(rates, "a")
    left_early.reserve([text_request()])
    assert left() == 1000 - 51 - 40 - 256
    left_early.begin()
    left_early.settle()
    assert left() == 1000 - 51 - 40, "its prompt was computed"
