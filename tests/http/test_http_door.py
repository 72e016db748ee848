"""A generation that is refused before an application is made for it hears what the application would have said."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import httpx
import pytest
from access.test_barred import ALICE, crowded
from web import until

from wicore_trt.core.text_engine import TURNS
from wicore_trt.http.door import Door

PROMPT = {"max_tokens": 3, "prompt": "hello"}
CHAT = {"max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
PATHS = {
    "/v1/completions": PROMPT,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {**CHAT, "model": "tiny"},
    "/v1/inference": PROMPT,
}
VARIES = re.compile(r"^(date|retry-after|retry-after-ms): \S.*$|[0-9a-f]{32}", re.MULTILINE)


def raw(path: str, body: object, *headers: str, method: str = "POST", version: str = "1.1") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/{version}", "host: localhost", f"content-length: {len(data)}", *headers]
    if not any(header.startswith("content-type") for header in headers):
        head.append("content-type: application/json")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


async def answers(url: str, sent: bytes) -> str:
    """All that comes back until the server closes the connection, without what differs from call to call."""
    at = httpx.URL(url)
    reader, writer = await asyncio.open_connection(at.host, at.port)
    writer.write(sent)
    async with asyncio.timeout(60):
        found = (await reader.read()).decode()
    writer.close()
    return VARIES.sub(lambda match: f"{match[1]}: ..." if match[1] else "ID", found.replace("\r\n", "\n"))


@pytest.fixture
def seen(monkeypatch):
    """What the door let through, by path, and what it answered."""
    found: dict[str, list[str]] = {"answered": [], "began": []}
    begin, answer = Door.begin, Door._answer

    def beginning(self, cycle, start):
        def started(place):
            found["began"].append(cycle.scope["path"])
            start(place)

        begin(self, cycle, started)

    def answering(self, cycle, *args, **kwargs):
        found["answered"].append(cycle.scope["path"])
        answer(self, cycle, *args, **kwargs)

    monkeypatch.setattr(Door, "begin", beginning)
    monkeypatch.setattr(Door, "_answer", answering)
    return found


CLOSE = "connection: close"
LAST = raw("/health", b"", CLOSE, method="GET")
ASKED = [
    *(pytest.param(raw(path, body, CLOSE), 1, id=path) for path, body in PATHS.items()),
    pytest.param(raw("/v1/completions", PROMPT, "x-request-id: mine", CLOSE), 1, id="own id"),
    pytest.param(raw("/v1/completions", PROMPT, "x-request-id: no good one", CLOSE), 1, id="bad id"),
    pytest.param(raw("/v1/completions?x=1", PROMPT, CLOSE), 1, id="query"),
    pytest.param(raw("/v1/completions", {**PROMPT, "priority": 2, "model": "another"}, CLOSE), 1, id="less urgent"),
    pytest.param(raw("/v1/completions", PROMPT, version="1.0"), 1, id="old HTTP"),
    pytest.param(raw("/v1/completions", PROMPT) + raw("/v1/messages", CHAT) + LAST, 1, id="three at once"),
    pytest.param(raw("/v1/completions", PROMPT, "origin: http://localhost", CLOSE), 0, id="a page"),
    pytest.param(raw("/v1/completions", PROMPT, "host: evil.example", CLOSE), 1, id="two hosts"),
    pytest.param(raw("/v1/completions", PROMPT, "expect: 100-continue", CLOSE), 0, id="asks first"),
    pytest.param(raw("/v1/completions", PROMPT, "content-type: text/plain", CLOSE), 0, id="no JSON"),
    pytest.param(raw("/v1/completions", b"{", CLOSE), 0, id="half a body"),
    pytest.param(raw("/v1/completions", b"[" * 10_000, CLOSE), 0, id="deep"),
    pytest.param(raw("/v1/completions", {**PROMPT, "priority": "x"}, CLOSE), 0, id="no priority"),
    pytest.param(raw("/v1/completions", {**PROMPT, "x": "y" * 20_000}, CLOSE), 0, id="long"),
    pytest.param(raw("/v1/completions", PROMPT, CLOSE, method="PUT"), 0, id="another method"),
    pytest.param(raw("/tokenize", {"prompt": "hello"}, CLOSE), 0, id="no generation"),
    pytest.param(raw("/nowhere", PROMPT, CLOSE), 0, id="nowhere"),
]


@pytest.mark.parametrize("origins", [(), ("http://localhost",), ("*",)])
async def test_the_answer_is_the_application_s(monkeypatch, seen, caplog, origins):
    """In bytes, and in the access line; and what is no such refusal is the application's."""
    caplog.set_level(logging.INFO, "wicore_trt.access")
    async with crowded(monkeypatch, cors_origins=origins) as (server, servers):
        assert (await server.ask("http"))[0] == "429"
        state = servers._http._listener._state
        for case in ASKED:
            sent, refused = case.values
            caplog.clear()
            seen["answered"].clear()
            found = await answers(server.url, sent)
            lines = [{**line.facts, "id": "", "peer": "", "total_ms": 0} for line in caplog.records]
            assert len(seen["answered"]) >= refused and (refused or not seen["answered"]), case.id
            caplog.clear()
            door, state.door = state.door, None
            assert found == await answers(server.url, sent), case.id
            state.door = door
            assert lines == [{**line.facts, "id": "", "peer": "", "total_ms": 0} for line in caplog.records], case.id
            assert refused == 0 or "429 Too Many Requests" in found
        told = servers._admission.counts.http
        assert told["POST", "/v1/chat/completions", "429"] == 2
        assert not servers._admission.calls.taken - 2 and server.engine.turns.free == TURNS


@pytest.mark.parametrize("full", ["calls", "bodies"])
async def test_where_all_is_taken_connections_close_as_those_of_the_application(monkeypatch, seen, full):
    """Of several requests on one the first has an answer."""
    async with crowded(monkeypatch) as (server, servers):
        assert (await server.ask("http"))[0] == "429"
        http, state = servers._http.context, servers._http._listener._state
        places = http.admission.calls if full == "calls" else http.room
        monkeypatch.setattr(places, "_places", 0)
        two = raw("/v1/messages", CHAT) * 2
        for sent in (raw("/v1/completions", PROMPT), two, raw("/v1/inference", PROMPT, CLOSE)):
            seen["answered"].clear()
            found = await answers(server.url, sent)
            assert len(seen["answered"]) == found.count("429 Too Many Requests") == 1
            door, state.door = state.door, None
            assert found == await answers(server.url, sent)
            state.door = door


async def test_keys_come_first(monkeypatch, seen, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{ALICE}\n")
    keys.chmod(0o600)
    async with crowded(monkeypatch, key=ALICE, keys_file=str(keys)) as (server, _):
        assert (await server.ask("http", ALICE))[0] == "429"
        seen["answered"].clear()
        assert (await server.ask("http", "c" * 16))[0] == "401" and not seen["answered"]
        assert (await server.ask("http", ALICE))[0] == "429" and len(seen["answered"]) == 1


async def test_many_that_wait_are_few_tasks(monkeypatch, seen):
    """Of a burst those that are refused have no application, also where nothing was known when they came."""
    async with crowded(monkeypatch) as (server, servers):
        at, sent = httpx.URL(server.url), raw("/v1/completions", PROMPT, CLOSE)
        pairs = [await asyncio.open_connection(at.host, at.port) for _ in range(200)]
        seen["began"].clear()
        for _, writer in pairs:
            writer.write(sent)
        async with asyncio.timeout(60):
            found = [await reader.read() for reader, _ in pairs]
        for _, writer in pairs:
            writer.close()
        assert all(b" 429 " in text for text in found)
        assert len(seen["began"]) <= 2 * TURNS and len(seen["answered"]) == 200 - len(seen["began"])
        assert server.engine.turns.free == TURNS and not servers._http._listener._state.door._waiting


async def test_a_fault_at_the_door_leaves_a_request_to_the_application(monkeypatch, seen):
    async with crowded(monkeypatch) as (server, _):
        asked = len(server.asked)
        monkeypatch.setattr(Door, "_refused", lambda *args: 1 / 0)
        found = await asyncio.gather(*(server.ask("http") for _ in range(20)))
        assert {end for end, _ in found} == {"429"} and len(server.asked) > asked
        await until(lambda: server.engine.turns.free == TURNS)
