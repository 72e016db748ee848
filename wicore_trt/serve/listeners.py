"""The servers that share the listening address, and the replacement of broken ones.

Must not know services. Invariants: until stopped, each broken server is replaced. Neither a broken server nor anything
that it waits for is freed while open calls use it: that would end the process with a segmentation fault.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress

import grpc

from wicore_trt.access.listening import format_address
from wicore_trt.access.log import QuietLog

log = logging.getLogger(__name__)

LISTENERS = 4
"""Servers on one TCP address. The files of Unix sockets cannot be shared."""
LOOK_S, RETRY_S = 0.5, 0.02
"""Time between two looks for the file of a Unix socket, and between two attempts to take an address."""
ACCEPTING = "_server_main_loop"
"""Part of the name of the coroutine in which grpc.aio accepts calls."""
PATIENCE, SLOW_S = 1000, 0.25
"""Broken servers, which keep some 40 KB each for ever, after which the next ones come more slowly."""
STOP_S = 1.0
"""Seconds beyond its grace that gRPC may take to stop. A server that broke waits for the client that broke it."""

_BROKEN: list[grpc.aio.Server] = []


class Services:
    """Collects the handlers of services in place of a server, so that their methods are not registered one by one."""

    # grpc.aio waits for a call of each registered method. When its loop breaks it cancels these waits and frees memory
    # into which gRPC's core still writes calls. Generic handlers have one wait, which is over when the loop breaks.
    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self.handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Leave them out."""


# grpc.aio ends its accept loop, and with it the port, when a call cannot be decoded: one HTTP/2 request whose :path is
# not UTF-8 is enough, before our code runs. Open streams go on. So several servers listen on one TCP address
# (SO_REUSEPORT): while one is replaced, clients find the others.
class Listeners:
    """Servers made by `make`, each bound by `bind`, which raises RuntimeError for a taken address. A server whose Unix
    socket was removed counts as broken."""

    def __init__(self, make: Callable[[], grpc.aio.Server], bind: Callable[[grpc.aio.Server, str], int]) -> None:
        self._make, self._bind = make, bind
        self._servers: list[grpc.aio.Server] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        self._warn = QuietLog(log, logging.WARNING)

    async def start_listening(self, host: str, port: int) -> str:
        """Listen and return the address with its actual port. Raises RuntimeError."""
        self._servers.append(self._make())
        address = format_address(host, self._bind(self._servers[0], format_address(host, port)))
        for _ in range(0 if host.startswith("unix:") else LISTENERS - 1):
            self._servers.append(self._make())
            self._bind(self._servers[-1], address)
        for place in range(len(self._servers)):
            accepting = await self._start_server(place)
            self._watchers.append(asyncio.ensure_future(self._watch_server(place, address, accepting)))
        return address

    async def _start_server(self, place: int) -> asyncio.Task[None]:
        """Start the server at this place; return gRPC's accept task, which ends when the server breaks."""
        async with self._starting:
            before = asyncio.all_tasks()  # `wait_for_termination` reports a break only when its time is over
            await self._servers[place].start()
            return next(
                task
                for task in asyncio.all_tasks() - before
                if ACCEPTING in str(getattr(task.get_coro(), "__qualname__", ""))
            )

    async def _watch_server(self, place: int, address: str, accepting: asyncio.Task[None]) -> None:
        while True:
            await asyncio.wait((accepting,), timeout=LOOK_S if address.startswith("unix:") else None)
            # gRPC removes a broken server's Unix socket file, perhaps after the next server has made it anew
            removed = address.startswith("unix:") and not os.path.exists(address.removeprefix("unix:"))
            if not (removed or accepting.done()):
                continue
            if not _BROKEN:
                # When the last server is freed, grpc.aio waits on the event loop's thread until every one has ended,
                # and one that broke ends when its clients please. With one more reference it never does.
                grpc.aio.init_grpc_aio()
            _BROKEN.append(self._servers[place])
            if len(_BROKEN) > PATIENCE:
                await asyncio.sleep(SLOW_S)
            server = self._make()
            while True:
                try:
                    self._bind(server, address)
                    break
                except RuntimeError:
                    await asyncio.sleep(RETRY_S)
            self._servers[place] = server
            accepting = await self._start_server(place)
            why = "socket file removed" if removed else "undecodable call"
            self._warn(f"gRPC listener stopped ({why}); restarted", address=address)

    async def stop_listening(self, grace_s: float) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        stopping = [asyncio.ensure_future(server.stop(grace_s)) for server in self._servers]
        if stopping:
            await asyncio.wait(stopping, timeout=grace_s + STOP_S)
        for ended in stopping:
            with suppress(Exception):  # it broke just now
                if ended.done():
                    ended.result()
