"""`wicore serve` on an engine of backend tensorrt-llm, over real sockets, with the stand-in as the library."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from backend_trtllm.trtllm_stand_in import Executor, next_token
from grpc_health.v1 import health_pb2
from serve.serving import Process, Running, failure, rest_of, serving, stats_now, until

from wicore_trt.cli.main import run_command
from wicore_trt.config import load_settings
from wicore_trt.core.assemble import load_engine, make_executor
from wicore_trt.core.port import LocalEngine
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.engine.directory import open_engine
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.llm import LLM
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import kv_pb2
from wicore_trt.types import SamplingParams

pytestmark = pytest.mark.timeout(60)
PROMPT = (5, 6, 7)
ENDLESS = 9
HERE = Path(__file__).parent


def load(engine: Path, **settings: Any) -> TextEngine:
    loaded = load_engine(load_settings(None, {"engine": str(engine), **settings}))
    return TextEngine(LocalEngine(loaded.core, max_waiting=100), loaded.tokenizer, loaded.info)


def ask(max_tokens: int = 10, *, first: int = PROMPT[0], **sampling: Any) -> pb2.GenerateRequest:
    values = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **sampling}
    ids = pb2.TokenIds(ids=[first, *PROMPT[1:]])
    return pb2.GenerateRequest(token_ids=ids, sampling=pb2.SamplingParams(**values))


def greedy(count: int, first: int = PROMPT[0]) -> list[int]:
    tokens = [first, *PROMPT[1:]]
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[3:]


def library(running: Running) -> Any:
    return running.engine.engine._loop._core.executor._executor


def load_of(running: Running) -> tuple[int, int]:
    stats = stats_now(running.engine)
    return stats.requests_running, stats.requests_waiting


async def answer(server: Running | Process, request: pb2.GenerateRequest) -> tuple[str, list[int], int]:
    """Text, token ids and finish reason of the one sequence of a request."""
    return read([message async for message in server.stub.Generate(request)])


def read(messages: list[pb2.GenerateResponse]) -> tuple[str, list[int], int]:
    deltas = [m.delta if m.HasField("delta") else m.finish.delta for m in messages]
    [finish] = [m.finish for m in messages if m.HasField("finish")]
    return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids], finish.reason


@asynccontextmanager
async def wicore_serve(machine: Path, *arguments: str, **stand_in: Any) -> AsyncIterator[Process]:
    """`wicore serve` on the engine of `machine`, in a process, serving."""
    paths = [str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "STAND_IN": json.dumps(stand_in)}
    spawned = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "trtllm_machine.py"), str(machine), "serve", str(machine / "engine"), "--grpc-port",
        "0", "--http-port", "none",
        *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env,
    )  # fmt: skip
    try:
        assert spawned.stdout is not None
        async with asyncio.timeout(60):
            ready = (await spawned.stdout.readline()).decode()
        server = Process(spawned, ready.removeprefix("ready on ").strip())
        yield server
        await server.channel.close()
    finally:
        if spawned.returncode is None:
            spawned.kill()
            await spawned.wait()


# --- answers ---


async def test_tokens_and_text_are_the_library_s(trtllm_engine: Path) -> None:
    async with serving(load(trtllm_engine)) as running:
        found = await asyncio.gather(*(answer(running, ask(20, first=first)) for first in range(5, 35)))
        tokenizer = running.engine.tokenizer
        for first, (text, tokens, reason) in enumerate(found, 5):
            assert tokens == greedy(20, first) and text == tokenizer.decode(tokens)
            assert reason == pb2.FINISH_REASON_LENGTH
        info = await running.stub.GetModelInfo(pb2.GetModelInfoRequest())
        assert (info.backend, info.kernels) == ("tensorrt-llm", "tensorrt-llm-1.2.1-sm90")
        stats = await running.stub.GetStats(pb2.GetStatsRequest())
        assert stats.generated_tokens == 600 and stats.requests_running == stats.requests_waiting == 0


async def test_a_text_prompt_of_several_sequences_with_a_stop_string(trtllm_engine: Path) -> None:
    async with serving(load(trtllm_engine)) as running:
        whole, _, _ = await answer(running, ask(20))
        stop = whole[6:8]
        text, tokens, reason = await answer(running, ask(20, stop=[stop]))
        assert text == whole[: whole.index(stop)] and reason == pb2.FINISH_REASON_STOP
        assert len(tokens) <= whole.index(stop) + 2
        await until(lambda: not running.engine.engine._loop._core.has_work)
        assert library(running).cancelled == [2], "the library goes on behind a stop string until it is told"
        several = pb2.GenerateRequest(text="hello world", sampling=pb2.SamplingParams(n=6, seed=3, max_tokens=8))
        messages = [message async for message in running.stub.Generate(several)]
        assert sorted(m.index for m in messages if m.HasField("finish")) == [*range(6)]


def test_the_offline_api_runs_on_it(trtllm_engine: Path) -> None:
    with LLM(trtllm_engine) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        [[first], [second]] = llm.generate([PROMPT, (8, *PROMPT[1:])], params)
        assert list(first.token_ids) == greedy(12) and list(second.token_ids) == greedy(12, 8)
        next(iter(llm.stream(PROMPT, params)))
        assert llm.stats().requests_running == 0


# --- ends ---


async def test_abort_and_clients_that_leave(trtllm_engine: Path) -> None:
    """Of running requests and of those that wait, because the engine was built for four."""
    Executor.script[ENDLESS] = ["run"]
    async with serving(load(trtllm_engine)) as running:
        calls = []
        for number in range(10):
            request = ask(100, first=ENDLESS)
            request.request_id = str(number)
            calls.append(running.stub.Generate(request))
        await until(lambda: load_of(running) == (4, 6))
        live = [s for sequences in running.engine.engine._loop._core.sequences.values() for s in sequences.values()]
        runs = next(s.request for s in live if s.turn is not None)
        waits = next(s.request for s in live if s.turn is None)
        names = {key: stream.request_id for key, stream in running.engine._streams.items()}
        ended = [int(names[request.request_key]) for request in (runs, waits)]
        for number in ended:
            assert (await running.stub.Abort(pb2.AbortRequest(request_id=str(number)))).aborted
            rest = await rest_of(calls[number])
            assert rest[-1].finish.reason == pb2.FINISH_REASON_CANCELLED
        for number in {*range(10)} - {*ended}:
            calls[number].cancel()
        await until(lambda: running.server.service.open.total() == 0)
        await until(lambda: not running.engine.engine._loop._core.has_work)
        theirs = library(running)
        assert {*theirs.cancelled} == {*theirs.requests} and len(theirs.requests) < 10
        assert (await answer(running, ask(5)))[1] == greedy(5)


async def test_a_deadline(trtllm_engine: Path) -> None:
    Executor.script[ENDLESS] = ["run"]
    async with serving(load(trtllm_engine)) as running:
        code, _, _ = await failure(running.stub.Generate(ask(100, first=ENDLESS), timeout=0.2))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: library(running).cancelled == [1])


async def test_an_error_of_one_request_is_its_own(trtllm_engine: Path) -> None:
    Executor.script[ENDLESS] = [[300], "bad sequence"]
    async with serving(load(trtllm_engine)) as running:
        other = asyncio.ensure_future(answer(running, ask(40)))
        code, words, _ = await failure(running.stub.Generate(ask(first=ENDLESS)))
        assert code is grpc.StatusCode.INTERNAL and "bad sequence" in words
        code, words, _ = await failure(running.stub.Generate(ask(first=63)))
        assert code is grpc.StatusCode.INTERNAL and "63 is not liked" in words
        assert (await other)[1] == greedy(40)


async def test_a_library_that_breaks_ends_every_stream_with_an_error(trtllm_engine: Path) -> None:
    """Those that run, and those that wait."""
    Executor.script[ENDLESS] = ["run"]
    async with serving(load(trtllm_engine)) as running:
        calls = [running.stub.Generate(ask(100, first=ENDLESS)) for _ in range(6)]
        await until(lambda: load_of(running) == (4, 2))
        library(running).broken = RuntimeError("CUDA error: an illegal memory access")
        for call in calls:
            code, words, _ = await failure(call)
            assert code is grpc.StatusCode.UNAVAILABLE and "CUDA error" in words
        assert running.engine.dead and not running.engine.ready
        library(running).stopped = True  # nobody asks a broken library to end


# --- what it does not have ---


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"logprobs": 2}, "sampling.logprobs"),
        ({"logit_bias": {3: 1.0}}, "sampling.logit_bias"),
        ({"presence_penalty": 0.5}, "sampling.presence_penalty"),
        ({"min_tokens": 2, "stop_token_ids": [3, 4]}, "sampling.min_tokens"),
    ],
)
async def test_request_fields_are_refused_by_name(trtllm_engine: Path, sampling: dict[str, Any], field: str) -> None:
    async with serving(load(trtllm_engine)) as running:
        code, words, details = await failure(running.stub.Generate(ask(**sampling)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and field.rpartition(".")[2] in words
        assert details["BadRequest"].field_violations[0].field == field


async def test_kv_events_are_refused(trtllm_engine: Path) -> None:
    async with serving(load(trtllm_engine)) as running:
        code, words, _ = await failure(running.stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest()))
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "KV events" in words


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv.host_bytes", "1GiB"), ("kv.device_bytes", "1GiB"), ("kv.page_tokens", 16), ("kv.salt", "x" * 32),
        ("kv.policy", "lru"), ("executor.threads", 2), ("executor.device", "cpu"), ("executor.batch_invariant", True),
        ("executor.compare_ranks", True), ("executor.peer_access", False),
    ],
)  # fmt: skip
def test_settings_are_refused_by_name(trtllm_engine: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: ") as found:
        load(trtllm_engine, **{name: value})
    assert "\n" not in str(found.value) and not Executor.made


def test_gpus_are_chosen_before_the_library_sees_any_or_refused(
    trtllm_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")

    def choose(devices: str, **settings: Any) -> None:
        given = {"engine": str(trtllm_engine), "executor.devices": devices, **settings}
        load_engine(load_settings(None, given)).core.close()

    choose("5,2")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,2"
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        choose("5,2")
        with pytest.raises(ConfigError, match="uses GPUs already"):
            choose("5")
    with pytest.raises(ConfigError, match="would run on the CPU"):
        choose("5", **{"executor.device": "cpu"})


def test_measurements_of_single_steps_are_refused(trtllm_engine: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match="make their steps themselves"):
        make_executor(open_engine(trtllm_engine), load_settings())


# --- the command ---


async def test_the_command_serves_and_drains(trtllm_built: Path) -> None:
    """Told to end while streams run, it lets one come to its end and cancels the one that has none."""
    async with wicore_serve(trtllm_built, "--grace", "1.5", pace_s=0.01, script={ENDLESS: ["run"]}) as server:
        await server.until_serving()
        assert (await answer(server, ask(5)))[1] == greedy(5)
        endless, call = server.stub.Generate(ask(100, first=ENDLESS)), server.stub.Generate(ask(60))
        head = [await call.read()]
        server.process.send_signal(signal.SIGTERM)
        assert read(head + await rest_of(call))[1] == greedy(60)
        assert (await rest_of(endless))[-1].finish.reason == pb2.FINISH_REASON_CANCELLED
        code, log = await server.end()
    assert code == 1 and "draining 2 streams" in log and "Traceback" not in log


@pytest.mark.long
async def test_the_command_starts_the_engine_again_when_the_library_breaks(trtllm_built: Path) -> None:
    async with wicore_serve(trtllm_built, script={ENDLESS: [[300], "break"]}) as server:
        code, words, _ = await failure(server.stub.Generate(ask(first=ENDLESS)))
        assert code is grpc.StatusCode.UNAVAILABLE and "CUDA error" in words
        await server.until_status(health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.until_serving()
        assert (await answer(server, ask(5)))[1] == greedy(5)
        server.process.send_signal(signal.SIGTERM)
        code, log = await server.end()
    assert code == 0 and "The engine stopped" in log and "starting it again" in log


def test_without_the_library_the_command_says_so_on_one_line(
    trtllm_built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["serve", str(trtllm_built / "engine"), "--grpc-port", "0", "--http-port", "none"]) == 4
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "TensorRT-LLM is not installed" in line
