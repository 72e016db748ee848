"""What a load test sends, as data: arrival times, lengths, shared beginnings, traces; and what the records become."""

from __future__ import annotations

import json
import math
import os
import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wicore_trt.bench.load import ClientSession, Offer
from wicore_trt.bench.measure import REFUSALS, ClientLag, Load, RequestRecord, Slo, Summary
from wicore_trt.bench.report import load_result, load_row, load_summary_rows, load_warnings
from wicore_trt.bench.workload import (
    LoadShape,
    PlannedTurn,
    PromptPart,
    Session,
    WordList,
    draw_arrivals,
    make_sessions,
    parse_lengths,
    plan_sessions,
    replay_trace,
)
from wicore_trt.errors import ConfigError
from wicore_trt.kv.study.trace import BLOCK_TOKENS, TraceRequest, generate_trace, load_trace

SEEDS = st.integers(0, 1 << 32)


def gaps(count: int, rate: float, **kwargs) -> list[float]:
    moments = list(islice(draw_arrivals(rate, **kwargs), count))
    return [b - a for a, b in pairwise([0.0, *moments])]


@pytest.mark.parametrize(("rate", "seed"), [(0.5, 0), (40.0, 1)])
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_their_law(rate, burstiness, seed):
    found = gaps(20_000, rate, burstiness=burstiness, seed=seed)
    assert min(found) >= 0
    assert statistics.mean(found) == pytest.approx(1 / rate, rel=0.05)
    # a gamma distribution's deviation is its mean over the root of its shape; of the exponential one, the mean
    assert statistics.stdev(found) == pytest.approx(1 / rate / math.sqrt(burstiness), rel=0.06)
    if burstiness == 1.0:
        assert sum(g > 1 / rate for g in found) / len(found) == pytest.approx(1 / math.e, abs=0.015)


def test_constant_arrivals_and_all_at_once():
    assert gaps(50, 4.0, burstiness=math.inf, seed=3) == pytest.approx([0.25] * 50)
    assert gaps(50, math.inf, seed=3) == [0.0] * 50


@settings(deadline=None)
@given(SEEDS, st.floats(0.1, 100), st.sampled_from([0.5, 1.0, 3.0]))
def test_a_rate_scales_the_same_arrivals(seed, rate, burstiness):
    one = list(islice(draw_arrivals(1.0, burstiness=burstiness, seed=seed), 20))
    other = list(islice(draw_arrivals(rate, burstiness=burstiness, seed=seed), 20))
    assert other == pytest.approx([moment / rate for moment in one])


def test_lengths_are_read():
    assert list(parse_lengths("7")) == [7]
    assert list(parse_lengths("64,128,128")) == [64, 128, 128]
    assert list(parse_lengths("3..6")) == [3, 4, 5, 6]
    for bad in ("", "0", "5..4", "1,x", "1..", "-3..4", "0..4"):
        with pytest.raises(ValueError):
            parse_lengths(bad)


SHAPES = st.builds(
    LoadShape,
    input_tokens=st.sampled_from([(50,), range(41, 90), (60, 60, 200)]),
    output_tokens=st.sampled_from([(1,), range(3, 9)]),
    turns=st.integers(1, 4),
    turn_tokens=st.sampled_from([(5,), range(1, 30)]),
    shared_prefix=st.sampled_from([0, 40]),
    prefixes=st.integers(1, 3),
)


def prompts(session: Session, vocabulary: WordList, *, chat: bool = False) -> list:
    """The prompts of a session whose answers are known by their length alone."""
    talk, found = ClientSession(session, vocabulary, chat=chat), []
    for number, turn in enumerate(session.turns):
        request = talk.make_request(number)
        found.append(request.messages if chat else request.prompt_token_ids)
        talk.take_answer(number, RequestRecord(0, 1, output_tokens=turn.output_tokens, answer="text"))
    return found


@settings(deadline=None)
@given(SHAPES, SEEDS)
def test_made_up_sessions_have_their_shape(shape, seed):
    sessions = make_sessions(shape, [0.5 * i for i in range(12)], seed=seed, run="a")
    assert sessions == make_sessions(shape, [0.5 * i for i in range(12)], seed=seed, run="a")
    vocabulary = WordList(32_000, seed=seed)
    starts = set()
    for session in sessions:
        assert len(session.turns) == shape.turns
        assert session.turns[0].tokens in shape.input_tokens
        assert all(turn.tokens in shape.turn_tokens for turn in session.turns[1:])
        assert all(turn.output_tokens in shape.output_tokens for turn in session.turns)
        said = prompts(session, vocabulary)
        for before, turn, after in zip(said, session.turns, said[1:], strict=False):
            assert after[: len(before)] == before  # a turn comes after the conversation so far, answer included
            assert len(after) - len(before) - turn.output_tokens in shape.turn_tokens
        assert len(said[-1]) + session.turns[-1].output_tokens == session.context_tokens
        starts.add(said[0][: shape.shared_prefix])
        own = said[0][shape.shared_prefix : shape.shared_prefix + 4]
        assert own not in starts
        starts.add(own)
    assert len({s for s in starts if len(s) == 40}) <= shape.prefixes
    other = make_sessions(shape, [0.0] * 12, seed=seed, run="b")
    assert [s.turns[0].tokens for s in other] == [s.turns[0].tokens for s in sessions]  # lengths are those of the seed
    names = {p.name for s in sessions for t in s.turns for p in t.pieces}
    assert not names & {p.name for s in other for t in s.turns for p in t.pieces}  # and no token is


def test_all_prefixes_are_used_and_must_be_shorter_than_prompts():
    shape = LoadShape((30,), (1,), shared_prefix=20, prefixes=3)
    names = {s.turns[0].pieces[0].name for s in make_sessions(shape, [0.0] * 60, seed=0, run="a")}
    assert len(names) == 3
    with pytest.raises(ConfigError, match="longer than the prefix"):
        LoadShape(range(20, 50), (1,), shared_prefix=20)


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 40), SEEDS)
def test_numbers_and_durations_of_runs(turns, requests, seed):
    shape = LoadShape((8,), (2,), turns=turns)
    made = plan_sessions(shape, 6.0, burstiness=1.0, requests=requests, duration_s=None, seed=seed, run="a")
    assert requests <= sum(len(s.turns) for s in made) < requests + turns
    timed = plan_sessions(shape, 6.0, burstiness=1.0, requests=1, duration_s=25.0, seed=seed, run="a")
    assert all(s.at_s < 25.0 for s in timed)
    more = plan_sessions(
        shape, 6.0, burstiness=1.0, requests=turns * (len(timed) + 1), duration_s=None, seed=seed, run="a"
    )
    assert more[:-1] == timed and more[-1].at_s >= 25.0


def test_a_run_without_requests_is_refused():
    with pytest.raises(ConfigError, match="within 0.001 s"):
        plan_sessions(LoadShape((8,), (2,)), 0.1, burstiness=1.0, requests=9, duration_s=0.001, seed=0, run="a")


def test_a_rate_is_of_requests_also_with_turns():
    shape = LoadShape((8,), (2,), turns=4)
    made = plan_sessions(shape, 8.0, burstiness=1.0, requests=1, duration_s=500.0, seed=1, run="a")
    assert sum(len(s.turns) for s in made) / 500 == pytest.approx(8.0, rel=0.1)


def written(path: Path, requests: list[TraceRequest], *, plain: bool = False) -> Path:
    lines = []
    for r in requests:
        line = {"timestamp": r.at_s * 1e3, "input_length": r.tokens, "output_length": r.answer, "hash_ids": r.blocks}
        lines.append(json.dumps({k: v for k, v in line.items() if v is not None and not (plain and k == "hash_ids")}))
    path.write_text("\n".join(lines) + "\n")
    return path


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_prompts_of_a_trace_share_what_their_ids_share(seed):
    trace = generate_trace(6, seed % 1000)[:25]
    sessions = replay_trace(trace, rate=math.inf, requests=None, duration_s=None, run="r")
    vocabulary = WordList(50_000, seed=seed)
    said = [prompts(session, vocabulary)[0] for session in sessions]
    assert [len(p) for p in said] == [r.tokens for r in trace]
    for i, (one, first) in enumerate(zip(said, trace, strict=True)):
        for other, second in list(zip(said, trace, strict=True))[:i]:
            blocks = sum(1 for _ in common(first.blocks, second.blocks))
            tokens = sum(1 for _ in common(one, other))
            least = min(blocks * BLOCK_TOKENS, len(one), len(other))
            assert least <= tokens <= least + 3  # chance may add a token


def common(one, other):
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


def test_a_trace_is_replayed_at_its_times_or_at_a_rate(tmp_path):
    trace = [TraceRequest((i, 100 + i), 700 + i, i or None, at_s=2.0 + i * i) for i in range(6)]
    read = load_trace(written(tmp_path / "t", trace))
    assert read == trace
    own = replay_trace(read, rate=None, requests=None, duration_s=None, run="r")
    assert [s.at_s for s in own] == [0.0, 1.0, 4.0, 9.0, 16.0, 25.0]
    assert [s.turns[0].output_tokens for s in own] == [128, 1, 2, 3, 4, 5]
    assert [[p.tokens for p in s.turns[0].pieces] for s in own][1] == [512, 189]
    fast = replay_trace(read, rate=2.0, requests=None, duration_s=None, run="r")
    assert 5 / fast[-1].at_s == pytest.approx(2.0) and fast[1].at_s == pytest.approx(0.1)
    assert len(replay_trace(read, rate=None, requests=2, duration_s=None, run="r")) == 2
    assert len(replay_trace(read, rate=None, requests=None, duration_s=4.5, run="r")) == 3
    assert [s.name for s in own if s.context_tokens <= 703 + 3] == ["r/1", "r/2", "r/3"]
    at_once = [TraceRequest((1,), 10)] * 2
    with pytest.raises(ConfigError, match="no times"):
        replay_trace(at_once, rate=2.0, requests=None, duration_s=None, run="r")


def test_a_trace_without_ids_shares_nothing_and_wants_its_times_in_order(tmp_path):
    trace = [TraceRequest((), 600, 3, at_s=float(i)) for i in range(3)]
    path = written(tmp_path / "t", trace, plain=True)
    assert load_trace(path, plain=True) == trace
    with pytest.raises(ConfigError, match="t:1"):
        load_trace(path)
    sessions = replay_trace(trace, rate=None, requests=None, duration_s=None, run="r")
    said = [prompts(s, WordList(32_000, seed=0))[0] for s in sessions]
    assert [len(p) for p in said] == [600] * 3 and len({p[:4] for p in said}) == 3
    with pytest.raises(ConfigError, match="t:2: the request came before"):
        load_trace(written(tmp_path / "t", trace[::-1], plain=True), plain=True)


def test_the_mooncake_trace_is_read_whole():
    where = os.environ.get("WICORE_TRACE")
    if not where:
        pytest.skip("set WICORE_TRACE to mooncake_conversation.jsonl (Mooncake, FAST 2025)")
    offer = Offer(LoadShape((2,), (1,)), load_trace(Path(where), plain=True), requests=200)
    sessions = offer.make_sessions(None, "r")
    assert len(sessions) == 200 and sessions[0].turns[0].tokens == 6758
    assert sessions[0].turns[0].pieces[0] == sessions[1].turns[0].pieces[0] == PromptPart("r/block/0", 512)


def test_a_conversation_carries_the_answers_that_came():
    session = Session("s", 0.0, (PlannedTurn((PromptPart("a", 3),), 2), PlannedTurn((PromptPart("b", 4),), 1)))
    vocabulary = WordList(1000, seed=1)
    talk = ClientSession(session, vocabulary, chat=False)
    first = talk.make_request(0).prompt_token_ids
    talk.take_answer(0, RequestRecord(0, 1, output_tokens=2, answer=(7, 8)))
    assert talk.make_request(1).prompt_token_ids == (*first, 7, 8, *vocabulary.tokens(PromptPart("b", 4)))
    chat = ClientSession(session, vocabulary, chat=True)
    request = chat.make_request(0)
    assert request.messages[0]["content"].split() == vocabulary.make_text(PromptPart("a", 3)).split()
    assert len(request.messages[0]["content"].split()) == 3
    chat.take_answer(0, RequestRecord(0, 1, output_tokens=2, answer="well said"))
    turns = chat.make_request(1).messages
    assert [t["role"] for t in turns] == ["user", "assistant", "user"] and turns[1]["content"] == "well said"
    assert len(request.messages) == 1  # what was asked before is left as it was


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=450ms,tpot=40ms", Slo(0.45, 0.04)),
        ("e2e=1.5s", Slo(e2e_s=1.5)),
        (" tpot=2s , ttft=3ms", Slo(0.003, 2.0)),
    ],
)
def test_objectives_are_read(text, slo):
    found = Slo.parse_limits(text)
    assert (found.ttft_s, found.tpot_s, found.e2e_s) == pytest.approx((slo.ttft_s, slo.tpot_s, slo.e2e_s))


@pytest.mark.parametrize("text", ["", "ttft", "ttft=450", "itl=3ms", "ttft=3ms,ttft=4ms", "ttft=ms", "ttft=1.2.3s"])
def test_wrong_objectives_are_refused(text):
    with pytest.raises(ValueError):
        Slo.parse_limits(text)


@st.composite
def records(draw) -> RequestRecord:
    started = draw(st.floats(0, 100))
    kind = draw(st.sampled_from(["ok", "ok", "ok", "429", "503", "BROKEN", "INCOMPLETE"]))
    if kind != "ok":
        return RequestRecord(started, started + draw(st.floats(0.001, 9)), error=f"{kind}: something: else")
    steps = draw(st.lists(st.tuples(st.floats(0.001, 0.2), st.integers(1, 3)), min_size=1, max_size=6))
    now, arrivals_ = started, []
    for gap, tokens in steps:
        now += gap
        arrivals_.append((now, tokens))
    known = draw(st.booleans())
    tokens = sum(t for _, t in steps) + (0 if known else 1)
    return RequestRecord(started, now, tuple(arrivals_), 10, tokens, 4, counted=draw(st.booleans()))


@settings(deadline=None)
@given(st.lists(records(), min_size=1, max_size=30), st.integers(0, 5), st.floats(0.05, 0.5), st.floats(0.01, 0.2))
def test_a_load_against_plain_counting(found, unsent, ttft_s, tpot_s):
    lag = ClientLag(Summary.from_values([0.001]), Summary.from_values([0.002]), None, 3)
    slo = Slo(ttft_s, tpot_s)
    load = Load.from_records(found, planned=len(found) + unsent, offered_per_s=2.0, slo=slo, lag=lag)
    good = refused = failed = gaps_ = 0
    for r in found:
        if r.error is None:
            first = r.arrivals[0][0] - r.started
            rest = r.finished - r.arrivals[0][0]
            good += first <= ttft_s and (r.output_tokens == 1 or rest / (r.output_tokens - 1) <= tpot_s)
            if sum(t for _, t in r.arrivals) == r.output_tokens:
                gaps_ += r.output_tokens - 1
        elif r.error.split(":")[0] in REFUSALS:
            refused += 1
        else:
            failed += 1
    answered = len(found) - refused - failed
    assert (load.good, load.refused, load.failed, load.unsent) == (good, refused, failed, unsent)
    assert sum(load.statuses.values()) == len(found) and load.statuses.get("OK", 0) == answered
    assert (load.refusal.count if load.refusal else 0) == refused
    assert (load.throughput.latencies["itl"].count if load.throughput.latencies["itl"] else 0) == gaps_
    result = json.loads(json.dumps(load_result(load, target="t", rate=2.0, tier_hits={"device": 3}), allow_nan=False))
    assert result["good_share"] == pytest.approx(good / (len(found) + unsent))  # what was not sent is not good
    assert result["completed"] == answered and not result["client"]["late"]
    row = load_row(result, several=False)
    assert row[0] == "2" and row[4:7] == (str(answered), str(refused), str(failed))
    shown = [r[1] for r in load_summary_rows(result, several=False)]
    assert ("REFUSAL" in shown) == bool(refused) and ("TTFT" in shown) == bool(answered)
    told = load_warnings(result)
    assert sum(": something: else" in line for line in told) == len(load.statuses) - ("OK" in load.statuses)
    assert any("not sent" in line for line in told) == bool(unsent)
    assert any("no ITL" in line for line in told) == any(
        r.error is None and sum(t for _, t in r.arrivals) != r.output_tokens and r.output_tokens > 1 for r in found
    )


@pytest.mark.parametrize(("send", "loop", "late"), [(0.002, 0.003, False), (0.02, 0.0, True), (0.0, 0.02, True)])
def test_a_late_client_says_so(send, loop, late):
    lag = ClientLag(Summary.from_values([0.0, send, send]), Summary.from_values([loop] * 3), None, 1)
    load = Load.from_records(
        [RequestRecord(0, 1, ((1, 1),), 5, 1)], planned=1, offered_per_s=math.inf, slo=None, lag=lag
    )
    result = load_result(load, target="t", rate=math.inf, tier_hits={})
    assert result["client"]["late"] == late == any("late itself" in line for line in load_warnings(result))
    assert result["rate"] == "inf" and result["offered_per_s"] is None and result["good_share"] is None
    assert load_row(result, several=True)[0] == "inf t"
