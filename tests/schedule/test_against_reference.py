"""The engine beside the slow reference, step by step, in random arrivals on a clock of their own; and what holds in all
of them, read from the steps alone: order, fairness, the bound of waiting, deadlines, budget."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
from schedule.reference import Job, Reference
from schedule.simulated import H200, SMALL, Simulated, ask, make_simulated

from wicore_trt.core.limits import Limits
from wicore_trt.request_fields import MAX_PRIORITY
from wicore_trt.schedule import scheduler as scheduling
from wicore_trt.schedule.queue import AGEING_S
from wicore_trt.schedule.step_time import StepLoad
from wicore_trt.types import FinishReason

QUICK, ALL = 50, 20_000
PAGE = 8


class Scenario:
    """One random scenario, played to its end."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        device = replace(rng.choice([H200, SMALL]), corner=rng.choice([1.0, 2.0, 8.0]))
        self.executor = Simulated(device, noise=rng.choice([0.0, 0.05]), seed=seed)
        self.executor.slice_tokens = rng.choice([1, 16, 64])
        target = rng.choice([None, None, device.step_s(StepLoad(3, 300)) * rng.uniform(0.8, 3)])
        budget, places = rng.choice([4, 16, 64, 300]), rng.choice([1, 2, 4, 8])
        places = min(places, budget)
        self.core = make_simulated(
            self.executor, target_s=target, max_batch_tokens=budget, max_sequences=places,
            page_tokens=PAGE, pages=1200,
        )  # fmt: skip
        self.scheduler = self.core.scheduler
        self.reference = Reference(self.scheduler.step_time, budget, places, self.scheduler.least_tokens)
        self.tenants = rng.choice([("",), ("",), ("a", "b"), ("a", "a", "a", "b", "c")])
        limit = rng.choice([None, None, device.step_s(StepLoad(4, 400)) * rng.randint(2, 40)])
        self.core._latest_start = lambda request, now, cost: now + (float("inf") if limit is None else limit)
        self.core.limits = Limits(limit)
        self.budget, self.jobs, self.ended = budget, {}, {}
        self.first: dict[int, tuple[int, float]] = {}  # step and time of the first tokens, by seq_id
        self.began: list[float] = []  # when each step began
        self.arrived: dict[int, int] = {}  # how many steps there had been

    def come(self) -> None:
        rng, now, number = self.rng, self.executor.now, self.core._next_id
        prompt = rng.choice([1, 2, rng.randint(1, 30), rng.randint(30, 200)])
        output = rng.choice([1, 3, rng.randint(1, 40)])
        tenant, priority = rng.choice(self.tenants), rng.choice([0, 0, rng.randint(-2, 2)])
        deadline = rng.choice([None, None, now + rng.choice([0.0, 0.02, 0.2, 2.0])])
        request = ask(f"r{number}", prompt, output, tenant=tenant, priority=priority, deadline=deadline)
        self.core.add(request)
        [made] = self.core.sequences[f"r{number}"].values()
        start_by = self.core._start_by.get(f"r{number}", float("inf"))
        job = Job(number, tenant, now, priority, made.cost_s, prompt, output, deadline, start_by)
        self.jobs[number], self.arrived[number] = job, len(self.executor.steps)
        self.reference.add(job)

    def play(self) -> None:
        rng, left, pause = self.rng, self.rng.randint(3, 25), self.rng.choice([0.0, 0.3, 0.8])
        while left or self.core.has_work:
            while left and (not self.core.has_work or rng.random() > pause):
                self.come()
                left -= 1
            if self.jobs and rng.random() < 0.02:
                self.cancel(rng.choice(list(self.jobs)))
            before, now = len(self.executor.steps), self.executor.now
            decoding = [job for job in self.reference.of(True) if job.remaining == 1 and not job.late(now)]
            load = StepLoad(len(decoding), sum(job.computed for job in decoding))
            time = deepcopy(self.scheduler.step_time)  # it learns from the step
            expected = self.reference.step(now)
            held = {job.seq_id: replace(job) for job in self.reference.jobs}
            outputs = self.core.step()
            made = self.executor.steps[before:]
            assert [sorted(step) for step in made] == ([expected] if expected else [])
            for step in made:
                self.began.append(now)
                self.holds(step, load, time, held, now)
            self.reference.computed(expected)
            for output in outputs:
                if output.finish_reason is not None:
                    self.ended[int(output.request_key[1:])] = output
            self.scheduler.check_integrity()
        assert self.ended.keys() == self.jobs.keys() and not self.reference.jobs
        self.bounds()

    def cancel(self, number: int) -> None:
        for output in self.core.abort(f"r{number}"):
            self.ended[number] = output
        self.reference.end(number)

    def holds(self, made, load, time, held, now) -> None:
        """What is true of every step, from what was made in it."""
        assert 0 < sum(count for _, count in made) <= self.budget
        prompts, limit = 0, time.limit_s(load)
        for seq_id, count in made:
            job = held[seq_id]
            if job.remaining > 1:
                load, prompts = load.with_prompt(job.computed, count), prompts + count
            assert not job.late(now), "a step for what is late"
            if seq_id not in self.first:
                self.first[seq_id] = len(self.began) - 1, now
        if prompts > self.scheduler.least_tokens:
            assert time.step_s(load) <= limit, "prompts take more than their time"

    def bounds(self) -> None:
        for number, job in self.jobs.items():
            reason = self.ended[number].finish_reason
            step = self.first.get(number, (0, 0.0))[0]
            late = step > self.arrived[number] and self.began[step - 1] >= job.start_by
            assert not late, "passed over when its time was over, and begun after that"
            assert reason is not FinishReason.ERROR or self.ended[number].retry_s
        if len(set(self.tenants)) > 1:
            return
        # of one tenant nobody is overtaken by what came later than its own time and the span of priorities after it
        for number, (step, _) in self.first.items():
            job = self.jobs[number]
            last = job.arrival + job.cost + 2 * MAX_PRIORITY * AGEING_S
            for other, (before, _) in self.first.items():
                passed = before < step and self.arrived[number] <= before
                assert not passed or self.jobs[other].arrival <= last, "overtaken for too long"
                if passed and self.jobs[other].key > job.key:
                    raise AssertionError("overtaken by what comes later in the order")


def play(seeds: range, monkeypatch) -> Counter[str]:
    """What happened in them."""
    monkeypatch.setattr(scheduling, "TURN_STEPS", 2)
    found: Counter[str] = Counter()
    for seed in seeds:
        scenario = Scenario(seed)
        try:
            scenario.play()
        except Exception as error:
            raise AssertionError(f"scenario {seed}") from error
        found["gave way"] += any(job.gave_way for job in scenario.jobs.values())
        found.update(output.finish_reason.value for output in scenario.ended.values())
        found["shared"] += sum(sum(count > 1 for _, count in step) > 1 for step in scenario.executor.steps)
    return found


def test_random_arrivals_are_scheduled_as_the_reference_does(monkeypatch):
    found = play(range(QUICK), monkeypatch)
    assert all(found[name] >= 5 for name in ("length", "deadline", "error", "cancelled", "shared")), found
    assert found["gave way"], found


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_random_arrivals_are_scheduled_as_the_reference_does(monkeypatch):
    play(range(QUICK, ALL), monkeypatch)


def test_tenants_with_prompts_are_given_tokens_in_turn():
    """Whatever they send, and however many of them, while both have prompts; neither is ahead by more than a step."""
    for seed in range(20):
        rng = random.Random(seed)
        executor = Simulated(H200)
        core = make_simulated(executor, max_batch_tokens=256, max_sequences=64)
        of: dict[int, str] = {}
        for name, count, most in (("flood", 40, 4000), ("polite", 4, 30_000)):
            for _ in range(count):
                of[core._next_id] = name
                core.add(ask(f"{name}{core._next_id}", rng.randint(2000, most), 1, tenant=name))
        given: Counter[str] = Counter()
        while core.scheduler.waiting.count_by_tenant().keys() >= {"flood", "polite"}:
            core.step()
            for seq_id, count in executor.steps[-1]:
                given[of[seq_id]] += count
            assert abs(given["flood"] - given["polite"]) <= 2 * 256, (seed, given)


def test_the_reference_would_notice(monkeypatch):
    """A scheduler that serves prompts in another order is found out within a few scenarios."""
    monkeypatch.setattr(scheduling.Scheduler, "_prompt_order", lambda self, sequence: (0, (-sequence.arrival, 0)))
    with pytest.raises(AssertionError):
        play(range(30), monkeypatch)
