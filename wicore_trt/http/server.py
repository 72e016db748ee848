"""Serve HTTP to clients: address, TLS, connections, routes, origins, drain.

Must not know what the engine is or when it is ready. Invariants: generations are refused from `set_draining` on;
after `stop` no connection and no task of this server is left. A TLS handshake counts as a connection of its address,
as each costs some 50 KB for as long as it likes to take.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.utils import get_remote_addr

from wicore_trt.access.admission import Admission, find_message_limit
from wicore_trt.access.listening import check_free, find_http_host, format_address, is_local, read_tls
from wicore_trt.config import ServerSettings
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.http.app import make_app
from wicore_trt.http.context import Context
from wicore_trt.http.protocol import GuardedHttp, GuardedWebSocket, Visitors
from wicore_trt.http.socket import MAX_FRAME

KEEP_ALIVE_S = 75
"""Seconds for which a connection without requests stays open."""
BACKLOG = 2048
POLL_S = 0.02
CANCEL_S = 1.0
HANDSHAKE_S = 10.0


class Listener:
    """Listener at one address. Construct it on the event loop that will run it; `app` may be replaced at any time.
    `flag` is the option that chooses the port, as errors name it."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, host: str, port: int, *, flag: str, max_frame: int = 1 << 16,
    ) -> None:  # fmt: skip
        """Raises ConfigError for bad TLS files."""
        self.app = app
        self._host, self._port, self._flag = host, port, flag
        self._tls = read_tls(settings)
        self._config = Config(
            self._call_app,
            interface="asgi3",  # which uvicorn does not see of a method
            http=GuardedHttp, ws=GuardedWebSocket, lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_keep_alive=KEEP_ALIVE_S, ws_max_size=max_frame,
            ws_per_message_deflate=False,
        )  # fmt: skip
        self._config.load()
        self._state = Visitors()
        self._make_protocol = partial(GuardedHttp, self._config, self._state, {})
        self._listener: asyncio.Server | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._shaking: set[asyncio.Future[None]] = set()

    async def _call_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    def change(self, settings: ServerSettings) -> None:
        """Use another certificate for new connections. Raises ConfigError, changing nothing, for bad files."""
        if self._tls is not None:
            self._tls = read_tls(settings)

    async def start(self) -> str:
        """Listen and return the URL (port 0: the system's choice). Raises EnvironmentUnfitError for a bad address."""
        host, port = self._host, self._port
        check_free(host, port, self._flag)
        loop = asyncio.get_running_loop()
        comes = self._make_protocol if self._tls is None else partial(Shaking, self._begin_handshake)
        try:
            if host.startswith("unix:"):
                path = host.removeprefix("unix:")
                with suppress(FileNotFoundError):
                    os.unlink(path)
                self._listener = await loop.create_unix_server(comes, path, backlog=BACKLOG)
            else:
                self._listener = await loop.create_server(comes, host, port, backlog=BACKLOG)
                port = self._listener.sockets[0].getsockname()[1]
        except OSError as error:
            raise EnvironmentUnfitError(f"Cannot listen on {format_address(host, port)}: {error}.") from None
        self._update_date()
        scheme = "http" if self._tls is None else "https"
        return host if host.startswith("unix:") else f"{scheme}://{format_address(host, port)}"

    def _begin_handshake(self, transport: asyncio.Transport) -> None:
        client = get_remote_addr(transport)
        self._state.shaking += 1
        if self._state.admit_connection(client):
            own = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            own.setblocking(False)
            transport.abort()  # it has read nothing of its socket
            shaking = asyncio.ensure_future(self._do_handshake(own))
            self._shaking.add(shaking)
            shaking.add_done_callback(lambda _: self._end_handshake(client, shaking))
        else:
            transport.abort()
            self._end_handshake(client)

    async def _do_handshake(self, sock: socket.socket) -> None:
        assert self._tls is not None
        with suppress(OSError, TimeoutError):  # those of TLS, too
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, sock, ssl=self._tls.context, ssl_handshake_timeout=HANDSHAKE_S
            )

    def _end_handshake(self, client: tuple[str, int] | None, shaking: asyncio.Future[None] | None = None) -> None:
        self._state.shaking -= 1
        self._state.drop_connection(client)
        if shaking is not None:
            self._shaking.discard(shaking)

    def _update_date(self) -> None:
        self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
        self._clock = asyncio.get_running_loop().call_later(1.0, self._update_date)

    async def wait_idle(self) -> None:
        """Wait until nothing is left which would begin an answer."""

    async def stop(self, grace_s: float) -> None:
        """Close the port; open connections are cancelled when nothing would begin an answer, after `grace_s` seconds
        at the latest."""
        if self._clock is not None:
            self._clock.cancel()
        if self._listener is not None:
            self._listener.close()
        end = time.monotonic() + grace_s
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait_idle(), max(grace_s, POLL_S))
        for shaking in self._shaking:
            shaking.cancel()
        for connection in list(self._state.connections):
            connection.shutdown()  # ends those that are idle, and WebSockets
        left_s = max(0.0, end - time.monotonic())
        if not await _wait_until(lambda: not self._state.connections and not self._state.tasks, left_s):
            # Requests end as they do when their clients leave, and say nothing in the log but their access lines.
            for connection in list(self._state.connections):
                assert isinstance(connection, (GuardedHttp, GuardedWebSocket))
                connection.cut_off()
            if not await _wait_until(lambda: not self._state.connections and not self._state.tasks, CANCEL_S):
                for task in list(self._state.tasks):
                    task.cancel()
                await _wait_until(lambda: not self._state.tasks, CANCEL_S)
        if self._listener is not None and self._host.startswith("unix:"):
            with suppress(FileNotFoundError):
                os.unlink(self._host.removeprefix("unix:"))


class Shaking(asyncio.Protocol):
    """Connection in a TLS handshake, of which `comes` is told; nothing is read from it here."""

    def __init__(self, comes: Callable[[asyncio.Transport], None]) -> None:
        self._comes = comes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._comes(transport)


async def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(POLL_S)
    return True


class HttpServer(Listener):
    """HTTP server of a front. Construct it on the event loop that will run it."""

    def __init__(
        self, settings: ServerSettings, max_context: int | None = None, admission: Admission | None = None
    ) -> None:
        """Construct with the engine's `max_context`, where known, and the `admission` that servers of this process
        share. Raises ConfigError for bad TLS or keys files."""
        limit = find_message_limit(max_context, settings.max_message_mb)
        host = find_http_host(settings)
        local = is_local(host) and not host.startswith("unix:")
        admission = admission or Admission.from_settings(settings)
        self.context = Context(admission, limit, local, settings.allowed_hosts)
        self.context.origins = settings.cors_origins
        port, max_frame = settings.http_port or 0, min(limit, MAX_FRAME)
        super().__init__(make_app(self.context), settings, host, port, flag="--http-port", max_frame=max_frame)

    def change(self, settings: ServerSettings) -> None:
        """Use other origins and certificate for new connections. Raises ConfigError, changing nothing, for bad
        files."""
        super().change(settings)
        self.context.allowed_hosts, self.context.origins = settings.allowed_hosts, settings.cors_origins
        self.app = make_app(self.context)

    async def stop(self, grace_s: float) -> None:
        self.context.draining = True
        await super().stop(grace_s)

    async def wait_idle(self) -> None:
        await self.context.idle.wait()
