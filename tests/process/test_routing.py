"""The choice of a replica, against its rules written down once more, and the memory of prompts against a plain one."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
from fakes import FAKE_INFO
from hypothesis import given
from hypothesis import strategies as st

from wicore_trt.config import load_settings
from wicore_trt.core.port import EnginePort
from wicore_trt.cores import count_cores
from wicore_trt.errors import QueueFullError, UnavailableError
from wicore_trt.kv.disk.claim import share_secret
from wicore_trt.kv.disk.tools import PurgeReport, add_reports, list_tiers
from wicore_trt.link.replicas import (
    RUNNING_TOKENS,
    WAITING_TOKENS,
    PrefixMemory,
    Replicas,
    add_figures,
    choose_replica,
    weigh_load,
)
from wicore_trt.process.replicas import divide_gpus, divide_settings, find_gpus
from wicore_trt.types import (
    ContentSpan,
    EngineStats,
    FinishReason,
    GenerateRequest,
    KVStats,
    PoolStats,
    SamplingParams,
    TextRequest,
    TierStats,
    TokenOutput,
)

LOADS = st.builds(weigh_load, st.integers(0, 200), st.just(64), st.integers(0, 10_000))
REPLICAS = st.lists(st.tuples(st.integers(0, 4096), st.none() | LOADS), min_size=1, max_size=6)


@given(REPLICAS, st.integers(0, 1000))
def test_the_choice_takes_requests_and_costs_least(replicas, turn):
    hits, loads = [hit for hit, _ in replicas], [load for _, load in replicas]
    chosen = choose_replica(hits, loads, turn)
    ready = [i for i, load in enumerate(loads) if load is not None]
    if not ready:
        return
    assert chosen in ready
    spared, held = loads[chosen] - min(loads[i] for i in ready), hits[chosen]
    assert spared <= held  # nobody waits longer than the prefix saves
    alike = [i for i in ready if loads[i] == loads[chosen]]
    assert held == max(hits[i] for i in alike)


@given(REPLICAS, st.integers(0, 1000), st.integers(1, 5000), st.integers(0, 5))
def test_what_gets_more_load_or_loses_its_prefix_is_not_chosen_for_it(replicas, turn, more, which):
    hits, loads = [hit for hit, _ in replicas], [load for _, load in replicas]
    which %= len(replicas)
    if loads[which] is None:
        return
    before = choose_replica(hits, loads, turn)
    busier = [*loads]
    busier[which] = loads[which] + more
    fewer = [max(0, hit - more * (i == which)) for i, hit in enumerate(hits)]
    for after in (choose_replica(hits, busier, turn), choose_replica(fewer, loads, turn)):
        assert after == before or (before == which and after != which)


def test_equal_replicas_take_turns_and_a_prefix_is_worth_some_sequences():
    turns = Counter(choose_replica([0, 0, 0], [5, 5, 5], turn) for turn in range(300))
    assert turns == {0: 100, 1: 100, 2: 100}
    for sequences in range(20):
        chosen = choose_replica([10 * RUNNING_TOKENS - 1, 0], [weigh_load(sequences, 64, 0), 0], 1)
        assert chosen == (sequences >= 10), sequences
    assert weigh_load(70, 64, 9) == 70 * RUNNING_TOKENS + 6 * WAITING_TOKENS + 9


def asked(tokens, tenant="", salt="", content=(), **params) -> TextRequest:
    return TextRequest("r", SamplingParams(**params), prompt_token_ids=tuple(tokens), tenant=tenant, cache_salt=salt,
                       content=content)  # fmt: skip


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=12), st.integers(0, 2), st.sampled_from("ab")), max_size=30)
)
def test_the_memory_knows_the_longest_prefix_in_blocks(served):
    memory, given_to = PrefixMemory(3, 2), []
    for tokens, replica, tenant in served:
        names = memory.name_blocks(asked(tokens, tenant))
        expected = [0, 0, 0]
        for other, whose, by in given_to:
            same = next(
                (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other))
            )
            if by == tenant:
                expected[whose] = max(expected[whose], same // 2 * 2)
        assert memory.find_hits(names) == expected
        memory.note_prompt(names, replica)
        given_to.append((tokens, replica, tenant))


def test_the_memory_separates_salts_and_pictures_is_bounded_and_forgets():
    memory = PrefixMemory(2, 4, most=100)
    picture, other = (ContentSpan(2, 6, bytes([digest]) * 32) for digest in (1, 2))
    for request in (asked(range(8)), asked(range(8), salt="s"), asked(range(8), content=(picture,))):
        assert memory.find_hits(memory.name_blocks(request)) == [0, 0]
        memory.note_prompt(memory.name_blocks(request), 1)
        assert memory.find_hits(memory.name_blocks(request)) == [0, 8]
    assert memory.find_hits(memory.name_blocks(asked(range(8), content=(other,)))) == [0, 0]
    assert memory.name_blocks(asked(range(8), prompt_logprobs=0)) == []
    memory.forget_replica(1)
    assert memory.find_hits(memory.name_blocks(asked(range(8)))) == [0, 0]
    rng = random.Random(1)
    for _ in range(50):
        memory.note_prompt(memory.name_blocks(asked([rng.randrange(9) for _ in range(40)])), 0)
    assert len(memory.holders) == 100
    longer = memory.name_blocks(asked(range(600)))  # longer than the memory: its end is forgotten first
    memory.note_prompt(longer, 0)
    assert memory.find_hits(longer) == [400, 0]


def test_figures_of_replicas_add_up():
    tier = TierStats("device", 10, 4, 1, {"global": 2}, 3, evictions={"capacity": 1})
    one = EngineStats(5.0, 1, 2, {"stop": 3}, 10, 4, 6, step_tokens=(1, 2), pools=(PoolStats("global", 8, 1, 2, 64),),
                      kv=KVStats((tier,), {"load": 1}, 1, 2, 3))  # fmt: skip
    host = TierStats("host", 7, 0, 0, {}, 0)
    other = EngineStats(3.0, 4, 0, {"length": 1}, 1, 1, 1, kv=KVStats((tier, host)))
    total = add_figures(one, other)
    assert (total.uptime_s, total.requests_running, total.requests_waiting) == (5.0, 5, 2)
    assert total.requests_finished == {"stop": 3, "length": 1} and total.step_tokens == (1, 2)
    assert total.pools == one.pools and total.kv.decisions == {"load": 1}
    device, below = sorted(total.kv.tiers, key=lambda t: t.tier)
    assert device == TierStats("device", 20, 8, 2, {"global": 4}, 6, evictions={"capacity": 2}) and below == host
    assert add_figures(one, one).pools == (PoolStats("global", 16, 2, 4, 64),)


@pytest.mark.parametrize(("names", "found"), [("-1", ()), ("NoDevFiles", ()), ("0, GPU-7f,-1,2", ("0", "GPU-7f"))])
def test_names_that_hide_gpus_are_none(monkeypatch, names, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert tuple(find_gpus("auto", 2, 1)) == found


def test_each_replica_sees_its_own_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-a,7,1")
    gpus = find_gpus("auto", 2, 2)
    assert [divide_gpus(gpus, i, 2) for i in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "GPU-a,7"}]  # fmt: skip
    assert find_gpus("cpu", 9, 1) == () == find_gpus("cuda", 1, 9)
    with pytest.raises(Exception, match="3 replicas of 2 GPUs each need 6, and there are 5"):
        find_gpus("cuda", 3, 2)


def test_the_machine_is_divided_and_its_replicas_have_one_secret(tmp_path):
    settings = load_settings(None, {"server": {"replicas": 3}, "kv": {"host_bytes": 10, "disk_path": str(tmp_path)}})
    parts = [divide_settings(settings, i) for i in range(3)]
    assert {part.kv.host_bytes for part in parts} == {3}
    assert sum(part.kv.disk_bytes for part in parts) <= settings.kv.disk_bytes
    assert sum(part.executor.threads for part in parts) <= max(3, count_cores())
    assert all(part.executor.threads for part in parts) and not divide_settings(settings, 0, ["0"]).executor.threads
    assert [Path(part.kv.disk_path).name for part in parts] == ["replica-0", "replica-1", "replica-2"]
    one = load_settings(None, {"kv": {"host_bytes": 10, "disk_path": str(tmp_path)}})
    assert divide_settings(one, 0) is one
    (tmp_path / "replica-1").mkdir(mode=0o700)
    (tmp_path / "replica-1/secret").write_bytes(b"s" * 32)
    (tmp_path / "replica-1/secret").chmod(0o600)
    share_secret(tmp_path, 3)
    assert {(Path(part.kv.disk_path) / "secret").read_bytes() for part in parts} == {b"s" * 32}
    (tmp_path / "replica-2/LOCK").touch()
    assert [home.name for home in list_tiers(tmp_path)] == ["replica-2"]  # the others have held no tier
    reports = [PurgeReport(1, 2, 3, ["a"]), PurgeReport(4, 5, 6, ["b"])]
    assert add_reports(reports) == PurgeReport(5, 7, 9, ["a", "b"])


class FakeEngine(EnginePort):
    """An engine of another process, without one: requests wait until `emit`."""

    prefix, dead = "1/", None

    def __init__(self, number: int) -> None:
        self.info, self.live, self.refuses = FAKE_INFO, {}, False
        self.pid = number

    @property
    def sequences(self) -> int:
        return sum(self.live.values())

    async def start(self, sink) -> None:
        self.sink = sink

    async def add(self, request) -> None:
        if self.dead is not None or self.refuses:
            raise QueueFullError("full") if self.dead is None else UnavailableError("dead")
        self.live[request.request_key] = request.params.n

    def emit(self, key: str, *, ends: bool, tokens: tuple[int, ...] = (5,)) -> None:
        if ends:
            self.live[key] -= 1
        self.sink([TokenOutput(key, 0, tokens, finish_reason=FinishReason.STOP if ends else None)])
        if ends and not self.live[key]:
            del self.live[key]

    def end(self) -> None:
        self.dead, live, self.live = "it was killed", self.live, {}
        self.sink([TokenOutput(key, 0, (), finish_reason=FinishReason.ERROR, error="killed") for key in live])

    def abort(self, request_key, index=None) -> None: ...

    async def stats(self, tenant=None): ...

    def kv_events(self, tenant, after): ...

    async def stop(self, timeout_s) -> None: ...


@given(st.lists(st.tuples(st.sampled_from("aaaaetkrf"), st.integers(0, 7), st.integers(0, 2)), max_size=60))
def test_books_of_loads_close_whatever_happens(steps):
    """Requests come, begin, end, are refused; replicas end and come back. What nobody computes weighs nothing."""
    engines, serial = [FakeEngine(1), FakeEngine(2)], count()
    port, outputs, ended = Replicas(engines, places=4, caches=True, keeps_pages=False), [], Counter()

    def take(found) -> None:
        outputs.extend(found)
        ended.update(output.request_key for output in found if output.finish_reason is not None)

    def ask(kind: int, n: int = 1) -> str:
        text = asked([kind] * 32, n=n)
        key = f"{port.choose_prefix(text)}{next(serial)}"
        run(port.add(GenerateRequest(key, text.prompt_token_ids, text.params)))
        return key

    def run(work) -> None:
        with pytest.raises(StopIteration):  # nothing here waits
            work.send(None)

    run(port.start(take))
    expected = Counter()
    for what, a, b in steps:
        engine = engines[a % 2]
        keys = sorted(engine.live)
        match what:
            case "a":
                try:
                    key = ask(b, 1 + a % 3)
                except QueueFullError:
                    assert any(each.refuses for each in engines)
                except UnavailableError:
                    assert port.dead is not None
                else:
                    expected[key] = 1 + a % 3
                    assert key in engines[int(key.split("/")[1])].live and port.part_of(key).dead is None
            case "t" | "e" if keys:
                engine.emit(keys[a % len(keys)], ends=what == "e")
            case "k" if engine.dead is None:
                engine.end()
            case "r" if engine.dead is not None:
                engine.dead, engine.pid = None, engine.pid + 2
            case "f":
                engine.refuses = not engine.refuses
        assert (port.dead is None) == any(each.dead is None for each in engines)
        assert sum(port.tokens) == sum(port.computing.values()) and min(port.tokens) >= 0
        assert all(key in port.part_of(key).live for key in port.computing)
    for engine in engines:
        engine.end()
    assert port.tokens == [0, 0] and not port.computing and port.dead is not None
    assert ended.keys() == expected.keys()
