"""The model of step time: learns every device, keeps to its limits, and is not led astray."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from schedule.simulated import CPU, H200, SMALL, p99

from wicore_trt.schedule.step_time import FLUENT_S, STRETCH, Budget, StepLoad, StepTime, sum_load

DEVICES = {
    f"{name}, corner {corner:g}": replace(device, corner=corner)
    for name, device in (("H200", H200), ("CPU", CPU), ("small", SMALL))
    for corner in (1.0, 2.0, 8.0)
}


def learnt(device, rng: random.Random, rows: int = 16) -> tuple[StepTime, int]:
    """After 16 prompts and 300 steps of decoding, one in a hundred of which took four times as long; and the keys."""
    time, keys = StepTime(), 0
    for i in range(rows):
        load = StepLoad(i, keys, 1000, 500_000)
        time.observe_step(load, device.step_s(load) * rng.lognormvariate(0, 0.03))
        keys += 1000
    for i in range(300):
        keys += rows
        load = StepLoad(rows, keys)
        time.observe_step(load, device.step_s(load) * rng.lognormvariate(0, 0.03) * (4 if i % 100 == 50 else 1))
    return time, keys


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_long_prompt_at_most_doubles_the_time_of_steps_that_decode(device):
    """With a target of STRETCH times; and it takes no more than a few times as long as if it had the device alone."""
    rng = random.Random(1)
    time, keys = learnt(device, rng)
    time.target_s = STRETCH * device.step_s(StepLoad(16, keys))
    start, over, seconds, alone = 0, [], 0.0, 0.0
    while start < 32_768:
        keys += 16
        budget = Budget(2048)
        budget.set_time(time, StepLoad(16, keys), 8)
        count = budget.fit_tokens(start, 32_768 - start)
        load = StepLoad(16, keys).with_prompt(start, count)
        took = device.step_s(load) * rng.lognormvariate(0, 0.03)
        over.append(took / device.step_s(StepLoad(16, keys)))
        time.observe_step(load, took)
        seconds, start = seconds + took, start + count
    for begin in range(0, 32_768, 2048):
        alone += device.step_s(StepLoad().with_prompt(begin, 2048))
    assert p99(over) <= 2 * math.exp(2.33 * 0.03), "twice, and the noise of one step in a hundred"
    assert seconds <= 5 * alone


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_steps_are_foretold(device):
    time, keys = learnt(device, random.Random(2))
    for load in (StepLoad(16, keys), StepLoad(12, keys // 2), StepLoad(0, 0, 1000, 500_000)):
        assert time.step_s(load) == pytest.approx(device.step_s(load), rel=0.5)


def test_a_device_that_slows_down_is_noticed_and_one_odd_step_is_not():
    time, keys = learnt(H200, random.Random(3))
    load = StepLoad(16, keys)
    before = time.step_s(load)
    time.observe_step(load, 50 * before)
    assert time.step_s(load) < 1.1 * before
    for _ in range(12):
        time.observe_step(load, 3 * before)
    assert time.step_s(load) == pytest.approx(3 * before, rel=0.2)


def test_a_step_that_stood_still_leaves_the_part_of_prompts_as_it_was():
    """What a newcomer is told to wait is divided by it."""
    time = StepTime()
    load = StepLoad(16, 8000, 128, 70_000)
    for _ in range(300):
        time.observe_step(load, 0.04)
    before = time.share
    time.observe_step(load, 300.0)
    assert time.share == pytest.approx(before, rel=0.1)


def test_nonsense_leaves_estimates_positive_and_finite():
    rng, time = random.Random(4), StepTime()
    for _ in range(3000):
        load = StepLoad(rng.randint(0, 300), rng.randint(0, 10**7), rng.randint(0, 10**5), rng.uniform(0, 1e12))
        time.observe_step(load, rng.choice([0.0, -1.0, 1e-9, 1e-3, 1.0, 1e9, math.inf, math.nan]))
        assert 0 < time.step_s(StepLoad(1, 100)) < math.inf and 0 < time.prompt_s(0, 100) < math.inf
        assert 0 < time.share <= 1


def test_a_load_is_counted_by_what_a_step_computes():
    assert sum_load([(10, 1), (20, 1), (100, 50)]) == StepLoad(2, 30, 50, 50 * 125)


@pytest.mark.parametrize("seed", range(60))
def test_a_budget_gives_what_fits_and_the_least_in_any_case(seed):
    rng = random.Random(seed)
    time = StepTime(rng.choice([None, rng.uniform(1e-4, 0.1)]))
    time.observe_step(StepLoad(4, 400), rng.uniform(1e-3, 0.1))
    decoding = StepLoad(rng.randint(0, 20), rng.randint(0, 10_000))
    sizes = tuple(sorted(rng.sample(range(1, 1000), rng.randint(1, 9)))) if rng.random() < 0.7 else ()
    limit, tokens, least = time.limit_s(decoding), rng.randint(1, 3000), rng.randint(1, 64)
    usual = max(FLUENT_S, STRETCH * time.step_s(decoding))
    assert limit == (math.inf if not decoding.rows else time.target_s or usual)

    def step_s(start: int, count: int) -> float:
        """Of the step as it is, padded, or launched for as long as twice the tokens of the largest graph take."""
        whole = load.tokens + count
        padded = next((size for size in sizes if size >= whole), max(whole, 2 * sizes[-1]) if sizes else whole)
        return time.step_s(load.with_prompt(start, padded - load.tokens))

    budget, load, given = Budget(tokens), decoding, 0
    budget.set_time(time, decoding, least, sizes)
    least = next((size for size in (*sizes, 2 * sizes[-1]) if size >= least), least) if sizes else least
    for _ in range(5):
        start, want = rng.randint(0, 30_000), rng.randint(1, 2000)
        count = budget.fit_tokens(start, want)
        assert count <= min(want, tokens - given) and count >= min(want, tokens - given, least - given)
        assert given + count <= least or count == 0 or step_s(start, count) <= limit
        more = min(want, tokens - given) > count
        assert not more or step_s(start, count + 1) > limit, "a token more would have fitted"
        assert budget.fit_tokens(0, 1) or step_s(0, 1) > limit or given >= tokens
        budget.take_tokens(start, count, prompt=True, ends=False)
        load, given = load.with_prompt(start, count), given + count


@pytest.mark.parametrize(
    ("rows", "target_s", "most", "tokens"),
    [
        (4, 0.04, 4096, 96), (4, 0.04, 150, 96), (4, 0.04, 90, 90), (4, 0.018, 4096, 60), (4, 0.005, 4096, 60),
        (0, 0.04, 4096, 4096), (0, 0.04, 150, 150), (4, 0.2, 4096, None),
    ],
)  # fmt: skip
def test_a_step_fills_a_graph_unless_it_has_time_for_far_more(rows, target_s, most, tokens):
    """None: as many as without graphs. Where it has time for hardly any, the smallest one."""
    time, found = StepTime(target_s), []
    for _ in range(200):
        time.observe_step(StepLoad(0, 0, 500, 0.0), 0.1)
        time.observe_step(StepLoad(4, 400), 0.005)
    for sizes in ((60, 80, 96), ()):
        budget = Budget(most)
        budget.set_time(time, StepLoad(rows, 100 * rows), 8, sizes)
        found.append(budget.fit_tokens(0, 4096))
    assert found[0] == (found[1] if tokens is None else tokens), found
    assert target_s < 0.01 or found[0] <= found[1]
    if tokens in (60, 96):
        budget = Budget(most)
        budget.set_time(time, StepLoad(rows, 100 * rows), 8, (60, 80, 96))
        budget.take_tokens(0, tokens, prompt=True, ends=False)
        assert not budget.fit_tokens(0, 1), "no token more without the padding of the next size"


def test_beside_a_load_from_disk_a_step_is_short_and_leaves_no_short_rest():
    budget = Budget(8192)
    budget.shorten_step(1024, 256)
    assert (
        budget.fit_tokens(0, 5000) == 1024 and budget.fit_tokens(0, 1280) == 1280 and budget.fit_tokens(0, 1281) == 1024
    )
    budget.take_tokens(0, 1280, prompt=True, ends=False)
    assert budget.tokens == 0 and not budget.fit_tokens(0, 1)
    full = Budget(1024)
    full.shorten_step(2048, 256)
    assert full.fit_tokens(0, 1200) == 1024, "more than there were"


def test_a_short_step_never_has_more_tokens_than_there_were():
    """Prompts take what there is and are preempted; the rest that passes a short step is had once."""
    rng, passed = random.Random(5), 0
    for _ in range(2000):
        whole, size = rng.randint(1, 40), rng.randint(1, 10)
        budget, given = Budget(whole), list[int]()
        for _ in range(12):
            act = rng.random()
            if act < 0.3:
                budget.shorten_step(rng.randint(0, 30), size)
            elif act < 0.8:
                want, short = rng.randint(1, 30), budget.tokens
                if count := budget.fit_tokens(0, want):
                    budget.take_tokens(0, count, prompt=True, ends=count == want and rng.random() < 0.1)
                    given.append(count)
                    passed += count > short
            elif given:  # as `Scheduler._preempt_sequence` does
                budget.tokens += given.pop(rng.randrange(len(given)))
            assert sum(given) <= whole
    assert passed > 100, "no prompt had its rest"


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("count", "left"), [(64, 192), (256, 0), (900, 0)])
def test_a_prompt_that_ends_beside_a_load_from_disk_waits_for_a_slice_at_most(before, count, left):
    """Whether it got its tokens before or after it was known that the step is to be short."""
    budget = Budget(8192)
    if before:
        budget.take_tokens(0, count, prompt=True, ends=True)
        assert budget.tokens == 8192 - count, "elsewhere steps are filled"
    budget.shorten_step(2560, 256)
    if not before:
        budget.take_tokens(0, count, prompt=True, ends=True)
    assert budget.tokens == left == budget.fit_tokens(0, 5000)
