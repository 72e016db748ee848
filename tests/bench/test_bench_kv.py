"""The benchmark of the KV tiers: what it sends, that it notices a wrong token, and what it concludes."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import comb
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from fakes import greedy, make_core, tiny_spec
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_source import write_tiny_source

from benchmarks.kv import report as kv_report
from benchmarks.kv import sessions as kv
from benchmarks.kv.report import DEVICE, DISK, HOST, NEXT, RESTART, UNLIMITED, ArmRun, NoReuse
from benchmarks.kv.workload import (
    BATCH_TOKENS,
    Conversations,
    FinishedRequest,
    NewPrompts,
    Sizes,
    TrafficShape,
    choose_sizes,
    replay,
    text_tokens,
    working_set_bytes,
)
from wicore_trt.bench.measure import RequestRecord
from wicore_trt.engine.build import build_engine
from wicore_trt.errors import WicoreError
from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.pool_sizes import pool_sizes
from wicore_trt.types import EngineStats, KVStats, TierStats

PAGE, WINDOW, VOCAB = 4, 8, 97
SHAPES = st.builds(
    TrafficShape,
    sessions=st.integers(1, 5),
    turns=st.integers(1, 3),
    system_prompts=st.integers(1, 3),
    system_tokens=st.integers(1, 3).map(lambda pages: pages * PAGE),
    turn_tokens=st.integers(1, 9),
    output_tokens=st.integers(1, 5),
    in_flight=st.integers(1, 3),
)


def words(shape: TrafficShape, turns: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(text_tokens(shape, turns))]


def serve(core, conversations, shape: TrafficShape, turns, **options) -> list[FinishedRequest]:
    return replay(
        core,
        conversations,
        shape.schedule(turns),
        output_tokens=shape.output_tokens,
        in_flight=shape.in_flight,
        **options,
    )


@given(SHAPES)
@settings(max_examples=40, deadline=None)
def test_conversations_grow_by_pieces_of_the_text_that_no_other_gets(shape):
    text = list(range(10, 10 + text_tokens(shape, shape.turns)))
    said = Conversations(shape, text, 2)
    last: dict[int, tuple[int, ...]] = {}
    used: list[int] = []
    for session, turn in shape.schedule(range(shape.turns)):
        prompt = said.prompt((session, turn))
        known = len(last[session]) if turn else shape.system_tokens
        assert prompt[:known] == last.get(session, prompt[:known]) and prompt[0] == 2
        assert len(prompt) == known + shape.turn_tokens == shape.length(turn + 1) - shape.output_tokens
        used += prompt[known:]
        answer = [5] * shape.output_tokens
        said.answer((session, turn), answer)
        last[session] = (*prompt, *answer)
    assert len(set(used)) == len(used) == shape.sessions * shape.turns * shape.turn_tokens
    heads = {session: prompt[: shape.system_tokens] for session, prompt in last.items()}
    for one in heads:
        for other in heads:
            same = (one - other) % shape.system_prompts == 0
            assert (heads[one] == heads[other]) is same or shape.system_tokens == 1
            assert not set(heads[one][1:]) & set(used)


@given(SHAPES, st.sampled_from([6, 8]), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_working_set_is_what_continuing_every_session_takes(shape, window, seed):
    """Counted from the pages that a cache with room for everything offers to the next turn of every session."""
    core = make_core(pages={GLOBAL: 400, LOCAL: 400}, page_tokens=PAGE, window=window)
    said = Conversations(shape, words(shape, shape.turns + 1, seed), 2)
    heads = {tuple(said.prompt((i, shape.turns))[: shape.system_tokens + PAGE]) for i in range(shape.sessions)}
    assume(len(heads) == shape.sessions)  # equal words by chance are equal pages
    serve(core, said, shape, range(shape.turns))
    manager = core.scheduler.manager
    needed: dict[str, set[bytes]] = {GLOBAL: set(), LOCAL: set()}
    for session in range(shape.sessions):
        pages = SequencePages(manager.chain.derive_names("", ""))
        hit = manager.find_prefix(pages, [*said.prompt((session, shape.turns)), 3])
        count = hit.tokens // PAGE
        assert count >= (shape.length(shape.turns) - 1) // PAGE
        count = (shape.length(shape.turns) - 1) // PAGE
        needed[GLOBAL] |= set(pages.keys[:count])
        needed[LOCAL] |= set(pages.keys[manager.first_visible_page(count * PAGE) : count])
    counted = working_set_bytes(shape, shape.turns, PAGE, window, {GLOBAL: 10, LOCAL: 1000})
    # the formula takes system prompts for distinct and windows for unshared, the cache knows better for short ones
    assert counted[GLOBAL] == 10 * len(needed[GLOBAL])
    if shape.length(shape.turns) - 1 - window >= shape.system_tokens + PAGE:
        assert counted[LOCAL] == 1000 * len(needed[LOCAL])
    else:
        assert counted[LOCAL] >= 1000 * len(needed[LOCAL])


@given(SHAPES.filter(lambda s: s.length(s.turns) > 20), st.sampled_from([4, 8, 16]), st.sampled_from([8, 32]))
@settings(max_examples=60, deadline=None)
def test_the_unlimited_pool_keeps_every_page_of_every_session(shape, page_tokens, window):
    shape = replace(shape, sessions=40 * shape.sessions)
    spec = tiny_spec(window, (LOCAL, LOCAL, LOCAL, GLOBAL))
    sizes = choose_sizes(shape, spec, page_tokens, 2)
    longest = shape.length(shape.turns + 1)
    limits = {"max_batch_tokens": BATCH_TOKENS, "max_sequences": sizes.windows}
    pools = pool_sizes(spec, page_tokens, 2, sizes.unlimited, longest, **limits)
    assert min(pools.values()) >= shape.sessions * -(-longest // page_tokens)
    assert sizes.device * 10 <= sizes.working_set < sizes.device * 10 + 10 and sizes.host == 3 * sizes.device
    assert sizes.disk > 2 * sizes.working_set


@given(SHAPES, st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_every_request_is_served_in_order_with_its_own_tokens(shape, seed):
    core = make_core(pages={GLOBAL: 60, LOCAL: 60}, page_tokens=PAGE, window=WINDOW, max_context=128)
    added: list[tuple[str, tuple[int, ...]]] = []
    inner = core.add

    def add(request):
        live = [name for name, _ in added if name in core.sequences]
        assert len(live) < shape.in_flight and request.request_key.split("/")[0] not in {n.split("/")[0] for n in live}
        added.append((request.request_key, request.prompt_token_ids))
        inner(request)

    core.add = add
    served = serve(core, Conversations(shape, words(shape, shape.turns, seed), 2), shape, range(shape.turns))
    turns = shape.schedule(range(shape.turns))
    assert [name for name, _ in added] == [f"{session}/{turn}" for session, turn in turns]
    assert sorted(s.turn for s in served) == sorted(turns)
    prompts = dict(added)
    for one in served:
        prompt = list(prompts[f"{one.turn[0]}/{one.turn[1]}"])
        assert list(one.token_ids) == greedy(prompt, shape.output_tokens, ignore_eos=True)
        assert one.record.prompt_tokens == len(prompt) and one.record.output_tokens == shape.output_tokens
        assert len(one.record.arrivals) == shape.output_tokens and one.record.ttft_s >= 0


def test_a_request_that_fails_or_is_lost_ends_the_replay():
    shape = TrafficShape(3, 1, 1, 4, 6, 4, 2)
    core = make_core()
    core.executor.poison = {1}
    with pytest.raises(WicoreError, match="1/0 ended wrongly"):
        serve(core, Conversations(shape, words(shape, 1), 2), shape, [0])

    core, now = make_core(), [0.0]

    def stuck():
        now[0] += 7.0
        return []

    core.step = stuck
    with pytest.raises(WicoreError, match="No token for 60 s; waiting: 0/0, 1/0"):
        serve(core, Conversations(shape, words(shape, 1), 2), shape, [0], clock=lambda: now[0])
    assert now[0] < 80


def record(started: float, ttft: float, total: float, prompt: int = 10, cached: int = 0) -> RequestRecord:
    return RequestRecord(started, started + total, ((started + ttft, 1), (started + total, 1)), prompt, 2, cached)


def run(arm: str, number: int, seconds: float, *, hits=None, tokens=(7, 8), turns=((0, 0), (1, 0))) -> ArmRun:
    served = [FinishedRequest(turn, tuple(tokens), record(0.0, seconds / 4, seconds)) for turn in turns]
    return ArmRun(arm, number, served, hits or {"device": 4}, [])


ALL_TIERS = {"device": 1, "host": 1, "disk": 1}


def runs(share: float = 0.9, restart_hits: int = 8) -> list[ArmRun]:
    return [
        run(DEVICE, 0, 8.0),
        run(HOST, 0, 4.0, hits={"device": 1, "host": 1}),
        run(DISK, 0, 2.0 / share, hits=ALL_TIERS),
        run(UNLIMITED, 0, 2.0),
        run(RESTART, 0, 2.0, hits={"device": 0, "host": 0, "disk": restart_hits}, turns=((0, 1),)),
        run(NEXT, 0, 1.0, hits={"device": 10}, turns=((0, 1),)),
    ]


def new_traffic(cost: float = 0.5, differing: int = 0, tiers=("device", "host", "disk")) -> NoReuse:
    return NoReuse(6, 24, differing, [1 - cost / 100] * 5, [0.001], tiers)


@pytest.mark.parametrize("arm", [DEVICE, HOST, DISK, RESTART, UNLIMITED, NEXT])
def test_one_wrong_token_in_any_arm_is_found(arm):
    first = runs()
    second = [replace(r, round=1) for r in runs()]
    clean = kv_report.compare_answers(first + second)
    assert (clean.requests, clean.tokens, list(clean.differing)) == (17, 34, [])
    at = next(i for i, r in enumerate(second) if r.arm == arm)
    wrong = list(second[at].served)
    wrong[-1] = replace(wrong[-1], token_ids=(7, 9))
    second[at] = replace(second[at], served=wrong)
    found = kv_report.compare_answers(second + first)
    assert list(found.differing) == [(arm, 1, wrong[-1].turn)]
    held = kv_report.requirements(kv_report.arm_results(first + second), found, None, judge_speed=True)[0]
    assert held.held is False and f"the first: {arm}, round 1" in held.figure


def test_an_answer_without_a_counterpart_counts_as_different():
    alone = kv_report.compare_answers([run(DISK, 0, 1.0)])
    assert len(alone.differing) == alone.requests == 2


@pytest.mark.parametrize(
    ("arms", "traffic", "missed"),
    [
        (runs(), new_traffic(), []),
        (runs(share=0.801), new_traffic(), []),
        (runs(share=0.799), new_traffic(), ["throughput with all tiers: 79.9 %"]),
        (runs(restart_hits=7), new_traffic(), ["restart with a warm disk: 70.0 %"]),
        (runs(), new_traffic(1.01), ["cost of tiers without reuse: +1.01 %"]),
        (runs(), new_traffic(-3.0), []),
        (runs(), new_traffic(differing=1), ["token ids as with an unlimited device pool"]),
        (runs(), new_traffic(tiers=("device", "host")), ["tiers are reported: without reuse: no disk"]),
        ([*runs()[:2], run(DISK, 0, 2.0), *runs()[3:]], new_traffic(), ["tiers are reported: + host + disk: no host"]),
    ],
)
def test_requirements(arms, traffic, missed):
    found = kv_report.requirements(
        kv_report.arm_results(arms), kv_report.compare_answers(arms), traffic, judge_speed=True
    )
    assert len(found) == 5
    lines = [r.line() for r in found if not r.held]
    assert [line.removeprefix("NOT held: ")[: len(start)] for line, start in zip(lines, missed, strict=True)] == missed


def test_speed_is_not_judged_by_a_short_run():
    slow = runs(share=0.1)
    found = kv_report.requirements(
        kv_report.arm_results(slow), kv_report.compare_answers(slow), new_traffic(50.0), judge_speed=False
    )
    assert [r.held for r in found] == [True, True, None, True, None]


def test_shares_are_taken_round_by_round():
    """A machine that is slow in one round is slow for the arm and for its baseline."""
    arms = [run(DISK, n, 4.0 * slow) for n, slow in enumerate((1, 3, 9))]
    arms += [run(UNLIMITED, n, 2.0 * slow) for n, slow in enumerate((1, 3, 9))]
    disk, unlimited = kv_report.arm_results(arms)
    assert disk["share_percent"] == pytest.approx(50.0) and disk["shares_percent"] == pytest.approx([50.0] * 3)
    assert unlimited["share_percent"] == 100.0
    assert disk["output_tokens_per_s"] == pytest.approx(4 / 12) and disk["prompt_tokens_per_s"] == pytest.approx(
        20 / 12
    )
    assert disk["ttft_p50_ms"] == pytest.approx(3000.0)


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 8, 9, 24, 25, 60, 101])
def test_the_interval_of_the_median_is_the_narrowest_that_is_sure_enough(n):
    def coverage(rank: int) -> float:
        """Chance that more than `rank` and fewer than n - rank values lie below the median."""
        return sum(comb(n, k) for k in range(rank + 1, n - rank)) / 2**n

    low, high = kv_report.median_interval(list(range(n)))
    assert high == n - 1 - low and 0 <= low <= high
    assert coverage(low + 1) < 0.95 and (coverage(low) >= 0.95 or low == 0)


def test_hits_are_what_a_phase_added():
    def stats(cached: int, **tiers: int) -> EngineStats:
        found = tuple(TierStats(name, 0, 0, 0, {}, hits, 0, 0.0, 0, 0.0, {}, {}, 0) for name, hits in tiers.items())
        return EngineStats(0.0, 0, 0, {}, 0, cached, 0, 0, kv=KVStats(found))

    assert kv_report.tier_hits(stats(3), stats(10)) == {"device": 7}
    assert kv_report.tier_hits(stats(9, device=5, host=1), stats(99, device=6, host=8)) == {"device": 1, "host": 7}


@pytest.fixture
def fake_bench(monkeypatch, tmp_path):
    """An experiment over fake engines; `opened` lists each engine's settings, `steps` gives the seconds of a step, by
    a clock that nothing else moves."""
    shape = TrafficShape(4, 2, 1, 4, 6, 3, 2)
    opened: list[dict] = []
    steps: dict[bool, float] = {True: 0.001, False: 0.001}
    now = 0.0
    order: list[tuple[bool, str]] = []

    @contextmanager
    def open_core(given, executor=None):
        opened.append(dict(given))
        tiers = "kv.disk_path" in given
        core = make_core(pages={GLOBAL: 60, LOCAL: 60})
        inner, execute = core.add, core.executor.execute

        def pass_time(batch):
            nonlocal now
            now += steps[tiers]
            return execute(batch)

        core.executor.execute = pass_time
        core.add = lambda request: (order.append((tiers, str(request.prompt_token_ids))), inner(request))
        assert (executor is None) or tiers, "the engine without tiers brings the executor"
        yield SimpleNamespace(engine_core=core)

    monkeypatch.setattr(kv, "open_core", open_core)
    monkeypatch.setattr(kv, "replay", partial(kv.replay, clock=lambda: now))
    sizes = Sizes(1000, 100, 300, 4000, 9000, 7)
    text = random.Random(1).sample(range(2, VOCAB), VOCAB - 2)
    bench = kv.Experiment(tmp_path, shape, sizes, text, 2, tmp_path, 1)
    return SimpleNamespace(bench=bench, opened=opened, steps=steps, order=order)


def test_arms_take_turns_and_a_restart_finds_the_disk_of_its_arm(fake_bench):
    found, without = kv.measure_arms(fake_bench.bench, list(kv.ARMS), 2, 0)
    there = [DEVICE, HOST, DISK, RESTART, UNLIMITED, NEXT]
    assert [r.arm for r in found] == [*there, UNLIMITED, NEXT, DISK, RESTART, HOST, DEVICE] and without is None
    comparison = kv_report.compare_answers(found)
    assert not comparison.differing and comparison.requests == 2 * (4 * 8 + 2 * 4) - 12
    disks = [s.get("kv.disk_path") for s in fake_bench.opened]
    assert disks[2] == disks[3] is not None and disks[6] == disks[7] != disks[2] and disks.count(None) == 6
    assert [s["kv.device_bytes"] for s in fake_bench.opened[:5]] == [100] * 4 + [9000]
    assert [s.get("kv.host_bytes") for s in fake_bench.opened[:5]] == [None, 300, 300, 300, None]
    assert not list(Path(fake_bench.bench.scratch).iterdir())


def test_without_reuse_both_engines_get_the_same_new_prompts_in_turn(fake_bench):
    fake_bench.steps.update({False: 0.001, True: 0.003})
    result = kv.no_reuse(fake_bench.bench, 2)
    bursts = [fake_bench.order[i : i + kv.BURST] for i in range(0, len(fake_bench.order), kv.BURST)]
    assert [burst[0][0] for burst in bursts] == [False, True, True, False] * 3
    for first, second in zip(bursts[::2], bursts[1::2], strict=True):
        assert [prompt for _, prompt in first] == [prompt for _, prompt in second]
    assert len({prompt for _, prompt in fake_bench.order}) == result.requests == 6 * kv.BURST
    assert result.ratios == pytest.approx([1 / 3] * 2) and not result.differing
    assert result.summary()["cost_percent"]["p50"] > 5


def test_a_hit_in_traffic_without_reuse_is_an_error(fake_bench):
    core = make_core()
    prompt = list(range(2, 22))
    with pytest.raises(WicoreError, match="prefix hit"):
        for _ in range(2):
            kv._burst(fake_bench.bench, core, [prompt])
    assert NewPrompts([prompt]).prompt((0, 0)) == tuple(prompt)


@pytest.fixture(scope="module")
def tiny_engine(tmp_path_factory) -> Path:
    """Random weights, one token per character."""
    scratch = tmp_path_factory.mktemp("bench-kv")
    source = write_tiny_source(scratch / "source")
    characters = ["<pad>", "<eos>", "<bos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ETAOIN.,"]
    model = tokenizers.models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(characters[:4])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (source / "generation_config.json").write_text('{"eos_token_id": 1, "bos_token_id": 2}')
    return build_engine(source, scratch / "engine", dtype="float32", page_tokens=8).path


def test_the_command_on_a_tiny_engine(tiny_engine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kv, "QUICK", TrafficShape(60, 2, 2, 16, 16, 3, 2))
    output = tmp_path / "kv.json"
    options = ["--threads", "1", "--arms", "device", "unlimited", "--groups", "0", "--scratch", str(tmp_path)]
    code = kv.main(["--quick", "--engine", str(tiny_engine), *options, "--output", str(output)])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and lines[0].startswith("60 sessions, 2 turns, 54 tokens each at the end: ")
    assert lines[-2].startswith("held: token ids as with an unlimited device pool: 120 requests and 360 tokens")
    report = json.loads(output.read_text())
    device, unlimited, following = report["results"]
    assert [r["arm"] for r in report["results"]] == [DEVICE, UNLIMITED, NEXT]
    assert device["hit_tokens"]["device"] < unlimited["hit_tokens"]["device"]
    # all that was said in the turn before, in whole pages (54 tokens, the last one without KV)
    assert following["hit_tokens"]["device"] == 60 * 48
    assert report["machine"]["cores"] > 0 and report["date"] and report["versions"]["python"]
    assert [r["held"] for r in report["requirements"]] == [True, True]
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.long
@pytest.mark.model
def test_the_real_model_says_the_same_in_every_arm(gemma_270m_gguf, tmp_path, capsys):
    engine = build_engine(gemma_270m_gguf, tmp_path / "engine").path
    kv.main(["--quick", "--engine", str(engine), "--scratch", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("held: token ids as with an unlimited device pool: 140") for line in lines)
