"""Places go from the tenant that has most to one that waits: soon, with right tokens, and a few times in a life."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fakes import greedy, make_core

from wicore_trt.config import KVSettings
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.schedule import scheduler as scheduling
from wicore_trt.schedule.scheduler import TURN_STEPS
from wicore_trt.types import GenerateRequest, SamplingParams

CONTEXT = 512


def core(max_sequences: int = 4, pages: int = 600, **kwargs):
    return make_core(
        pages={GLOBAL: pages, LOCAL: pages},
        max_context=CONTEXT,
        max_sequences=max_sequences,
        max_batch_tokens=64,
        **kwargs,
    )


def ask(engine, name: str, tenant: str, count: int, prompt: tuple[int, ...] = (5, 6, 7)) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count)
    engine.add(GenerateRequest(name, prompt, params, tenant=tenant))


def run(engine, steps: int, found: dict[str, list[int]], ended: dict[str, int], begin: int = 0) -> int:
    """Step until nothing lives, or `steps` more; fills the tokens and the step of each one's end."""
    for number in range(begin, begin + steps):
        if not engine.has_work:
            return number
        for output in engine.step():
            found.setdefault(output.request_key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.error is None
                ended[output.request_key] = number
        engine.scheduler.check_integrity()
    return begin + steps


VARIANTS = {"recomputing": {}, "host tier": {"kv": KVSettings(host_bytes=1 << 20)}, "ahead": {"ahead": 1}}


@pytest.mark.parametrize("kwargs", VARIANTS.values(), ids=VARIANTS)
def test_who_waits_gets_a_place_although_nobody_ends(kwargs):
    engine, found, ended = core(**kwargs), {}, {}
    engine.executor.leads = lambda batch: True  # an executor that runs ahead does so whenever it may
    for i in range(6):
        ask(engine, f"a{i}", "alice", 250)
    step = run(engine, 40, found, ended)
    ask(engine, "b", "bob", 10, (9, 8, 7))
    ask(engine, "b2", "bob", 10, (9, 8, 6))
    ask(engine, "c", "carol", 10, (3, 4))
    step = run(engine, 3 * TURN_STEPS, found, ended, step)
    assert {"b", "b2", "c"} == set(ended), "they wait for alice's 250 tokens"
    run(engine, 10_000, found, ended, step)
    for i in range(6):
        assert found[f"a{i}"] == greedy([5, 6, 7], 250, ignore_eos=True)
    assert found["b"] == greedy([9, 8, 7], 10, ignore_eos=True) and len(ended) == 9


def test_pages_are_given_too():
    engine, found, ended = core(max_sequences=8, pages=130), {}, {}
    for i in range(3):
        ask(engine, f"a{i}", "alice", 200, tuple(random.Random(i).choices(range(3, 90), k=100)))
    step = run(engine, 60, found, ended)
    ask(engine, "b", "bob", 5, tuple(range(3, 90)) * 2)
    step = run(engine, 60, found, ended, step)
    assert set(ended) == {"b"}
    run(engine, 10_000, found, ended, step)
    assert len(ended) == 4


@pytest.mark.parametrize("kwargs", VARIANTS.values(), ids=VARIANTS)
def test_who_holds_no_place_comes_before_a_tenant_whose_sequences_lost_their_pages(kwargs):
    """Alice's sequences take pages from each other, and each that lost its pages gave a place back."""
    engine, found, ended = core(max_sequences=8, pages=130, **kwargs), {}, {}
    for i in range(20):
        ask(engine, f"a{i}", "alice", 400)
    step = run(engine, 120, found, ended)
    assert engine.scheduler.preemptions > 2
    ask(engine, "b", "bob", 30, (9, 8, 7))
    step = run(engine, 100, found, ended, step)
    assert set(ended) == {"b"} and found["b"] == greedy([9, 8, 7], 30, ignore_eos=True)


def test_equals_and_a_lone_tenant_take_nothing_from_each_other():
    for tenants in (["alice"] * 6, ["alice", "alice", "bob", "bob", "bob", "bob"]):
        engine, found, ended = core(), {}, {}
        for i, tenant in enumerate(tenants):
            ask(engine, f"r{i}", tenant, 150)
        run(engine, 10_000, found, ended)
        assert engine.scheduler.preemptions == 0 and len(ended) == 6


def test_short_requests_one_after_the_other_do_not_keep_a_long_one_from_its_end(monkeypatch):
    monkeypatch.setattr(scheduling, "TURN_STEPS", 4)
    engine, found, ended = core(max_sequences=2), {}, {}
    for i in range(2):
        ask(engine, f"a{i}", "alice", 150)
    alice = list(engine.scheduler.waiting)
    step = run(engine, 10, found, ended)
    for i in range(60):
        ask(engine, f"b{i}", "bob", 3)
        while f"b{i}" not in ended:
            step = run(engine, 1, found, ended, step)
    run(engine, 1000, found, ended, step)
    assert len(ended) == 62 and found["a0"] == found["a1"] == greedy([5, 6, 7], 150, ignore_eos=True)
    assert 0 < max(s.gave_way for s in alice) <= 5, "once after 4 steps, then 8, 16, 32 and 64"


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 8))])
def test_nobody_gives_way_again_before_it_got_on(seed, monkeypatch):
    """Random tenants, lengths, arrivals, pools and tiers. A sequence gives way after twice as many steps each time, the
    places become more equal by it, and all tokens are right."""
    monkeypatch.setattr(scheduling, "TURN_STEPS", 4)
    rng = random.Random(seed)
    kwargs = rng.choice(list(VARIANTS.values()))
    engine = core(rng.randint(1, 6), rng.choice([150, 300, 600]), **kwargs)
    found: dict[str, list[int]] = {}
    ended: dict[str, int] = {}
    wanted: dict[str, tuple[tuple[int, ...], int]] = {}
    gave: list[tuple[int, int]] = []
    times: Counter[int] = Counter()
    preempt = engine.scheduler._preempt_sequence

    def watched(victim, plan):
        head, gives_way = engine.scheduler.waiting.peek_next(), victim.gave_way > times[victim.seq_id]
        times[victim.seq_id] = victim.gave_way
        if gives_way:
            gave.append((victim.seq_id, victim.ran))
            of = [s.request.tenant for s in engine.scheduler.running]
            assert of.count(victim.request.tenant) >= of.count(head.request.tenant) + 2
        refund = preempt(victim, plan)
        assert not gives_way or engine.scheduler.waiting.peek_next() is head
        return refund

    monkeypatch.setattr(engine.scheduler, "_preempt_sequence", watched)
    step = 0
    for i in range(rng.randint(5, 25)):
        prompt = tuple(rng.choices(range(3, 90), k=rng.randint(1, 30)))
        wanted[f"r{i}"] = prompt, rng.choice([3, 10, 60, 150])
        ask(engine, f"r{i}", rng.choice(["alice", "alice", "alice", "bob", "carol"]), wanted[f"r{i}"][1], prompt)
        step = run(engine, rng.randint(0, 30), found, ended, step)
    work = sum(len(prompt) + count for prompt, count in wanted.values())
    run(engine, 4 * work + 1000, found, ended, step)
    assert ended.keys() == wanted.keys(), "somebody is stuck"
    for name, (prompt, count) in wanted.items():
        assert found[name] == greedy(list(prompt), count, ignore_eos=True)
    for victim in {seq_id for seq_id, _ in gave}:
        turns = [ran for seq_id, ran in gave if seq_id == victim]
        assert all(ran >= 4 << k for k, ran in enumerate(turns)) and len(turns) <= 7
