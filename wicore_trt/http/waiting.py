"""Waiting for work while watching whether anybody still wants it. Must not know the work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from wicore_trt.http.errors import ClientGoneError
from wicore_trt.http.sse import until_gone

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. Cancels it and raises ClientGoneError when the client leaves before."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
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
