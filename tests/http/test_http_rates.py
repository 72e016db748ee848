"""Rate limits as HTTP tells them, and that gRPC has the same."""

from __future__ import annotations

import re

import grpc
from grpc_status import rpc_status
from web import GREEDY, error_of, executor_of, make_engine, serving

from wicore_trt.access.admission import Admission, Rates
from wicore_trt.config import ServerSettings
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc
from wicore_trt.serve.server import GrpcServer


async def test_answers_tell_what_is_left():
    async with serving(requests_per_minute=10, tokens_per_minute=1000) as running:
        found = await running.completion(max_tokens=5)
        headers = {k: v for k, v in found.headers.items() if k.startswith("x-ratelimit")}
        assert headers["x-ratelimit-limit-requests"] == "10" and headers["x-ratelimit-limit-tokens"] == "1000"
        assert headers["x-ratelimit-remaining-requests"] == "9"
        assert headers["x-ratelimit-remaining-tokens"] == "990"
        assert re.fullmatch(r"\d+(\.\d+)?s|\d+ms", headers["x-ratelimit-reset-requests"])
        streamed = await running.completion(max_tokens=5, stream=True)
        assert streamed.headers["x-ratelimit-remaining-requests"] == "8"
        assert "x-ratelimit-limit-requests" not in (await running.client.get("/v1/models")).headers


async def test_too_many_requests_are_told_when_to_come_back():
    async with serving(requests_per_minute=3) as running:
        codes = [(await running.completion(prompt=["a", "b"])).status_code, (await running.chat()).status_code]
        assert codes == [200, 200], "a prompt counts as one"
        steps = len(executor_of(running.engine).steps)
        for ask in (running.completion, running.chat):
            found = await ask(stream=True)
            assert found.status_code == 429 and error_of(found)["code"] == "rate_limit_exceeded"
            assert 1 <= int(found.headers["retry-after"]) <= 20
            assert 0 < int(found.headers["retry-after-ms"]) <= 20_000
            assert found.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(executor_of(running.engine).steps) == steps
        assert (await running.client.get("/v1/models")).status_code == 200, "only generations count"


async def test_tokens_that_were_not_used_come_back():
    async with serving(tokens_per_minute=1000) as running:
        for _ in range(8):
            found = await running.completion(max_tokens=900, stop=["\x20", ";", "F"])
            assert found.status_code == 200, "none of them took what it reserved"


async def test_both_ways_into_the_server_count_together():
    settings = ServerSettings(port=0, http_port=0)
    admission = Admission.from_settings(settings)
    object.__setattr__(admission, "rates", Rates(requests_per_minute=2, clock=lambda: 0.0))
    engine = make_engine()
    grpc_server = GrpcServer(settings, admission=admission)
    async with serving(engine) as running:
        running.server.context.admission = admission
        address = await grpc_server.start_listening()
        grpc_server.service.engine = engine
        assert (await running.completion()).status_code == 200
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            message = pb2.GenerateRequest(text="hello", sampling=pb2.SamplingParams(max_tokens=3, **GREEDY))
            assert [m async for m in stub.Generate(message)]
            call = stub.Generate(message)
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            status = await rpc_status.aio.from_call(call)
            assert any(detail.type_url.endswith("google.rpc.RetryInfo") for detail in status.details)
        assert (await running.completion()).status_code == 429
        await grpc_server.stop_listening(0)


async def test_origins_and_rates_change_while_the_server_runs():
    async with serving(requests_per_minute=5) as running:
        for _ in range(2):
            assert (await running.completion()).status_code == 200
        page = {"origin": "https://chat.example.org"}
        assert "access-control-allow-origin" not in (await running.client.get("/health", headers=page)).headers
        changed = ServerSettings(requests_per_minute=1, cors_origins=(page["origin"],))
        running.server.change(changed)
        running.server.context.admission.apply_settings(changed)
        answer = await running.client.get("/health", headers=page)
        assert answer.headers["access-control-allow-origin"] == page["origin"]
        answer = await running.completion()  # three were left, and a bucket holds one now
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        assert (await running.completion()).status_code == 429
        running.server.context.admission.apply_settings(ServerSettings())
        assert (await running.completion()).status_code == 200
