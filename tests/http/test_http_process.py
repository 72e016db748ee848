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
    async with supervised(tmp_path, step_s=0.005, server={"http_port": 0}) as server:
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
            last = asyncio.ensure_future(client.post("/v1/completions", json={**body, "max_tokens": 150}))
            async with asyncio.timeout(60):
                while (await client.get("/status")).json()["requests_open"] != 1:
                    await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            assert (await last).json()["choices"][0]["text"] == expected("hello", 150)
        code, log = await server.end()
        assert code == 0 and "Traceback" not in log, log
