"""The online meters: they find the truth, follow a change, shrug off outliers, and try a slow tier again."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import replace
from unittest import mock

import pytest
from fakes import clear_cache, make_core
from fault_injection import Fault, FaultPlan, FaultyFiles
from hypothesis import given
from hypothesis import strategies as st

from wicore_trt.config import KVSettings
from wicore_trt.kv.prefix.planner import Candidate, choose_load
from wicore_trt.kv.prefix.rates import (
    DISK_PRIOR,
    DOUBLING_S,
    HOPE,
    HOST_PRIOR,
    KNOWN,
    PREFILL_PRIOR,
    PrefillMeter,
    TierMeter,
    TierRate,
)
from wicore_trt.kv.tiers.moves import Stage
from wicore_trt.model.spec import GLOBAL
from wicore_trt.types import GenerateRequest, SamplingParams

MB = 1_000_000


def feed(meter, rng, truth, count, *, noise=0.15, now=0.0, sizes=(2, 8, 40, 200, 800)):
    for _ in range(count):
        size = rng.choice(sizes) * MB
        meter.observe_read(size, truth.read_seconds(size) * math.exp(rng.gauss(0, noise)), now=now)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("truth", [TierRate(4e9, 1e-3), TierRate(0.25e9, 0.02), TierRate(55e9, 5e-5)])
def test_a_tier_is_found_within_its_noise(seed, truth):
    rng = random.Random(seed)
    meter = TierMeter(DISK_PRIOR)
    feed(meter, rng, truth, 40)
    rate = meter.tier_rate(now=0.0)
    for size in (10 * MB, 100 * MB, 1000 * MB):
        assert rate.read_seconds(size) == pytest.approx(truth.read_seconds(size), rel=0.35)


def test_the_first_observation_counts_fully():
    meter = TierMeter(DISK_PRIOR)
    meter.observe_read(100 * MB, 0.02, now=0.0)
    assert meter.tier_rate(now=0.0).read_seconds(100 * MB) == pytest.approx(0.02)
    prefill = PrefillMeter()
    prefill.observe_step([(0, 512)], 5.12)
    assert prefill.compute_rate().seconds_alone(0, 512) == pytest.approx(5.12)


@pytest.mark.parametrize("factor", [0.1, 0.3, 3.0, 10.0])
def test_a_change_is_followed_within_a_few_observations(factor):
    rng = random.Random(7)
    meter = TierMeter(DISK_PRIOR)
    feed(meter, rng, TierRate(2e9, 1e-3), 30)
    after = TierRate(2e9 * factor, 1e-3 / factor)
    feed(meter, rng, after, 3, noise=0.05)
    assert 0.5 < meter.tier_rate(now=0.0).read_seconds(100 * MB) / after.read_seconds(100 * MB) < 2.0
    feed(meter, rng, after, 3, noise=0.05)
    assert meter.tier_rate(now=0.0).read_seconds(100 * MB) == pytest.approx(after.read_seconds(100 * MB), rel=0.3)


def test_one_outlier_moves_little():
    meter = TierMeter(DISK_PRIOR)
    for _ in range(20):
        meter.observe_read(100 * MB, 0.05, now=0.0)
    meter.observe_read(100 * MB, 10.0, now=0.0)
    assert meter.tier_rate(now=0.0).read_seconds(100 * MB) < 0.05 * math.sqrt(2) * 1.01


@pytest.mark.parametrize("seed", range(5))
def test_what_reads_wait_for_each_other_is_not_taken_for_slowness(seed):
    """Bursts of reads of random sizes, each asked for while those before it are under way; some are given up."""
    meter, rng, second = TierMeter(DISK_PRIOR), random.Random(seed), 0.0
    for _ in range(30):
        asked, counts = second, [rng.randrange(1, 20) * MB for _ in range(rng.randrange(1, 60))]
        second += 1e-3
        for i, count in enumerate(counts):
            if rng.random() < 0.2:
                continue  # nobody wanted it any more
            second += count / 2e9
            meter.observe_requested_read(count, asked, second - asked, rests=i == len(counts) - 1, now=second)
        second += rng.choice((0.001, 1.0))
    assert meter.tier_rate(now=second).read_seconds(100 * MB) == pytest.approx(0.051, rel=0.2)
    assert meter.tier_rate(queued=200 * MB, now=second).read_seconds(100 * MB) == pytest.approx(0.151, rel=0.2)


def test_a_slow_disk_is_known_before_much_of_it_was_read():
    meter = TierMeter(DISK_PRIOR)
    for _ in range(5):
        meter.observe_read(100 * MB, 0.05, now=0.0)
    meter.observe_requested_read(2 * MB, 1.0, 0.1, rests=False, now=1.1)
    meter.observe_requested_read(2 * MB, 1.0, 0.2, rests=False, now=1.2)
    meter.observe_requested_read(2 * MB, 1.0, 0.3, rests=False, now=1.3)
    assert meter.tier_rate(now=1.3).read_seconds(100 * MB) > 0.3


def test_a_slow_tier_is_tried_again():
    meter = TierMeter(DISK_PRIOR)
    for _ in range(5):
        meter.observe_read(100 * MB, 0.025, now=0.0)
    for _ in range(8):
        meter.observe_read(100 * MB, 0.8, now=100.0)
    slow = meter.tier_rate(now=100.0).read_seconds(100 * MB)
    assert slow == pytest.approx(0.8, rel=0.1)
    assert meter.tier_rate(now=100.0 + DOUBLING_S).read_seconds(100 * MB) == pytest.approx(slow / 2)
    assert meter.tier_rate(now=1e9).read_seconds(100 * MB) == pytest.approx(
        0.025, rel=0.1
    )  # never better than its best
    meter.observe_read(100 * MB, 0.8, now=200.0)
    assert meter.tier_rate(now=200.0).read_seconds(100 * MB) == pytest.approx(0.8, rel=0.1)


def test_a_load_that_hangs_counts_before_it_ends():
    meter = TierMeter(DISK_PRIOR)
    for _ in range(5):
        meter.observe_read(100 * MB, 0.025, now=0.0)
    before = meter.tier_rate(now=1.0)
    meter.observe_overdue(100 * MB, 0.02, now=1.0)
    assert meter.tier_rate(now=0.0).read_seconds(100 * MB) == pytest.approx(before.read_seconds(100 * MB))
    meter.observe_overdue(100 * MB, 1.0, now=1.0)
    meter.observe_overdue(100 * MB, 1.0, now=1.0)
    assert meter.tier_rate(now=1.0).read_seconds(100 * MB) > 0.08


@pytest.mark.parametrize("seed", range(5))
def test_prefill_of_27b_is_found_from_mixed_steps(seed):
    rng = random.Random(seed)
    c0, c1 = 1.2e-4, 3.3e-10
    meter = PrefillMeter()
    for _ in range(300):
        slices = [(rng.randrange(4096), 1) for _ in range(rng.randrange(30))]
        slices.append((rng.randrange(0, 100_000), rng.choice((128, 256, 512))))
        seconds = sum(c0 * n + c1 * n * (a + n / 2) for a, n in slices)
        meter.observe_step(slices, seconds * math.exp(rng.gauss(0, 0.1)))
    rate = meter.compute_rate()
    for begin, end in ((0, 2048), (0, 32_768), (100_000, 131_072)):
        truth = c0 * (end - begin) + c1 * (end**2 - begin**2) / 2
        assert rate.seconds_alone(begin, end) == pytest.approx(truth, rel=0.12)


def test_steps_without_prefill_are_ignored():
    meter = PrefillMeter()
    meter.observe_step([(i, 1) for i in range(64)], 3.0)
    meter.observe_step([(0, 8)], 3.0)
    meter.observe_step([(0, 512)], 0.0)
    assert meter.observed == 0 and meter.compute_rate().per_token_s == PREFILL_PRIOR[0]


def test_steps_as_long_as_they_would_be_with_more_tokens_teach_until_there_is_another():
    """The 64 tokens behind a hit take as long as 256, because of the weights."""
    meter = PrefillMeter()
    for _ in range(5):
        meter.observe_step([(4096, 64)], 0.011, 256)
    assert meter.compute_rate().per_token_s > 1e-4, "better than a prior"
    meter.observe_step([(0, 4096)], 0.2, 256)
    learnt = meter.compute_rate().seconds_alone(0, 4096)
    assert learnt == pytest.approx(0.2)
    for _ in range(50):
        meter.observe_step([(4096, 64)], 0.011, 256)
        meter.observe_step([(4096, 30), (0, 225), *[(i, 1) for i in range(9)]], 0.02, 256)
    assert meter.compute_rate().seconds_alone(0, 4096) == learnt
    meter.observe_step([(0, 256)], 0.02, 256)
    assert meter.compute_rate().seconds_alone(0, 4096) > learnt


def test_a_disk_of_which_much_was_read_is_known_for_a_while():
    meter = TierMeter(DISK_PRIOR)
    meter.observe_read(1 << 30, 0.5, now=0.0)
    assert meter.hoped_factor(0.0) == HOPE, "a probe is not what requests read"
    meter.observe_requested_read(KNOWN // 2, 0.9, 0.02, rests=True, now=1.0)
    assert meter.hoped_factor(1.0) == pytest.approx(HOPE**0.5)
    meter.observe_requested_read(KNOWN // 2, 0.9, 0.02, rests=True, now=1.0)
    assert meter.hoped_factor(1.0) == 1.0
    for n in range(100):
        meter.observe_requested_read(KNOWN, 1.0 + n, 0.02, rests=True, now=2.0)
    meter.observe_read(1 << 20, 0.02, now=2.0 + DOUBLING_S)
    assert meter.hoped_factor(2.0 + DOUBLING_S) == 1.0
    hopes = [meter.hoped_factor(2.0 + n * DOUBLING_S) for n in range(9)]
    assert hopes == sorted(hopes) and hopes[4] > 3.0 and hopes[8] > 0.8 * HOPE


def test_priors_load_from_the_host_and_compute_instead_of_a_disk_that_may_be_slow():
    tiers = {"host": TierMeter(HOST_PRIOR).tier_rate(now=0.0), "disk": TierMeter(DISK_PRIOR).tier_rate(now=0.0)}
    compute = PrefillMeter().compute_rate()
    for tokens in (1024, 8192, 32_768):
        pages = {tier: [tier] * (tokens // 32) for tier in ("host", "disk")}
        large = {t: Candidate(tokens, pages[t], 32, 32 * 81_920, {t: 436_207_616}) for t in pages}
        if tokens < 32_768:  # longer prefixes split, which costs nothing if the disk is slow
            assert choose_load(tokens + 100, 0, [large["disk"]], compute, tiers).decision == "compute"
        assert choose_load(tokens + 100, 0, [large["host"]], compute, tiers).decision != "compute"
        small = Candidate(tokens, pages["disk"], 32, 32 * 3072, {"disk": 15 * 1024 * 512})
        assert choose_load(tokens + 100, 0, [small], compute, tiers).decision != "compute" or tokens < 2048


def test_who_waits_for_its_load_leaves_the_device_to_others():
    """Only those that compute beside their loads take part of it; nobody waits for what it has to compute itself."""
    core = make_core(pages={GLOBAL: 100}, max_context=80, kv=KVSettings(host_bytes=1 << 20))
    scheduler, manager = core.scheduler, core.scheduler.manager
    prompts = [[n, *range(2, 62)] for n in range(20, 23)]

    def add(name):
        for n, prompt in enumerate(prompts):
            core.add(GenerateRequest(f"{name}{n}", tuple(prompt), SamplingParams(max_tokens=1, temperature=0.0)))

    add("first")
    while core.has_work or core.do_housekeeping():
        core.step()
    with mock.patch.object(manager, "tiers", None):
        clear_cache(manager)
    loader = scheduler.loader
    scheduler.prefill.__init__()
    loader.host_meter, loader._clock = TierMeter(HOST_PRIOR), lambda: 0.0
    manager.tiers.poll_all = lambda: False  # the loads hang
    add("second")
    core.step()
    loads = [sequence.pages.load for sequence in scheduler.running]
    assert [loader._begun[load].choice.decision for load in loads] == ["load"] * 3
    rate_behind = scheduler.estimates.rate_behind
    assert rate_behind(scheduler.running).share == 1.0
    loader._begun[loads[0]].choice = replace(loader._begun[loads[0]].choice, decision="split")
    assert rate_behind(scheduler.running).share == 0.5
    first = scheduler.running[0]
    traffic = manager.tiers.movers.host_traffic
    traffic.read_bytes, traffic.read_seconds = traffic.read_bytes + 8 * MB, traffic.read_seconds + 100.0
    loader.cancel_load(first.pages)
    assert loader.host_meter.observed == 1, "a link that is too slow for every load would never be known"
    assert rate_behind(scheduler.running).delay_s > 0.0 == rate_behind(scheduler.running, first).delay_s
    core.abort_all()
    core.close()


@pytest.mark.parametrize("comes", [True, False])
def test_a_load_that_came_during_a_long_step_was_not_late(comes, tmp_path):
    """The disk has done its work; how long others' step took says nothing of it."""
    kv = KVSettings(host_bytes=1 << 20, disk_path=str(tmp_path / "kv"), disk_bytes=1 << 24, disk_free_bytes=0)
    core = make_core(pages={GLOBAL: 100}, kv=kv)
    scheduler, manager, tiers = core.scheduler, core.scheduler.manager, core.scheduler.manager.tiers
    for name in ("first", "again"):
        core.add(GenerateRequest(name, tuple(range(2, 62)), SamplingParams(max_tokens=1, temperature=0.0)))
        if name == "again":
            break
        while core.has_work or core.do_housekeeping():
            core.step()
        for copy in list(tiers.host.iterate_copies()):
            tiers.host.drop_copy(copy, "test")
        with mock.patch.object(manager, "tiers", None):
            clear_cache(manager)
        scheduler.prefill.observe_step([(0, 64)], 64.0)
    loader, heard, now = scheduler.loader, [], 0.0
    loader._clock, loader.disk_meter.observe_overdue = lambda: now, lambda *read, **more: heard.append(read)
    poll, tiers.poll_all = tiers.poll_all, lambda: False
    schedule = scheduler.schedule_step()
    assert not schedule.slices and loader._begun[scheduler.running[0].pages.load].from_disk
    while comes and tiers.loads.loads:
        tiers.wait_for_report(0.01)
        poll()
    now = 1e6
    loader.next_move(scheduler.running[0].pages, 0, compute=scheduler.prefill.compute_rate())
    assert bool(heard) != comes
    tiers.poll_all = poll
    core.abort_all()
    core.close()


def test_reads_that_fail_at_once_do_not_make_a_disk_fast(tmp_path):
    plan = FaultPlan()
    kv = KVSettings(host_bytes=1 << 20, disk_path=str(tmp_path / "kv"), disk_bytes=1 << 24, disk_free_bytes=0)
    core = make_core(pages={GLOBAL: 100}, kv=kv, files=FaultyFiles(plan))
    core.add(GenerateRequest("a", tuple(range(2, 62)), SamplingParams(max_tokens=1, temperature=0.0)))
    tiers, inbox, heard = core.scheduler.manager.tiers, deque(), []
    while core.has_work or core.do_housekeeping():
        core.step()
    tiers.up.disk_rate = lambda *read: heard.append(read)
    kept = [copy.page for copy in tiers.movers.disk[0].iterate_copies()]
    for copy in list(tiers.host.iterate_copies()):
        tiers.host.drop_copy(copy, "test")
    for pages, rates, stage in ((kept[:5], {Fault.READ_EIO: 1.0}, Stage.FAILED), (kept[5:], {}, Stage.HERE)):
        plan.rates = rates
        fetches = [tiers.up.fetch_page(page, inbox) for page in pages]
        assert tiers.wait_idle(30)
        assert [fetch.stage for fetch in fetches] == [stage] * len(pages) and pages
        assert len(heard) == (stage is Stage.HERE) * len(pages)
    core.close()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_what_is_no_time_says_nothing(seconds):
    tier, prefill = TierMeter(DISK_PRIOR), PrefillMeter()
    tier.observe_read(MB, seconds, now=0.0)
    prefill.observe_step([(0, 512)], seconds)
    assert tier.observed == prefill.observed == 0


@given(st.lists(st.tuples(st.integers(0, 10**12), st.floats(0, 1e6), st.floats(0, 1e6), st.booleans()), max_size=60))
def test_estimates_stay_positive_and_finite(observations):
    meter = TierMeter(DISK_PRIOR)
    for i, (count, seconds, asked, rests) in enumerate(observations):
        meter.observe_read(count, seconds, now=float(i))
        meter.observe_requested_read(count, asked, seconds, rests=rests, now=float(i))
        rate = meter.tier_rate(now=i + 1e7)
        assert 0 < rate.bytes_per_s < math.inf and 0 <= rate.latency_s < math.inf
