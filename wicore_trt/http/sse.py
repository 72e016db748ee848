"""Server-sent events: ready bytes to a client, until the last one or until the client leaves.

Must not know what the events say. Invariants: nothing is sent before the first event (which is due when the engine has
begun) or comment, so that what fails before, a refusal say, is an answer with a status of its own; a stream that breaks
later ends with an event `error` and without `done`; the source is closed, however the response ends; a client that
leaves ends it within one event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from starlette.types import Message, Receive, Scope, Send

from wicore_trt.errors import WicoreError
from wicore_trt.http.errors import ClientGoneError

KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """An ASGI response. `close` is awaited at the end; `failed` turns what is no WicoreError into one; `done` and
    `broken` are the last bytes of a stream."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        failed: Callable[[Exception], WicoreError],
        keep_alive_s: float,
        headers: list[tuple[bytes, bytes]],
        *,
        done: bytes,
        broken: Callable[[WicoreError], bytes],
    ) -> None:
        self._events, self._close, self._failed = events, close, failed
        self._keep_alive_s, self._done, self._broken = keep_alive_s, done, broken
        self._headers = [*HEADERS, *headers]
        self._started = False
        self._sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what broke the stream before anything was sent, and ClientGoneError."""
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(self._watch(receive, send))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                raise ClientGoneError
            pump.result()
        finally:
            for task in (pump, watch):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(pump, watch, return_exceptions=True)
            await self._close()

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def _pump(self, send: Send) -> None:
        try:
            async for event in self._events:
                if not self._started:
                    await self._start(send)
                self._sent += 1
                await send({"type": "http.response.body", "body": event, "more_body": True})
            if not self._started:
                await self._start(send)
            last = self._done
        except Exception as raised:
            error = raised if isinstance(raised, WicoreError) else self._failed(raised)
            if not self._started:
                raise error from raised
            last = self._broken(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Ends when the client has left; meanwhile sends comments while nothing else is sent."""
        while True:
            sent = self._sent
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    await until_gone(receive)
                    return
            except TimeoutError:
                if sent == self._sent:
                    if not self._started:
                        await self._start(send)
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


async def until_gone(receive: Receive) -> None:
    """Wait until the client has left."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
