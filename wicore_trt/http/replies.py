"""Send answers: JSON, or server-sent events until the last one or until the client leaves.

Must not know routes, nor what events say. Invariants: nothing is sent before the first event or comment, so earlier
failures have a status of their own; a stream that breaks later ends with an event `error` and without `done`; the
source is closed, however the response ends; a client that leaves ends it within one event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from wicore_trt.access.calls import Call
from wicore_trt.errors import WicoreError
from wicore_trt.http.context import Context
from wicore_trt.http.errors import ClientGoneError

T = TypeVar("T")


def json_reply(body: object, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> Response:
    """Make a JSON answer; bytes are sent as they are."""
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    reply = Response(raw, status, media_type="application/json")
    reply.raw_headers.extend(headers or ())
    return reply


def format_span(seconds: float) -> bytes:
    """Format a span of time as x-ratelimit-reset-* has it: 6m12.5s, 1s, 20ms."""
    if seconds < 1:
        return b"%dms" % round(seconds * 1000)
    minutes, rest = divmod(seconds, 60)
    return (b"%dm" % minutes if minutes else b"") + f"{rest:.3f}".rstrip("0").rstrip(".").encode() + b"s"


def rate_headers(context: Context, call: Call) -> list[tuple[bytes, bytes]]:
    """Make headers with the caller's remaining requests and tokens."""
    found = []
    for kind, allowance in context.admission.rates.list_allowances(call.who).items():
        name = kind.encode()
        found += [
            (b"x-ratelimit-limit-" + name, b"%d" % allowance.limit),
            (b"x-ratelimit-remaining-" + name, b"%d" % allowance.remaining),
            (b"x-ratelimit-reset-" + name, format_span(allowance.reset_s)),
        ]
    return found


KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a comment is sent, so that proxies keep the connection."""
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(slots=True)
class EventStream:
    """ASGI response. `close` is awaited at the end; `failed` notes an exception and makes it a WicoreError. `done`
    and `broken` are the last bytes of a stream."""

    events: AsyncIterator[bytes]
    close: Callable[[], Awaitable[None]]
    failed: Callable[[Exception], WicoreError]
    headers: list[tuple[bytes, bytes]]
    done: bytes
    broken: Callable[[WicoreError], bytes]
    _started: bool = False
    _sent: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Raises the error that broke the stream before anything was sent, and ClientGoneError."""
        pump = asyncio.ensure_future(self._send_events(send))
        watch = asyncio.ensure_future(self._watch_client(receive, send))
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
            await self.close()

    async def _send_head(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *self.headers]})

    async def _send_events(self, send: Send) -> None:
        try:
            async for event in self.events:
                if not self._started:
                    await self._send_head(send)
                self._sent += 1
                await send({"type": "http.response.body", "body": event, "more_body": True})
            if not self._started:
                await self._send_head(send)
            last = self.done
        except Exception as raised:
            error = self.failed(raised)
            if not self._started:
                raise error from raised
            last = self.broken(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _watch_client(self, receive: Receive, send: Send) -> None:
        """Return when the client has left; meanwhile send comments while nothing else is sent."""
        while True:
            sent = self._sent
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await wait_until_gone(receive)
                    return
            except TimeoutError:
                if sent == self._sent:
                    if not self._started:
                        await self._send_head(send)
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


async def wait_until_gone(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def run_unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. Cancels it and raises ClientGoneError when the client leaves before."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(wait_until_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait((task, watch))
        if not task.cancelled():
            task.exception()  # seen, whatever it is
        del task, watch  # an error in them has this frame in its traceback
