"""Runs slow work on threads, for callers on an event loop.

It must not know what the work is. Invariants: at most `workers` functions run at a time. At most one per named tenant
runs or waits for a thread, so a busy tenant delays another by one function. Threads never keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def on_daemon_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a slow function on a thread that does not keep the process alive."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a caller who no longer waits cannot cancel it

    def target() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # it is raised again on the loop's thread
            future.set_exception(error)

    threading.Thread(target=target, name="wicore-work", daemon=True).start()
    return asyncio.wrap_future(future)


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
