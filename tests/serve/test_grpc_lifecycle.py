"""A server process from start to exit: signals, drain, exit codes, failures while loading and serving."""

from __future__ import annotations

import json
import signal
import time

import grpc
from grpc_health.v1 import health_pb2
from serving import expected, failure, process, request, rest_of

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    async with process(step_s=0.01, json=True, hold=str(hold)) as server:
        await server.until_serving()
        call = server.stub.Generate(request("keep me", 100))
        first = await call.read()
        server.process.send_signal(signal.SIGTERM)
        await server.until_status(NOT_SERVING)
        code, message, _ = await failure(server.stub.Generate(request()))
        assert code is grpc.StatusCode.UNAVAILABLE and "shutting down" in message
        info = await server.stub.GetServerInfo(pb2.GetServerInfoRequest())
        assert info.state == pb2.SERVER_STATE_DRAINING
        hold.unlink()
        responses = [first, *await rest_of(call)]
        text = "".join(r.delta.text or r.finish.delta.text for r in responses)
        assert text == expected("keep me", 100)[0]
        assert responses[-1].finish.reason == pb2.FINISH_REASON_LENGTH
        exit_code, log = await server.end()
        assert exit_code == 0, log
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        (access,) = [line for line in lines if line["logger"] == "wicore_trt.access" and line["code"] == "OK"]
        assert access["tokens"] == 100 and access["finish"] == "length"


async def test_requests_that_outlast_the_grace_are_cancelled_and_the_exit_code_says_so():
    async with process(step_s=0.02, server={"grace_s": 0.3}) as server:
        await server.until_serving()
        call = server.stub.Generate(request(max_tokens=1000))
        await call.read()
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        responses = await rest_of(call)
        assert responses[-1].finish.reason == pb2.FINISH_REASON_CANCELLED
        exit_code, log = await server.end()
        assert exit_code == 1 and "were cancelled" in log
        assert time.monotonic() - started >= 0.3


async def test_health_is_not_serving_while_loading_and_a_signal_then_ends_it():
    async with process(load_s=60) as server:
        assert await server.status() == NOT_SERVING
        code, _, _ = await failure(server.stub.Generate(request()))
        assert code is grpc.StatusCode.UNAVAILABLE
        server.process.send_signal(signal.SIGTERM)
        exit_code, log = await server.end(timeout_s=30)
        assert exit_code == 0 and "stopped while loading" in log


async def test_an_engine_that_cannot_be_loaded_ends_the_process_with_its_code():
    async with process(load_fails=True) as server:
        exit_code, log = await server.end()
        assert exit_code == 4 and "error: engine.json is missing." in log and "Traceback" not in log
