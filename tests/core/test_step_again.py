"""A step that raises runs again, each sequence alone: the request at fault ends, the others get their right tokens.

Invariants: I17.
"""

from __future__ import annotations

import random

import fakes
import pytest
from fakes import greedy, make_core
from late_device import LateExecutor

from wicore_trt.config import KVSettings
from wicore_trt.core.loop import EngineLoop
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams

VARIANTS = {"recomputing": {}, "host tier": {"kv": KVSettings(host_bytes=1 << 20)}, "ahead": {"ahead": 1}}


def request(name: str, prompt: list[int], max_tokens: int = 20) -> GenerateRequest:
    return GenerateRequest(name, tuple(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))


def break_on(core, bad: set[int], where: str = "computed") -> list[int]:
    """Steps with one of these sequences raise when they have done what they do. Returns how large those steps were."""
    executor, broken = core.executor, []
    name = where if hasattr(executor, "submit") else "execute"
    run = getattr(executor, name)

    def breaks(batch):
        done = run(batch)
        if bad & {piece.seq_id for piece in batch.slices}:
            broken.append(len(batch.slices))
            if name == "submit":
                executor.queue.pop() if executor.queue else executor.results.pop()
            raise RuntimeError("a kernel failed")
        return done

    setattr(executor, name, breaks)
    return broken


@pytest.mark.parametrize("where", ["submit", "computed"])
@pytest.mark.parametrize("kwargs", VARIANTS.values(), ids=VARIANTS)
def test_the_request_at_fault_ends_alone(kwargs, where):
    core = make_core(max_batch_tokens=64, **kwargs)
    core.executor.leads = lambda batch: False
    prompts = {name: [5 + i, 6, 7, *range(9 + i)] for i, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        core.add(request(name, prompt))
    tokens, last = {}, {}
    for step in range(200):
        if not core.has_work:
            break
        if step == 5:
            broken = break_on(core, {2}, where)
        for output in core.step():
            tokens.setdefault(output.request_key, []).extend(output.token_ids)
            last[output.request_key] = output if output.finish_reason is not None else None
        core.scheduler.check_integrity()
    assert broken == [4, 1], "with the others, and alone"
    assert last["c"].finish_reason is FinishReason.ERROR and "a kernel failed" in last["c"].error
    for name in "abd":
        assert tokens[name] == greedy(prompts[name], 20, ignore_eos=True)
    assert tokens["c"] == greedy(prompts["c"], 20, ignore_eos=True)[: len(tokens["c"])]
    assert all(pool.used_slots == 0 for pool in core.scheduler.manager.pools.values())
    core.add(request("again", prompts["c"]))
    found = core.scheduler.manager.find_prefix(core.sequences["again"][0].pages, prompts["c"])
    assert not found.tokens, "what the failed step computed is in the cache"


@pytest.mark.parametrize("seed", range(6))
def test_faults_in_random_traffic_cost_those_alone_who_have_them(seed):
    rng = random.Random(seed)
    core = make_core(max_batch_tokens=rng.choice([8, 16, 64]), **rng.choice(list(VARIANTS.values())))
    core.executor.leads = lambda batch: False
    bad = set(rng.sample(range(1, 13), 3))
    break_on(core, bad)
    keep = request("keep", [9, 8, 7], 110)  # one alone with a fault would stand for a broken device
    core.add(keep)
    prompts = {str(i): [rng.randrange(3, 90) for _ in range(rng.randint(2, 30))] for i in range(1, 13)}
    tokens: dict[str, list[int]] = {}
    ended = {}
    left = list(prompts)
    while left or core.has_work:
        if left and rng.random() < 0.7:
            name = left.pop(0)
            core.add(request(name, prompts[name], 10))
        for output in core.step():
            tokens.setdefault(output.request_key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ended[output.request_key] = output.finish_reason
        core.scheduler.check_integrity()
    for name, prompt in prompts.items():
        assert (ended[name] is FinishReason.ERROR) == (int(name) in bad)
        if int(name) not in bad:
            assert tokens[name] == greedy(prompt, 10, ignore_eos=True)


@pytest.mark.parametrize("count", [1, 5])
def test_a_broken_device_ends_the_engine_after_two_tries(count):
    core = make_core(max_batch_tokens=64)
    outputs = []
    loop = EngineLoop(core, outputs.extend, max_waiting=100)
    broken = break_on(core, set(range(5)))
    for i in range(count):
        loop.add(request(str(i), [i + 3, 4, 5]))
    loop.start()
    loop._thread.join(60)
    assert "a kernel failed" in loop.dead and not loop.live_ids() and len(outputs) == count
    assert broken == [count, 1] + [1] * (count > 1)


@pytest.mark.parametrize("ahead", [None, 1])
def test_sequences_that_run_each_alone_are_progress(ahead):
    """However many there are: the watchdog ends an engine that ends no step, and each of theirs is one."""
    core, count = make_core(max_batch_tokens=64, ahead=ahead), 8
    loop = EngineLoop(core, lambda outputs: None, max_waiting=100)
    seen, execute = [], core.executor.execute

    def watched(batch):
        if len(batch.slices) == 1:
            seen.append(loop.progress)
        return execute(batch)

    core.executor.execute = watched
    broken = break_on(core, {7}, "computed")
    for i in range(count):
        loop.add(request(str(i), [i + 3, 4, 5]))
    loop._rests = False  # it has work
    assert loop._take_inbox()
    core.step()
    assert broken[0] == count and len(seen) == len(set(seen)) == count


def test_a_sequence_without_finite_logits_is_no_sign_of_a_broken_device():
    core = make_core(max_batch_tokens=64)
    for i in range(3):
        core.add(request(str(i), [i + 3, 4, 5]))
    core.step()
    core.executor.poison.add(0)
    assert break_on(core, {1}) == []
    tokens: dict[str, list[int]] = {}
    ended = finish(core, tokens)
    assert ended == {"0": FinishReason.ERROR, "1": FinishReason.ERROR, "2": FinishReason.LENGTH}


def run_ahead(core, names: str) -> dict[str, list[int]]:
    """The requests' prompts, of sequences that have run ahead for a while."""
    core.executor.leads = lambda batch: True
    core.executor.rng.random = lambda: 1.0
    prompts = {name: [5, 6, ord(name)] for name in names}
    for name, prompt in prompts.items():
        core.add(request(name, prompt))
    for _ in range(3):
        core.step()
    assert core._flight is not None
    return prompts


def finish(core, tokens: dict[str, list[int]]) -> dict[str, FinishReason]:
    """Step until all have ended; adds their tokens."""
    ended = {}
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ended[output.request_key] = output.finish_reason
        core.scheduler.check_integrity()
    assert all(pool.used_slots == 0 for pool in core.scheduler.manager.pools.values())
    return ended


@pytest.mark.parametrize("where", ["submit", "computed"])
def test_a_step_that_fails_while_the_next_one_runs_costs_those_alone_who_are_at_fault(where):
    core = make_core(ahead=0, max_batch_tokens=64)
    prompts = run_ahead(core, "abc")
    tokens = {name: core.sequences[name][0].tokens[3:] for name in prompts}
    broken = break_on(core, {1}, where)
    ended = finish(core, tokens)
    assert 3 in broken and broken.count(1) == 1
    assert ended == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR, "c": FinishReason.LENGTH}
    for name in "ac":
        assert tokens[name] == greedy(prompts[name], 20, ignore_eos=True)


def test_a_device_that_broke_while_the_next_step_ran_ends_the_engine():
    core = make_core(ahead=0, max_batch_tokens=64)
    run_ahead(core, "abc")
    broken = break_on(core, {0, 1, 2})
    with pytest.raises(RuntimeError, match="a kernel failed"):
        for _ in range(5):
            core.step()
    assert broken == [3, 3, 1, 1], "two that ran ahead, and two tries"


class Flaky:
    """Steps of an executor fail at random, when they are started or when they are over; the tries alone do not, but for
    the sequence `bad`."""

    def __init__(self, executor, rng: random.Random, bad: int) -> None:
        self.failed, self._rng, self._bad, self._alone = {"submit": 0, "collect": 0}, rng, bad, False
        self._where = rng.choice([*self.failed])
        self._execute, self._submit, self._computed = executor.execute, executor.submit, executor.computed
        executor.execute, executor.submit, executor.computed = self.execute, self.submit, self.computed

    def execute(self, batch):
        self._alone = True
        try:
            return self._execute(batch)
        finally:
            self._alone = False

    def submit(self, batch):
        self._fail("submit", batch)
        self._submit(batch)

    def computed(self, batch):
        early = self._rng.random() < 0.5
        if early:
            self._fail("collect", batch)
        result = self._computed(batch)
        if not early:
            self._fail("collect", batch)
        return result

    def _fail(self, where: str, batch) -> None:
        at_fault = where == self._where and any(piece.seq_id == self._bad for piece in batch.slices)
        if at_fault or (not self._alone and self._rng.random() < 0.04):
            self.failed[where] += 1
            raise RuntimeError("a kernel failed")


@pytest.mark.parametrize("late", [False, True], ids=["at odds", "late"])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.long) for n in range(4, 12))])
def test_failures_at_random_moments_with_aborts_preemption_and_loads(seed, late, monkeypatch):
    rng = random.Random(f"{seed} {late}")
    kv = KVSettings(host_bytes=1 << 16) if rng.random() < 0.7 else None
    if late:
        monkeypatch.setattr(fakes, "AheadFakeExecutor", LateExecutor)
    core = make_core(max_batch_tokens=rng.choice([16, 64]), pages={GLOBAL: 48, LOCAL: 40}, ahead=seed, kv=kv)
    try:
        random_traffic(core, rng)
    finally:
        core.close()


def random_traffic(core, rng: random.Random) -> None:
    if rng.random() < 0.3:
        core.executor.leads = lambda batch: False
    bad = rng.randrange(1, 20)
    flaky = Flaky(core.executor, rng, bad)
    core.add(GenerateRequest("0", (9, 8, 7), SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)))
    stem = [rng.randrange(3, 90) for _ in range(24)]
    prompts = {"0": [9, 8, 7]}
    for i in range(1, 20):  # some share a prefix, so that pages are found and loaded
        prompts[str(i)] = [*stem[: rng.choice([0, 8, 24])], *(rng.randrange(3, 90) for _ in range(rng.randint(2, 30)))]
    tokens: dict[str, list[int]] = {}
    ended: dict[str, FinishReason] = {}
    left = [name for name in prompts if name != "0"]
    aborted: set[str] = set()
    while left or core.has_work:
        if left and (rng.random() < 0.3 or not core.has_work):
            name = left.pop(0)
            core.add(request(name, prompts[name], 16))
        outputs = core.step()
        if rng.random() < 0.03:
            name = rng.choice([*prompts][1:])
            aborted.add(name) if name in core.sequences else None
            outputs += core.abort(name)
        for output in outputs:
            tokens.setdefault(output.request_key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.request_key not in ended
                ended[output.request_key] = output.finish_reason
        core.scheduler.check_integrity()
    assert ended.keys() == prompts.keys()
    for name, prompt in prompts.items():
        right = greedy(prompt, 100 if name == "0" else 16, ignore_eos=True)
        if name in aborted:
            assert tokens.get(name, []) == right[: len(tokens.get(name, []))]
        elif int(name) == bad:
            assert ended[name] is FinishReason.ERROR and not tokens.get(name)
        else:
            assert ended[name] is FinishReason.LENGTH and tokens[name] == right, name
    assert all(pool.used_slots == 0 for pool in core.scheduler.manager.pools.values())
    assert sum(flaky.failed.values()) > 1
