"""Spans of calls as a collector gets them, over OTLP on a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import httpx
import pytest
from process.test_reload import ALICE
from process.test_supervisor import supervised
from serve.serving import request
from test_http_log import grpc_address, secret
from web import GREEDY

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

ALLOY = Path(__file__).parents[2] / "examples" / "observability" / "logs.alloy"
"""Names fields of the log."""


class Collector(ThreadingHTTPServer):
    """Keeps what it is sent."""

    daemon_threads = True

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                collector.raw.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)

    def spans(self) -> list[tuple[str, Span]]:
        """Spans with the names of their services."""
        messages = [ExportTraceServiceRequest.FromString(raw) for raw in list(self.raw)]
        return [
            (values(resource.resource.attributes)["service.name"], span)
            for message in messages
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector(monkeypatch) -> Iterator[Collector]:
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield server
    server.shutdown()


def values(attributes) -> dict[str, object]:
    def plain(value):
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(v) for v in found.values] if kind == "array_value" else found

    return {a.key: plain(a.value) for a in attributes}


def parent() -> tuple[str, str, dict[str, str]]:
    """A trace, a span of it, and the header that names both."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, {"traceparent": f"00-{trace}-{span}-01"}


async def test_a_span_for_each_generation_over_both_ways(collector, tmp_path):
    said = secret()
    options = {"json": True, "chat": True, "fail_at": 60, "max_sequences": 1, "step_s": 0.002}
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"alice:{ALICE}\n")
    async with supervised(tmp_path, **options, server={"http_port": 0, "keys_file": str(keys)}) as server:
        url = await server.line("bound")
        await server.line("ready on")
        web, rpc, broken = parent(), parent(), parent()
        async with httpx.AsyncClient(base_url=url, timeout=60, headers={"x-api-key": ALICE}) as client:
            body = {"prompt": said, "max_tokens": 7, **GREEDY}
            headers = {**web[2], "x-request-id": "web-1"}
            assert (await client.post("/v1/completions", json={**body, "n": 2}, headers=headers)).status_code == 200
            assert (await client.post("/v1/completions", json={"prompt": []}, headers=parent()[2])).status_code == 400
            messages = [{"role": "user", "content": said}]
            assert (await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})).is_success
            await client.get("/v1/models", headers=parent()[2])
            async with grpc.aio.insecure_channel(await grpc_address(client, server)) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                async for _ in stub.Generate(request(said, 5), metadata=[("x-api-key", ALICE), *rpc[2].items()]):
                    pass
            failed = await client.post("/v1/completions", json={**body, "max_tokens": 100}, headers=broken[2])
            assert failed.status_code == 503
            async with asyncio.timeout(60):
                while len(collector.spans()) < 5:
                    await asyncio.sleep(0.02)
        server.process.terminate()
        _, log = await server.end()
    found = {span.trace_id.hex(): span for _, span in collector.spans()}
    assert len(collector.spans()) == 5 and {name for name, _ in collector.spans()} == {"wicore-trt"}
    span = found[web[0]]
    assert span.parent_span_id.hex() == web[1] and span.kind == Span.SPAN_KIND_SERVER
    told = values(span.attributes)
    assert span.name == f"text_completion {told['gen_ai.request.model']}"
    assert told["gen_ai.operation.name"] == "text_completion" and told["gen_ai.request.max_tokens"] == 7
    assert told["gen_ai.request.choice.count"] == 2 and told["gen_ai.usage.output_tokens"] == 14
    assert told["gen_ai.usage.input_tokens"] == len(said) and "gen_ai.usage.cache_read.input_tokens" in told
    assert told["gen_ai.response.finish_reasons"] == ["length"] and told["wicore.request_id"] == "web-1"
    assert 0 <= told["wicore.queue_time"] <= told["gen_ai.response.time_to_first_chunk"]
    times = [span.start_time_unix_nano, *(e.time_unix_nano for e in span.events), span.end_time_unix_nano]
    assert [e.name for e in span.events] == ["wicore.scheduled", "wicore.first_token"] and times == sorted(times)
    assert found[rpc[0]].parent_span_id.hex() == rpc[1]
    assert values(found[rpc[0]].attributes)["gen_ai.usage.output_tokens"] == 5
    assert "chat" in {values(s.attributes)["gen_ai.operation.name"] for s in found.values()}
    end = found[broken[0]]
    assert end.status.code == Status.STATUS_CODE_ERROR and values(end.attributes)["error.type"] == "EngineDeadError"
    refused = [s for s in found.values() if values(s.attributes).get("error.type") == "InvalidRequestError"]
    assert len(refused) == 1 and refused[0].status.code == Status.STATUS_CODE_UNSET
    assert told["wicore.tenant"] == "alice" and ALICE.encode() not in b"".join(collector.raw)
    [line] = [made for made in map(json.loads, log.splitlines()) if made.get("id") == "web-1"]
    fields = set(re.findall(r'= "(\w+)",', ALLOY.read_text()))
    assert line["trace_id"] == web[0] and len(fields) >= 7 and fields <= line.keys()
    assert said.encode() not in b"".join(collector.raw)


@pytest.mark.parametrize(
    "env", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}]
)
def test_nothing_is_loaded_when_traces_are_off(env):
    code = "import sys; from wicore_trt.access import calls, tracing; tracing.start_tracing(); tracing.stop_tracing()\n"
    code += "assert calls.span_sender is None and not any(m.startswith('opentelemetry') for m in sys.modules)"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", code], env=clean | env, check=True, timeout=60)


async def test_a_collector_that_never_answers_holds_up_no_end(monkeypatch, tmp_path):
    """Or the supervisor would have to kill the front, and say so."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100")
        async with supervised(tmp_path, chat=True, server={"http_port": 0}) as server:
            url = await server.line("bound")
            await server.line("ready on")
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})).is_success
            server.process.terminate()
            assert (await server.end())[0] == 0
