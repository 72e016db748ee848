"""`cache.store`: pages of `device` and `never` requests stay out of host memory, files and what others find."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path

import pytest
from fakes import chain, greedy, make_core
from test_tiers_end_to_end import SLOT, prefer_loads

from wicore_trt.config import KVSettings
from wicore_trt.errors import InvalidRequestError
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.schedule.sequence import StepSchedule
from wicore_trt.types import CacheHints, CachePriority, CacheStore, GenerateRequest, SamplingParams

ANSWER = 12
PARAMS = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
ALL, DEVICE, NEVER = CacheStore


def name_positions(tokens: list[int]) -> list[bytes]:
    """Bytes that FakeExecutor keeps for each position."""
    return list(accumulate(tokens, chain, initial=b""))[1:]


def serve(core, asked: dict[str, tuple[list[int], CacheStore]], rng: random.Random | None = None) -> dict[str, int]:
    """Serve requests at once, parking some at random, and check their tokens; cached tokens by name."""
    cached: dict[str, int] = {}
    got = {name: list[int]() for name in asked}
    for name, (prompt, store) in asked.items():
        core.add(GenerateRequest(name, tuple(prompt), PARAMS, cache=CacheHints(store=store)))
    while core.has_work:
        if rng is not None and rng.random() < 0.1 and core.scheduler.running:
            core.scheduler._preempt_sequence(rng.choice(core.scheduler.running), StepSchedule())
        for output in core.step():
            assert output.error is None
            got[output.request_key] += output.token_ids
            if output.usage is not None:
                cached[output.request_key] = output.usage.cached_tokens
        core.scheduler.check_integrity()
    while core.do_housekeeping():
        core.scheduler.manager.tiers.wait_for_report(0.01)
    for name, (prompt, _) in asked.items():
        assert got[name] == greedy(prompt, ANSWER, ignore_eos=True)
    return cached


def read_lower_tiers(core, folder: Path) -> bytes:
    return bytes(core.scheduler.manager.tiers.movers.host._slab) + b"".join(
        path.read_bytes().replace(bytes(512), b"") for path in folder.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize("write_policy", ["through", "selective", "back"])
@pytest.mark.parametrize("seed", range(2))
def test_no_byte_and_no_name_goes_where_the_request_forbids_it(tmp_path: Path, write_policy: str, seed: int) -> None:
    rng = random.Random(seed)
    kv = KVSettings(
        host_bytes=rng.choice([30, 120]) * SLOT, disk_path=str(tmp_path / "kv"), disk_bytes=16 << 20,
        disk_free_bytes=0, write_policy=write_policy,
    )  # fmt: skip
    core = make_core(pages={GLOBAL: 40, LOCAL: 30}, kv=kv, max_context=120)
    prefer_loads(core)
    left, to_host = set[bytes](), core.executor.to_host

    def watch(group, slot, *args, **more):
        left.update(core.executor.memory[group][slot])
        to_host(group, slot, *args, **more)

    core.executor.to_host = watch
    told: dict[CacheStore, set[bytes]] = {store: set() for store in CacheStore}
    history: list[tuple[list[int], CacheStore]] = []
    for wave in range(5):
        asked = {}
        for i in range(5):
            begun = rng.choice(history)[0] if history and rng.random() < 0.5 else []
            prompt = [*begun, *(rng.randrange(2, 97) for _ in range(rng.randint(6, 24)))][:80]
            asked[f"{wave}/{i}"] = (prompt, rng.choice([*CacheStore]))
        serve(core, asked, rng)
        for prompt, store in asked.values():
            history.append((prompt, store))
            told[store].update(name_positions([*prompt, *greedy(prompt, ANSWER, ignore_eos=True)]))
    below = read_lower_tiers(core, tmp_path)
    for digest in told[DEVICE] | told[NEVER]:
        if digest not in told[ALL]:
            assert digest not in left and digest not in below
    enough = sum(digest in below for digest in told[ALL]) > 20
    assert enough or write_policy == "selective", "requests without a wish go down"  # few are used twice
    for prompt, store in history:
        if store is NEVER and not set(name_positions(prompt)) & (told[ALL] | told[DEVICE]):
            assert serve(core, {"again": ([*prompt, 3], NEVER)}) == {"again": 0}, "pages of `never` requests have names"
    core.close()


def test_a_page_of_a_device_request_is_found_on_the_device_and_goes_down_with_anothers_prompt(tmp_path: Path) -> None:
    core = make_core(pages={GLOBAL: 160, LOCAL: 60}, kv=KVSettings(host_bytes=400 * SLOT))
    manager, prompt = core.scheduler.manager, [5 + i % 60 for i in range(41)]
    digests = name_positions(prompt)[:40]
    serve(core, {"first": (prompt, DEVICE)})
    assert serve(core, {"second": (prompt, DEVICE)}) == {"second": 40}
    assert not any(d in read_lower_tiers(core, tmp_path) for d in digests)
    assert not list(manager.tiers.host.iterate_copies())
    assert serve(core, {"third": ([*prompt, 9, 9, 9], ALL)}) == {"third": 40}
    below = read_lower_tiers(core, tmp_path)
    assert all(d in below for d in digests), "the chain of the third has no gap"


def test_nobody_waits_for_pages_of_a_never_request() -> None:
    core = make_core(pages={GLOBAL: 160, LOCAL: 60}, kv=KVSettings(host_bytes=400 * SLOT))
    prompt = tuple(range(10, 50))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, n=3)
    core.add(GenerateRequest("never", prompt, params, cache=CacheHints(store=NEVER)))
    core.add(GenerateRequest("all", prompt, PARAMS))
    ended = []
    while core.has_work:
        ended += [o.request_key for o in core.step() if o.finish_reason is not None]
    assert ended == ["all", "never", "never", "never"]


@pytest.mark.parametrize(
    "hints",
    [
        {"store": DEVICE, "session": "s"},
        {"store": NEVER, "priority": CachePriority.HIGH},
        {"store": NEVER, "ttl_s": 5.0},
        {"store": "never"},
    ],
)
def test_hints_that_contradict_are_refused(hints: dict) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        CacheHints(**hints)
    assert refused.value.field == "cache.store"
    CacheHints(store=DEVICE, ttl_s=5.0)
