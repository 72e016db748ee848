"""Raw sockets against the server: messages that never end, readers that stop, trailers, HTTP/2 offers, refusals."""

from __future__ import annotations

import asyncio
import gc
import json
import socket as stdlib_socket
from contextlib import asynccontextmanager, suppress

import pytest
import websockets
from web import GREEDY, TOKENIZER, make_engine, serving, until
from websockets.streams import StreamReader

from wicore_trt.http import protocol
from wicore_trt.http.intake import BLOCK, BodyBudget

KEY = "a-key-of-an-operator"
SHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def begun(size: int) -> bytes:
    """The head of a masked text frame of so many bytes."""
    return bytes([0x81, 0xFF]) + size.to_bytes(8, "big") + bytes(4)


@asynccontextmanager
async def shaken(running):
    """A WebSocket by hand."""
    reader, writer = await asyncio.open_connection(*running.address)
    writer.write(SHAKE)
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def buffered() -> int:
    """Bytes that parsers of WebSockets hold."""
    return sum(len(found.buffer) for found in gc.get_objects() if type(found) is StreamReader)


async def test_a_message_that_has_not_come_whole_counts_as_a_body_does():
    async with serving() as running:
        running.server.context.body_budget = room = BodyBudget(40)
        async with shaken(running) as (_, first), shaken(running) as (refused, second):
            first.write(begun(3 << 20) + bytes(30 * BLOCK))
            await until(lambda: room.taken_places >= 30)
            second.write(begun(3 << 20) + bytes(20 * BLOCK))
            [close] = {(await refused.readexactly(4))[2:]}
            assert int.from_bytes(close, "big") == 1013
            await until(lambda: 30 <= room.taken_places <= 31)
            plain = await running.completion(prompt="x" * 900_000)
            assert plain.status_code == 429, "they share what there is"
        await until(lambda: not room.taken_places)


async def test_what_a_connection_leaves_behind_is_freed_without_the_collector():
    async with serving() as running:
        gc.disable()
        try:
            for _ in range(3):
                async with shaken(running) as (_, writer):
                    writer.write(begun(3 << 20) + bytes(2 << 20))
                    await until(lambda: buffered() >= 1 << 20)
                await until(lambda: not running.server._state.connections)
                assert buffered() == 0
        finally:
            gc.enable()


async def test_a_message_that_does_not_end_ends_its_connection(monkeypatch):
    monkeypatch.setattr(protocol, "READ_S", 0.2)
    async with serving() as running:
        async with shaken(running) as (reader, writer):
            writer.write(bytes([0x01, 0x81, 0, 0, 0, 0]) + b"a")  # a fragment, and frames between that say nothing
            for _ in range(3):
                writer.write(bytes([0x8A, 0x80, 0, 0, 0, 0]))
                await asyncio.sleep(0.02)
            head = await asyncio.wait_for(reader.readexactly(4), 60)
            assert int.from_bytes(head[2:], "big") == 1008
        async with websockets.connect(running.url.replace("http", "ws", 1) + "/v1/stream") as connection:
            await asyncio.sleep(0.3)  # one that is silent stays
            await connection.send(json.dumps({"type": "cancel", "id": "x"}))
            assert json.loads(await connection.recv())["type"] == "error"


async def test_messages_that_wait_count():
    """A reader that stops holds up the answers to its messages, and these."""
    async with serving() as running:
        room = running.server.context.body_budget
        async with shaken(running) as (_, writer):
            for _ in range(200):
                writer.write((bytes([0x81, 0x81, 0, 0, 0, 0]) + b"{") * 2000)
                await asyncio.sleep(0)
            await until(lambda: room.taken_places * BLOCK > 500 * protocol.MESSAGE_BYTES)
        await until(lambda: not room.taken_places)


async def test_a_reader_that_stops_is_no_fault_of_the_server(caplog):
    async with serving(make_engine(logprobs=True)) as running:
        config = running.server._config
        config.ws_ping_interval = config.ws_ping_timeout = 0.3
        with stdlib_socket.socket() as silent:
            silent.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_RCVBUF, 4096)
            silent.connect(running.address)
            silent.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(silent, SHAKE)
            assert b" 101 " in await loop.sock_recv(silent, 4096)
            for number in range(8):
                fields = {"prompt": "p", "max_tokens": 900, "logprobs": 5, **GREEDY}
                body = json.dumps({"type": "generate", "id": str(number), **fields}).encode()
                await loop.sock_sendall(silent, bytes([0x81, 0xFE]) + len(body).to_bytes(2, "big") + bytes(4) + body)
            await until(lambda: running.server.context.open)
            await until(lambda: not running.server._state.connections)
        await until(lambda: not running.server.context.open)
    assert "Traceback" not in caplog.text and " 500" not in caplog.text


async def test_an_origin_that_is_no_url_is_refused():
    async with serving() as running:
        head = SHAKE.replace(b"host: localhost", b"host: localhost\r\norigin: http://[")
        assert (await _raw(running, head)).split()[1] == b"403"


async def test_a_trailer_is_no_header():
    async with serving(api_key=KEY) as running:
        head = "POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
        head += 'x-api-key: {}\r\n\r\nf\r\n{{"prompt":"hi"}}\r\n0\r\n{}\r\n'
        key = f"authorization: Bearer {KEY}\r\n"
        assert (await _raw(running, head.format("none", key).encode())).split()[1] == b"401"
        assert (await _raw(running, head.format(KEY, key).encode())).split()[1] == b"200"


@pytest.mark.parametrize("offer", ["h2c", "foo"])
async def test_who_offers_another_protocol_is_answered_in_this_one(offer):
    """curl --http2 and Java's HttpClient offer h2c with their first request."""
    async with serving() as running:
        body = b'{"prompt":"hi"}'
        head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nupgrade: {offer}\r\n"
        head += f"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAE\r\ncontent-length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(*running.address)
        for parts in ((head.encode() + body,), (head.encode(), body), (head[:50].encode(), head[50:].encode() + body)):
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.02)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.split()[1] == b"200"
            size = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert json.loads(await reader.readexactly(size))["tokens"] == TOKENIZER.encode("hi")
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        SHAKE.replace(b"\r\n\r\n", b"\r\ncookie: " + b"a" * 9000 + b"\r\n\r\n"),
        SHAKE.replace(b"\r\n\r\n", b"\r\nx: y" * 150 + b"\r\n\r\n"),
        SHAKE.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\ncontent-length: 2\r\n\r\n{}"),
    ],
)
async def test_who_opens_no_websocket_reads_why(head):
    async with serving() as running:
        reader, writer = await asyncio.open_connection(*running.address)
        writer.write(head)
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.split()[1] == b"400" and b"This opens no WebSocket" in answer
        writer.close()


@pytest.mark.parametrize("coding", ["content-length: {}", "transfer-encoding: chunked"])
async def test_who_sends_too_much_reads_why(coding, monkeypatch):
    """A client that sends all of its body before it reads, as most do."""
    monkeypatch.setattr(protocol, "LINGER_S", 60.0)
    size = 24 << 20
    async with serving(max_message_mb=1, api_key=KEY) as running:
        for key, status in ((KEY, b"413"), ("wrong", b"401")):
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{coding.format(size)}\r\n"
            )
            head += "content-type: application/json\r\n\r\n" + (f"{size:x}\r\n" if "chunked" in coding else "")
            answer = await asyncio.to_thread(_sent_first, running.address, head.encode(), size)
            assert answer.split()[1] == status and b"connection: close" in answer.lower()


async def test_who_sends_too_long_a_head_reads_why(monkeypatch):
    monkeypatch.setattr(protocol, "LINGER_S", 60.0)
    async with serving() as running:
        head = b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 1000
        answer = await asyncio.to_thread(_sent_first, running.address, head, 24 << 20)
        assert answer.split()[1] == b"431"


async def test_who_goes_on_sending_is_cut_off(monkeypatch):
    monkeypatch.setattr(protocol, "LINGER_S", 0.3)
    async with serving(api_key=KEY) as running:
        reader, writer = await asyncio.open_connection(*running.address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n")
        assert b" 401 " in await reader.readuntil(b"\r\n\r\n")
        with pytest.raises(OSError):
            async with asyncio.timeout(60):
                while True:
                    writer.write(bytes(1000))
                    await writer.drain()
                    await asyncio.sleep(0.01)
        await until(lambda: not running.server._state.connections)


def _sent_first(address, head: bytes, size: int) -> bytes:
    with stdlib_socket.create_connection(address, timeout=60) as client:
        client.sendall(head)
        for _ in range(size >> 16):
            client.sendall(b"y" * (1 << 16))
        answer = b""
        while b"\r\n\r\n" not in answer and (got := client.recv(1 << 16)):
            answer += got
        return answer


async def _raw(running, request: bytes) -> bytes:
    """The head of an answer."""
    reader, writer = await asyncio.open_connection(*running.address)
    writer.write(request)
    answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return answer


async def test_who_is_refused_before_the_body_is_asked_for_is_no_fault_of_the_server(caplog):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"expect: 100-continue\r\ncontent-length: 15\r\n\r\n"
    )
    async with serving() as running:
        reader, writer = await asyncio.open_connection(*running.address)
        writer.write(head + b'{"prompt": "a"}' + b"no HTTP\r\n\r\n")
        told = await reader.read()
        writer.close()
        counts = running.server.context.admission.counts.http
        await until(lambda: counts.total() == 1)
    assert told.startswith(b"HTTP/1.1 400 ") and b"not valid HTTP" in told
    assert "Traceback" not in caplog.text and " 500" not in caplog.text
