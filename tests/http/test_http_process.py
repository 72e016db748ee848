"""`wicore serve` with HTTP: the processes of it, one of them killed, and a signal that lets requests finish."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
from process.test_supervisor import supervised
from web import GREEDY, expected


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.02)


async def test_http_is_served_by_the_front_and_at_the_same_address_by_the_next(tmp_path):
    hold = tmp_path / "hold"
    async with supervised(tmp_path, hold=str(hold), server={"http_port": 0}) as server:
        url = await server.line("bound")
        await server.line("ready on")
        body = {"prompt": "hello", **GREEDY}
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await until_ready(client)
            found = await client.post("/v1/completions", json={**body, "max_tokens": 9})
            assert found.json()["choices"][0]["text"] == expected("hello", 9)
            for name in ("front", "engine"):
                [pid] = server.alive(name)
                os.kill(pid, signal.SIGKILL)
                async with asyncio.timeout(60):
                    while pid in server.alive(name) or not server.alive(name):
                        await asyncio.sleep(0.02)
                await until_ready(client)
            hold.touch()
            last = asyncio.ensure_future(client.post("/v1/completions", json={**body, "max_tokens": 150}))
            async with asyncio.timeout(60):
                while (await client.get("/status")).json()["requests_open"] != 1:
                    await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            await server.log_line("SIGTERM received")
            hold.unlink()
            assert (await last).json()["choices"][0]["text"] == expected("hello", 150)
        code, log = await server.end()
        assert code == 0 and "Traceback" not in log, log


async def test_an_engine_that_ends_gives_503_before_an_answer_began_and_an_event_after(tmp_path):
    async with supervised(tmp_path, step_s=0.02, max_sequences=1, server={"http_port": 0}) as server:
        url = await server.line("bound")
        await server.line("ready on")
        body = {"prompt": "hello", "max_tokens": 3000, **GREEDY}
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await until_ready(client)
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as begun:
                lines = begun.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                waiting = [
                    asyncio.ensure_future(client.post("/v1/completions", json={**body, "stream": stream}))
                    for stream in (False, True)
                ]
                async with asyncio.timeout(60):
                    while (await client.get("/status")).json()["requests_open"] != 3:
                        await asyncio.sleep(0.01)
                os.kill(server.alive("engine")[0], signal.SIGKILL)
                rest = [line async for line in lines]
            assert "event: error" in rest and "data: [DONE]" not in rest
            assert any("The engine stopped" in line for line in rest)
            for found in await asyncio.gather(*waiting):
                assert found.status_code == 503 and found.headers["retry-after"] == "1", found.text
                error = found.json()["error"]
                assert error["type"] == "unavailable_error" and error["code"] == "engine_dead"
            await until_ready(client)
            found = await client.post("/v1/completions", json={**body, "max_tokens": 4})
            assert found.json()["choices"][0]["text"] == expected("hello", 4)
