"""Requests beyond the queue are refused soon, with a time to retry, and no other request is, in each protocol.

Invariants: I16.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import httpx
import pytest
import websockets
from core.linked import LinkedEngine
from fakes import FAKE_INFO, FakeTokenizer, make_core
from google.rpc import error_details_pb2
from serve.serving import details_of, request
from web import until

from wicore_trt.config import ServerSettings
from wicore_trt.core.limits import LATEST_S, LONGEST_S, Hints, Limits
from wicore_trt.core.loop import EngineLoop
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.errors import QueueFullError, RateLimitError
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc
from wicore_trt.serve.guard import make_status
from wicore_trt.serve.lifecycle import Servers
from wicore_trt.types import GenerateRequest, SamplingParams

CONTEXT = 1024
WAYS = ("http", "websocket", "grpc")
ALICE, BOB = "a" * 16, "b" * 16
BURST = 500
MUST_S = {"completions": 4.0, "chat/completions": 4.0, "grpc": 4.0}
"""CPU seconds of server and clients for a burst."""


@dataclass
class Crowded:
    """A server whose only place is taken; one waits behind it and nobody else may. Steps wait for `go`."""

    engine: TextEngine
    url: str
    address: str
    go: threading.Event
    asked: list[str] = field(default_factory=list)  # requests that came to the engine
    tasks: list[asyncio.Task] = field(default_factory=list)

    async def ask(self, how: str, key: str = "", prompt: str = "hello", **fields) -> tuple[str, float | None]:
        """How a request ended, and the seconds after which to retry."""
        body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **fields}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if how == "http":
            async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60, verify=False) as client:
                found = await client.post("/v1/completions", json=body)
            retry = found.headers.get("retry-after-ms")
            return str(found.status_code), float(retry) / 1e3 if retry else None
        if how == "websocket":
            url = f"ws{self.url.removeprefix('http')}/v1/stream"
            async with websockets.connect(url, additional_headers=headers) as socket:
                await socket.send(json.dumps({"type": "generate", "id": "x", **body}))
                while (frame := json.loads(await socket.recv()))["type"] == "delta":
                    pass
            return ("200" if frame["type"] == "done" else {"queue_full": "429"}[frame["error"]["code"]]), None
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub, message = inference_pb2_grpc.InferenceServiceStub(channel), request(prompt, 3, **fields)
            call = stub.Generate(message, metadata=tuple(headers.items()))
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                status = await grpc_status(call)
                delay = details_of(status).get("RetryInfo")
                name = {"RESOURCE_EXHAUSTED": "429", "UNAUTHENTICATED": "401"}[error.code().name]
                return name, delay.retry_delay.ToTimedelta().total_seconds() if delay else None
            return "200", None

    async def begin(self, *args, **kwargs) -> asyncio.Task:
        """A request that the engine takes."""
        count = len(self.asked)
        self.tasks.append(asyncio.ensure_future(self.ask(*args, **kwargs)))
        await until(lambda: len(self.asked) > count)
        return self.tasks[-1]


async def grpc_status(call):
    from grpc_status import rpc_status

    return await rpc_status.aio.from_call(call)


@asynccontextmanager
async def crowded(limits: Limits | None = None, key: str = "", **settings):
    pages = {GLOBAL: 2 * CONTEXT // 4, LOCAL: 256}
    core = make_core(pages=pages, max_context=CONTEXT, max_sequences=1, clock=lambda: 100.0)  # however long it takes
    core.limits = limits or Limits(max_queue_s=15.0)
    core._hold_s = 10.0  # as far as is known, the place becomes free in so many seconds
    go, held, execute, free = threading.Event(), threading.Event(), core.executor.execute, iter(range(4))

    def step(batch):
        if next(free, None) is None:
            held.set()
            go.wait()
        return execute(batch)

    core.executor.execute = step
    linked = LinkedEngine(core, max_waiting=100)
    engine = TextEngine(linked, FakeTokenizer(), replace(FAKE_INFO, max_context_tokens=CONTEXT, bos_token_id=2))
    servers = Servers(ServerSettings(port=0, http_port=0, **settings), CONTEXT)
    address, url = await servers.start_listening()
    await engine.start()
    servers.grpc.service.engine = engine
    servers.http.context.attach(engine)
    await servers.grpc.set_serving()
    found = Crowded(engine, url, address, go)
    add = linked.host.engine.add

    def counted(request):
        found.asked.append(request.request_key)
        add(request)

    linked.host.engine.add = counted
    try:
        await found.begin("http", key, max_tokens=900)
        await until(held.is_set)
        await found.begin("http", key)
        yield found, servers
    finally:
        go.set()
        for task in found.tasks:
            task.cancel()
        await asyncio.gather(*found.tasks, return_exceptions=True)
        await servers.stop_listening(0)
        await engine.close()


@pytest.mark.parametrize("how", WAYS)
async def test_who_would_be_let_in_is(how):
    """By its priority, which goes before those that wait."""
    async with crowded() as (server, _):
        assert (await server.ask(how))[0] == "429"
        sooner = await server.begin(how, priority=-1)
        server.go.set()
        assert (await sooner)[0] == "200"


@pytest.mark.parametrize("how", ["http", "grpc"])
async def test_other_tenants_are_asked_for_and_strangers_are_told_so(how, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    keys.chmod(0o600)
    async with crowded(Limits(max_queue_s=25.0), ALICE, keys_file=str(keys)) as (server, _):
        await server.begin(how, ALICE)
        assert (await server.ask(how, ALICE))[0] == (await server.ask(how, ALICE))[0] == "429"
        asked = len(server.asked)
        assert (await server.ask(how, "c" * 16))[0] == "401" and len(server.asked) == asked
        polite = await server.begin(how, BOB)
        server.go.set()
        assert (await polite)[0] == "200"


async def burst_over_http(server: Crowded, way: str) -> tuple[list[float], list[float]]:
    """Seconds until each of BURST requests, sent at once, was refused, and the times to retry."""
    host, prompt = httpx.URL(server.url), "p" * 600
    streams = [await asyncio.open_connection(host.host, host.port) for _ in range(BURST)]
    said = {"prompt": prompt} if way == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    body = json.dumps({**said, "max_tokens": 3}).encode()
    head = f"POST /v1/{way} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    sent = time.monotonic()
    for _, writer in streams:
        writer.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async def refused(reader: asyncio.StreamReader) -> tuple[float, float]:
        lines = (await reader.read()).decode().splitlines()
        taken = time.monotonic() - sent
        assert " 429 " in lines[0]
        return taken, next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("retry-after-ms"))

    ends = await asyncio.gather(*(refused(reader) for reader, _ in streams))
    for _, writer in streams:
        writer.close()
    return [taken for taken, _ in ends], [retry_s for _, retry_s in ends]


async def burst_over_grpc(server: Crowded, way: str) -> tuple[list[float], list[float]]:
    """Send a burst over gRPC: seconds of each answer, and times to retry."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub, message = inference_pb2_grpc.InferenceServiceStub(channel), request("p" * 600, 3)
        sent = time.monotonic()

        async def refused() -> tuple[float, float]:
            call = stub.Generate(message)
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            taken, delay = time.monotonic() - sent, details_of(await grpc_status(call))["RetryInfo"].retry_delay
            return taken, delay.ToTimedelta().total_seconds()

        ends = await asyncio.gather(*(refused() for _ in range(BURST)))
    return [taken for taken, _ in ends], [retry_s for _, retry_s in ends]


@pytest.mark.parametrize(
    ("way", "timed"),
    [("completions", False), ("grpc", False), *(pytest.param(way, True, marks=pytest.mark.long) for way in MUST_S)],
)
async def test_a_burst_is_refused_in_time_and_comes_back_one_by_one(way, timed):
    """CPU time of clients and server in this one process stands for the longest wait, which depends on the machine."""
    async with crowded() as (server, servers):
        began = time.process_time()
        taken, retries = await (burst_over_grpc if way == "grpc" else burst_over_http)(server, way)
        used = time.process_time() - began
        print(f"{way}: longest {max(taken):.3f} s, {used:.3f} s of CPU")
        assert len(taken) == BURST and (not timed or used <= MUST_S[way]), used
        hints = sorted(retries)
        assert hints[0] >= 1.0 and hints[-1] > 20.0 and len(set(hints)) > BURST / 2, "they come back one by one"
        assert hints[-1] <= LATEST_S
        await until(lambda: servers._admission.calls.taken_places == 2)


def test_a_request_waits_for_those_before_it_alone():
    """Also while these have not come to the queue: not for such as are less urgent, nor for another tenant's."""
    core = make_core(max_sequences=1)
    core.limits, core._hold_s = Limits(max_queue_s=2.5), 1.0
    loop = EngineLoop(core, lambda outputs: None, max_waiting=100)  # not started: all stay in the inbox

    def add(name: str, priority: int) -> None:
        loop.add(GenerateRequest(name, (2, 3), SamplingParams(max_tokens=1), priority=priority))

    for number in range(3):
        add(f"late{number}", 2)
    with pytest.raises(QueueFullError):
        add("late", 2)
    for number in range(3):
        add(f"soon{number}", -2)
    with pytest.raises(QueueFullError) as refused:
        add("soon", -2)
    assert refused.value.pace_s == 1.0, "the client hears when to ask again"


def test_no_time_to_retry_is_none():
    told = make_status(RateLimitError("", retry_after_s=1e-6), "").details
    info = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(info) for detail in told) and info.retry_delay.ToMilliseconds() == 1


def test_times_to_retry_are_spread_and_grow_with_the_number_of_those_who_are_told():
    hints, now = Hints(), 100.0
    first = [hints.retry_s("a", now, 1.0, 0.1) for _ in range(200)]
    for second in range(1, 20):
        assert sum(second <= told < second + 1 for told in first) <= 2 * 10, "twice the pace at most"
    assert 15.0 < max(first) <= 1.25 * 21.0
    assert hints.retry_s("b", now, 1.0) <= 1.25, "whoever else is refused"
    lasting = [hints.retry_s("a", now, 1.0) for _ in range(2000)]
    assert max(lasting) <= LATEST_S and len({round(told) for told in lasting[-500:]}) > 25
    assert 1.0 <= hints.retry_s("a", now + 300.0, 1.0) <= 1.25, "and it ends"
    long = [hints.retry_s("a", now, 90.0) for _ in range(50)]
    assert min(long) >= 90.0 and max(long) <= 112.5 and len({round(told) for told in long}) > 10, "not all at once"
    assert LONGEST_S <= hints.retry_s("a", now, float("inf")) <= 1.25 * LONGEST_S
    unknown = [Hints().retry_s("a", now, 2.0, 0.0) for _ in range(50)]
    assert len(set(unknown)) > 40 and min(unknown) >= 2.0 and max(unknown) <= 2.5
