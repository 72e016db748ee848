"""From an engine factory to a running server process and back: start order, signals, drain, exit code.

Order: bind the port (a used port fails in milliseconds, not after the engine was loaded), load and start the engine,
report SERVING; while an engine of another process has ended and the next one has not come, report NOT_SERVING; on
SIGTERM or SIGINT report NOT_SERVING, refuse new requests, let running ones finish, cancel the rest, close. Must
not know messages or models. Invariant: the process ends within the grace time plus a few seconds,
and a second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from wicore_trt.access.fronts import Fronts
from wicore_trt.access.listening import check_exposure, http_host, is_local
from wicore_trt.config import ServerSettings
from wicore_trt.errors import EngineDeadError
from wicore_trt.serve.servers import Servers

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine

log = logging.getLogger(__name__)

T = TypeVar("T")
Told = Callable[[str, "str | None"], None]
"""What is told the address of gRPC and the URL of HTTP, where that is served."""

POLL_S = 0.02
CANCEL_S = 5.0  # for an engine to end its step and for streams to see that they were cancelled
FLUSH_S = 0.5  # for the last bytes of small calls when the port closes


def run_server(
    settings: ServerSettings,
    engine_factory: Callable[[], Awaitable[TextEngine]],
    announce: Told = lambda address, url: None,
    max_context: int | None = None,
    bound: Told = lambda address, url: None,
    watch: Callable[[asyncio.Event, Servers], None] | None = None,
    fronts: Callable[[], Fronts] = Fronts,
) -> int:
    """Serve until a signal; returns the exit code: 0 when every request could finish, 1 when some were cancelled.

    `engine_factory` loads an engine. `announce` is told the addresses when it serves, `bound` when the ports are taken.
    With `watch` no signal ends the server: it is told, before it listens, the servers and an event that ends them when
    it is set. `fronts` makes what this one sees of the others. The largest message follows from `max_context`, the
    engine's, unless the settings say. Raises EnvironmentUnfitError, ConfigError and what the factory raises before
    serving, EngineDeadError when an engine that does not recover breaks while serving.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(settings, engine_factory, announce, max_context, bound, watch, fronts))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, which makes a streamed message cheaper by a third; asyncio's own where there is no wheel of it."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(
    settings: ServerSettings,
    engine_factory: Callable[[], Awaitable[TextEngine]],
    announce: Told,
    max_context: int | None,
    bound: Told,
    watch: Callable[[asyncio.Event, Servers], None] | None,
    fronts: Callable[[], Fronts],
) -> int:
    check_exposure(settings)
    stop = asyncio.Event()
    if watch is None:
        _stop_on_signals(stop)
    server = Servers(settings, max_context, fronts())
    if watch is not None:
        watch(stop, server)
    try:
        address, url = await server.start()
        bound(address, url)
        log.info("loading the engine for %s and %s", address, url)
        _warn_of_strangers(settings)
        started = time.monotonic()
        engine = await _unless(stop, asyncio.ensure_future(engine_factory()))
        if engine is None:
            log.info("stopped while loading")
            return 0
        await engine.start()
        server.attach(engine)
        await server.set_serving()
        log.info("serving %s after %.1f s", engine.info.model_id, time.monotonic() - started)
        announce(address, url)
        while not stop.is_set() and (death := await _unless(stop, asyncio.ensure_future(_death(engine)))) is not None:
            if not engine.engine.recovers:
                await server.set_draining()
                raise _dead(death)
            log.error("no requests are taken: %s", death)
            await server.set_waiting()
            if await _unless(stop, asyncio.ensure_future(_life(engine))):
                await server.set_serving()
                log.info("requests are taken again")
        return await _drain(server, engine, settings.grace_s)
    finally:
        await server.stop(FLUSH_S)


async def _drain(server: Servers, engine: TextEngine, grace_s: float) -> int:
    """Let requests finish within `grace_s` seconds, cancel the rest; returns the exit code."""
    log.info("draining %d streams for up to %g s", server.streams_open, grace_s)
    end = time.monotonic() + grace_s
    await server.set_draining()
    clean = False
    with suppress(TimeoutError):
        clean = await asyncio.wait_for(engine.drain(grace_s), grace_s + CANCEL_S)
        # Streams still open wait for readers that have not taken their output yet.
        await asyncio.wait_for(server.until_idle(), max(end - time.monotonic(), FLUSH_S))
    clean = clean and server.idle
    await server.stop(FLUSH_S)
    await engine.close(CANCEL_S)
    if engine.dead is not None and not engine.engine.recovers:
        raise _dead(engine.dead)
    if clean:
        log.info("stopped")
    else:
        log.warning("stopped; requests that had not finished after %g s were cancelled", grace_s)
    return 0 if clean else 1


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT sets `stop`. A second one ends the process there and then."""
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("second signal: exit at once")
            logging.shutdown()
            os._exit(128 + number)
        log.info("%s received", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


async def _unless(stop: asyncio.Event, work: asyncio.Future[T]) -> T | None:
    """The result of `work`, or None when `stop` is set first; `work` is then cancelled."""
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        stopped.cancel()
        work.cancel()


async def _death(engine: TextEngine) -> str:
    """Wait until the engine breaks; returns why."""
    while engine.dead is None:
        await asyncio.sleep(POLL_S)
    return engine.dead


async def _life(engine: TextEngine) -> bool:
    """Wait until the engine, or the next one, takes requests."""
    while engine.dead is not None:
        await asyncio.sleep(POLL_S)
    return True


def _dead(why: str) -> EngineDeadError:
    return EngineDeadError(f"The engine stopped: {why}.")


def _warn_of_strangers(settings: ServerSettings) -> None:
    known = [host for host in sorted({settings.host, http_host(settings)}) if not is_local(host)]
    if not known:
        return
    if not (settings.api_key or settings.keys_file or settings.tls_client_ca):
        log.warning("everybody who reaches %s may use this server: set server.api_key or server.keys_file", known[0])
    elif not settings.tls_cert:
        log.warning("API keys travel in clear text: set server.tls_cert and server.tls_key")
