"""The life of a process that serves clients: bind the ports, load, serve, drain, exit.

Ports come first, so that a used port fails at once. Health is SERVING while an engine is there, else NOT_SERVING. To
stop, the process refuses requests, lets running ones finish, cancels the rest and closes. It must not know messages or
models. Invariant: once told to stop, it ends within the grace time plus a few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from wicore_trt.access.admission import Admission
from wicore_trt.access.listening import check_exposure, find_http_host, is_local
from wicore_trt.config import ServerSettings
from wicore_trt.http.metrics import take_snapshot
from wicore_trt.http.server import HttpServer
from wicore_trt.metrics.exposition import collect_families, render_metrics
from wicore_trt.serve.server import GrpcServer

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine

log = logging.getLogger(__name__)

CANCEL_S = 5.0  # for an engine to end its step and for streams to see that they were cancelled
FLUSH_S = 0.5  # for the last bytes of small calls when the port closes


def choose_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory, which makes a streamed message a third cheaper; None where it has no wheel."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class Servers:
    """The gRPC and (with server.http_port) HTTP server. Construct it on the event loop that will run them."""

    def __init__(self, settings: ServerSettings, max_context: int | None = None) -> None:
        """`max_context` is the engine's, where it is known. Raises ConfigError for bad TLS or keys files."""
        admission = self._admission = Admission.from_settings(settings)
        self.grpc = GrpcServer(settings, max_context, admission)
        self.http = HttpServer(settings, max_context, admission)
        self._serves_http = settings.http_port is not None

    async def start_listening(self) -> tuple[str, str | None]:
        """Listen and return the address of gRPC and the URL of HTTP. Raises EnvironmentUnfitError."""
        address = await self.grpc.start_listening()
        return address, await self.http.start() if self._serves_http else None

    def apply_settings(self, settings: ServerSettings) -> None:
        """Apply other keys, rates, origins and certificates from now on. Raises ConfigError."""
        self.grpc.apply_settings(settings)
        self.http.change(settings)
        self._admission.apply_settings(settings)

    @property
    def streams_open(self) -> int:
        return self.grpc.service.open.total() + self.http.context.open.total()

    async def wait_until_idle(self) -> None:
        await self.grpc.service.idle.wait()
        await self.http.context.idle.wait()

    async def set_draining(self) -> None:
        """Refuse requests from now on, and tell probes."""
        self.http.context.draining = True
        await self.grpc.set_draining()

    async def render_metrics(self) -> str:
        return render_metrics(collect_families(await take_snapshot(self.http.context)))[0].decode()

    async def stop_listening(self, grace_s: float) -> None:
        """Close the ports; calls still open after `grace_s` seconds are cancelled."""
        await asyncio.gather(self.grpc.stop_listening(grace_s), self.http.stop(grace_s))


class ServingProcess(ABC):
    """Serves an engine that may end and come again; subclasses find it, and set `changed` when it came or ended."""

    def __init__(self, settings: ServerSettings, max_context: int | None = None) -> None:
        """`max_context` is the engine's; the largest message follows from it unless it is set."""
        self._settings, self._max_context = settings, max_context
        self.changed = asyncio.Event()
        self.stopping = False

    @abstractmethod
    def begin_watching(self, servers: Servers) -> None:
        """Begin to watch for the engine and for the end; on the event loop, before the servers listen."""

    @abstractmethod
    def find_engine(self) -> TextEngine | None:
        """Return the engine when it is loaded, else None. Raises WicoreError when it cannot be loaded."""

    def report_bound(self, address: str, url: str | None) -> None:  # noqa: B027
        """Report that the ports are taken: the address of gRPC and the URL of HTTP, None where that is not served."""

    def report_serving(self, address: str, url: str | None) -> None:  # noqa: B027
        """Report that requests are taken."""

    def stop_serving(self) -> None:
        self.stopping = True
        self.changed.set()

    def run(self) -> int:
        """Serve until told to stop; return the exit code: 0 when every request could finish, 1 when some were
        cancelled. Raises EnvironmentUnfitError, ConfigError and, before serving, the errors of `find_engine`."""
        with asyncio.Runner(loop_factory=choose_loop_factory()) as runner:
            return runner.run(self._serve_until_stopped())

    async def _serve_until_stopped(self) -> int:
        check_exposure(self._settings)
        servers = Servers(self._settings, self._max_context)
        self.begin_watching(servers)
        try:
            address, url = await servers.start_listening()
            self.report_bound(address, url)
            log.info("loading the engine for %s and %s", address, url)
            _warn_of_strangers(self._settings)
            started = time.monotonic()
            engine: TextEngine | None = None
            while engine is None:
                self.changed.clear()
                if self.stopping:
                    log.info("stopped while loading")
                    return 0
                engine = self.find_engine()
                if engine is None:
                    await self.changed.wait()
            await engine.start()
            servers.grpc.service.engine = engine
            servers.http.context.attach(engine)
            await servers.grpc.set_serving()  # HTTP asks the engine itself
            log.info("serving %s after %.1f s", engine.info.model_id, time.monotonic() - started)
            self.report_serving(address, url)
            await self._follow_engine(servers, engine)
            return await drain_requests(servers, engine, self._settings.grace_s)
        finally:
            await servers.stop_listening(FLUSH_S)

    async def _follow_engine(self, servers: Servers, engine: TextEngine) -> None:
        """Tell the servers whenever the engine ends or the next one comes, until told to stop."""
        serving = True
        while not self.stopping:
            self.changed.clear()
            dead = engine.dead
            if dead is not None and serving:
                log.error("no requests are taken: %s", dead)
                await servers.grpc.set_serving(False)
            elif dead is None and not serving:
                await servers.grpc.set_serving()
                log.info("requests are taken again")
            serving = dead is None
            await self.changed.wait()


async def drain_requests(servers: Servers, engine: TextEngine, grace_s: float) -> int:
    """Let requests finish within `grace_s` seconds, cancel the rest; return the exit code."""
    log.info("draining %d streams for up to %g s", servers.streams_open, grace_s)
    end = time.monotonic() + grace_s
    await servers.set_draining()
    clean = False
    with suppress(TimeoutError):
        clean = await asyncio.wait_for(engine.drain(grace_s), grace_s + CANCEL_S)
        # streams still open wait for their readers
        await asyncio.wait_for(servers.wait_until_idle(), max(end - time.monotonic(), FLUSH_S))
    clean = clean and not servers.streams_open
    await engine.close(CANCEL_S)  # first, so that requests of an engine that hangs end with an error
    await servers.stop_listening(FLUSH_S)
    if clean:
        log.info("stopped")
    else:
        log.warning("stopped; requests that had not finished after %g s were cancelled", grace_s)
    return 0 if clean else 1


def _warn_of_strangers(settings: ServerSettings) -> None:
    known = [host for host in sorted({settings.host, find_http_host(settings)}) if not is_local(host)]
    if not known:
        return
    if not (settings.api_key or settings.keys_file or settings.tls_client_ca):
        log.warning("everybody who reaches %s may use this server: set server.api_key or server.keys_file", known[0])
    elif not settings.tls_cert:
        log.warning("API keys travel in clear text: set server.tls_cert and server.tls_key")
