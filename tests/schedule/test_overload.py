"""What users see under load, on simulated devices: long prompts, bursts, more requests than they can do, floods."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
from schedule.load import TPOT_S, TTFT_S, good, graphs_of, poisson, run_on
from schedule.simulated import CPU, H200, SMALL, Device, ask, p99

from wicore_trt.core.limits import Limits
from wicore_trt.schedule.step_time import STRETCH, StepLoad
from wicore_trt.types import FinishReason


@pytest.mark.parametrize(
    "device", [H200, SMALL, pytest.param(CPU, marks=pytest.mark.long)], ids=["H200", "small", "CPU"]
)
def test_a_prompt_of_32k_at_most_doubles_the_gaps_of_16_streams(device):
    target = STRETCH * device.step_s(StepLoad(16, 16 * 700))
    run = run_on(device, max_batch_tokens=256 if device is CPU else 2048, target_s=target)
    run.executor.slice_tokens = 32 if device is CPU else 256
    for i in range(16):
        run.add(ask(f"s{i}", 500, 4000))
    while not all(len(run.seen[f"s{i}"].tokens) > 200 for i in range(16)):
        run.step()
    begun = run.executor.now
    run.add(ask("long", 32_768, 1))
    while not run.seen["long"].tokens:
        run.step()
    ended, alone, beside = run.executor.now, [], []
    for i in range(16):
        for at, gap in zip(run.seen[f"s{i}"].tokens[1:], run.seen[f"s{i}"].gaps, strict=True):
            if begun - 100 * gap < at:
                (alone if at <= begun else beside).append(gap)
    assert p99(beside) <= 2 * p99(alone), (p99(beside), p99(alone))
    least = sum(device.step_s(StepLoad().with_prompt(start, 2048)) for start in range(0, 32_768, 2048))
    assert ended - begun < 6 * least, "and the prompt has its part of the device"


def test_a_short_prompt_passes_a_long_one_that_runs():
    run = run_on(H200)
    run.add(ask("long", 100_000, 1))
    for i in range(5):
        run.step()
        run.add(ask(f"short{i}", 200, 1))
        run.step()
        assert len(run.seen[f"short{i}"].tokens) == 1
    while not run.seen["long"].tokens:
        run.step()


class KernelsOneByOne(Device):
    """With a prompt in the step kernels are started one by one, which takes a while however few its tokens are."""

    def step_s(self, load: StepLoad) -> float:
        return max(0.022, super().step_s(load)) if load.tokens else super().step_s(load)


def test_without_a_target_a_device_that_is_slower_with_any_prompt_keeps_up():
    """At 8 requests a second; STRETCH alone would leave prompts the least there is, for ever."""
    run = run_on(KernelsOneByOne(*astuple(H200)))
    asked = poisson(8.0, 30.0, 3)
    run.play(asked)
    assert good(run, len(asked))[0] > 0.95


def test_what_cannot_be_served_in_time_is_refused_and_most_of_the_rest_is_good():
    """At 12 requests a second on a device that does some 10, with targets for the first token and for the others.
    Without targets nobody is refused, and next to none is good."""
    arrivals = poisson(12.0, 30.0, 1)
    run = run_on(H200, limits=Limits(60.0, TTFT_S), target_s=0.95 * TPOT_S)
    run.play(arrivals)
    share, of_served = good(run, len(arrivals))
    assert share >= 0.75 and of_served >= 0.95, (share, of_served)
    assert run.refused and all(1.0 <= retry < 60.0 for retry in run.refused.values())
    plain = run_on(H200, limits=Limits(60.0))
    plain.play(arrivals)
    assert good(plain, len(arrivals))[0] < share / 2


def test_at_8_requests_a_second_nearly_all_are_good():
    arrivals = poisson(8.0, 30.0, 1)
    run = run_on(H200, limits=Limits(60.0, TTFT_S), target_s=0.95 * TPOT_S)
    run.play(arrivals)
    assert good(run, len(arrivals))[0] >= 0.95


@pytest.mark.parametrize("launch_s", [0.028, 0.04])
def test_steps_that_fill_graphs_do_not_wait_for_launches(launch_s):
    """At 8 requests a second the steps before those with prompts are short, and the device would wait for the host."""
    gaps, share = {}, {}
    for name, graphs in {"as they are": graphs_of(768), "of a token": graphs_of(0)}.items():
        arrivals = poisson(8.0, 30.0, 4)
        run = run_on(H200, limits=Limits(60.0, 0.65), target_s=0.95 * TPOT_S, launches=(graphs, launch_s))
        run.play(arrivals)
        gaps[name] = p99([gap for name, one in run.seen.items() if name[0] == "r" for gap in one.gaps])
        share[name] = good(run, len(arrivals))[0]
    assert gaps["as they are"] < 0.041 and gaps["of a token"] > 0.045, gaps
    assert share["as they are"] >= 0.98, share


@pytest.mark.parametrize("ttft", [None, TTFT_S])
def test_a_burst_is_answered_within_its_limits_or_told_at_once(ttft):
    run = run_on(H200, limits=Limits(5.0, ttft))
    at = run.executor.now
    run.play([(at, ask(f"r{i}", 1000, 100)) for i in range(500)])
    served = [one for name, one in run.seen.items() if name[0] == "r" and one.last.finish_reason is FinishReason.LENGTH]
    late = [one for name, one in run.seen.items() if name[0] == "r" and one.last.finish_reason is FinishReason.ERROR]
    assert len(served) + len(late) + len(run.refused) == 500
    assert all(one.last.retry_s >= 1.0 for one in late) and len(late) <= 5, "the estimate is worth something"
    assert len(served) >= (2 if ttft else 30)
    assert max(one.ttft for one in served) <= (2 * TTFT_S if ttft else 5.5)


def test_a_deadline_that_cannot_be_met_is_refused_and_one_that_passed_is_never_begun():
    run = run_on(H200, limits=Limits(60.0))
    for i in range(40):
        run.add(ask(f"r{i}", 4000, 50))
    run.add(ask("hurried", 100, 5, deadline=run.executor.now + 0.5, priority=2))
    assert run.refused["hurried"] >= 1.0
    run.add(ask("late", 100, 5, deadline=run.executor.now - 1.0))
    run.step()
    late = run.seen.get("late")
    assert late is None or late.last.finish_reason is FinishReason.DEADLINE and not late.tokens


def test_who_waits_longer_than_it_may_is_ended_and_told_when_to_retry():
    run = run_on(H200, limits=Limits(2.0), max_sequences=1)
    run.core._hold_s = 0.0  # nobody knows yet how long requests run
    run.add(ask("first", 100, 1000))
    run.add(ask("second", 100, 10))
    run.play([])
    second = run.seen["second"].last
    assert second.finish_reason is FinishReason.ERROR and second.retry_s >= 1.0 and not run.seen["second"].tokens
    assert run.seen["first"].last.finish_reason is FinishReason.LENGTH


def test_a_request_has_a_time_limit_where_it_names_none():
    run = run_on(H200, limits=Limits(timeout_s=3.0))
    at = run.executor.now
    run.add(ask("endless", 100, 100_000))
    run.add(ask("own", 100, 1000, deadline=at + 1.0))
    run.play([])
    assert run.seen["endless"].last.finish_reason is run.seen["own"].last.finish_reason is FinishReason.DEADLINE
    assert 3.0 <= run.executor.now - at < 3.2 and run.seen["own"].tokens[-1] < at + 1.1


@pytest.mark.parametrize("ttft", [None, TTFT_S])
def test_a_polite_tenant_keeps_nine_tenths_of_its_lone_rate_beside_200_streams(ttft):
    """One request after the other, beside a tenant that has 200 open all the time. The target is a tenth above what
    a step takes for the polite one alone, so that steps have no more rows than that allows."""
    lone = H200.step_s(StepLoad(1, 700))

    def rate(flood: int) -> float:
        run = run_on(H200, limits=Limits(600.0, ttft), target_s=1.1 * lone)
        rng, number, done, begun = random.Random(1), 0, 0, 0.0
        for number in range(flood):
            run.add(ask(f"flood{number}", rng.randint(10, 2000), 400, tenant="flood"))
        polite = 0
        run.add(ask("polite0", 200, 500, tenant="polite"))
        while done < 6:
            run.step()
            last = run.seen[f"polite{polite}"].last
            if last is not None:
                assert last.finish_reason is FinishReason.LENGTH, "the polite one is never refused"
                done, polite = done + 1, polite + 1
                begun = begun or run.executor.now
                run.add(ask(f"polite{polite}", 200, 500, tenant="polite"))
            while flood and len(run.core.scheduler.waiting) + len(run.core.scheduler.running) < flood and number < 5000:
                number += 1
                run.add(ask(f"flood{number}", rng.randint(10, 2000), 400, tenant="flood"))
        return (done - 1) * 500 / (run.executor.now - begun)

    crowded, alone = rate(200), rate(0)
    assert crowded >= 0.9 * alone, (crowded, alone)
