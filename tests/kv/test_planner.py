"""The compute-or-load planner: exact small cases, optimality over all (k, n), and the rule that runs a plan."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wicore_trt.kv.planner import BAND, MARGIN, Candidate, ComputeRate, LoadPlan, TierRate, advance, plan

PAGE = 32
LINEAR = ComputeRate(1e-3, slice_tokens=64)


def candidate(tokens, tier="disk", *, window=0, page_bytes=32_000, pages=None):
    return Candidate(tokens, pages or [tier] * (tokens // PAGE), PAGE, page_bytes, {tier: window})


def test_without_candidates_it_computes():
    assert plan(1000, 200, [], LINEAR, {}) == LoadPlan(0, 200, 0.8, 0.8, "compute")


def test_an_even_split_of_two_equal_rates():
    """1000 B per token at 1 MB/s: loading a token takes as long as computing it."""
    tiers = {"host": TierRate(1e12), "disk": TierRate(1e6)}
    made = plan(1280, 0, [candidate(1024)], LINEAR, tiers)
    assert made.decision == "split" and made.stop == 1024
    assert made.seconds == pytest.approx(0.512 + 0.256) and made.compute_seconds == pytest.approx(1.28)
    # 20 % faster: meets at 1024 * 0.8 / 1.8 = 455.1; slower: 1024 * 1.2 / 2.2 = 558.5. Both at the better page.
    assert (made.start, made.late) == (448, 576)


def test_a_fast_host_is_loaded_alone_and_a_slow_disk_not_at_all():
    tiers = {"host": TierRate(1e9), "disk": TierRate(1e4)}
    made = plan(1280, 0, [candidate(1024, "host")], LINEAR, tiers)
    assert (made.decision, made.stop, made.start) == ("load", 1024, 0)
    assert made.deadline_s == pytest.approx(1.5 * 0.001024)
    assert plan(1280, 0, [candidate(1024)], LINEAR, tiers).decision == "compute"


def test_latency_makes_short_prefixes_computed():
    tiers = {"host": TierRate(1e9), "disk": TierRate(1e8, latency_s=0.2)}
    assert plan(192, 0, [candidate(128)], LINEAR, tiers).decision == "compute"
    assert plan(2048, 0, [candidate(1984)], LINEAR, tiers).decision == "split"


def test_the_queue_and_the_link_count():
    tiers = {"host": TierRate(1e6), "disk": TierRate(1e9)}
    made = plan(1280, 0, [candidate(1024)], LINEAR, tiers)  # the link is the slower of the two
    assert made.seconds == pytest.approx(0.512 + 0.256, abs=0.04)
    busy = {"host": TierRate(1e12), "disk": TierRate(1e6, queued_bytes=10_000_000)}
    assert plan(1280, 0, [candidate(1024)], LINEAR, busy).decision == "compute"


def test_loads_go_on_while_the_sequence_waits_for_its_turn():
    tiers = {"host": TierRate(1e12), "disk": TierRate(1e6)}
    waiting = ComputeRate(1e-3, delay_s=2.0, slice_tokens=64)
    made = plan(1280, 0, [candidate(1024)], waiting, tiers)
    assert made.decision == "load" and made.seconds == pytest.approx(2.0 + 0.256)


def test_a_missing_tier_rules_its_candidates_out():
    tiers = {"host": TierRate(1e9)}
    made = plan(1280, 0, [candidate(512, "host"), candidate(1024, "disk")], LINEAR, tiers)
    assert made.stop == 512
    assert plan(1280, 0, [candidate(1024)], LINEAR, {}).decision == "compute"


def test_pages_on_the_device_cost_nothing():
    made = plan(1280, 0, [candidate(1024, pages=["device"] * 32, tier="host")], LINEAR, {})
    assert made.decision == "load" and made.seconds == pytest.approx(0.256)


TIER = st.sampled_from(["device", "host", "disk"])


@st.composite
def problems(draw):
    pages = draw(st.lists(TIER, min_size=2, max_size=40))
    start = draw(st.integers(0, PAGE * len(pages) // 2))
    first = start // PAGE
    stops = draw(st.sets(st.integers(start // PAGE + 1, len(pages)), min_size=1, max_size=4))
    window = st.dictionaries(TIER, st.integers(1, 10**6), max_size=3)
    candidates = [Candidate(n * PAGE, pages[first:], PAGE, 40_000, draw(window)) for n in sorted(stops)]
    rate = st.floats(1e5, 1e9)
    tiers = {
        name: TierRate(draw(rate), draw(st.floats(0, 0.1)), draw(st.integers(0, 10**6))) for name in ("host", "disk")
    }
    compute = ComputeRate(
        draw(st.floats(1e-6, 1e-2)),
        draw(st.floats(0, 1e-6)),
        draw(st.floats(0.1, 1)),
        draw(st.floats(0, 1)),
        draw(st.sampled_from([1, 32, 100])),
    )
    return PAGE * len(pages) + draw(st.integers(1, 100)), start, candidates, compute, tiers


def exhaustive(total, start, candidates, compute, tiers):
    """Best seconds over all (k, n), straight from the definitions."""
    best = compute.delay_s + compute.seconds(start, total)
    recompute = best
    for c in candidates:
        first = start - start % PAGE
        for k in sorted({start, *range(first + PAGE, c.tokens, PAGE)}):
            pages = c.global_pages[(k - first) // PAGE : (c.tokens - first) // PAGE]
            counts = {t: pages.count(t) * c.page_bytes + c.window_bytes.get(t, 0) for t in ("host", "disk")}
            load = tiers["host"].seconds(sum(counts.values()))
            if counts["disk"]:
                tail = tiers["host"].latency_s + c.page_bytes / tiers["host"].bytes_per_s
                load = max(load, tiers["disk"].seconds(counts["disk"]) + tail)
            front = compute.delay_s + compute.seconds(start, k)
            best = min(best, max(front, load) + compute.seconds(c.tokens, total))
    return best, recompute


@given(problems())
def test_predicted_time_is_the_best_of_all_splits(problem):
    made = plan(*problem)
    best, recompute = exhaustive(*problem)
    compute = problem[3]
    assert made.compute_seconds == pytest.approx(recompute)
    assert made.seconds >= best - 1e-9
    # Off the optimum by no more than the margin, a page at the meeting point and a slice that is too small to compute.
    page = compute.seconds(problem[0] - PAGE, problem[0])
    slices = compute.seconds(problem[0] - compute.slice_tokens, problem[0])
    assert made.seconds <= max(best / (1 - MARGIN), best + page + slices) + 1e-9
    if made.decision == "compute":
        assert made.stop == 0 and made.start == problem[1]
    else:
        assert made.seconds <= (1 - MARGIN) * recompute
        assert problem[1] <= made.start <= made.late < made.stop
        assert made.start == problem[1] or made.start % PAGE == 0


@given(problems(), st.floats(0.01, 1))
def test_more_of_the_device_never_makes_it_slower(problem, factor):
    total, start, candidates, compute, tiers = problem
    slower = ComputeRate(
        compute.per_token_s, compute.per_key_s, compute.share * factor, compute.delay_s, compute.slice_tokens
    )
    fast = plan(total, start, candidates, compute, tiers).seconds
    slack = compute.seconds(total - PAGE - compute.slice_tokens, total)
    assert plan(total, start, candidates, slower, tiers).seconds >= (1 - MARGIN) * fast - slack - 1e-9


SPLIT = LoadPlan(1024, 512, 0.7, 1.3, "split", late=640, load_seconds=0.5, slice_tokens=100)


@pytest.mark.parametrize(
    ("computed", "ready", "action", "tokens"),
    [
        (0, math.inf, "compute", 512),
        (500, 1024, "compute", 12),
        (500, 500, "jump", 0),
        (512, 544, "compute", 100),  # between start and late: small slices, so that the meeting is not missed by much
        (600, 700, "compute", 40),
        (640, 700, "compute", 384),  # late: as if there were no load
        (700, 700, "jump", 0),
        (1024, 512, "drop", 0),
    ],
)
def test_running_a_split(computed, ready, action, tokens):
    step = advance(SPLIT, computed, ready, elapsed_s=99.0)
    assert (step.action, step.max_tokens) == (action, tokens)


def test_running_a_load():
    load = LoadPlan(1024, 0, 0.3, 1.3, "load", late=0, load_seconds=0.02, deadline_s=0.03)
    assert advance(load, 0, 2048, 0.029).action == "wait"
    assert advance(load, 0, 0, 0.029).action == "jump"
    assert advance(load, 0, 512, 0.03).action == "compute"
    assert advance(load, 512, 512, 0.5).action == "jump"


@given(problems())
def test_a_load_that_never_comes_costs_only_the_wait(problem):
    """The invariant in the module's docstring, for every plan."""
    total, start, _, compute, _ = problem
    made = plan(*problem)
    if made.decision == "compute":
        return
    now, computed, idle = compute.delay_s, start, 0.0
    while True:
        step = advance(made, computed, made.stop + 1, now)
        if step.action == "drop":
            break
        if step.action == "wait":
            idle = made.deadline_s - now
            now = made.deadline_s
            continue
        assert step.action == "compute" and step.max_tokens > 0
        now += compute.seconds(computed, computed + step.max_tokens)
        computed += step.max_tokens
    now += compute.seconds(computed, total)
    assert now <= made.compute_seconds + idle + 1e-9
    assert idle <= 1.5 * compute.seconds(start, start + compute.slice_tokens + PAGE) + 1e-9


def test_the_band_brackets_the_meeting_point():
    tiers = {"host": TierRate(1e12), "disk": TierRate(1e6)}
    made = plan(4096, 0, [candidate(3840)], LINEAR, tiers)
    assert made.start < made.load_seconds * 1000 < made.late
    assert made.late - made.start < 2.5 * BAND * made.start
