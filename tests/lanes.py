"""Streams of a device for `StreamPageCopier`, as queues that run when a test says so: work, and events to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch


class Event:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(20), "an event that nobody reaches"


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

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            assert len(target) == len(source)
            half = len(target) // 2
            for part in (slice(half), slice(half, None)):
                self.put(lambda to=target[part], of=source[part]: to.copy_(of))

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
