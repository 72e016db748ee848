"""Reads, bounds and parses the requests of gRPC calls.

Must not know the work or the permissions of a call. Invariants: a request that does not come ends its call; bytes that
are no message of the call are INVALID_ARGUMENT; of requests that need no key at most READS are in memory at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from wicore_trt.access.calls import find_network
from wicore_trt.errors import DeadlineError, InvalidRequestError

READ_S, LOOKS = 20.0, 20
"""A call whose request has not come by then is ended, at one of so many looks in that time."""
READS = 4
"""Health requests that are read at the same time. gRPC unpacks each up to the message limit before we see its size."""
HURRY_S, LEAST_HURRY_S = 0.1, 0.01
"""Seconds a health request may take to come while others wait for its place, and the least when many wait."""
WAIT_S = 0.25
"""Seconds that silent calls may hold up later ones, roughly: probes give up after a second."""
MAX_HEALTH_BYTES = 1024
"""A health request holds the name of a service."""


def parse_request(handler: grpc.RpcMethodHandler, raw: bytes) -> Any:
    """Parse the message of a method. Raises InvalidRequestError for invalid bytes."""
    try:
        return handler.request_deserializer(raw)
    except DecodeError:
        raise InvalidRequestError(
            "The request is not a valid message of this call: truncated, or text that is not UTF-8.", field="request"
        ) from None


class RequestReader:
    """Reads the requests of calls. One timer serves all: a timer for each would cost a refusal a tenth of its time."""

    def __init__(self) -> None:
        self._since: dict[asyncio.Task[Any], float] = {}  # by the loop's time
        self._clock: asyncio.TimerHandle | None = None

    async def read_request(self, context: grpc.aio.ServicerContext) -> bytes:
        """Read a request, unparsed. Raises DeadlineError when it does not come, InvalidRequestError for none."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._since[task] = loop.time()
        if self._clock is None:
            self._clock = loop.call_later(READ_S / LOOKS, self._end_late, loop)
        try:
            raw = await context.read()
        except asyncio.CancelledError:
            if task in self._since or task.uncancel():  # cancelled by another caller
                raise
            raise DeadlineError(f"No request came within {READ_S:g} s.") from None
        finally:
            self._since.pop(task, None)
        if raw is grpc.aio.EOF:
            raise InvalidRequestError("The call has no request.", field="request")
        message: bytes = raw
        return message

    def _end_late(self, loop: asyncio.AbstractEventLoop) -> None:
        latest = loop.time() - READ_S
        for task in [task for task, since in self._since.items() if since <= latest]:
            del self._since[task]
            task.cancel()
        self._clock = loop.call_later(READ_S / LOOKS, self._end_late, loop) if self._since else None


async def read_stream(requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the requests of a stream, until none comes for READ_S seconds."""
    stream = aiter(requests)
    while True:
        try:
            async with asyncio.timeout(READ_S):
                request = await anext(stream)
        except (TimeoutError, StopAsyncIteration):
            return
        yield request


class BriefRequestReader:
    """Reads requests of a few bytes, READS at a time: hosts in turn, requests of one host in the order of their calls.
    A silent call keeps its place for READ_S seconds, and for HURRY_S or less while others wait. So a client that sends
    its request with its call gets its turn soon, however many calls are silent."""

    def __init__(self) -> None:
        self._requests = RequestReader()
        self._free = READS
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by host, the next one first
        self._count = 0  # requests that wait
        self._reading: dict[asyncio.Timeout, float] = {}  # with the loop's time at which each began

    async def read_request(self, context: grpc.aio.ServicerContext, host: str) -> bytes:
        """Read a request. Raises DeadlineError when it does not come, InvalidRequestError for none or a long one."""
        await self._take_place(host)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._reading[limit] = asyncio.get_running_loop().time()
                self._shorten_limits()
                raw = await self._requests.read_request(context)
        except TimeoutError:
            raise DeadlineError("No request came, and others wait for the place.") from None
        finally:
            self._reading.pop(limit, None)
            self._free_place()
        if len(raw) > MAX_HEALTH_BYTES:
            del raw  # the traceback of the error would keep it until the call has ended
            raise InvalidRequestError(f"The request has more than {MAX_HEALTH_BYTES} bytes.", field="request")
        return raw

    async def _take_place(self, host: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, deque()).append(turn)
        self._count += 1
        try:
            self._shorten_limits()
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it got a place just now
                self._free_place()
            raise
        finally:
            self._count -= 1

    def _free_place(self) -> None:
        while self._waiting:
            host = next(iter(self._waiting))
            turns = self._waiting.pop(host)
            turn = turns.popleft()
            if turns:
                self._waiting[host] = turns  # behind the other hosts
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _shorten_limits(self) -> None:
        if self._count:
            seconds = max(LEAST_HURRY_S, min(HURRY_S, READS * WAIT_S / self._count))
            for limit, begun in self._reading.items():
                if limit.when() is None:
                    limit.reschedule(begun + seconds)


def find_host(peer: str) -> str:
    """Find the host of `context.peer()`, without port: an IPv4 address, the /64 of IPv6, else the kind."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind or "unknown"
    return find_network(rest.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]").strip("[]")) or peer
