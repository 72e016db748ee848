"""Token buckets under a clock of our own: limits, refill, refund, debt, tenants."""

from __future__ import annotations

import random

import pytest

from wicore_trt.access.admission import Admission, Grant, Rates
from wicore_trt.access.keys import Identity, KeyRing
from wicore_trt.core.shares import Gate
from wicore_trt.errors import QueueFullError, RateLimitError
from wicore_trt.types import SamplingParams, TextOutput, TextRequest, Usage

A, B = Identity("a"), Identity("b")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(rates: Rates, who: Identity, tokens: int = 0, requests: int = 1) -> float:
    with pytest.raises(RateLimitError) as caught:
        rates.reserve_units(who, tokens, requests)
    return caught.value.retry_after_s


def settle(grant: Grant, used: int) -> None:
    """As at the end of `Admission.reserve_tokens`."""
    if grant.bucket is not None:
        grant.bucket.add_units(grant.reserved - used)


def test_requests_of_a_minute():
    clock = Clock()
    rates = Rates(requests_per_minute=60, clock=clock)
    for _ in range(60):
        rates.reserve_units(A, 10**9)
    assert refused(rates, A) == pytest.approx(1.0) and issubclass(RateLimitError, QueueFullError)
    rates.reserve_units(B, 0)
    clock.now += 0.999
    assert refused(rates, A) == pytest.approx(0.001)
    clock.now += 0.001
    rates.reserve_units(A, 0)
    assert rates.list_allowances(A)["requests"].remaining == 0 and rates.list_allowances(B)["requests"].remaining == 60
    clock.now += 10**6
    assert rates.list_allowances(A)["requests"].remaining == 60, "a bucket holds a minute's worth"


def test_tokens_are_given_back_and_taken_later():
    clock = Clock()
    rates = Rates(tokens_per_minute=600, clock=clock)
    grant = rates.reserve_units(A, 500)
    assert refused(rates, A, 200) == pytest.approx(10.0)
    settle(grant, 100)
    assert rates.list_allowances(A)["tokens"].remaining == 500
    settle(rates.reserve_units(A, 500), 1100)
    allowance = rates.list_allowances(A)["tokens"]
    assert allowance.remaining == 0 and allowance.reset_s == pytest.approx(120.0), "600 of debt, then 600"
    assert refused(rates, A, 1) == pytest.approx(60.1)


def test_what_is_larger_than_the_bucket_takes_all_of_it():
    clock = Clock()
    rates = Rates(requests_per_minute=3, tokens_per_minute=100, clock=clock)
    settle(rates.reserve_units(A, 10_000, 50), 100)
    assert refused(rates, A, 1) == pytest.approx(20.0)
    clock.now += 60
    rates.reserve_units(A, 10_000, 50)


def test_a_refusal_takes_nothing():
    rates = Rates(requests_per_minute=10, tokens_per_minute=100, clock=Clock())
    rates.reserve_units(A, 90)
    for _ in range(20):
        refused(rates, A, 50)
    assert rates.list_allowances(A)["requests"].remaining == 9
    rates.reserve_units(A, 10)


def test_no_limits_are_none():
    rates = Rates()
    for _ in range(1000):
        settle(rates.reserve_units(A, 10**9), 10**9)
    assert not rates.list_allowances(A)


def test_no_span_gives_more_than_the_rate_and_one_bucket():
    rng, clock = random.Random(5), Clock()
    rates = Rates(tokens_per_minute=600, clock=clock)
    taken, open_grants = [], []
    for _ in range(3000):
        clock.now += rng.expovariate(5)
        if open_grants and rng.random() < 0.5:
            grant, reserved, used = open_grants.pop(rng.randrange(len(open_grants)))
            settle(grant, used)
            continue
        reserved = rng.randrange(1, 200)
        try:
            grant = rates.reserve_units(A, reserved)
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


def test_changed_limits_hold_at_once_for_buckets_that_are_there():
    """Buckets of a tenant, and of a key with a rate of its own."""
    own = Identity("c", requests_per_minute=60, key=b"k"), Identity("c", requests_per_minute=6000, key=b"k")
    clock = Clock()
    rates = Rates(60, clock=clock)
    for who in (A, own[0]):
        rates.reserve_units(who, 0)
    rates.change_limits(6000, None, {b"k": own[1]})
    clock.now += 60
    for who in (A, own[1]):
        assert rates.list_allowances(who)["requests"].remaining == 6000
    few = Identity("c", requests_per_minute=6, key=b"k")
    for who in (A, own[1]):
        rates.reserve_units(who, 0, 6000)
    rates.change_limits(6, None, {b"k": few})
    clock.now += 1
    for who in (A, few):
        assert refused(rates, who) == pytest.approx(9.0), "it adds nothing"


def text_request(**kwargs) -> TextRequest:
    return TextRequest("r", SamplingParams(**kwargs), prompt_token_ids=(5,) * 40, tenant="a")


def output(tokens: int, usage: Usage | None = None) -> TextOutput:
    return TextOutput("r", 0, "x" * tokens, (5,) * tokens, usage=usage)


def test_a_meter_settles_what_was_used():
    rates = Rates(tokens_per_minute=1000, clock=Clock())

    def left() -> int:
        return rates.list_allowances(A)["tokens"].remaining

    admission = Admission(KeyRing({}), Gate(8, "calls"), rates)
    with admission.reserve_tokens(A, [text_request(max_tokens=100, n=2)]) as grant:
        assert left() == 1000 - 240
        grant.used += 41
        grant.used += 7
        grant.used += 3
    assert left() == 1000 - 41 - 10
    with pytest.raises(QueueFullError), admission.reserve_tokens(A, [text_request(max_tokens=100)]):
        assert left() == 1000 - 51 - 140
        raise QueueFullError("full")
    assert left() == 1000 - 51, "the engine refused it"
    with admission.reserve_tokens(A, [text_request()]) as left_early:
        assert left() == 1000 - 51 - 40 - 256
        left_early.used += 44
    assert left() == 1000 - 51 - 44, "its prompt was computed, whatever was guessed"


def test_a_key_has_its_own_rates_in_place_of_its_tenants(tmp_path):
    file, keys = tmp_path / "keys", [c * 16 for c in "xyz"]
    file.touch(0o600)
    file.write_text(f"a:{keys[0]}\na:{keys[1]}:requests=2\na:{keys[2]}:tokens=50:requests=100:operator\n")
    plain, few, tokens = (KeyRing.from_files(None, str(file)).find_identity(key) for key in keys)
    rates = Rates(requests_per_minute=3, clock=Clock())
    for who, count in ((few, 2), (plain, 3), (tokens, 5)):
        for _ in range(count):
            rates.reserve_units(who, 10)
    assert refused(rates, few) == pytest.approx(30.0) and refused(rates, plain) == pytest.approx(20.0)
    assert refused(rates, tokens, 1) == pytest.approx(60 / 50) and tokens.operator
    file.write_text(f"a:{keys[1]}:requests=4\na:{keys[2]}\n")
    few, tokens = (KeyRing.from_files(None, str(file)).find_identity(key) for key in keys[1:])
    assert rates.list_allowances(few)["requests"].limit == 4
    assert refused(rates, few) == pytest.approx(15.0), "what was taken before the change counts"
    assert refused(rates, tokens) == pytest.approx(20.0), "it counts with its tenant now"
