"""Streams of a device for `StreamPageCopier`, as queues that run when a test says so: work, and events to wait for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from wicore_trt.runtime.page_digest import PageDigest


class Event:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(20), "an event that nobody reaches"

    def seconds_after(self, earlier: Event) -> float:
        assert earlier.happened.is_set() and self.happened.is_set()
        return 0.0


class Lane:
    """Work waits in a queue until somebody runs it. Copies take two operations, so that whoever looks too early sees
    half of one. `waits` False forgets events; `lock` guards the queue where a thread runs it."""

    def __init__(self, *, waits: bool = True, lock: Any = None) -> None:
        self.queue: list[Callable[[], object] | Event] = []
        self._waits, self._lock = waits, lock or nullcontext()

    def put(self, work: Callable[[], object] | Event) -> None:
        with self._lock:
            self.queue.append(work)

    def record(self) -> Event:
        event = Event()
        self.put(event.happened.set)
        return event

    def wait(self, event: Event) -> None:
        if self._waits:
            self.put(event)

    def copy(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        for target, source, count in pieces:
            half = count // 2
            for at, size in ((0, half), (half, count - half)):
                self.put(lambda to=target + at, of=source + at, size=size: ctypes.memmove(to, of, size))

    def run_one(self) -> bool:
        """Whether the head of the queue could run."""
        head = self.queue[0] if self.queue else None
        if head is None or (isinstance(head, Event) and not head.happened.is_set()):
            return False
        self.queue.pop(0)
        if not isinstance(head, Event):
            head()
        return True

    def run_all(self) -> None:
        """All that can run."""
        while self.run_one():
            pass


class AtOnce:
    """A `page_copier.Starter` without a thread."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def shutdown(self) -> None:
        pass


class Digests:
    """Digests of pages, computed when the lane gets there."""

    def __init__(self, digest: PageDigest) -> None:
        self._digest = digest

    def start(self, lane: Lane, pages: Sequence[tuple[int, int]]) -> Callable[[], Sequence[bytes]]:
        found: list[bytes] = []
        for address, count in pages:
            page = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
            lane.put(lambda page=page: found.append(self._digest.compute_digest([page])))
        return lambda: found
