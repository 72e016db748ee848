"""Load tests end to end: when requests go out, how late the client was, and the command against real servers."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fakes import Gate
from lazy import LazyModule
from serve.serving import make_engine as make_grpc_engine
from serve.serving import serving as serving_grpc
from web import executor_of, make_engine, serving, until

from wicore_trt.bench.client import GrpcTarget, LocalTarget, run_quickly
from wicore_trt.bench.load import LoadOptions, Offer, run_load, run_sweep
from wicore_trt.bench.measure import RequestRecord
from wicore_trt.bench.workload import BenchRequest, LoadShape, PlannedTurn, PromptPart, Session, WordList, make_sessions
from wicore_trt.cli.main import run_command
from wicore_trt.errors import ConfigError

plot = LazyModule("benchmarks.serve.plot")  # matplotlib
WORDS = WordList(97, seed=0)


class Info:
    model_id, vocab_size, max_context_tokens = "scripted", 97, 10_000


class Remembering:
    """Answers after `seconds`; remembers what it was asked for, when, and how many requests were open."""

    info, chat = Info(), False

    def __init__(self, seconds: float = 0.0, *, hold: float = 0.0, fails: bool = False) -> None:
        self.seconds, self.hold, self.fails = seconds, hold, fails
        self.requests: list[BenchRequest] = []
        self.started: list[float] = []
        self.asked: list[float] = []
        self.open = self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request: BenchRequest, started: float | None = None) -> RequestRecord:
        self.asked.append(time.perf_counter())
        self.requests.append(request)
        self.started.append(started)
        self.open += 1
        self.most = max(self.most, self.open)
        time.sleep(self.hold)  # a client that is slow to send
        sent = time.perf_counter()
        try:
            await asyncio.sleep(self.seconds)
            await self.gate.wait()
        finally:
            self.open -= 1
        now = time.perf_counter()
        if self.fails:
            return RequestRecord(started, now, error="503: no", sent=sent)
        answer = tuple(range(20, 20 + request.output_tokens))
        counts = (len(request.prompt_token_ids), request.output_tokens, 0)
        return RequestRecord(started, now, ((now, request.output_tokens),), *counts, sent=sent, answer=answer)

    async def tier_hits(self) -> dict[str, int]:
        return {"device": 7 * len(self.requests)}

    async def close(self) -> None:
        pass


def plan(*moments: float, turns: int = 1) -> list[Session]:
    return make_sessions(LoadShape((10,), (3,), turns=turns, turn_tokens=(4,)), moments, seed=0, run="a")


async def test_requests_go_out_when_they_are_due_and_wait_for_nobody():
    target, moments = Remembering(), [0.0, 0.05, 0.06, 0.3]
    target.gate.clear()
    load = asyncio.create_task(run_load(target, plan(*moments), WORDS, LoadOptions()))
    async with asyncio.timeout(60):
        while target.open < 4:
            await asyncio.sleep(0.01)
    target.gate.set()
    origin = target.started[0]
    assert [at - origin for at in target.started] == pytest.approx(moments)
    result = await load
    assert result.lag.most_open == 4 and result.offered_per_s == pytest.approx(4 / 0.3)
    assert result.lag.send.count == 4 and result.lag.place is None


def test_no_request_goes_out_before_it_is_due():
    """Also on the event loop that the command runs on, whose timers go off early: e2e would be too short by that."""
    target = Remembering()
    run_quickly(run_load(target, plan(*(0.0031 * i for i in range(60))), WORDS, LoadOptions()))
    assert min(asked - due for asked, due in zip(target.asked, target.started, strict=True)) >= 0.0


async def test_waiting_for_a_place_counts_and_is_told():
    """Coordinated omission: five requests due at once at one place, each served in 50 ms."""
    load = await run_load(Remembering(0.05), plan(*[0.0] * 4, 0.001), WORDS, LoadOptions(1))
    latencies = load.throughput.latencies
    assert load.lag.most_open == 1 and load.lag.place.count == 5
    assert latencies["e2e"].p99 >= 0.24  # the last one waited for four others
    assert load.lag.place.mean >= 0.09 > load.lag.send.p50  # which is not the client's lag
    assert 5 * latencies["e2e"].mean > load.throughput.duration_s
    closed = await run_load(Remembering(0.05), plan(*[0.0] * 5), WORDS, LoadOptions(1))
    assert 5 * closed.throughput.latencies["e2e"].mean <= closed.throughput.duration_s  # one after the other


@pytest.mark.parametrize("places", [1, 3, 50])
async def test_a_closed_loop_keeps_so_many_requests_open(places):
    target, most = Remembering(), min(places, 12)
    target.gate.clear()
    load = asyncio.create_task(run_load(target, plan(*[0.0] * 12), WORDS, LoadOptions(places)))
    async with asyncio.timeout(60):
        while target.open < most:
            await asyncio.sleep(0.01)
    target.gate.set()
    result = await load
    assert target.most == result.lag.most_open == most and result.throughput.completed == 12


@pytest.mark.parametrize("places", [None, 8])
async def test_a_client_that_is_slow_itself_says_so(places):
    load = await run_load(Remembering(hold=0.03), plan(*[0.0] * 8), WORDS, LoadOptions(places))
    assert load.lag.is_late and load.lag.send.p99 > 0.1
    assert (load.lag.place is None) if places is None else (load.lag.place.p99 == 0)  # a place was free all the time
    assert load.throughput.latencies["e2e"].p99 > 0.1  # and what it delayed counts


async def test_a_turn_comes_after_the_answer_and_carries_it():
    target = Remembering(0.01)
    load = await run_load(target, plan(0.0, turns=3), WORDS, LoadOptions(pause_s=0.02))
    first, second, third = (request.prompt_token_ids for request in target.requests)
    assert len(first) == 10 and second[:13] == (*first, 20, 21, 22) and third[:20] == (*second, 20, 21, 22)
    assert load.planned == 3 and load.unsent == 0
    gaps = [b - a for a, b in zip(target.started, target.started[1:], strict=False)]
    assert min(gaps) >= 0.02


async def test_what_follows_a_failed_turn_is_not_sent():
    load = await run_load(Remembering(0.02, hold=0.03, fails=True), plan(*[0.0] * 2, turns=3), WORDS, LoadOptions())
    assert load.refusal.count == 2 and load.refusal.p50 > 0.015  # the server's time, without the client's 30 ms each
    assert load.refusal.mean < load.throughput.duration_s - 0.025
    assert (load.planned, load.unsent, load.refused, load.throughput.completed) == (6, 4, 2, 0)


async def test_a_request_without_end_is_ended():
    load = await run_load(Remembering(60.0), plan(0.0), WORDS, LoadOptions(timeout_s=0.05))
    assert load.statuses == {"TIMEOUT": 1} and load.throughput.duration_s < 30


async def test_more_prompts_than_are_made_ahead(monkeypatch):
    monkeypatch.setattr("wicore_trt.bench.load.AHEAD", 3)
    target = Remembering()
    load = await run_load(target, plan(*[i / 1000 for i in range(20)]), WORDS, LoadOptions())
    assert load.throughput.completed == 20
    assert len({request.prompt_token_ids for request in target.requests}) == 20


async def test_targets_get_like_requests_and_no_run_helps_another():
    one, other = Remembering(), Remembering()
    offer = Offer(LoadShape(range(5, 30), (2,), shared_prefix=4), requests=6)
    results = await run_sweep(
        [("one", one), ("other", other)], offer, [200.0, 400.0, float("inf")], LoadOptions(), warmups=2, slo=None
    )
    assert [r["target"] for r in results] == ["one", "other", "other", "one", "one", "other"]
    assert all(r["tier_hit_tokens"] == {"device": 7 * 6} and r["completed"] == 6 for r in results)
    beginnings = []
    for target in (one, other):
        prompts = [request.prompt_token_ids for request in target.requests]
        runs = [prompts[:2], prompts[2:8], prompts[8:14], prompts[14:]]
        assert [[len(prompt) for prompt in run_command] for run_command in runs[1:]] == [[len(p) for p in runs[1]]] * 3
        starts = [{prompt[:4] for prompt in run_command} for run_command in runs]
        assert all(len(start) == 1 for start in starts)
        beginnings += starts
    assert len(set.union(*beginnings)) == 8
    lengths = [[len(request.prompt_token_ids) for request in target.requests] for target in (one, other)]
    assert lengths[0] == lengths[1]


async def test_what_does_not_fit_the_context_is_left_out_and_told():
    target = Remembering()
    target.info = Info()
    target.info.max_context_tokens = 40
    offer = Offer(LoadShape((20, 80), (2,)), requests=30)
    (result,) = await run_sweep([("t", target)], offer, [float("inf")], LoadOptions(), warmups=0, slo=None)
    assert result["left_out"] > 0 and result["planned"] == 30 - result["left_out"] == len(target.requests)
    with pytest.raises(ConfigError, match="No request fits"):
        await run_sweep([("t", target)], Offer(LoadShape((80,), (2,))), [1.0], LoadOptions(), warmups=0, slo=None)


@pytest.mark.parametrize("kind", ["grpc", "local"])
async def test_conversations_find_their_own_answers_in_the_cache(kind):
    """The answer's tokens are part of the next prompt: but for its last page it all comes from the cache."""
    session = Session("s", 0.0, (PlannedTurn((PromptPart("a", 20),), 20), PlannedTurn((PromptPart("b", 4),), 4)))
    if kind == "local":
        engine = make_grpc_engine()
        await engine.start()
        target = LocalTarget(engine)
        load = await run_load(target, [session], WORDS, LoadOptions())
        hits = await target.tier_hits()
        await target.close()
    else:
        async with serving_grpc(make_grpc_engine()) as running:
            target = await GrpcTarget.connect(running.address)
            load = await run_load(target, [session], WORDS, LoadOptions())
            hits = await target.tier_hits()
            await target.close()
    assert load.throughput.prompt_tokens == 20 + 44 and load.throughput.output_tokens == 24
    assert 36 <= load.throughput.cached_tokens <= 40
    assert hits == {"device": load.throughput.cached_tokens}


Captured = pytest.CaptureFixture[str]
SMALL = ["--input-tokens", "8..20", "--output-tokens", "3,5"]


async def command(*arguments: str) -> int:
    return await asyncio.to_thread(run_command, ["bench", "serve", *arguments])


async def test_the_command_over_both_transports(tmp_path: Path, capsys: Captured) -> None:
    engine = make_engine(step_s=0.001)
    async with serving(engine) as web, serving_grpc(make_grpc_engine(step_s=0.001)) as grpc_:
        arguments = ["--target", web.url, "--target", grpc_.address, *SMALL, "--rate", "100,200", "--requests", "12"]
        limits = ["--slo", "ttft=60s,tpot=60s"]
        assert await command(*arguments, *limits, "--burstiness", "0.5", "--json") == 0
        captured = capsys.readouterr()
        report = json.loads(captured.out)
        assert await command(*arguments, "--max-concurrency", "2", "--turns", "2", "--turn-tokens", "4") == 0
        text = capsys.readouterr()
    assert captured.err == "" and report["command"] == "serve" and report["rates"] is None
    assert report["parameters"]["burstiness"] == 0.5 and report["parameters"]["slo"] == "ttft=60s,tpot=60s"
    assert "api_key" not in report["parameters"] and report["target"] == f"{web.url}, {grpc_.address}"
    assert [(r["target"], r["rate"]) for r in report["results"]] == [
        (web.url, 100), (grpc_.address, 100), (grpc_.address, 200), (web.url, 200),
    ]  # fmt: skip
    for result in report["results"]:
        assert result["good"] == result["completed"] == result["planned"] == 12 and result["good_share"] == 1.0
        assert result["statuses"] == {"OK": 12} and result["uncounted"] == 0
        assert result["itl"]["count"] == result["output_tokens"] - 12
        assert result["goodput"]["value"] == pytest.approx(result["requests"]["value"])
        assert result["client"]["send"]["count"] == 12 and result["client"]["loop"]["p99"] > 0
    assert len({(r["prompt_tokens"], r["output_tokens"]) for r in report["results"]}) == 1
    (tmp_path / "load.json").write_text(captured.out)
    plot.main([str(tmp_path / "load.json"), "--out", str(tmp_path / "load.svg")])
    drawing = ElementTree.parse(tmp_path / "load.svg").getroot()
    words = " ".join("".join(node.itertext()) for node in drawing.iter("{http://www.w3.org/2000/svg}text"))
    assert drawing.tag.endswith("svg") and all(word in words for word in (web.url, grpc_.address, "TTFT", "objective"))
    lines = text.out.splitlines()
    assert lines[0] == f"fake, {web.url}, {grpc_.address}" and lines[1].startswith("client: ")
    assert sum(line.split()[:2] in (["100", web.url], ["200", web.url]) for line in lines) == 4  # in both tables
    assert f"100 {web.url}: prompt tokens saved by tier: device " in text.out


async def test_the_command_with_chats_and_a_trace(tmp_path: Path, capsys: Captured) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(
        json.dumps({"timestamp": 5 * i, "input_length": 600, "output_length": 3, "hash_ids": [0, 1 + i]}) + "\n"
        for i in range(8)
    ))  # fmt: skip
    async with serving(make_engine()) as web:
        where = ["--target", f"{web.url}/v1", "--json", "--warmups", "1"]
        assert await command(*where, "--trace", str(trace), "--requests", "6") == 0
        (replay,) = json.loads(capsys.readouterr().out)["results"]
        assert await command(*where, "--api", "chat", "--turns", "2", "--rate", "inf", *SMALL, "--requests", "6") == 0
        (chats,) = json.loads(capsys.readouterr().out)["results"]
    assert replay["rate"] is None and replay["completed"] == 6 and replay["prompt_tokens"] == 6 * 600
    assert replay["offered_per_s"] == pytest.approx(6 / 0.025)
    assert 3 * 512 <= replay["cached_tokens"] == sum(replay["tier_hit_tokens"].values())  # some come at once
    assert chats["rate"] == "inf" and chats["offered_per_s"] is None and chats["completed"] == 6
    assert chats["cached_tokens"] > 0  # the second turns begin as the first ones


async def test_the_command_says_what_was_refused_and_fails_when_all_was(capsys: Captured) -> None:
    engine = make_engine(max_waiting=1, max_sequences=1)
    async with serving(engine) as web:
        where = ["--target", web.url, "--warmups", "0", "--slo", "e2e=60s", "--rate", "inf", *SMALL]
        with Gate(executor_of(engine)):
            asked = asyncio.ensure_future(command(*where, "--requests", "12"))
            await until(lambda: web.server.context.admission.counts.http["POST", "/v1/completions", "429"])
        assert await asked == 0
        captured = capsys.readouterr()
        assert "requests 429: " in captured.err and "REFUSAL" in captured.out
        assert await command(*where, "--requests", "3", "--extra-body", '{"top_p": 7}') == 1
        captured = capsys.readouterr()
        assert "3 requests 400: " in captured.err and "Not one request was answered" in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "Give --target URL or HOST:PORT, or --engine DIR"),
        (["--target", "http://127.0.0.1:1"], 1, "No server answers"),
        (["--target", "x:1", "--engine", "y"], 2, "Give --target"),
        (["--target", "x:1", "--rate", "1,0"], 2, "not a list of rates"),
        (["--target", "x:1", "--rate", "nan"], 2, "not a list of rates"),
        (["--target", "x:1", "--rate", "1,x"], 2, "x"),
        (["--target", "x:1", "--input-tokens", "5..1"], 2, "list of positive numbers"),
        (["--target", "x:1", "--slo", "ttft=4"], 2, "is no limit"),
        (["--target", "x:1", "--extra-body", "[1]"], 2, "--extra-body"),
        (["--target", "x:1", "--shared-prefix", "128"], 3, "longer than the prefix"),
        (["--target", "x:1", "--trace", "/nowhere"], 3, "No such file"),
        (["--engine", "/nowhere"], 4, "does not exist"),
    ],
)
def test_user_errors(arguments: list[str], code: int, words: str, capsys: Captured) -> None:
    assert run_command(["bench", "serve", *arguments]) == code
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())
