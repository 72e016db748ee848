"""The operator's calls of a supervised server, over real sockets, while its processes hang or end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest
import trustme
from process.test_reload import ALICE
from process.test_supervisor import Server, answer, supervised
from prometheus_client.parser import text_string_to_metric_families
from serve.serving import expected
from suspend import suspend_process

from wicore_trt.serve.front import MAX_METRICS

OPERATOR = "o" * 20


@asynccontextmanager
async def administered(tmp_path, *, verify=True, **options) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    options["server"] = {"admin_port": 0, **options.get("server", {})}
    async with supervised(tmp_path, **options) as server:
        url = re.search(r"https?://\S+", await server.log_line("operators' calls on"))[0]
        server.address = await server.line("bound")
        server.url = await server.line("ready on")
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=verify) as client:
            yield server, client


async def until(condition) -> None:
    async with asyncio.timeout(200):
        while not await condition():
            await asyncio.sleep(0.25)  # conditions ask all processes of the server


async def scraped(client: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    """Samples by name and process; those of other labels go by name alone."""
    found = (await client.get("/metrics")).text
    return {
        (s.name, s.labels.get("process", "")): s.value
        for family in text_string_to_metric_families(found)
        for s in family.samples
    }


async def test_a_reload_answers_what_changed_and_what_needs_a_restart(tmp_path):
    recipe = tmp_path / "server.yaml"
    recipe.write_text("server:\n  requests_per_minute: 1000\nkv:\n  salt: some secret\n")
    async with administered(tmp_path, recipe=str(recipe)) as (_, client):
        recipe.write_text("server:\n  requests_per_minute: 7\nscheduler:\n  max_waiting: 5\nkv:\n  salt: some secret\n")
        found = (await client.post("/reload")).json()
        assert found == {"changed": ["server.requests_per_minute"], "needs_restart": ["scheduler.max_waiting"]}
        settings = {s["key"]: s for s in (await client.get("/config")).json()["settings"]}
        assert settings["server.requests_per_minute"]["value"] == 7
        assert f"{recipe}:2" in settings["server.requests_per_minute"]["source"]
        assert settings["scheduler.max_waiting"] == {"key": "scheduler.max_waiting", "value": 1024, "source": "default"}
        assert settings["kv.salt"]["value"] == "***"
        assert "some secret" not in (await client.get("/config")).text
        recipe.write_text("server:\n  nothing_like_it: 7\n")
        refused = await client.post("/reload")
        assert refused.status_code == 400 and "nothing_like_it" in refused.json()["error"]["message"]
        rebound = await client.post("/drain", headers={"host": "rebound.example.org"})
        assert rebound.status_code == 403 and rebound.json()["error"]["type"] == "permission_error"


async def test_draining_lets_streams_end_and_holds_for_the_next_front(tmp_path):
    hold = tmp_path / "hold"
    async with administered(tmp_path, hold=str(hold)) as (server, client), server.stub() as stub:
        hold.touch()
        last = asyncio.ensure_future(answer(stub, "the last one", 150))

        async def begun() -> bool:
            return (await scraped(client)).get(("wicore_requests_open", "")) == 1

        await until(begun)
        assert (await client.post("/drain")).json() == {"state": "draining", "idle": False}
        waiting = asyncio.ensure_future(client.post("/drain", params={"wait": 60}))

        async def refused() -> bool:
            try:
                await answer(stub, "too late", 1)
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in error.details()
            return False

        await until(refused)
        assert not last.done() and not waiting.done()
        hold.unlink()
        assert await last == expected("the last one", 150)[0]
        assert (await waiting).json()["idle"] is True
        os.kill(server.alive("front")[0], signal.SIGKILL)

        async def idle_again() -> bool:
            return (await scraped(client)).get(("wicore_process_restarts_total", "front")) == 1

        await until(idle_again)
        assert (await client.post("/drain", params={"wait": 60})).json()["idle"] is True
        await until(refused)
        for wrong in ("-1", "x", "nan", "1e9"):
            assert (await client.post("/drain", params={"wait": wrong})).status_code == 400
        server.process.terminate()
        assert (await server.end())[0] == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["engine", pytest.param("front", marks=pytest.mark.long)])
async def test_a_process_that_hangs_holds_up_nothing_else(tmp_path, name):
    """The supervisor answers, starts the others again, and ends what takes none of its messages any more."""
    async with administered(tmp_path, narrow=True) as (server, client):
        [hangs] = server.alive(name)
        suspend_process(hangs)
        try:
            assert (await client.get("/health")).status_code == 200
            other = "engine" if name == "front" else "front"
            [killed] = server.alive(other)
            os.kill(killed, signal.SIGKILL)

            async def again() -> bool:
                return server.alive(other) not in ([], [killed])

            await until(again)
            while hangs in server.alive(name):
                answers = await asyncio.gather(*(client.post("/reload") for _ in range(20)))
                assert {a.status_code for a in answers} == {200}
            await until(lambda: healthy(server))
            async with server.stub() as stub:
                assert await answer(stub, "after all", 9) == expected("after all", 9)[0]
            assert (await scraped(client))["wicore_process_restarts_total", name] >= 1
        finally:
            if hangs in server.alive(name):
                os.kill(hangs, signal.SIGCONT)


async def healthy(server: Server) -> bool:
    await server.until_serving()
    return True


async def test_metrics_of_any_length_are_there_and_some_while_the_front_hangs(tmp_path):
    """Calls of strangers have many rows."""
    async with administered(tmp_path, server={"http_port": 0}) as (server, client):
        paths = ("/v1/models", "/v1/stats", "/status", "/version", "/openapi.json", "/nope", "/v1/completions")
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as other:
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
                for path in paths:
                    await other.request(method, path)

        async def told() -> bool:
            """On a slow machine the front may tell them later than the supervisor waits."""
            return ("wicore_engine_up", "") in await scraped(client)

        await until(told)
        text = (await client.get("/metrics")).text
        assert len(text) > MAX_METRICS and "wicore_time_to_first_token" in text
        found = await scraped(client)
        assert found["wicore_process_up", "front"] == found["wicore_process_up", "engine"] == 1
        assert found["wicore_engine_up", ""] == 1 and ("wicore_process_resident_bytes", "engine") in found
        [front] = server.alive("front")
        suspend_process(front)
        try:
            found = await scraped(client)
            assert ("wicore_engine_up", "") not in found and found["wicore_process_up", "front"] == 1
        finally:
            os.kill(front, signal.SIGCONT)


async def test_operators_alone_call_and_no_web_page(tmp_path):
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"alice:{ALICE}\nops:{OPERATOR}:operator\n")
    async with administered(tmp_path, server={"keys_file": str(keys)}) as (_, client):
        calls = [("POST", "/reload"), ("POST", "/drain"), ("GET", "/config"), ("GET", "/metrics")]
        for key, code in ((None, 401), (ALICE, 403)):
            headers = {"x-api-key": key} if key else {}
            for method, path in calls:
                assert (await client.request(method, path, headers=headers)).status_code == code, path
        assert (await client.get("/health")).status_code == 200
        found = await client.get("/config", headers={"x-api-key": OPERATOR})
        assert found.status_code == 200 and OPERATOR not in found.text
        page = {"x-api-key": OPERATOR, "origin": "https://elsewhere.example.org"}
        assert (await client.post("/reload", headers=page)).status_code == 403
        assert (await client.get("/reload", headers={"x-api-key": OPERATOR})).status_code == 405


async def test_certificates_of_clients_open_it_too(tmp_path):
    authority = trustme.CA()
    mine, theirs = authority.issue_cert("127.0.0.1"), authority.issue_cert("ops@example.org")
    paths = {name: str(tmp_path / name) for name in ("tls_cert", "tls_key", "tls_client_ca", "client")}
    mine.cert_chain_pems[0].write_to_path(paths["tls_cert"])
    mine.private_key_pem.write_to_path(paths["tls_key"])
    authority.cert_pem.write_to_path(paths["tls_client_ca"])
    theirs.private_key_and_cert_chain_pem.write_to_path(paths["client"])
    context = ssl.create_default_context(cafile=paths["tls_client_ca"])
    server = {name: paths[name] for name in ("tls_cert", "tls_key", "tls_client_ca")}
    async with administered(tmp_path, server=server, verify=context) as (_, client):
        with pytest.raises(httpx.HTTPError):
            await client.post("/reload")
        context.load_cert_chain(paths["client"])
        async with httpx.AsyncClient(base_url=client.base_url, verify=context) as known:
            assert (await known.post("/reload")).status_code == 200
