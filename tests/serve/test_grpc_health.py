"""Health checks and reflection with bytes, silence and watches that no probe sends; plain probes are answered."""

from __future__ import annotations

import asyncio
import gzip
import random
import struct
from pathlib import Path

import grpc
import psutil
import pytest
import raw_http2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import SERVICE, failure, process, serving, until

from wicore_trt.serve import intake
from wicore_trt.serve.intake import find_host

CHECK = "/grpc.health.v1.Health/Check"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
OWN = [("grpc.use_local_subchannel_pool", 1)]


async def test_large_health_requests_take_little_memory_and_plain_checks_are_answered():
    """Of three servers one must: a machine that stalls lets many messages come before the first is let go of."""
    taken = [await memory_taken()]
    while taken[-1] >= 100 << 20 and len(taken) < 3:
        taken.append(await memory_taken())
    assert taken[-1] < 100 << 20, f"{[count >> 20 for count in taken]} MiB were taken"


async def memory_taken() -> int:
    """Bytes that a server takes for 150 gzip messages of 4 KB that unpack to 4 MiB each, without a key."""
    async with process(server={"api_key": "the-operators-own-key"}) as server:
        await server.until_serving()
        before = psutil.Process(server.process.pid).memory_info().rss
        packed = gzip.compress(health_pb2.HealthCheckRequest(service="x" * ((4 << 20) - 100)).SerializeToString())
        message = b"\x01" + struct.pack(">I", len(packed)) + packed
        fields = raw_http2.headers(CHECK.encode(), grpc_encoding=b"gzip")
        calls = b"".join(
            raw_http2.frame(raw_http2.HEADERS, raw_http2.END_HEADERS, i, fields)
            + raw_http2.frame(raw_http2.DATA, raw_http2.END_STREAM, i, message)
            for i in range(1, 20, 2)
        )
        sockets = [raw_http2.connect(server.address) for _ in range(15)]
        for opened in sockets:
            opened.sendall(raw_http2.PREFACE + raw_http2.frame(raw_http2.SETTINGS, 0, 0) + calls)
        async with asyncio.timeout(60):
            answered = 0
            while answered < 50:
                try:
                    assert await server.status() == 1
                    answered += 1
                except grpc.aio.AioRpcError as error:  # on a busy machine its message may be later than its turn
                    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                await asyncio.sleep(0.01)
        for opened in sockets:
            opened.close()
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
        return peak - before


async def test_silent_health_calls_give_way_to_one_that_sends():
    async with serving() as running, grpc.aio.insecure_channel(running.address, options=OWN) as channel:
        silent = [channel.stream_stream(CHECK)() for _ in range(5 * intake.READS)]
        interceptor = running.server._guard
        await until(lambda: interceptor._checks.taken_places == len(silent))
        check = health_pb2_grpc.HealthStub(running.channel).Check
        assert (await asyncio.wait_for(check(health_pb2.HealthCheckRequest()), 60)).status == 1
        code, message, _ = await failure(silent[0])
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "others wait" in message
        for call in silent:
            call.cancel()
        await until(lambda: interceptor._checks.taken_places == 0)
        assert not interceptor._brief._reading and interceptor._brief._free == intake.READS


class Silent:
    """The context of a call; `raw` comes with it, or nothing ever."""

    def __init__(self, raw: bytes | None = None) -> None:
        self.raw = raw

    async def read(self) -> bytes:
        return self.raw if self.raw is not None else await asyncio.Future()


@pytest.mark.parametrize("host", ["198.51.100.7", "203.0.113.1"], ids=["another's", "the same"])
async def test_many_silent_health_calls_of_one_address_hold_nobody_up_for_long(host):
    requests, given = intake.BriefRequestReader(), []

    class Reading(dict):
        """Keeps how long each silent call was let wait, which the load of this machine does not change."""

        def pop(self, limit, default=None):
            begun = super().pop(limit, default)
            given.extend([] if limit.when() is None else [limit.when() - begun])
            return begun

    requests._reading = Reading()
    silent = [asyncio.ensure_future(requests.read_request(Silent(), "203.0.113.1")) for _ in range(100)]
    await until(lambda: requests._count == 100 - intake.READS)
    async with asyncio.timeout(60):
        assert await requests.read_request(Silent(b"x"), host) == b"x"
    assert 0 < sum(given) / intake.READS < (0.2 if host == "198.51.100.7" else 1.8)
    for task in silent:
        task.cancel()
    await asyncio.gather(*silent, return_exceptions=True)
    assert requests._free == intake.READS and not requests._count and not requests._reading


async def test_places_for_health_requests_outlast_cancelled_calls():
    requests, rng = intake.BriefRequestReader(), random.Random(1)
    for _ in range(20):
        calls = [Silent(b"x") if rng.random() < 0.5 else Silent() for _ in range(20)]
        tasks = [asyncio.ensure_future(requests.read_request(call, str(i % 3))) for i, call in enumerate(calls)]
        for task in rng.sample(tasks, 20):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (
        requests._free == intake.READS
        and not requests._count
        and await requests.read_request(Silent(b"y"), "0") == b"y"
    )


async def test_a_lone_silent_health_call_has_its_time(monkeypatch):
    monkeypatch.setattr(intake, "HURRY_S", 0.01)
    async with serving() as running:
        call = running.channel.stream_stream(CHECK)()
        await asyncio.sleep(0.1)
        await call.write(b"")
        assert await call.read() == b"\x08\x01"


async def test_one_address_takes_no_more_than_its_share_of_the_watches(monkeypatch):
    async with serving() as running:
        monkeypatch.setattr(running.server._guard._watches, "_places", 8)
        health = health_pb2_grpc.HealthStub(running.channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(4)]
        for watch in watches:
            await watch.read()
        assert (await asyncio.wait_for(failure(health.Watch(health_pb2.HealthCheckRequest())), 60))[0] is EXHAUSTED
        with running.server._guard._watches.hold_place("198.51.100.7"):
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        for watch in watches:
            watch.cancel()


@pytest.mark.parametrize("method", [CHECK, "/grpc.health.v1.Health/Watch", REFLECT, SERVICE + "GetStats"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(method, caplog):
    async with serving() as running:
        for raw in (b"\x0a\xff", b"\xff\xff\xff"):
            call = running.channel.stream_stream(method)()
            await call.write(raw)
            code, message, _ = await failure(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, message
            assert "not a valid message" in message
    assert "Traceback" not in caplog.text and not [r for r in caplog.records if r.levelname == "ERROR"]


def test_callers_are_told_apart_by_address():
    assert find_host("ipv4:10.0.0.1:4711") == find_host("ipv6:%5B::ffff:10.0.0.1%5D:4711") == "10.0.0.1"
    assert find_host("ipv6:%5B2001:db8::1%5D:1") == find_host("ipv6:[2001:db8::2%25eth0]:9") == "2001:db8::/64"
    assert find_host("unix:") == find_host("unix:/run/x") == "unix" and find_host("") == "unknown"
