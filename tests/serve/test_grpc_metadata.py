"""Metadata that no library of gRPC sends: not UTF-8, without end, from clients that never acknowledge settings."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    HEALTH_CHECK,
    PREFACE,
    SETTINGS,
    connect,
    frame,
    headers,
    literal,
)
from serving import SERVICE, failure, process, serving

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2

KEY = "the-operators-own-key"
NEWEST = b"\xbe"
"""The header that was added to the dynamic table last."""


def answer(address: str, path: bytes, *fields: bytes) -> bytes:
    """What comes back for a call with an empty message whose header block is that of `path` and these fields."""
    with connect(address) as opened:
        opened.settimeout(60)
        block = headers(path) + b"".join(fields)
        opened.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, block))
        opened.sendall(frame(DATA, END_STREAM, 1, bytes(5)))
        got = b""
        while not ended(got):
            piece = opened.recv(1 << 16)
            assert piece, got
            got += piece
        return got


def ended(got: bytes) -> bool:
    """Whether the headers that end a stream are there to their last byte; they come in as many pieces as they like."""
    at = 0
    while at + 9 <= len(got):
        size, kind, flags = int.from_bytes(got[at : at + 3], "big"), got[at + 3], got[at + 4]
        at += 9 + size
        if kind == HEADERS and flags & END_STREAM:
            return at <= len(got)
    return False


async def test_metadata_that_are_no_text_are_not_in_the_log():
    async with process(server={"api_key": KEY}) as server:
        await server.until_serving()
        refused = answer(
            server.address, SERVICE.encode() + b"Generate", literal(b"authorization", b"Bearer %b\xff" % KEY.encode())
        )
        assert b"API key" in refused
        server.process.terminate()
        code, log = await server.end()
        assert code == 0 and "without a valid API key" in log
        assert KEY not in log and "Traceback" not in log


async def test_metadata_are_bounded_also_before_settings_are_acknowledged():
    many = b"\x40" + bytes([1]) + b"a" + b"\0", 600
    long = b"\x40" + bytes([1]) + b"a" + bytes([100]) + b"v" * 100, 150
    async with process() as server:
        await server.until_serving()
        for path in (HEALTH_CHECK, f"{SERVICE}GetStats".encode(), b"/nobody/Knows"):
            for added, repeats in (many, long):
                got = answer(server.address, path, added, NEWEST * repeats)
                assert b"grpc-status\x013" in got and b"metadata have more than 16384 bytes" in got, (path, repeats)
                assert b"metadata have" not in answer(server.address, path, added, NEWEST * 90), (path, repeats)


async def test_metadata_within_the_limit_are_always_taken_and_beyond_it_never():
    """gRPC's own default refuses some of the calls with more than 8 KiB."""
    async with serving() as running:

        async def code(size: int) -> grpc.StatusCode:
            call = running.stub.GetModelInfo(pb2.GetModelInfoRequest(), metadata=[("x-baggage", "v" * size)])
            return await call.code()

        assert {await code(15_000) for _ in range(20)} == {grpc.StatusCode.OK}
        assert {await code(17_000) for _ in range(5)} == {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def test_exceptions_of_other_services_are_told_to_the_log_alone(monkeypatch, caplog):
    async with serving() as running:
        monkeypatch.setattr(running.server._health, "_statuses", 5)
        code, message, _ = await failure(
            health_pb2_grpc.HealthStub(running.channel).Check(health_pb2.HealthCheckRequest())
        )
        assert code is grpc.StatusCode.INTERNAL
        assert "int" not in message.replace("Internal", "") and "log" in message
        assert any(record.exc_info and "failed unexpectedly" in record.getMessage() for record in caplog.records)
