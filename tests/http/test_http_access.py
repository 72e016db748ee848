"""Access of callers and hosts: keys on every route, tenants, web pages, TLS, Unix sockets, states of the server.

Invariants: I19.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack

import httpx
import pytest
import trustme
from fakes import Gate
from starlette.routing import Route
from web import GREEDY, error_of, executor_of, make_engine, serving, until
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from wicore_trt.access.listening import find_http_host
from wicore_trt.config import ServerSettings
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.http import protocol
from wicore_trt.http.page import load_assets
from wicore_trt.http.routes import OPEN, ROUTES, make_routes
from wicore_trt.http.server import HttpServer

KEY = "the-operators-own-key"
ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789ab"


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    path.chmod(0o600)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_every_route_but_two_and_the_page_needs_a_key():
    async with serving(api_key=KEY) as running:
        listed = {route.path: route for route in make_routes(running.server.context)}
        assert set(listed) >= {o.path for o in ROUTES} and {"/health", "/ready", "/ping"} == OPEN
        for path, route in [*listed.items(), ("/nowhere", None)]:
            url = path.replace("{name:path}", "fake")
            if route is not None and not isinstance(route, Route):
                continue  # WebSockets have a test of their own
            for method in sorted((route.methods if route else None) or {"GET", "POST"}):
                found = await running.client.request(method, url, json={} if method == "POST" else None)
                if path in OPEN or path in load_assets():
                    assert found.status_code == 200, path
                else:
                    assert found.status_code == 401 and found.headers["www-authenticate"] == "Bearer", path
                    if method != "HEAD":
                        assert error_of(found)["type"] == "authentication_error"


async def test_a_page_under_a_name_of_its_own_reaches_no_server_without_keys():
    """DNS rebinding: a stranger's name leads here, and the browser takes the server for that page's own."""
    strange, named = {"host": "evil.example.org:8000"}, {"host": "chat.example.org"}
    async with serving(allowed_hosts=("chat.example.org",)) as running:
        for path in ("/", "/health", "/v1/models", "/metrics"):
            found = await running.client.get(path, headers=strange)
            assert found.status_code == 403 and error_of(found)["type"] == "permission_error", path
            assert (await running.client.get(path, headers=named)).status_code == 200, path
            assert (await running.client.get(path)).status_code == 200, path
        found = await running.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, headers=strange)
        assert found.status_code == 403 and not executor_of(running.engine).steps
        with pytest.raises(InvalidStatus) as caught:
            host, port = running.address
            async with connect("ws://evil.example.org/v1/stream", host=host, port=port):
                pass
        assert caught.value.response.status_code == 403
        running.server.change(ServerSettings(allowed_hosts=("*",)))
        assert (await running.client.get("/v1/models", headers=strange)).status_code == 200
    async with serving(api_key=KEY) as running:
        assert (await running.client.get("/v1/models", headers={**strange, **bearer(KEY)})).status_code == 200


async def test_keys_come_in_two_headers():
    async with serving(api_key=KEY) as running:
        for headers in (bearer(KEY), {"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
            assert (await running.client.get("/v1/models", headers=headers)).status_code == 200
        for headers in (
            bearer(KEY[:-1]),
            {"authorization": f"Basic {KEY}"},
            {"x-api-key": ""},
            {"authorization": "Bearer"},
        ):
            assert (await running.client.get("/v1/models", headers=headers)).status_code == 401
        for path in ("//v1/models", "/v1/../v1/models", "/health/../v1/models", "/health%2f..%2fv1/models", "/health/"):
            assert (await running.client.get(path)).status_code in (401, 404), path


async def test_nothing_of_a_body_is_read_without_a_key():
    async with serving(api_key=KEY) as running:
        reader, writer = await asyncio.open_connection(*running.address)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 999999\r\n\r\n"  # noqa: E501
        writer.write(head.encode())
        answer = await reader.read()
        assert b" 401 " in answer.splitlines()[0] and b"connection: close" in answer.lower(), "and then it is closed"
        writer.close()


async def test_tenants_see_their_own_requests(keys_file):
    async with serving(keys_file=keys_file, api_key=KEY) as running:
        for _ in range(2):
            found = await running.completion(prompt="shared by nobody at all", **{})
            assert found.status_code == 401
        body = {"prompt": "shared by nobody at all", "max_tokens": 4, **GREEDY}
        cached = []
        for key in (ALICE, BOB, ALICE):
            found = await running.post("/v1/completions", body, headers=bearer(key))
            cached.append(found.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[:2] == [0, 0] and cached[2] > 0
        counts = {}
        for key in (ALICE, BOB, KEY):
            counts[key] = (await running.client.get("/v1/stats", headers=bearer(key))).json()
        assert [sum(counts[key]["requests_finished"].values()) for key in (ALICE, BOB, KEY)] == [2, 1, 3]
        assert counts[ALICE]["pools"] == [] and counts[KEY]["pools"]


async def test_probes_follow_the_state_of_the_server():
    async with serving(attach=False) as running:
        assert (await running.client.get("/health")).status_code == 200
        found = await running.client.get("/ready")
        assert found.status_code == 503 and found.headers["retry-after"] and "starting" in error_of(found)["message"]
        assert (await running.client.get("/status")).json()["state"] == "starting"
        for ask in (running.completion, running.chat):
            assert (await ask()).status_code == 503
        assert (await running.client.get("/v1/models")).status_code == 503
        await running.engine.start()
        running.server.context.attach(running.engine)
        assert (await running.client.get("/ready")).status_code == 200
        assert (await running.completion()).status_code == 200
        running.server.context.draining = True
        found = await running.client.get("/ready")
        assert found.status_code == 503 and "draining" in error_of(found)["message"]
        refused = await running.completion()
        assert refused.status_code == 503 and refused.headers["retry-after-ms"]
        assert (await running.client.get("/health")).status_code == 200


async def test_an_engine_that_broke_is_told():
    async with serving() as running:
        executor_of(running.engine).fail_at = 0
        found = await running.completion()
        assert found.status_code == 503 and error_of(found)["type"] == "unavailable_error"
        assert found.headers["retry-after"] == "1"
        assert (await running.client.get("/ready")).status_code == 503


async def test_stopping_lets_streams_end_and_cuts_those_that_do_not(caplog):
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serving())
        gate = stack.enter_context(Gate(executor_of(running.engine)))
        done = asyncio.ensure_future(running.completion(max_tokens=60))
        await until(lambda: running.server.context.open)
        stopping = asyncio.ensure_future(running.server.stop(60))
        await until(lambda: running.server.context.draining)
        gate.let()
        await stopping
        assert (await done).json()["usage"]["completion_tokens"] == 60
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient(base_url=running.url).get("/health")
    async with serving(make_engine(step_s=0.01)) as running:
        cut = asyncio.ensure_future(running.completion(max_tokens=1000, stream=True))
        await until(lambda: running.server.context.open)
        await running.server.stop(0.05)
        with pytest.raises(httpx.HTTPError):
            await cut
        assert not running.server.context.open and not running.server._state.tasks
    assert "Traceback" not in caplog.text and "ASGI" not in caplog.text


async def test_web_pages_may_call_where_they_are_named():
    origin = "https://chat.example.org"
    preflight = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with serving(api_key=KEY, cors_origins=(origin,)) as running:
        found = await running.client.options("/v1/chat/completions", headers=preflight)
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == origin
        assert "authorization" in found.headers["access-control-allow-headers"]
        headers = {"origin": origin, **bearer(KEY)}
        found = await running.client.get("/v1/models", headers=headers)
        assert found.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in found.headers["access-control-expose-headers"]
        found = await running.client.get("/v1/models", headers={"origin": origin})
        assert found.status_code == 401 and found.headers["access-control-allow-origin"] == origin
        found = await running.client.get("/v1/models", headers={**headers, "origin": "https://elsewhere.example.org"})
        assert "access-control-allow-origin" not in found.headers
    async with serving() as running:
        found = await running.client.options("/v1/chat/completions", headers=preflight)
        assert found.status_code == 405 and "access-control-allow-origin" not in found.headers


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """Paths of a server's chain and key, of a CA, and of a client's certificate."""
    authority, folder = trustme.CA(), tmp_path_factory.mktemp("pem")
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client@example.org")
    paths = {name: str(folder / name) for name in ("cert", "key", "ca", "client")}
    server.cert_chain_pems[0].write_to_path(paths["cert"])
    server.private_key_pem.write_to_path(paths["key"])
    authority.cert_pem.write_to_path(paths["ca"])
    client.private_key_and_cert_chain_pem.write_to_path(paths["client"])
    return paths


async def test_tls_and_certificates_of_clients(pem):
    async with serving(tls_cert=pem["cert"], tls_key=pem["key"], tls_client_ca=pem["ca"]) as running:
        assert running.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=pem["ca"])
        async with httpx.AsyncClient(base_url=running.url, verify=context) as nobody:
            with pytest.raises(httpx.HTTPError):
                await nobody.get("/health")
        context = ssl.create_default_context(cafile=pem["ca"])
        context.load_cert_chain(pem["client"])
        async with httpx.AsyncClient(base_url=running.url, verify=context) as known:
            found = await known.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True})
            assert found.status_code == 200 and found.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_who_does_not_shake_hands_counts_as_a_connection(pem, loop, monkeypatch):
    """Of one address, so that others find room; and holds up no end of the server."""

    async def silent() -> asyncio.Task[bytes]:
        """Of a connection on which nothing is sent: what ends when the server closes it."""
        reader, writer = await asyncio.open_connection(*address)
        kept.append(writer)
        return asyncio.ensure_future(reader.read(1))

    async def shakes(local: str) -> bool:
        context = ssl.create_default_context(cafile=pem["ca"])
        try:
            reader, writer = await asyncio.open_connection(*address, ssl=context, local_addr=(local, 0))
        except (OSError, ssl.SSLError):
            return False
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        found = await reader.read()
        writer.close()
        return b" 200 " in found

    async def play() -> None:
        files = {"tls_cert": pem["cert"], "tls_key": pem["key"]}
        monkeypatch.setattr(protocol, "MAX_OF_ADDRESS", 4)
        monkeypatch.setattr("wicore_trt.http.server.HANDSHAKE_S", 120.0)
        async with serving(**files) as running:
            address[:] = running.url.removeprefix("https://").split(":")
            assert [await shakes("127.0.0.1") for _ in range(3)] == [True] * 3
            reads = [await silent() for _ in range(12)]
            await until(lambda: sum(read.done() for read in reads) == 8 and running.server._state.shaking == 4)
            assert not await shakes("127.0.0.1") and await shakes("127.0.0.2")
            for writer in kept:
                writer.transport.abort()
            await until(lambda: not running.server._state.shaking)
            assert await shakes("127.0.0.1")
            reads += [await silent() for _ in range(4)]
            await until(lambda: running.server._state.shaking == 4)
        assert not running.server._shaking and not running.server._state.shaking
        await asyncio.gather(*reads, return_exceptions=True)

    address: list = []
    kept: list[asyncio.StreamWriter] = []
    factory = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(play())


async def test_a_unix_socket(tmp_path):
    host = f"unix:{tmp_path}/s"
    assert find_http_host(ServerSettings(host=host)) == f"{host}.http"
    async with serving(host=host) as running:
        assert running.url == f"{host}.http"
        transport = httpx.AsyncHTTPTransport(uds=f"{tmp_path}/s.http")
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            assert (await client.get("/health")).status_code == 200
        with pytest.raises(EnvironmentUnfitError):
            await HttpServer(ServerSettings(host=host)).start()
    assert not (tmp_path / "s.http").exists()


async def test_addresses_and_files_that_will_not_do(tmp_path):
    async with serving() as running:
        with pytest.raises(EnvironmentUnfitError, match="in use"):
            await HttpServer(ServerSettings(http_port=running.address[1])).start()
    with pytest.raises(ConfigError):
        HttpServer(ServerSettings(tls_cert=str(tmp_path / "none"), tls_key=str(tmp_path / "none")))
