"""The waiting queue: tenants in turn, priorities within a tenant, nobody overtaken for long (I18)."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest
from fakes import make_core

from wicore_trt.request_fields import MAX_PRIORITY
from wicore_trt.schedule.queue import AGEING_S, WaitingQueue, order_key
from wicore_trt.schedule.sequence import Sequence
from wicore_trt.types import GenerateRequest, SamplingParams


def sequence(number: int, tenant: str = "", priority: int = 0, arrival: float | None = None) -> Sequence:
    request = GenerateRequest(f"r{number}", (1, 2), SamplingParams(), priority=priority, tenant=tenant)
    arrived = float(number) if arrival is None else arrival
    return Sequence(seq_id=number, request=request, index=0, seed=0, tokens=[1, 2], arrival=arrived, pages=None)


def drained(queue: WaitingQueue) -> list[Sequence]:
    found = []
    while (first := queue.peek_next()) is not None:
        assert queue.pop_next() is first
        found.append(first)
    assert not len(queue) and not queue.count_by_tenant() and queue.pop_next() is None
    return found


def test_one_tenant_is_served_by_priority_with_ageing_as_ever():
    rng, queue = random.Random(1), WaitingQueue()
    made = [sequence(i, priority=rng.randint(-2, 2), arrival=rng.uniform(0, 40)) for i in range(200)]
    for one in made:
        queue.push_sequence(one)
    assert drained(queue) == sorted(made, key=order_key)


def test_a_polite_tenant_waits_for_one_sequence_of_a_flood():
    queue = WaitingQueue()
    for i in range(200):
        queue.push_sequence(sequence(i, "flood", priority=-MAX_PRIORITY))
    for _ in range(20):
        one = queue.pop_next()
        assert one.request.tenant == "flood"
        queue.end_place(one)
    polite = [sequence(1000 + i, "polite", priority=MAX_PRIORITY) for i in range(3)]
    for one in polite:
        queue.push_sequence(one)
    order = [one.request.tenant for one in drained(queue)]
    assert [i for i, tenant in enumerate(order) if tenant == "polite"] in ([0, 2, 4], [1, 3, 5])


@pytest.mark.parametrize("seed", range(5))
def test_places_differ_by_one_between_tenants_that_wait_whatever_comes_back(seed: int):
    """Some sequences are put back, as those that do not fit are, and some come back after they ran."""
    rng, queue, number, taken = random.Random(seed), WaitingQueue(), 0, Counter()
    running: list[Sequence] = []
    for tenant, count in (("a", 300), ("b", 60), ("c", 60)):
        for _ in range(count):
            queue.push_sequence(sequence(number, tenant))
            number += 1
    for _ in range(150):
        one = queue.pop_next()
        assert one is not None and one not in queue
        action = rng.random()
        if action < 0.3:
            queue.undo_pops([one])
            assert one in queue
            continue
        running.append(one)
        taken[one.request.tenant] += 1
        if action > 0.9:
            victim = running.pop(rng.randrange(len(running)))
            taken[victim.request.tenant] -= 1
            queue.push_sequence(victim)
        assert max(taken.values()) - min(taken[t] for t in "abc") <= 2, taken
    late = sequence(number, "late")
    queue.push_sequence(late)
    waited = 0
    while queue.pop_next() is not late:
        waited += 1
    assert waited <= 3


def test_an_old_place_that_is_given_back_lets_nothing_else_of_its_tenant_pass():
    queue, old = WaitingQueue(), sequence(0, "flood")
    queue.push_sequence(old)
    assert queue.pop_next() is old
    for i in range(1, 101):
        queue.push_sequence(sequence(i, "polite"))
        queue.end_place(queue.pop_next())
    queue.push_sequence(old)  # it ran all the time, and lost its pages
    for i in range(200, 250):
        queue.push_sequence(sequence(i, "flood"))
    late = sequence(300, "polite")
    queue.push_sequence(late)
    assert queue.pop_next() is old
    queue.end_place(old)
    waited = 0
    while (one := queue.pop_next()) is not late:  # there is one place
        queue.end_place(one)
        waited += 1
    assert waited <= 2


@pytest.mark.parametrize("ran", [False, True])
def test_places_that_are_given_back_make_no_newcomer_wait_for_them(ran: bool):
    queue = WaitingQueue()
    for i in range(100):
        queue.push_sequence(sequence(i, "flood"))
    taken = [queue.pop_next() for _ in range(60)]
    if ran:
        for one in taken:
            queue.push_sequence(one)
    else:
        queue.undo_pops(taken)
    late = sequence(1000, "late")
    queue.push_sequence(late)
    assert drained(queue).index(late) <= 1


def test_a_sequence_can_be_removed_from_the_middle():
    queue, made = WaitingQueue(), [sequence(i, tenant) for i, tenant in enumerate("aabba")]
    for one in made:
        queue.push_sequence(one)
    queue.remove_member(made[1])
    assert made[1] not in queue and queue.count_by_tenant() == {"a": 2, "b": 2} and len(queue) == 4
    assert made[1] not in drained(queue)


def test_the_worst_priority_waits_a_bounded_time_behind_the_best():
    now = [0.0]
    core = make_core(max_sequences=2, clock=lambda: now[0])
    count = 0

    def attack() -> None:
        nonlocal count
        count += 1
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        core.add(GenerateRequest(f"a{count}", (5, 6, 7 + count % 80), params, priority=-MAX_PRIORITY))

    for _ in range(4):
        attack()
    core.step()
    last = SamplingParams(temperature=0, max_tokens=1)
    core.add(GenerateRequest("normal", (9, 9, 9), last, priority=MAX_PRIORITY))
    while now[0] < 3 * MAX_PRIORITY * AGEING_S:
        now[0] += 0.1
        while len(core.scheduler.waiting) < 3:
            attack()
        if any(output.request_key == "normal" for output in core.step()):
            assert now[0] < 2 * MAX_PRIORITY * AGEING_S + 5
            return
    raise AssertionError("it never came")


def test_members_that_leave_from_the_middle_cost_no_heap_each(monkeypatch):
    """Thousands of clients that give up at once are taken out between two steps."""
    rng, queue, heaps, heapify = random.Random(3), WaitingQueue(), [], heapq.heapify
    monkeypatch.setattr(heapq, "heapify", lambda heap: heaps.append(len(heap)) or heapify(heap))
    made = [sequence(i, arrival=rng.random()) for i in range(3000)]
    for one in made:
        queue.push_sequence(one)
    leaving = rng.sample(made, 2900)
    for one in leaving:
        queue.remove_member(one)
    assert sum(heaps) <= 3000
    left = [one for one in made if one not in leaving]
    assert queue.count_by_tenant() == {"": 100} and list(queue) == left
    queue.push_sequence(leaving[0])
    queue.remove_member(leaving[0])
    queue.push_sequence(leaving[0])
    assert drained(queue) == sorted([*left, leaving[0]], key=order_key)
