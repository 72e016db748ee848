"""Runs slow work on lasting threads, for callers on an event loop.

It must not know what the work is. Invariants: at most `workers` functions run at a time. At most one per named tenant
runs, and tenants take turns, so a busy tenant delays another by one function. Threads never keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

IDLE_S = 5.0
"""Seconds after which a thread without work ends. Starting one for each function costs as much as a short function."""


class Offload:
    """Runs `workers` functions at a time; a named tenant has one of them at most, and tenants take turns."""

    def __init__(self, workers: int) -> None:
        self._workers, self._threads = workers, 0
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[tuple[asyncio.Future[Any], Callable[[], Any]]]] = {}  # by tenant, next first
        self._busy: set[str] = set()  # named tenants with a running function

    async def run_function(self, tenant: str, function: Callable[[], T]) -> T:
        """Return the result of `function`, which runs to its end once begun, even if the caller is cancelled."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._threads < self._workers:
                threading.Thread(target=self._run_functions, name="wicore-work", daemon=True).start()
                self._threads += 1
            self._waiting.setdefault(tenant, deque()).append((future, function))
            self._changed.notify()
        try:
            return await future
        except asyncio.CancelledError:
            self._forget_function(tenant, (future, function))
            raise
        finally:
            del future  # it holds an error that holds this frame: a circle, which would keep what the function holds

    def _forget_function(self, tenant: str, left: tuple[asyncio.Future[Any], Callable[[], Any]]) -> None:
        """Let go of what a caller who left had waiting: it may hold megabytes, which nobody counts any more."""
        with self._changed, suppress(KeyError, ValueError):
            self._waiting[tenant].remove(left)
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def _run_functions(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the function whose turn it is; return False when none came for IDLE_S."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._waiting.keys() <= self._busy, IDLE_S):
                self._threads -= 1
                return False
            tenant = next(name for name in self._waiting if name not in self._busy)
            queue = self._waiting.pop(tenant)
            future, function = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the other tenants
            if tenant:
                self._busy.add(tenant)
        result: Any = None
        error: BaseException | None = None
        try:
            if not future.cancelled():
                result = function()
        except BaseException as raised:  # it is raised again on the loop's thread
            error = raised
        with suppress(RuntimeError):  # the loop was closed meanwhile
            future.get_loop().call_soon_threadsafe(_settle_future, future, result, error)
        del error, future  # each leads to the other, by the error's traceback and this frame
        with self._changed:
            self._busy.discard(tenant)
        return True


def _settle_future(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
