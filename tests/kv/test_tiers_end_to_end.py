"""The whole cache over checked memory: device pools too small for the traffic, a host tier, a disk.

Every position that a query sees is checked by FakeExecutor on every step, and every output against the pure function
that it computes, so a page that comes back wrong, late or to the wrong place fails at once.
"""

from __future__ import annotations

import random

import pytest
from fakes import clear_pool, greedy, make_core

from wicore_trt.config import KVSettings
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.schedule import scheduler
from wicore_trt.types import GenerateRequest, SamplingParams

SLOT = 4096


def conversations(rng: random.Random, count: int, system: int = 12) -> list[list[int]]:
    shared = [rng.randrange(2, 97) for _ in range(system)]
    return [shared + [rng.randrange(2, 97) for _ in range(rng.randint(4, 12))] for _ in range(count)]


def prefer_loads(core) -> None:
    """Let the planner believe that computing is slow; FakeExecutor is faster than any copy."""
    core.scheduler.prefill.observe_step([(0, 64)], 64.0)
    core.scheduler.prefill.observe_step = lambda *args: None  # or what its steps take would soon say otherwise


def run(core, requests: list[GenerateRequest], *, check=True) -> dict[str, list[int]]:
    """Step until all requests ended; tokens by request id."""
    tokens: dict[str, list[int]] = {r.request_key: [] for r in requests}
    left = set(tokens)
    for request in requests:
        core.validate_request(request)
        core.add(request)
    while left:
        for output in core.step():
            assert output.error is None
            tokens[output.request_key] += output.token_ids
            if output.finish_reason is not None:
                left.discard(output.request_key)
        if check:
            core.scheduler.check_integrity()
    return tokens


def replay(core, rng: random.Random, prompts: list[list[int]], turns: int, *, answer: int = 6) -> int:
    """Multi-turn sessions in waves; every answer is checked. Returns requests served."""
    served = 0
    for turn in range(turns):
        order = list(range(len(prompts)))
        rng.shuffle(order)
        while order:
            wave, order = order[:4], order[4:]
            requests = [
                GenerateRequest(
                    f"{turn}/{i}", tuple(prompts[i]), SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
                )
                for i in wave
            ]
            outputs = run(core, requests)
            for i in wave:
                assert outputs[f"{turn}/{i}"] == greedy(prompts[i], answer, ignore_eos=True)
                prompts[i] += outputs[f"{turn}/{i}"] + [rng.randrange(2, 97) for _ in range(rng.randint(1, 6))]
                served += 1
    return served


@pytest.mark.parametrize("write_policy", ["through", "selective", "back"])
@pytest.mark.parametrize("policy", ["lru", "cost", "a2cr"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1,))])
def test_conversations_that_outgrow_the_device_are_right(tmp_path, write_policy, policy, seed):
    rng = random.Random(f"{write_policy}/{policy}/{seed}")
    kv = KVSettings(
        host_bytes=rng.choice([24, 60, 200]) * SLOT,
        disk_path=str(tmp_path / "kv") if rng.random() < 0.8 else None,
        disk_bytes=rng.choice([3, 16]) << 20,
        disk_free_bytes=0,
        write_policy=write_policy,
        policy=policy,
        tenant_quota=rng.choice([1.0, 0.7]),
    )
    core = make_core(pages={GLOBAL: 40, LOCAL: 24}, kv=kv, window=rng.choice([5, 8, 11]), max_context=120)
    prefer_loads(core)
    replay(core, rng, conversations(rng, 10), 4)
    stats = core.stats().kv
    assert sum(tier.hit_tokens for tier in stats.tiers[1:]) > 0 or write_policy != "through"
    assert all(not tier.failures.get("corrupt") for tier in stats.tiers)
    core.close()


@pytest.mark.parametrize(("pages", "most"), [(13, 2), (512, 7)])
def test_few_large_loads_begin_before_a_step(pages, most, monkeypatch):
    """To begin one takes the engine's thread a while: who needs no load shall not wait for those of all others. Nor
    shall it wait a step for each two of small ones, which take no time."""
    monkeypatch.setattr(scheduler, "PAGES_AT_ONCE", pages)
    rng = random.Random(5)
    core = make_core(pages={GLOBAL: 200, LOCAL: 120}, kv=KVSettings(host_bytes=400 * SLOT), max_context=120)
    prefer_loads(core)
    prompts = [[rng.randrange(2, 97) for _ in range(40)] for _ in range(7)]  # loads of 12 pages
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    run(core, [GenerateRequest(f"first/{i}", tuple(prompt), params) for i, prompt in enumerate(prompts)])
    for pool in core.scheduler.manager.pools.values():
        clear_pool(pool)
    loader, begun = core.scheduler.loader, []
    schedule = core.scheduler.schedule_step

    def counted():
        before = loader.decisions["load"]
        found = schedule()
        begun.append(loader.decisions["load"] - before)
        return found

    monkeypatch.setattr(core.scheduler, "schedule_step", counted)
    outputs = run(core, [GenerateRequest(f"again/{i}", tuple(prompt), params) for i, prompt in enumerate(prompts)])
    assert all(outputs[f"again/{i}"] == greedy(prompt, 4, ignore_eos=True) for i, prompt in enumerate(prompts))
    assert sum(begun) == len(prompts) and max(begun) == most
    core.close()
