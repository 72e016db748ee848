"""Requests leave nothing behind that only Python's collector finds."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter

import pytest
from web import GREEDY, make_engine, serving

from wicore_trt.errors import QueueFullError

REQUESTS = 60
MOST = 20.0
"""Objects of each request; those of a connection's transports, at both of its ends, are 14."""

CASES = {
    "served": ("/v1/completions", {}),
    "streamed": ("/v1/completions", {"stream": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "prompt": None}),
    "refused": ("/v1/completions", {}),
    "wrong": ("/v1/completions", {"max_tokens": -1}),
    "no such": ("/v1/nothing", {}),
    "without a key": ("/v1/completions", {}),
    "statistics": ("/v1/stats", {}),
}


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, more: dict) -> int:
    """The status of a request."""
    body = {"prompt": "hello", "max_tokens": 3, **GREEDY, **more}
    raw = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    method = "GET" if path == "/v1/stats" else "POST"
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(raw) * (method == 'POST')}\r\n\r\n".encode() + raw * (method == "POST"))
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"chunked" in answer:
        await reader.readuntil(b"0\r\n\r\n")
    else:
        await reader.readexactly(int(answer.split(b"content-length: ")[1].split(b"\r\n")[0]))
    return int(answer.split()[1])


@pytest.mark.parametrize("how", CASES)
async def test_a_request_leaves_no_circles(how, monkeypatch):
    path, more = CASES[how]
    async with serving(make_engine(), api_key="k" * 20 if how == "without a key" else None) as running:
        port, ends = running.engine.engine, Counter[int]()

        async def refuse(made):
            raise QueueFullError("Come later.", retry_after_s=1.0)

        if how == "refused":
            monkeypatch.setattr(port, "add", refuse)
        host, _, number = running.url.removeprefix("http://").rpartition(":")

        async def ask(times: int) -> None:
            for _ in range(times):
                reader, writer = await asyncio.open_connection(host, int(number))
                ends[await asked(reader, writer, path, more)] += 1
                writer.close()
            await asyncio.sleep(0.05)  # the other end closes, too

        await ask(5)
        gc.collect()
        gc.disable()
        try:
            await ask(REQUESTS)
            found = gc.collect() / REQUESTS
        finally:
            gc.enable()
    statuses = {"refused": 429, "wrong": 400, "no such": 404, "without a key": 401}
    assert set(ends) == {statuses.get(how, 200)}
    print(how, found)
    assert found < MOST, found
