"""Work that takes time, on threads, for callers on an event loop.

It must not know what the work is. Invariants: at most so many functions run at the same time, and of one tenant at most
one waits for a thread or has one, so that a tenant with much work delays another one by one piece of it; threads never
keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def on_daemon_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function that may take long, on a thread that does not keep the process alive when it is not wanted."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def target() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # it is raised again on the loop's thread
            error = raised
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=target, name="wicore-work", daemon=True).start()
    return future


class Offload:
    """`workers` functions at a time; a named tenant has one of them at most, and tenants come in turn."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._free = asyncio.Semaphore(workers)
        self._tenants: dict[str, asyncio.Semaphore] = {}

    async def run_function(self, tenant: str, function: Callable[[], T]) -> T:
        """The result of `function`. When the caller is cancelled it still runs to its end, if it has begun."""
        wanted = True
        own = self._tenants.setdefault(tenant, asyncio.Semaphore(1 if tenant else self._workers))

        async def work() -> T:
            async with own, self._free:
                if not wanted:
                    raise asyncio.CancelledError
                return await on_daemon_thread(function)

        task = asyncio.ensure_future(work())
        try:
            return await asyncio.shield(task)
        finally:
            wanted = False
            if not task.done():
                task.add_done_callback(_retrieve_outcome)


def _retrieve_outcome(task: asyncio.Task[Any]) -> None:
    """Nobody waits for the outcome any more."""
    if not task.cancelled():
        task.exception()
