"""Runs slow work on threads, for callers on an event loop.

It must not know what the work is. Invariants: at most `workers` functions run at a time. At most one per named tenant
runs or waits for a thread, so a busy tenant delays another by one function. Threads never keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def on_daemon_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a slow function on a thread that does not keep the process alive."""
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
    """Runs `workers` functions at a time; a named tenant has one of them at most, and tenants take turns."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._free = asyncio.Semaphore(workers)
        self._tenants: dict[str, asyncio.Semaphore] = {}

    async def run_function(self, tenant: str, function: Callable[[], T]) -> T:
        """Return the result of `function`, which runs to its end once begun, even if the caller is cancelled."""
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
    """Retrieve an outcome that nobody awaits, so that asyncio logs no warning."""
    if not task.cancelled():
        task.exception()
