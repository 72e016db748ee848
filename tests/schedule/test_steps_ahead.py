"""Steps that start before the last one's tokens are read: the same answers, and no page given back too early."""

from __future__ import annotations

import random
from functools import partial

import pytest
from fakes import AheadFakeExecutor, greedy, make_core
from kv import campaign

from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams


def always(core) -> AheadFakeExecutor:
    """An executor that always agrees to run ahead and computes as late as it may."""
    core.executor.leads = lambda batch: True
    core.executor.rng.random = lambda: 1.0
    return core.executor


def request(name: str, prompt: list[int], max_tokens: int = 12, **params) -> GenerateRequest:
    return GenerateRequest(name, tuple(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens, **params))


def run(core) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_key, []).extend(output.token_ids)
        core.scheduler.check_integrity()
    assert all(pool.used_slots == 0 for pool in core.scheduler.manager.pools.values())
    return tokens


def test_decoding_runs_ahead_and_stops_where_it_should():
    core = make_core(ahead=0, max_batch_tokens=64)
    executor = always(core)
    prompts = {"a": list(range(9)), "b": [7, 8, 9], "c": [1] * 30}
    for name, prompt in prompts.items():
        core.add(request(name, prompt, 20, ignore_eos=True))
    assert run(core) == {name: greedy(prompt, 20, ignore_eos=True) for name, prompt in prompts.items()}
    assert len(executor.steps) == 20 and executor.led == 19, "every step but the first was started ahead"


def test_a_token_that_ends_a_sequence_is_the_last_though_the_next_step_runs():
    stop = greedy([5, 6, 7], 12, ignore_eos=True)[4]
    core = make_core(ahead=0)
    executor = always(core)
    core.add(request("a", [5, 6, 7], ignore_eos=True, stop_token_ids=(stop,)))
    want = greedy([5, 6, 7], 12, ignore_eos=True)
    want = want[: want.index(stop) + 1]
    assert run(core) == {"a": want}
    assert len(executor.steps) == len(want) + 1, "one step too many was started"


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_pages_stay_until_the_step_that_writes_into_them_has_landed(how):
    now = [0.0]
    core = make_core(ahead=0, pages={GLOBAL: 8, LOCAL: 8}, clock=lambda: now[0])
    always(core)
    made = GenerateRequest(
        "a", tuple(range(6)), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), deadline=5.0
    )
    core.add(made)
    core.step()
    assert core._flight is not None
    used = core.scheduler.manager.pools[GLOBAL].used_slots
    if how == "abort":
        (output,) = core.abort("a")
    else:
        now[0] = 6.0
        core._end_expired()
        output = None
    assert output is None or output.finish_reason is FinishReason.CANCELLED
    assert "a" not in core.sequences and core.has_work and core.scheduler.manager.pools[GLOBAL].used_slots == used
    assert core.stats().requests_running == 0
    core.add(request("a", [50, 51, 52]))  # the name is free at once
    assert run(core)["a"] == greedy([50, 51, 52], 12)


def test_bad_logits_end_a_sequence_alone_while_the_next_step_runs():
    core = make_core(ahead=0)
    executor = always(core)
    core.add(request("bad", [5, 6, 7], ignore_eos=True))
    core.add(request("good", [8, 9], ignore_eos=True))
    core.step()
    executor.poison.add(0)
    ends = {}
    while core.has_work:
        ends |= {o.request_key: o for o in core.step() if o.finish_reason is not None}
    assert ends["bad"].finish_reason is FinishReason.ERROR and ends["good"].finish_reason is FinishReason.LENGTH
    assert core.scheduler.manager.pools[GLOBAL].used_slots == 0


def test_closing_waits_for_the_step_that_runs():
    core = make_core(ahead=0)
    executor = always(core)
    core.add(request("a", [5, 6, 7], ignore_eos=True))
    core.step()
    assert len(core.abort_all()) == 1 and executor.queue
    core.close()
    assert not executor.queue and not core.has_work


def test_a_queue_that_is_blocked_does_not_stop_it_and_a_free_place_does():
    core = make_core(ahead=0, max_sequences=2)
    executor = always(core)
    for i in range(6):
        core.add(request(str(i), [i, 3, 4], 10, ignore_eos=True))
    assert run(core) == {str(i): greedy([i, 3, 4], 10, ignore_eos=True) for i in range(6)}
    assert executor.led >= 3 * 8


def test_nothing_is_computed_beyond_the_context():
    core = make_core(ahead=0, max_context=20)
    executor = always(core)
    core.add(request("a", [5, 6, 7], 100, ignore_eos=True))
    assert run(core) == {"a": greedy([5, 6, 7], 17, ignore_eos=True)}
    assert len(executor.steps) == 17, "a step was started that no sequence needed"


def test_a_newcomer_is_computed_in_the_step_after_the_one_that_runs():
    core = make_core(ahead=0)
    executor = always(core)
    core.add(request("a", [5, 6, 7], 100, ignore_eos=True))
    for _ in range(5):
        core.step()
    core.add(request("b", [8, 9], 5))
    before = len(executor.steps) + len(executor.queue)
    while not any(seq_id == 1 for step in executor.steps for seq_id, _ in step):
        core.step()
    assert len(executor.steps) == before + 1


def test_a_step_that_nobody_waits_for_can_be_landed():
    """As a caller does that steps only while its own request lives."""
    stop = greedy([5, 6, 7], 12, ignore_eos=True)[4]
    core = make_core(ahead=0)
    always(core)
    core.add(request("a", [5, 6, 7], ignore_eos=True, stop_token_ids=(stop,)))
    core.step()
    core.settle_flight()
    assert core._flight is not None, "somebody still waits for it"
    while "a" in core.sequences:
        core.step()
    assert core.has_work
    core.settle_flight()
    assert not core.has_work and core.scheduler.manager.pools[GLOBAL].used_slots == 0


def test_a_sequence_that_loads_is_not_left_behind():
    """Only planning a step in full looks after loads."""
    core = make_core(ahead=0)
    always(core)
    core.add(request("a", [5, 6, 7], 40, ignore_eos=True))
    core.step()
    (sequence,) = core.scheduler.running
    plan = core._flight.schedule
    assert core.scheduler.schedule_ahead(plan) is not None
    core.scheduler.loader = sequence.pages.load = object()
    assert core.scheduler.schedule_ahead(plan) is None
    core.scheduler.loader = sequence.pages.load = None
    run(core)


def test_a_head_that_waits_for_a_prefix_is_admitted_though_the_next_one_does_not_fit():
    core = make_core(pages={GLOBAL: 30}, max_batch_tokens=48)
    core.add(request("long", [3, 4, 5], 60, ignore_eos=True))
    for _ in range(3):
        core.step()
    core.add(request("pair", [9] * 44, 20, n=2, ignore_eos=True))
    core.add(request("big", [7] * 80, 4, ignore_eos=True))
    for _ in range(8):
        core.step()
    assert sorted(s.request.request_key for s in core.scheduler.running) == ["long", "pair", "pair"]
    run(core)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_random_traffic_over_tiers(tmp_path, monkeypatch, seed):
    """Arrivals, aborts, deadlines, preemption, parking, host and disk pages; each step checks each position."""
    monkeypatch.setattr(campaign, "FakeExecutor", partial(AheadFakeExecutor, seed=seed))
    rng = random.Random(seed)
    stack = campaign.Stack(tmp_path, seed=seed)
    for _ in range(400):
        if len(stack.expected) < 10 and rng.random() < 0.4:
            deadline = stack.now + rng.randint(1, 60) if rng.random() < 0.1 else None
            stack.add(answer=rng.randint(1, 24), n=rng.choice([1, 1, 1, 2]), deadline=deadline)
        if stack.expected and rng.random() < 0.05:
            stack.abort(rng.choice(sorted(stack.expected))[0])
        stack.now += rng.random()
        stack.step()
        stack.core.scheduler.check_integrity()
    stack.settle(check=True)
    assert stack.wrong == 0 and stack.finished > 30 and stack.executor.led > 60
    stack.check_idle()
    stack.close()


def test_a_prompt_under_way_gets_on_though_the_others_could_run_ahead():
    """A step that begins before the last one's tokens are read has nothing but decoding in it."""
    core = make_core(ahead=0, max_batch_tokens=16, max_context=512)
    executor = always(core)
    for name in ("a", "b"):
        core.add(request(name, [5, 6, ord(name)], 300, ignore_eos=True))
    for _ in range(4):
        core.step()
    core.add(request("long", [9] * 100, 5, ignore_eos=True))
    before = len(executor.steps)
    while not any(output.request_key == "long" for output in core.step()):
        pass
    assert len(executor.steps) - before <= 100 // 14 + 3, "a part of the prompt in every step but the one under way"
    run(core)
