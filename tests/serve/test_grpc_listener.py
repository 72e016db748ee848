"""A request that gRPC cannot decode, from a client without a key: the port stays open and the streams go on."""

from __future__ import annotations

import asyncio
import random
import socket

import grpc
import pytest
from raw_http2 import call
from serving import expected, process, request, rest_of

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc

UNDECODABLE = (b"/\xff", b"/a\xe3", b"/wicore.inference.v1.InferenceService/\xc3")
KEY = "the-operators-own-key"
LOST = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
METADATA = (("x-api-key", KEY),)


async def attacked(address: str, path: bytes) -> socket.socket:
    """A connection that called `path` after the server greeted it; it is not answered."""
    while True:
        try:
            opened = call(address, path)
            opened.settimeout(60)
            if opened.recv(4096):
                return opened
        except OSError:  # the listener was broken by the call before
            pass
        await asyncio.sleep(0.005)


async def ask(address: str) -> str:
    """The answer to a new request. One that comes in the very moment of an attack is lost and is to be tried again."""
    async with asyncio.timeout(60), grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        while True:
            answer = stub.Generate(request("new", 5), metadata=METADATA, wait_for_ready=True, timeout=5)
            try:
                return "".join([r.delta.text or r.finish.delta.text async for r in answer])
            except grpc.aio.AioRpcError as error:
                assert error.code() in LOST, error


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_path_that_is_no_text_closes_the_port_for_a_moment_and_ends_no_stream(kind, tmp_path):
    host = "127.0.0.1" if kind == "tcp" else f"unix:{tmp_path}/socket"
    async with process(step_s=0.01, server={"host": host, "api_key": KEY}) as server:
        await server.until_serving()
        stream = server.stub.Generate(request("old", 300), metadata=METADATA)
        first = await stream.read()
        held = []
        for path in UNDECODABLE:
            held.append(await attacked(server.address, path))
            assert await ask(server.address) == expected("new", 5)[0]
        if kind == "unix":  # a socket that was removed is made again
            (tmp_path / "socket").unlink(missing_ok=True)  # gRPC may just have removed it with a broken server
            assert await ask(server.address) == expected("new", 5)[0]
        texts = [r.delta.text or r.finish.delta.text for r in [first, *await rest_of(stream)]]
        assert "".join(texts) == expected("old", 300)[0]
        server.process.terminate()  # the attackers' connections are still open
        code, log = await server.end()
        assert code == 0 and log.count("gRPC listener stopped (") >= 1, log
        for connection in held:
            connection.close()


async def test_sixty_attacks_in_a_row_leave_little_of_a_log_and_a_server_that_answers():
    rng = random.Random(1)
    async with process() as server:
        await server.until_serving()
        for _ in range(60):
            (await attacked(server.address, bytes([47, rng.randrange(0x80, 0x100)]))).close()
        assert await ask(server.address) == expected("new", 5)[0]
        server.process.terminate()
        code, log = await server.end()
        assert code == 0 and len(log.splitlines()) < 60, log


async def test_attacks_while_others_call_do_not_end_the_process():
    """What the core still writes into must not be freed when a listener breaks: the process would crash."""
    async with process() as server:
        await server.until_serving()
        done = asyncio.Event()

        async def keep_asking() -> None:
            while not done.is_set():
                assert await ask(server.address) == expected("new", 5)[0]

        asking = [asyncio.ensure_future(keep_asking()) for _ in range(4)]
        for _ in range(100):
            (await attacked(server.address, b"/\xff")).close()
            assert server.process.returncode is None, (await server.end())[1]
        done.set()
        await asyncio.gather(*asking)
        server.process.terminate()
        code, log = await server.end()
        assert code == 0, log
