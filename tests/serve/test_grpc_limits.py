"""What a client can make the server hold: silent calls, messages, calls at once, watches, a log that nobody reads."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import grpc
import psutil
import pytest
import raw_http2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from serving import HERE, SERVICE, details_of, failure, make_engine, process, request, rest_of, serving, until

from wicore_trt.access import admission
from wicore_trt.access.admission import find_message_limit
from wicore_trt.access.log import QUIET_S
from wicore_trt.serve import intake
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc

KEY = "the-operators-own-key"
METADATA = (("x-api-key", KEY),)
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def silent(channel, method: str, metadata=None):
    """A call that sends its headers and nothing more."""
    return channel.stream_stream(method)(metadata=metadata)


async def test_calls_without_the_key_end_before_anything_is_read():
    """A gzip message of 60 KB that unpacks to 60 MiB, twice, and 300 streams that never send."""
    async with process(server={"api_key": KEY, "max_message_mb": 64}) as server:
        await server.until_serving()
        memory = psutil.Process(server.process.pid).memory_info
        await server.stub.GetServerInfo(pb2.GetServerInfoRequest(), metadata=METADATA)
        before, peak, begun = memory().rss, 0, time.monotonic()
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            bomb = channel.unary_unary(SERVICE + "Generate")
            calls = [bomb(bytes(60 << 20), compression=grpc.Compression.Gzip, timeout=60) for _ in range(2)]
            codes = asyncio.gather(*(call.code() for call in calls))
            while not codes.done():
                peak = max(peak, memory().rss)
                await asyncio.sleep(0.005)
            assert set(codes.result()) == {grpc.StatusCode.UNAUTHENTICATED}
            assert peak - before < 40 << 20, f"{(peak - before) >> 20} MiB were taken"
            quiet = [silent(channel, SERVICE + "Generate") for _ in range(300)]
            assert set(await asyncio.gather(*(call.code() for call in quiet))) == {grpc.StatusCode.UNAUTHENTICATED}
        server.process.terminate()
        _, log = await server.end()
        lines = [line for line in log.splitlines() if "without a valid API key" in line]
        assert (
            1 <= len(lines) <= 2 + (time.monotonic() - begun) // QUIET_S
            and "peer=ipv4:127.0.0.1:" in lines[0]
            and KEY not in log
        )


async def test_a_compressed_message_is_not_unpacked_beyond_the_limit():
    async with process() as server:
        await server.until_serving()
        memory = psutil.Process(server.process.pid).memory_info
        before = memory().rss
        async with grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel:
            call = channel.unary_unary(SERVICE + "Tokenize")(bytes(64 << 20), compression=grpc.Compression.Gzip)
            assert await call.code() is EXHAUSTED
        assert memory().rss - before < 40 << 20


async def test_a_call_that_sends_nothing_ends_and_gives_its_place_back(monkeypatch):
    monkeypatch.setattr(admission, "MAX_CALLS", 50)
    async with serving() as running:
        info = running.channel.unary_unary(SERVICE + "GetServerInfo")
        methods = [SERVICE + "Generate", SERVICE + "GetStats", "/grpc.health.v1.Health/Check"]
        with monkeypatch.context() as hurried:  # for silent calls alone: the others may take their time
            hurried.setattr(intake, "READ_S", 0.2)
            for method in methods:
                code, message, _ = await failure(silent(running.channel, method))
                assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "No request came" in message
        reflect = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        watch = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == 1
        listing = reflect.ServerReflectionInfo()
        await listing.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await listing.read()).list_services_response.service
        ended = silent(running.channel, SERVICE + "GetStats")
        await ended.done_writing()
        code, _, details = await failure(ended)
        assert code is grpc.StatusCode.INVALID_ARGUMENT and details["BadRequest"].field_violations[0].field == "request"
        assert await info(b"") and not watch.done()
        watch.cancel()
        monkeypatch.setattr(intake, "READ_S", 0.0)
        last = reflect.ServerReflectionInfo()  # a stream that sends nothing ends well
        assert await last.read() is grpc.aio.EOF and await last.code() is grpc.StatusCode.OK
        listing.cancel()
        interceptor = running.server._guard
        await until(lambda: interceptor._calls.taken_places == 0 and interceptor._watches.taken_places == 0)


async def test_four_hundred_calls_at_once_are_answered_or_told_when_to_come_back(tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    async with process(hold=str(hold)) as server:  # ten steps end 80 requests at most; 16 run and 100 wait
        await server.until_serving()
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(server.address, options=options) for _ in range(8)]
        outcomes: Counter[object] = Counter()

        async def one(i: int) -> None:
            stub = inference_pb2_grpc.InferenceServiceStub(channels[i % 8])
            call = stub.Generate(request(f"hello{i}", 2))
            try:
                async for _ in call:
                    pass
                outcomes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                details = details_of(await rpc_status.aio.from_call(call))
                assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0
                outcomes[error.code()] += 1

        answers = asyncio.gather(*map(one, range(400)))
        await until(lambda: outcomes[EXHAUSTED] >= 200)
        hold.unlink()
        await answers
        assert set(outcomes) == {"OK", EXHAUSTED} and outcomes["OK"] >= 100, outcomes
        for channel in channels:
            await channel.close()
        server.process.terminate()
        assert (await server.end())[0] == 0


async def test_calls_and_watches_at_once_are_limited(monkeypatch):
    async with serving(make_engine(step_s=0.01)) as running:
        monkeypatch.setattr(running.server._guard._calls, "_places", 5)
        monkeypatch.setattr(running.server._guard._watches, "_places", 6)  # half of them for one address
        calls = [running.stub.Generate(request(str(i), 900)) for i in range(5)]
        for call in calls:
            await call.read()
        for more in (running.stub.Generate(request()), running.stub.GetStats(pb2.GetStatsRequest())):
            code, message, details = await failure(more)
            assert code is EXHAUSTED and "no room for more calls" in message and "RetryInfo" in details
        health = health_pb2_grpc.HealthStub(running.channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        for watch in watches:
            await watch.read()
        assert (await failure(health.Watch(health_pb2.HealthCheckRequest())))[0] is EXHAUSTED
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1, "a health check has no such limit"
        for call in (*calls, *watches):
            call.cancel()


COUNTED = {
    "chat.messages": lambda n: request("").FromString(
        pb2.GenerateRequest(chat=pb2.Chat(messages=[{}] * n)).SerializeToString()
    ),
    "token_ids": lambda n: pb2.GenerateRequest(token_ids=pb2.TokenIds(ids=[5] * n)),
    "sampling.stop": lambda n: request("a", stop=["a"] * n),
    "sampling.stop_token_ids": lambda n: request("a", stop_token_ids=[5] * n),
}


@pytest.mark.parametrize("path", COUNTED)
async def test_many_items_are_counted_before_they_are_converted(path, monkeypatch):
    async with serving() as running:
        message = COUNTED[path](200_000)
        started = time.process_time()
        code, text, details = await failure(running.stub.Generate(message))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "200000 items" in text
        assert details["BadRequest"].field_violations[0].field == path
        assert time.process_time() - started < 5
    many = pb2.DetokenizeRequest(token_ids=[5] * 200_000)
    async with serving() as running:
        assert (await failure(running.stub.Detokenize(many)))[2]["BadRequest"].field_violations[0].field == "token_ids"


def test_the_message_limit_follows_from_the_context():
    assert find_message_limit(None) == find_message_limit(512) == 4 << 20
    assert find_message_limit(32_768) == 4 << 20 and find_message_limit(131_072) == 16 << 20


async def test_a_watcher_that_reads_nothing_holds_up_no_change_of_status():
    async with process() as server:
        await server.until_serving()
        watch = raw_http2.call(server.address, b"/grpc.health.v1.Health/Watch", window=0)
        watch.sendall(raw_http2.frame(raw_http2.DATA, 0, 1, bytes(5)))
        watch.settimeout(60)
        assert watch.recv(4096)
        server.process.terminate()
        assert (await server.end())[0] == 0
        watch.close()


async def test_a_log_that_nobody_reads_hangs_nothing_and_says_what_it_lost():
    """A pipe holds 64 KiB; 800 access lines are some 130 KiB. SIGTERM ends the process in spite of it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    done = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, str(HERE / "fake_server.py"), "{}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
    )  # fmt: skip
    try:
        address = (await asyncio.to_thread(done.stdout.readline)).decode().strip()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for _ in range(8):
                calls = [stub.Generate(request("x", 1), wait_for_ready=True) for _ in range(100)]
                assert all(await asyncio.gather(*map(rest_of, calls)))
        done.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(done.wait, 60) == 0
    finally:
        done.kill()
        done.wait()
        done.stderr.close()


async def test_a_server_that_everybody_reaches_without_a_key_says_so():
    async with process(server={"host": "0.0.0.0", "insecure": True}) as server:
        await server.until_serving()
        server.process.terminate()
        assert "set server.api_key or server.keys_file" in (await server.end())[1]
