"""Helpers of the server tests: a real GrpcServer on a real socket, over the checked fake executor."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from fakes import FAKE_INFO, FakeExecutor, FakeTokenizer, greedy, make_core
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from wicore_trt.config import ServerSettings
from wicore_trt.core.port import LocalEngine
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc
from wicore_trt.serve.server import GrpcServer
from wicore_trt.types import EngineStats

HERE = Path(__file__).parent
TOKENIZER = FakeTokenizer()
MAX_CONTEXT = 1024
SERVICE = "/wicore.inference.v1.InferenceService/"


def make_engine(*, max_waiting: int = 100, step_s: float = 0.0, **kwargs) -> TextEngine:
    """A TextEngine over a FakeExecutor with room for a few sequences of MAX_CONTEXT tokens."""
    pages = {GLOBAL: 2 * MAX_CONTEXT // 4, LOCAL: 256}
    core = make_core(**{"pages": pages, "max_context": MAX_CONTEXT, "max_sequences": 16, **kwargs})
    core.executor.step_s = step_s
    info = replace(
        FAKE_INFO, max_context_tokens=MAX_CONTEXT, bos_token_id=2, page_tokens=core.executor.layout.page_tokens
    )
    return TextEngine(LocalEngine(core, max_waiting=max_waiting), TOKENIZER, info)


def executor_of(engine: TextEngine) -> FakeExecutor:
    return engine.engine._loop._core.executor


def steps_of(engine: TextEngine) -> int:
    return len(executor_of(engine).steps)


def expected(prompt: str, count: int) -> tuple[str, list[int]]:
    """Text and tokens that the fake model continues a prompt with."""
    tokens = greedy(TOKENIZER.encode(prompt), count, ignore_eos=True)
    return TOKENIZER.decode(tokens), tokens


def request(prompt: str = "hello", max_tokens: int = 10, **kwargs) -> pb2.GenerateRequest:
    """A greedy request of exactly `max_tokens` tokens; keyword arguments are sampling fields or request fields."""
    message = pb2.GenerateRequest(text=prompt)
    own = {k: kwargs.pop(k) for k in list(kwargs) if k in pb2.GenerateRequest.DESCRIPTOR.fields_by_name}
    sampling = pb2.SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **kwargs})
    message.MergeFrom(pb2.GenerateRequest(sampling=sampling, **own))
    return message


@dataclass
class Running:
    server: GrpcServer
    engine: TextEngine
    address: str
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceStub


@asynccontextmanager
async def serving(engine=None, *, options=(), attach: bool = True, **settings) -> AsyncIterator[Running]:
    """A started server, its engine and a client. Settings are those of ServerSettings; the port is a free one."""
    engine = engine or make_engine()
    server = GrpcServer(ServerSettings(**{"port": 0, **settings}))
    address = await server.start_listening()
    if attach:
        await engine.start()
        server.service.engine = engine
        await server.set_serving()
    try:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            yield Running(server, engine, address, channel, inference_pb2_grpc.InferenceServiceStub(channel))
    finally:
        await server.stop_listening(0)
        await engine.close()


async def rest_of(call) -> list:
    """The messages that are left of a stream from which `read` was called."""
    found = []
    while (message := await call.read()) is not grpc.aio.EOF:
        found.append(message)
    return found


async def failure(call) -> tuple[grpc.StatusCode, str, dict[str, object]]:
    """Code, message and details (by message name) of a call that must fail; unary call or stream."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        status = await rpc_status.aio.from_call(call)
        return error.code(), error.details(), details_of(status)
    raise AssertionError("the call did not fail")


def details_of(status) -> dict[str, object]:
    """google.rpc details of a status by message name."""
    found = {}
    for packed in status.details if status is not None else ():
        detail = getattr(error_details_pb2, packed.type_url.rpartition(".")[2])()
        assert packed.Unpack(detail)
        found[type(detail).__name__] = detail
    return found


async def until(condition, timeout_s: float = 60.0) -> None:
    """Wait until a condition, which may be a coroutine function, holds; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if (await holds) if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.005)


def stats_now(engine: TextEngine, tenant: str | None = None) -> EngineStats:
    """What the engine in this process counts, for conditions."""
    return engine.engine._loop.stats(tenant)


class Process:
    """A server process (fake_server.py) and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process, self.address = process, address
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def status(self) -> int:
        return (await self.health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)).status

    async def until_status(self, status: int) -> None:
        async with asyncio.timeout(60):
            while await self.status() != status:
                await asyncio.sleep(0.02)

    async def until_serving(self) -> None:
        await self.until_status(health_pb2.HealthCheckResponse.SERVING)

    async def end(self, timeout_s: float = 60) -> tuple[int, str]:
        """Exit code and log."""
        async with asyncio.timeout(timeout_s):
            _, log = await self.process.communicate()
        return self.process.returncode, log.decode()


@asynccontextmanager
async def process(**options) -> AsyncIterator[Process]:
    """A process of fake_server.py that has bound its port, or ended without."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    spawned = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "fake_server.py"), json.dumps(options),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            address = (await spawned.stdout.readline()).decode().strip()
        server = Process(spawned, address)
        yield server
        await server.channel.close()
    finally:
        if spawned.returncode is None:
            spawned.kill()
            await spawned.wait()
