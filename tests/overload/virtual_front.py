"""A whole front and its engine in virtual time, on one thread: every wait takes no real time, every order is a seed's.

Real: the ASGI application, the gRPC service, TextEngine, both ends of the link, EngineLoop, the queue. Made up: the
clock, the wire between front and engine (delays, or none), how long steps take, the model.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

import grpc
from fakes import FAKE_INFO, next_token
from serve.serving import SERVICE
from serve.serving import request as grpc_request
from web import VOCAB, WebTokenizer

from wicore_trt.access.admission import Admission, Rates
from wicore_trt.access.keys import Identity, KeyRing
from wicore_trt.core.loop import EngineLoop
from wicore_trt.core.request_core import RequestCore
from wicore_trt.core.shares import Gate
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.http.app import make_app
from wicore_trt.http.context import Context
from wicore_trt.link import host as host_end
from wicore_trt.link import remote as remote_end
from wicore_trt.link.host import EngineHost
from wicore_trt.link.messages import Welcome
from wicore_trt.link.remote import RemoteEngine
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc
from wicore_trt.serve.guard import Guard
from wicore_trt.serve.listeners import Services
from wicore_trt.serve.service import InferenceService
from wicore_trt.types import FinishReason, GenerateRequest, TokenOutput, Usage

CONTEXT = 4096
MOST_RETRY_S = 3600.0 * 1.25
KEYS = {name: Identity(tenant=name) for name in ("alice", "bob", "carol")}
SOCKET_ENDS = {"queue_full": 429, "request_cancelled": 499, "engine_dead": 503, "unavailable": 503, "deadline": 504}
SOCKET_ENDS["invalid_request_error"] = 400


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when everybody waits for it."""

    def __init__(self) -> None:
        selector = selectors.SelectSelector()
        wait, self.now = selector.select, 1000.0

        def select(timeout):
            assert timeout is not None, "everybody waits for ever"
            self.now += max(0.0, timeout)
            return wait(0)

        selector.select = select
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class Wire:
    """One end of a channel. Messages keep their order; each takes its time, none where `delay` says None."""

    def __init__(self, delay) -> None:
        self.delay, self.open, self.peer, self._free_at = delay, False, None, 0.0
        self.received = self.closed = None
        self.backlog = 0

    @classmethod
    def pair(cls, delay) -> tuple[Wire, Wire]:
        one, two = cls(delay), cls(delay)
        one.peer, two.peer = two, one
        return one, two


class WireChannel:
    """`link.channel.Channel` over a Wire."""

    backlog = 0

    def __init__(self, wire, loop, received, closed) -> None:
        self._wire, self._loop = wire, loop
        wire.received, wire.closed, wire.open = received, closed, True

    file_bytes = 0

    def post(self, message: bytes, file: int = -1) -> None:
        wire, peer = self._wire, self._wire.peer
        if not wire.open:
            return
        taken = wire.delay()
        if taken is None:
            peer.received(message, file)
            return
        wire._free_at = max(wire._free_at + 1e-6, self._loop.time() + taken)  # timers of one time have no order
        self._loop.call_at(wire._free_at, lambda: peer.open and peer.received(message, file))

    def close(self) -> None:
        for end in (self._wire, self._wire.peer):
            if end.open:
                end.open = False
                end.closed()


class PacedExecutor:
    """A token for each sequence and poll."""

    kernels = "fake"

    def __init__(self, places: int) -> None:
        self.spec, self.max_sequences = SimpleNamespace(vocab_size=VOCAB), places
        self._open: dict[tuple[str, int], list[int]] = {}
        self._requests: dict[str, GenerateRequest] = {}
        self.broken = False

    def check(self, request, stop_ids) -> None: ...

    def submit(self, request, index, seed, stop_ids) -> None:
        self._open[request.request_key, index] = list(request.prompt_token_ids)
        self._requests[request.request_key] = request

    def poll(self, timeout_s: float) -> list[TokenOutput]:
        if self.broken:
            raise RuntimeError("device lost")
        outputs = []
        for (name, index), tokens in list(self._open.items()):
            request = self._requests[name]
            tokens.append(next_token(tokens))
            made = len(tokens) - len(request.prompt_token_ids)
            ended = made >= request.params.max_tokens
            if ended:
                del self._open[name, index]
            reason, usage = (FinishReason.LENGTH, Usage(len(request.prompt_token_ids), made)) if ended else (None, None)
            outputs.append(TokenOutput(name, index, (tokens[-1],), finish_reason=reason, usage=usage))
        return outputs

    def cancel(self, request_id: str, index: int) -> None:
        self._open.pop((request_id, index), None)

    def close(self) -> None: ...


class PacedCore(RequestCore):
    token_s, share = 0.0, 1.0

    def make_outlook(self):
        return replace(super().make_outlook(), token_s=self.token_s, share=self.share)


@dataclass
class End:
    """How a request ended: an HTTP status, in whatever words; the text; after which time to retry."""

    status: int
    text: str = ""
    retry_s: float | None = None
    body: object = None


class Site:
    """`delay` says how long a message takes between front and engine; `slowest` is its longest."""

    def __init__(self, rng, monkeypatch, *, places, max_waiting, limits, step_s, delay=lambda: None, slowest=0.0):
        self.rng, self.paths, self.delay, self.slowest = rng, Counter(), delay, slowest
        self.loop = asyncio.get_running_loop()
        monkeypatch.setattr(time, "monotonic", self.loop.time)
        monkeypatch.setattr(host_end, "Channel", WireChannel)
        monkeypatch.setattr(remote_end, "Channel", WireChannel)
        self._make = lambda: PacedCore(PacedExecutor(places), eos_ids=(1,), max_context=CONTEXT, clock=self.loop.time)
        self._limits, self._max_waiting, self.step_s = limits, max_waiting, step_s
        self.token_s, self.share = rng.choice((0.0, 1e-4, 1e-3)), rng.uniform(0.3, 1.0)
        self.remote, self._thread = RemoteEngine(), asyncio.Semaphore(2)
        info = replace(FAKE_INFO, max_context_tokens=CONTEXT, bos_token_id=2)
        self.engine = TextEngine(self.remote, WebTokenizer(), info, lambda constraint: None)
        monkeypatch.setattr(self.engine, "work", self._work)
        keys = KeyRing(KEYS)
        self.admission = Admission(keys, Gate(4096, "calls"), Rates())
        self.context = Context(self.admission, 1 << 20)
        self.service, services = InferenceService(max_message_bytes=1 << 20, admission=self.admission), Services()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.service, services)
        self.guard = Guard(self.admission, services.handlers)
        self.app = make_app(self.context)
        self.ends: Counter[int] = Counter()
        self.by_way: dict[str, Counter[int]] = {}
        self._steps: asyncio.Task | None = None

    async def _work(self, tenant, function):
        """A thread that tokenizes."""
        async with self._thread:
            await asyncio.sleep(self.rng.choice((0.0, 0.001, 0.02)))
        return function()

    async def start(self) -> None:
        await self.engine.start()
        self.context.attach(self.engine)
        self.service.engine = self.engine
        await self.start_engine()

    async def start_engine(self) -> None:
        self.core = self._make()
        self.core.limits = self._limits
        self.core.token_s, self.core.share = self.token_s, self.share
        host = self.host = EngineHost(self.core, FAKE_INFO, max_waiting=self._max_waiting)
        host.loop.close()
        host.loop = self.loop
        ours, theirs = Wire.pair(self.delay)
        self.remote.connect(ours)
        link = host.links["1/"] = host_end._Link(host, "1/", theirs)
        link.send_message(Welcome("1/", FAKE_INFO, 1))
        while self.remote.dead:
            await asyncio.sleep(0.001)
        self.link = link
        self._steps = asyncio.ensure_future(self._run(host.engine))

    async def _run(self, engine: EngineLoop) -> None:
        """The engine's thread."""
        while True:
            if not (engine._inbox or self.core.has_work):
                await asyncio.sleep(0.001)
                continue
            try:
                engine._take_inbox()
                await asyncio.sleep(self.step_s())
                engine._emit_outputs(self.core.step())
            except RuntimeError as error:
                with engine._wake:
                    engine.dead, engine._open = str(error), False
                    live, engine._live = engine._live, {}
                engine._sink(
                    [TokenOutput(name, 0, (), finish_reason=FinishReason.ERROR, error=str(error)) for name in live]
                )
                return

    async def kill_engine(self) -> None:
        """Its process ends between two of its steps."""
        self._steps.cancel()
        self.link.channel.close()

    # --- clients ------------------------------------------------------------------------------------------------------

    def noted(self, end: End, way: str) -> End:
        self.ends[end.status] += 1
        self.by_way.setdefault(way, Counter())[end.status] += 1
        if end.status == 429 and end.retry_s is not None:
            assert 0 < end.retry_s <= MOST_RETRY_S
        return end

    async def http(self, tenant: str, path: str, body: dict, *, leave_s: float | None = None, slow_s=0.0) -> End:
        """`leave_s`: seconds after which the client leaves; `slow_s`: how long its body takes."""
        raw = json.dumps(body, ensure_ascii=False).encode()
        headers = [(b"content-type", b"application/json"), (b"x-api-key", tenant.encode())]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": [*headers, (b"content-length", b"%d" % len(raw))], "state": {}, "root_path": "",
                 "client": ("127.0.0.1", 1)}  # fmt: skip
        gone, messages, parts = asyncio.Event(), [], [raw[:1], raw[1:]]

        async def receive():
            if parts and not gone.is_set():
                part = parts.pop(0)
                if not parts and slow_s:
                    await asyncio.wait((asyncio.ensure_future(gone.wait()),), timeout=slow_s)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            messages.append(message)

        timer = self.loop.call_later(leave_s, gone.set) if leave_s is not None else None
        left_at = None if leave_s is None else self.loop.time() + leave_s
        await self.app(scope, receive, send)
        if timer is not None:
            timer.cancel()
        if not messages or messages[-1].get("more_body"):
            assert gone.is_set()
            late = self.loop.time() - left_at
            self.paths["left"] += 1
            assert late <= 0.1 or self.paths["clock jumped"], f"a client that left was kept for {late} s"
            return self.noted(End(499), "http")
        head = dict(messages[0]["headers"])
        retry = head.get(b"retry-after-ms")
        body = b"".join(message.get("body", b"") for message in messages[1:])
        if messages[0]["status"] == 429:
            assert int(head[b"retry-after"]) >= 1
        return self.noted(End(messages[0]["status"], body.decode(), int(retry) / 1e3 if retry else None), "http")

    async def websocket(self, tenant: str, frame: dict, *, leave_s: float | None = None, cancel=False) -> End:
        scope = {"type": "websocket", "path": "/v1/stream", "raw_path": b"/v1/stream", "query_string": b"",
                 "headers": [(b"x-api-key", tenant.encode())], "state": {}, "client": ("127.0.0.1", 1),
                 "root_path": "", "subprotocols": []}  # fmt: skip
        frames, told = asyncio.Queue(), asyncio.Queue()
        frames.put_nowait({"type": "websocket.connect"})
        said = json.dumps({"type": "generate", "id": "x", **frame}, ensure_ascii=False)
        frames.put_nowait({"type": "websocket.receive", "text": said})
        task = asyncio.ensure_future(self.app(scope, frames.get, told.put))
        if leave_s is not None:
            last = {"type": "websocket.receive", "text": '{"type":"cancel","id":"x"}'} if cancel else None
            self.loop.call_later(leave_s, frames.put_nowait, last or {"type": "websocket.disconnect"})
        text, end = "", End(499)
        getting = asyncio.ensure_future(told.get())
        while True:
            await asyncio.wait((getting, task), return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                break
            message, getting = getting.result(), asyncio.ensure_future(told.get())
            if message["type"] == "websocket.http.response.start":
                end = End(message["status"])
            if message["type"] != "websocket.send":
                continue
            found = json.loads(message["text"])
            if found["type"] == "delta":
                text += found["text"]
            elif found["type"] == "done":
                end = End(200, text)
                break
            elif found["id"] == "x":
                end = End(SOCKET_ENDS.get(found["error"]["code"] or found["error"]["type"], 500))
                break
        getting.cancel()
        frames.put_nowait({"type": "websocket.disconnect"})
        await task
        return self.noted(end, "websocket")

    async def grpc(self, tenant: str, fields: dict, *, leave_s: float | None = None) -> End:
        message, text, ended = grpc_request(**fields), [], []

        class Context:
            async def read(self):
                return message.SerializeToString()

            def peer(self):
                return "ipv4:127.0.0.1:1"

            def time_remaining(self):
                return None

            async def send_initial_metadata(self, metadata): ...

            async def write(self, answer):
                text.append(answer.delta.text + answer.finish.delta.text)

            async def abort(self, code, details, trailing_metadata):
                ended.append(SimpleNamespace(code=code, trailing_metadata=trailing_metadata))
                raise grpc.aio.AbortError

        details = SimpleNamespace(method=f"{SERVICE}Generate", invocation_metadata=(("x-api-key", tenant),))
        task = asyncio.ensure_future(self.guard.service(details).stream_stream(None, Context()))
        if leave_s is not None:
            self.loop.call_later(leave_s, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            self.paths["left"] += 1
            return self.noted(End(499), "grpc")
        if ended:
            names = {"RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503, "INVALID_ARGUMENT": 400, "DEADLINE_EXCEEDED": 504,
                     "CANCELLED": 499, "INTERNAL": 500}  # fmt: skip
            from google.rpc import error_details_pb2

            retry, info = None, error_details_pb2.RetryInfo()
            for name, value in ended[0].trailing_metadata:
                if name == "grpc-status-details-bin":
                    from google.rpc import status_pb2

                    for detail in status_pb2.Status.FromString(value).details:
                        if detail.Unpack(info):
                            retry = info.retry_delay.ToTimedelta().total_seconds()
            return self.noted(End(names[ended[0].code.name], retry_s=retry), "grpc")
        return self.noted(End(200, "".join(text)), "grpc")

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Nothing is held when nobody asks."""
        assert not self.context.open and self.context.idle.is_set() and self.service.idle.is_set()
        assert (
            not self.service.open.total()
            and not self.admission.calls.taken_places
            and not self.context.body_budget.taken_places
        )
        assert not self.engine._streams and not self.engine._keys
        assert not self.remote._pending and not self.remote._live

    async def stop(self) -> None:
        with suppress(asyncio.CancelledError):
            self._steps.cancel()
            await self._steps
