"""The WebSocket: generations beside each other, cancel, faults, keys, origins, clients that leave or read slowly."""

from __future__ import annotations

import asyncio
import json
import socket as stdlib_socket
from contextlib import suppress

import pytest
import websockets
from fakes import Gate
from web import GREEDY, executor_of, expected, make_engine, serving, until

from wicore_trt.access.keys import EVERYBODY, Identity, KeyRing
from wicore_trt.http import protocol, socket

KEY = "the-operators-own-key"


def connect(running, **kwargs):
    return websockets.connect(running.url.replace("http", "ws", 1) + "/v1/stream", **kwargs)


def generate(name: str, **fields) -> str:
    return json.dumps({"type": "generate", "id": name, "max_tokens": 20, **GREEDY, **fields})


async def answers(connection, *names: str) -> dict[str, list[dict]]:
    """Frames by id until each of these generations has ended."""
    found: dict[str, list[dict]] = {name: [] for name in names}
    while not all(frames and frames[-1]["type"] != "delta" for frames in found.values()):
        frame = json.loads(await connection.recv())
        found.setdefault(frame["id"], []).append(frame)
    return found


def text_of(frames: list[dict], index: int = 0) -> str:
    return "".join(f["text"] for f in frames if f["type"] == "delta" and f["index"] == index)


async def test_generations_beside_each_other():
    async with serving() as running, connect(running) as connection:
        for name in ("hello", "world", "again"):
            await connection.send(generate(name, prompt=name))
        await connection.send(generate("chat", messages=[{"role": "user", "content": "talk"}], n=2))
        found = await answers(connection, "hello", "world", "again", "chat")
        for name in ("hello", "world", "again"):
            assert text_of(found[name]) == expected(name, 20)
            *_, last, done = found[name]
            assert last["finish_reason"] == "length" and last["stop_reason"] is None
            assert done["type"] == "done" and done["usage"]["completion_tokens"] == 20
        assert text_of(found["chat"], 0) == text_of(found["chat"], 1) == expected("talk", 20)
        await connection.send(generate("hello", prompt="hello"))
        assert text_of((await answers(connection, "hello"))["hello"]) == expected("hello", 20), "its id is free again"


async def test_probabilities_come_with_the_text():
    async with serving(make_engine(logprobs=True)) as running, connect(running) as connection:
        await connection.send(generate("a", prompt="hello", logprobs=2))
        frames = (await answers(connection, "a"))["a"]
        tokens = [entry["token"] for f in frames if f["type"] == "delta" for entry in f["logprobs"] or ()]
        assert "".join(tokens) == expected("hello", 20)


async def test_one_is_cancelled_and_the_others_go_on():
    async with serving(make_engine(step_s=0.005)) as running, connect(running) as connection:
        await connection.send(generate("long", prompt="hello", max_tokens=1000))
        await connection.send(generate("short", prompt="world", max_tokens=40))
        assert json.loads(await connection.recv())["type"] == "delta"
        await connection.send(json.dumps({"type": "cancel", "id": "long"}))
        await connection.send(generate("never", prompt="hello", max_tokens=1000))
        await connection.send(json.dumps({"type": "cancel", "id": "never"}))
        found = await answers(connection, "long", "short", "never")
        assert found["never"][-1]["error"]["type"] == "cancelled_error"
        assert found["long"][-1]["error"]["type"] == "cancelled_error"
        assert text_of(found["short"]) == expected("world", 40)
        await until(lambda: running.engine.engine._loop.stats().requests_running == 0)
        assert len(executor_of(running.engine).steps) < 900


TOOL_FRAME = json.dumps(
    {
        "type": "generate",
        "id": "a",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
)


@pytest.mark.parametrize(
    ("frame", "param"),
    [
        ("{", None),
        ("[]", None),
        ('{"type": "generate"}', "id"),
        ('{"type": "generate", "id": 5}', "id"),
        ('{"type": "generate", "id": ""}', "id"),
        ('{"type": "jump", "id": "a"}', "type"),
        ('{"type": "cancel", "id": "a"}', None),
        ('{"type": "generate", "id": "a"}', "messages"),
        ('{"type": "generate", "id": "a", "prompt": 5}', "prompt"),
        ('{"type": "generate", "id": "a", "prompt": "x", "tools": [1]}', "tools"),
        (TOOL_FRAME, "tools"),
        ('{"type": "generate", "id": "a", "prompt": "x", "guided_regex": "(a"}', "guided_regex"),
        ('{"type": "generate", "id": "a", "prompt": "x", "echo": true}', "echo"),
        ('{"type": "generate", "id": "a", "prompt": "x", "prompt_logprobs": 0}', "prompt_logprobs"),
        ('{"type": "generate", "id": "a", "prompt": "x", "temprature": 1}', "temprature"),
        (b"\xff\xfe", None),
        ("", None),
        ("[" * 30_000, None),
    ],
)
async def test_bad_frames_are_answered_and_the_connection_stays(frame, param):
    async with serving() as running, connect(running) as connection:
        await connection.send(frame)
        answer = json.loads(await connection.recv())
        assert answer["type"] == "error" and answer["error"]["param"] == param
        await connection.send(generate("good", prompt="hello"))
        assert text_of((await answers(connection, "good"))["good"]) == expected("hello", 20)


async def test_ids_and_numbers_of_generations_are_bounded(monkeypatch):
    monkeypatch.setattr(socket, "MAX_OPEN", 2)
    async with serving(make_engine(step_s=0.01)) as running, connect(running) as connection:
        for name in ("a", "a", "b", "c"):
            await connection.send(generate(name, prompt="hello", max_tokens=900))
        refused = []
        while len(refused) < 2:
            frame = json.loads(await connection.recv())
            refused += [(frame["id"], frame["error"]["message"])] if frame["type"] == "error" else []
        assert refused[0][0] == "a" and "is open" in refused[0][1]
        assert refused[1][0] == "c" and "at most 2" in refused[1][1]


async def test_a_client_that_leaves_ends_its_generations():
    async with serving(make_engine(step_s=0.005)) as running:
        connection = await connect(running)
        for name in "abc":
            await connection.send(generate(name, prompt=name, max_tokens=1000))
        await until(lambda: running.server.context.open.total() == 3)
        connection.transport.abort()
        await until(lambda: not running.server.context.open)
        await until(lambda: running.server.context.admission.calls.taken_places == 0)
        assert len(executor_of(running.engine).steps) < 900


async def test_who_may_connect():
    async with serving(api_key=KEY, cors_origins=("https://chat.example.org",)) as running:
        host = running.url.removeprefix("http://")
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"x-api-key": KEY, "origin": "https://elsewhere.example.org"}, 403),
            ({"x-api-key": KEY, "origin": f"http://{host}.example.org"}, 403),
            ({"x-api-key": KEY, "origin": "null"}, 403),
        ):
            with pytest.raises(websockets.InvalidStatus) as caught:
                await connect(running, additional_headers=headers)
            response = caught.value.response
            assert response.status_code == status and json.loads(response.body)["error"]["message"]
            assert response.headers["x-request-id"]
        for headers in ({}, {"origin": "https://chat.example.org"}, {"origin": f"http://{host}"}):
            async with connect(running, additional_headers={"x-api-key": KEY, **headers}) as connection:
                assert connection.response.headers["x-request-id"]
        for path in ("/v1/elsewhere", "/v1/models"):
            with pytest.raises(websockets.InvalidStatus) as caught:
                url = running.url.replace("http", "ws", 1) + path
                await websockets.connect(url, additional_headers={"x-api-key": KEY})
            response = caught.value.response
            assert response.status_code == 404 and response.headers["x-request-id"]
            assert (
                json.loads(response.body)["error"]["message"]
                == f"There is no {path}. /openapi.json lists what there is."
            )


async def test_a_key_that_is_taken_back_begins_nothing_on_an_open_connection():
    """What it has begun ends as ever; a key with another role has that one."""
    async with serving(api_key=KEY, requests_per_minute=1000) as running:
        keys, headers = running.server.context.admission.keys, {"x-api-key": KEY}
        async with connect(running, additional_headers=headers) as connection:
            await connection.send(generate("long", prompt="long", max_tokens=500))
            first = json.loads(await connection.recv())
            keys.replace_keys(KeyRing({"another key": EVERYBODY}))
            await connection.send(generate("late", prompt="late"))
            found = await answers(connection, "long", "late")
            assert text_of([first, *found["long"]]) == expected("long", 500)
            [refused] = found["late"]
            assert refused["type"] == "error" and refused["error"]["code"] == "invalid_api_key", refused
            keys.replace_keys(KeyRing({KEY: Identity("alice", requests_per_minute=1)}))
            await connection.send(generate("one", prompt="one"))
            await connection.send(generate("two", prompt="two"))
            found = await answers(connection, "one", "two")
            assert sorted(frames[-1]["type"] for frames in found.values()) == ["done", "error"], "its own rate"


async def test_frames_are_bounded(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_FRAGMENTS", 10)
    async with serving(max_message_mb=1) as running:
        for message in ("x" * (2 << 20), [b"x"] * 50):
            async with connect(running) as connection:
                with pytest.raises(websockets.ConnectionClosed):
                    await connection.send(message)
                    await connection.recv()
        async with connect(running) as connection:
            await connection.send([generate("a", prompt="hello")[:20], generate("a", prompt="hello")[20:]])
            assert text_of((await answers(connection, "a"))["a"]) == expected("hello", 20)
        assert (await running.client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "frame", [b"\x89\xfd" + bytes(4) + b"p" * 125, b"\x81\x81" + bytes(4) + b"{"], ids=["pings", "bad"]
)
async def test_a_client_that_reads_nothing_is_not_answered_without_end(frame):
    """Each of its frames is answered."""
    async with serving() as running:
        loop = asyncio.get_running_loop()
        with stdlib_socket.create_connection(running.address) as silent:
            silent.sendall(
                b"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
                b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            silent.setblocking(False)
            assert b" 101 " in await loop.sock_recv(silent, 4096)
            frames, sent = frame * 2000, 0
            with suppress(TimeoutError):
                while sent < 64 << 20:
                    await asyncio.wait_for(loop.sock_sendall(silent, frames), 0.5)
                    sent += len(frames)
            [connection] = running.server._state.connections
            assert sent < 64 << 20 and connection.transport.get_write_buffer_size() < 1 << 20
        await until(lambda: not running.server._state.connections)


async def test_nothing_is_unpacked():
    async with serving() as running, connect(running, compression="deflate") as connection:
        assert not connection.protocol.extensions


async def test_sockets_are_bounded(monkeypatch):
    monkeypatch.setattr(socket, "MAX_SOCKETS", 2)
    async with serving() as running, connect(running), connect(running):
        with pytest.raises(websockets.InvalidStatus) as caught:
            await connect(running)
        assert caught.value.response.status_code == 429


async def test_stopping_tells_clients():
    async with serving() as running, connect(running) as connection:
        with Gate(executor_of(running.engine)):
            await connection.send(generate("a", prompt="hello", max_tokens=40))
            await until(lambda: running.server.context.open)
            stopping = asyncio.ensure_future(running.server.stop(60))
            await asyncio.sleep(0)
            await connection.send(generate("b", prompt="hello"))
            found = await answers(connection, "b")
        found |= await answers(connection, "a")
        assert text_of(found["a"]) == expected("hello", 40) and "shutting down" in found["b"][-1]["error"]["message"]
        with pytest.raises(websockets.ConnectionClosed):
            await connection.recv()
        await stopping


async def test_a_text_that_is_not_utf8_ends_the_connection_without_a_traceback(caplog):
    async with serving() as running, connect(running) as connection:
        await connection.send("\u00e9".encode("latin-1"), text=True)
        with pytest.raises(websockets.ConnectionClosed) as ended:
            await connection.recv()
        assert ended.value.rcvd.code == 1007
    assert "Traceback" not in caplog.text
