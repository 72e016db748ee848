"""Port of an engine for a front, wherever the engine runs, and the engine that runs in this process.

Every call is made on the front's event loop and answers there. It must not know text, transports or processes.
Invariant: a request that `add` took gets its final output through the sink, also when the engine breaks.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from wicore_trt.core.loop import Core, EngineLoop
from wicore_trt.kv.events import Event, EventFeed, EventSnapshot
from wicore_trt.types import EngineStats, GenerateRequest, TextRequest, TokenOutput

Sink = Callable[[list[TokenOutput]], None]
Position = tuple[int, int]
"""The epoch of a feed of KV events and the number of the last event that its reader has."""
UNKNOWN: Position = (0, -1)
Change = tuple[int, EventSnapshot | list[Event]]
"""The epoch of a feed, and a snapshot of its pages or events that follow each other."""


class EnginePort(ABC):
    """Engine as a front sees it, or several in one: `parts`."""

    prefix = ""
    pid: int | None = None
    """The process that the engine runs in, where it is known."""

    @property
    def parts(self) -> Sequence[EnginePort]:
        """Return the replicas that requests are spread over: itself where it is one engine."""
        return (self,)

    def choose_prefix(self, request: TextRequest) -> str:
        """Return what the key of this request, whose prompt is token ids, must begin with; `add` it next."""
        return self.prefix

    def part_of(self, request_key: str) -> EnginePort:
        """Return the engine that has a request."""
        return self

    @property
    @abstractmethod
    def dead(self) -> str | None:
        """Return why the engine takes no requests; None unless it broke."""

    @abstractmethod
    async def start(self, sink: Sink) -> None:
        """Begin to take requests."""

    @abstractmethod
    async def add(self, request: GenerateRequest) -> None:
        """Hand over a request whose key is not live. Outputs may come before this returns. Raises InvalidRequestError,
        QueueFullError, UnavailableError or EngineDeadError; there is then no output."""

    @abstractmethod
    def abort(self, request_key: str, index: int | None = None) -> None:
        """Ask for the end of a request, or of one of its sequences; ignore keys that are not live."""

    @abstractmethod
    async def stats(self, tenant: str | None = None) -> EngineStats:
        """Return counters and gauges of the engine; with `tenant` only uptime and that tenant's load."""

    @abstractmethod
    def kv_events(self, tenant: str | None, after: Position) -> AsyncGenerator[Change, None]:
        """Yield what the KV cache gains and loses from `after` on, of one tenant's pages or all: the epoch, and a
        snapshot if events were missed, else events. Ends when closed. Raises as `Core.find_feed`."""

    @abstractmethod
    async def stop(self, timeout_s: float) -> None:
        """Cancel live requests and end the engine; a step that hangs longer than `timeout_s` seconds is abandoned."""


class LocalEngine(EnginePort):
    """Engine on a thread of this process. `max_waiting` bounds the sequences that wait for their first step."""

    def __init__(self, core: Core, *, max_waiting: int = 1024) -> None:
        self.core = core
        self._loop = EngineLoop(core, self._emit_outputs, max_waiting=max_waiting)
        core.began = self._emit_outputs
        self._sink: Sink = lambda outputs: None
        self._asyncio: asyncio.AbstractEventLoop | None = None

    @property
    def dead(self) -> str | None:
        return self._loop.dead

    async def start(self, sink: Sink) -> None:
        self._sink, self._asyncio, self.pid = sink, asyncio.get_running_loop(), os.getpid()
        self._loop.start()

    async def add(self, request: GenerateRequest) -> None:
        self._loop.add(request)

    def abort(self, request_key: str, index: int | None = None) -> None:
        self._loop.abort(request_key, index)

    async def stats(self, tenant: str | None = None) -> EngineStats:
        return self._loop.stats(tenant)

    def kv_events(self, tenant: str | None, after: Position) -> AsyncGenerator[Change, None]:
        return follow_feed(self.core.find_feed(tenant), after)

    async def stop(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._loop.stop, timeout_s)

    def _emit_outputs(self, outputs: list[TokenOutput]) -> None:
        assert self._asyncio is not None
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._asyncio.call_soon_threadsafe(self._sink, outputs)


async def follow_feed(feed: EventFeed, after: Position) -> AsyncGenerator[Change, None]:
    """Yield the changes of a feed from `after` on as they happen; read the feed no faster than the caller does."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def on_event() -> None:  # on the engine's thread
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(changed.set)

    epoch, position = after
    if epoch != feed.epoch:
        position = -1  # is always too old
    end_listening = feed.add_listener(on_event)
    try:
        while True:
            changed.clear()
            events = feed.list_since(position)
            if events is None:
                snapshot = feed.take_snapshot()
                position = snapshot.sequence
                yield feed.epoch, snapshot
            elif events:
                position = events[-1].sequence
                yield feed.epoch, events
            else:
                await changed.wait()
    finally:
        end_listening()
