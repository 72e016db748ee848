"""Clients that leave, read slowly, send slowly or send nonsense; what waits for the first token."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress

import pytest
import websockets
from fakes import Gate
from web import GREEDY, error_of, executor_of, expected, make_engine, serving, until

from wicore_trt.access import admission
from wicore_trt.errors import WicoreError
from wicore_trt.http import intake, protocol, replies
from wicore_trt.http.protocol import MAX_HEAD, MAX_HEADERS


def head_of(path: str = "/v1/completions", length: int | None = None, *extra: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *extra]
    lines += [] if length is None else [f"content-length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def request_bytes(**body) -> bytes:
    raw = json.dumps({"prompt": "hello", "max_tokens": 1000, **GREEDY, **body}).encode()
    return head_of("/v1/completions", len(raw)) + raw


@asynccontextmanager
async def connection(running):
    reader, writer = await asyncio.open_connection(*running.address)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def rests(running) -> bool:
    """Nothing is open, and the engine has nothing to do."""
    loop = running.engine.engine._loop
    stats = loop.stats()
    context = running.server.context
    taken = context.admission.calls.taken_places
    return (
        not context.open
        and not taken
        and not context.body_budget.taken_places
        and stats.requests_running == stats.requests_waiting == 0
    )


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"prompt": ["a", "b", "c"], "n": 2, "stream": True}])
async def test_a_client_that_leaves_ends_its_request(body):
    async with serving(make_engine(step_s=0.005)) as running:
        async with connection(running) as (reader, writer):
            writer.write(request_bytes(**body))
            await until(lambda: len(executor_of(running.engine).steps) > 5)
            if body.get("stream"):
                assert await reader.read(1)
            assert running.server.context.open
        await until(lambda: rests(running))
        assert len(executor_of(running.engine).steps) < 900, "the engine did not go on to the end"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_behind_a_second_request(stream, caplog):
    """The first of two requests on the connection is being answered; the second waits for it."""
    async with serving(make_engine(step_s=0.005)) as running:
        async with connection(running) as (_, writer):
            writer.write(request_bytes(stream=stream) + request_bytes())
            await until(lambda: len(executor_of(running.engine).steps) > 5)
        await until(lambda: rests(running))
        assert len(executor_of(running.engine).steps) < 900
    assert "Traceback" not in caplog.text


async def test_bytes_behind_a_request_do_not_end_it(monkeypatch):
    """Some clients send an empty line after a body."""
    monkeypatch.setattr(protocol, "HEAD_S", 0.1)
    async with serving(make_engine(step_s=0.005)) as running, connection(running) as (reader, writer):
        writer.write(request_bytes(stream=True, max_tokens=100) + b"\r\n")
        await until(lambda: executor_of(running.engine).steps)
        writer.write(b"GET /heal")
        answer = b""
        while b"[DONE]" not in answer:
            part = await reader.read(65536)
            assert part, "the connection was closed"
            answer += part
        with suppress(ConnectionError):
            while await reader.read(65536):
                pass


async def test_a_client_that_leaves_while_it_waits_in_the_queue():
    async with serving(make_engine(max_sequences=1)) as running:
        with Gate(executor_of(running.engine)):
            first = asyncio.ensure_future(running.completion(max_tokens=200))
            await until(lambda: running.server.context.open)
            async with connection(running) as (_, writer):
                writer.write(request_bytes(stream=True))
                await until(lambda: running.server.context.open.total() == 2)
            await until(lambda: running.server.context.open.total() == 1)
        assert (await first).status_code == 200


async def test_a_closed_half_of_a_connection_is_a_client_that_left():
    async with serving(make_engine(step_s=0.005)) as running:
        with socket.create_connection(running.address) as half:
            half.sendall(request_bytes())
            await until(lambda: running.server.context.open)
            half.shutdown(socket.SHUT_WR)
            await until(lambda: rests(running))


async def test_a_slow_reader_holds_up_nobody_and_gets_all():
    """The socket takes little, so that the server has to wait; the engine goes on meanwhile."""
    async with serving() as running:
        text = expected("hello", 900)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect(running.address)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(slow, request_bytes(stream=True, max_tokens=900))
            await until(lambda: running.engine.engine._loop.stats().requests_finished.get("length"))
            assert (await running.completion()).status_code == 200
            raw = b""
            while b"[DONE]" not in raw:
                raw += await loop.sock_recv(slow, 4096)
        events = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: {")]
        assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == text


async def test_a_reader_that_takes_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(protocol, "STALL_S", 0.1)
    engine = make_engine(logprobs=True)
    async with serving(engine) as running:
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            stalled.connect(running.address)
            many = ["hello"] * 60
            stalled.sendall(request_bytes(stream=True, max_tokens=1000, logprobs=20, prompt=many, n=1))
            await until(lambda: running.server.context.open)
            await until(lambda: rests(running))


async def test_comments_keep_a_silent_stream_alive(monkeypatch):
    monkeypatch.setattr(replies, "KEEP_ALIVE_S", 0.05)
    body = {"prompt": "x" * 40, "max_tokens": 2, "stream": True, **GREEDY}
    async with serving() as running:
        with Gate(executor_of(running.engine)) as gate:
            async with running.client.stream("POST", "/v1/completions", json=body) as found:
                lines = found.aiter_lines()
                assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2
                gate.let()
                rest = [line async for line in lines if line and line != ": keep-alive"]
    *chunks, last = rest  # tokens that wait together come in one chunk
    assert 1 <= len(chunks) <= 2 and all(line.startswith("data: {") for line in chunks) and last == "data: [DONE]"


async def test_a_stream_that_breaks_ends_with_an_error_event():
    async with serving(make_engine(step_s=0.005)) as running:
        executor_of(running.engine).fail_at = 30
        found = await running.completion(max_tokens=500, stream=True)
        assert found.status_code == 200 and "[DONE]" not in found.text
        last = found.text.rstrip().rpartition("\n\n")[2].split("\n")
        assert last[0] == "event: error"
        assert json.loads(last[1].removeprefix("data: "))["error"]["type"] == "unavailable_error"


async def test_a_request_that_is_aborted_elsewhere_is_an_error():
    async with serving(make_engine(step_s=0.005)) as running:
        for stream in (False, True):
            call = asyncio.ensure_future(running.completion(max_tokens=1000, stream=stream))
            await until(lambda: running.engine._streams and executor_of(running.engine).steps)
            await asyncio.sleep(0.05)
            for opened in list(running.engine._streams.values()):
                running.engine.abort_request(opened.request_id, "")
            found = await call
            assert found.status_code in (200, 499) and "cancelled" in found.text and "[DONE]" not in found.text


async def test_faults_of_ours_tell_nothing_but_the_id(monkeypatch, caplog):
    async def broken(request):
        raise ZeroDivisionError("a secret")

    async with serving() as running:
        monkeypatch.setattr(running.engine, "submit", broken)
        found = await running.completion(stream=True)
        assert found.status_code == 500 and "secret" not in found.text
        assert error_of(found)["message"].endswith(f"{found.headers['x-request-id']}.") and "a secret" in caplog.text
        await until(lambda: rests(running))


async def test_bodies_are_bounded_while_they_come():
    async with serving(max_message_mb=1) as running:
        found = await running.completion(prompt="x" * (1 << 20))
        assert found.status_code == 413 and "1048576" in error_of(found)["message"]
        async with connection(running) as (reader, writer):
            writer.write(head_of("/tokenize", None, "transfer-encoding: chunked"))
            sent = 0
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                while True:
                    writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                    await writer.drain()
                    sent += 65536
                    await asyncio.sleep(0)
            assert sent < 64 << 20
        await until(lambda: rests(running))


async def test_bodies_that_do_not_come(monkeypatch):
    monkeypatch.setattr(intake, "READ_S", 0.1)
    async with serving() as running, connection(running) as (reader, writer):
        writer.write(head_of(length=100) + b'{"prompt"')
        answer = await reader.read()
        assert b" 408 " in answer.splitlines()[0] and b"did not come" in answer
        await until(lambda: rests(running))


async def test_all_bodies_together_are_bounded():
    room, block = intake.BodyBudget(16), intake.BLOCK
    with room.open_share("b") as other:
        with room.open_share("a") as hold:
            hold.grow_to(8 * block - 1)
            hold.grow_to(8 * block)
            with pytest.raises(WicoreError):
                hold.grow_to(8 * block + 1)
            other.grow_to(4 * block)
            with pytest.raises(WicoreError):
                other.grow_to(5 * block)
        other.grow_to(5 * block)
        assert room.taken_places == 5
    assert not room.taken_places and not room._taken


async def test_a_body_has_its_room_until_it_is_answered():
    async with serving(make_engine(step_s=0.01)) as running:
        call = asyncio.ensure_future(running.completion(max_tokens=50))
        await until(lambda: running.server.context.open)
        assert running.server.context.body_budget.taken_places == 1
        await call
        await until(lambda: rests(running))
        monkey = intake.BodyBudget(1)
        running.server.context.body_budget = monkey
        found = await running.completion(prompt="x" * intake.BLOCK)
        assert found.status_code == 429 and found.headers["retry-after"]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /" + b"x" * (2 * MAX_HEAD) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * (MAX_HEAD + 1) + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * (8 * MAX_HEAD), 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS to a port without", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET \x00\xff HTTP/1.1\r\n\r\n", 400),
    ],
)
async def test_heads_that_are_too_long_or_none(raw, status):
    async with serving() as running, connection(running) as (reader, writer):
        writer.write(raw)
        answer = await reader.read(65536)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert f" {status} ".encode() in head.splitlines()[0] and b"x-request-id" in head, answer[:200]
        assert json.loads(body)["error"]["message"]
        assert (await running.client.get("/health")).status_code == 200


async def test_silent_connections_end_and_busy_ones_do_not(monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_S", 1.5)  # shorter than the answer, longer than the busy one's head takes
    async with (
        serving(make_engine(step_s=0.04)) as running,
        connection(running) as (silent, _),
        connection(running) as (dripping, writer),
    ):
        writer.write(b"GET /health HT")
        busy = asyncio.ensure_future(running.completion(max_tokens=60))
        for reader in (silent, dripping):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        assert (await busy).status_code == 200
        assert (await running.client.get("/health")).status_code == 200


async def test_a_connection_that_rested_is_used_again(monkeypatch):
    """The limit for a head runs from its first byte: pools of clients and proxies keep connections for a minute."""
    monkeypatch.setattr(protocol, "HEAD_S", 0.1)
    async with serving() as running, connection(running) as (reader, writer):
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200" in await reader.readuntil(b'{"status":"ok"}')
            await asyncio.sleep(0.4)  # it must outlast the limit; how much later it is asked again does not matter


async def test_connections_have_an_end(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 4)
    async with serving() as running:
        sockets = [await asyncio.open_connection(*running.address) for _ in range(12)]
        await until(lambda: len(running.server._state.connections) <= 4)
        for _, writer in sockets:
            writer.transport.abort()
        await until(lambda: not running.server._state.connections)
        assert (await running.client.get("/health")).status_code == 200


async def test_one_address_leaves_connections_to_others(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_OF_ADDRESS", 4)
    async with serving() as running:
        host, port = running.address

        async def connected(source: str):
            reader, writer = await asyncio.open_connection(host, port, local_addr=(source, 0))
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            with suppress(ConnectionError):
                return writer, await reader.read(12)
            return writer, b""

        greedy = [await connected("127.0.0.2") for _ in range(8)]
        assert [answer[:8] for _, answer in greedy] == [b"HTTP/1.1"] * 4 + [b""] * 4
        assert (await connected("127.0.0.3"))[1]
        greedy[0][0].transport.abort()
        shake = {"additional_headers": {}, "local_addr": ("127.0.0.2", 0)}
        await until(lambda: running.server._state._open["127.0.0.2"] == 3)
        async with websockets.connect(f"ws://{host}:{port}/v1/stream", **shake):
            assert running.server._state._open["127.0.0.2"] == 4, "a WebSocket is one connection as before"
            assert not (await connected("127.0.0.2"))[1]
        await until(lambda: running.server._state._open["127.0.0.2"] == 3)
        assert (await connected("127.0.0.2"))[1]


async def test_requests_in_a_row_and_in_a_pipe():
    async with serving() as running, connection(running) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10)
        answer = b""
        while answer.count(b'{"status":"ok"}') < 10:
            answer += await reader.read(65536)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
        with suppress(ConnectionError):
            while await reader.read(65536):
                pass


async def test_open_calls_are_bounded(monkeypatch):
    monkeypatch.setattr(admission, "MAX_CALLS", 3)
    async with serving() as running:
        with Gate(executor_of(running.engine)):
            calls = [asyncio.ensure_future(running.completion(max_tokens=100)) for _ in range(3)]
            await until(lambda: running.server.context.admission.calls.taken_places == 3)
            found = await running.completion()
            assert found.status_code == 429 and found.headers["retry-after"] and error_of(found)["code"] == "queue_full"
            assert (await running.client.get("/health")).status_code == 200, "probes have no place"
        assert {(await call).status_code for call in calls} == {200}
        await until(lambda: rests(running))


async def test_a_full_queue_says_when_to_come_back():
    async with serving(make_engine(max_sequences=1, max_waiting=1)) as running:
        with Gate(executor_of(running.engine)):
            asked = [asyncio.ensure_future(running.completion(max_tokens=50)) for _ in range(6)]
            await until(lambda: sum(call.done() for call in asked) >= 4)
        found = await asyncio.gather(*asked)
        codes = [response.status_code for response in found]
        assert 429 in codes and 200 in codes and set(codes) <= {200, 429}
        refused = next(response for response in found if response.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1 and int(refused.headers["retry-after-ms"]) >= 1
        with Gate(executor_of(running.engine)):
            found = await running.completion(prompt=["a", "b", "c", "d"], max_tokens=50)
            assert found.status_code == 429, "all of its prompts or none"
        await until(lambda: rests(running))


async def test_the_access_line_tells_what_happened(caplog):
    caplog.set_level("DEBUG", "wicore_trt.access")
    async with serving(make_engine(step_s=0.005)) as running:
        await running.completion(headers_unused=1)
        await running.client.get("/health")
        async with connection(running) as (_, writer):
            writer.write(request_bytes(stream=True))
            await until(lambda: running.server.context.open)
        await until(lambda: rests(running))
    lines = [(r.getMessage(), r.levelname, r.facts) for r in caplog.records if r.name == "wicore_trt.access"]
    assert [line[:2] for line in lines] == [
        ("POST /v1/completions 200", "INFO"), ("GET /health 200", "DEBUG"), ("POST /v1/completions 499", "INFO"),
    ]  # fmt: skip
    facts = lines[0][2]
    assert facts["tokens"] == 5 and facts["prompt"] == 5 and facts["finish"] == "length" and facts["ttft_ms"] >= 0
    assert facts["peer"].startswith("127.0.0.1:")
