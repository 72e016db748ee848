"""Pairs of numbers by name, which the processes of a server may share: levels of buckets, times that were told.

They are in memory that whoever made it keeps for those that begin later. Must not know what they mean. Invariants: a
process that ends or stands still at any moment holds up no other; where the table is full, or another process stands
still with the lock, a number is this process's own, or may miss a change.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import TypeAlias

PLACES = 1 << 15
"""Names that the shared table has room for; each tenant with a rate takes two, and one when it is refused."""
_NAME, _PLACE = 16, 32  # bytes: a digest and two doubles
_PROBES = 64
PATIENCE_S = 0.002
"""For the lock, which others hold for microseconds."""

Pair: TypeAlias = "list[float] | memoryview[float]"
"""Two numbers that can be set."""


class Cells:
    """Of this process alone."""

    def __init__(self) -> None:
        self._own: dict[object, Pair] = {}

    def pair(self, name: tuple[object, ...], first: float, second: float) -> Pair:
        """The pair of this name, with these values if it is new."""
        return self._own.setdefault(name, [first, second])

    def forget(self, name: tuple[object, ...]) -> None:
        """This process has no more use for it."""
        self._own.pop(name, None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While no other process changes them."""
        yield


def shared_memory() -> int:
    """The file descriptor of an empty table."""
    file = os.memfd_create("wicore-cells", os.MFD_CLOEXEC)
    os.ftruncate(file, PLACES * _PLACE)
    return file


class SharedCells(Cells):
    """Of the processes that have this `shared_memory`, and of those that they fork."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._bytes = mmap.mmap(self._file, PLACES * _PLACE)
        self._numbers = memoryview(self._bytes).cast("d")
        self._depth = 0

    def pair(self, name: tuple[object, ...], first: float, second: float) -> Pair:
        found = self._own.get(name)
        if found is None:
            with self.held():
                found = self._own[name] = self._find(name, first, second)
        return found

    def _find(self, name: tuple[object, ...], first: float, second: float) -> Pair:
        digest = blake2b(repr(name).encode(), digest_size=_NAME).digest()
        at = int.from_bytes(digest[:4], "little")
        for probe in range(_PROBES):
            place = (at + probe) % PLACES
            start = place * _PLACE
            there = self._bytes[start : start + _NAME]
            pair = self._numbers[start // 8 + 2 : start // 8 + 4]
            if there == digest:
                return pair
            if not any(there):
                pair[0], pair[1] = first, second
                self._bytes[start : start + _NAME] = digest
                return pair
        return [first, second]

    @contextmanager
    def held(self) -> Iterator[None]:
        """The system lets go of the lock of a process that ends. On the thread of one event loop."""
        self._depth += 1
        taken = self._depth == 1 and self._lock()
        try:
            yield
        finally:
            self._depth -= 1
            if taken:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= end:
                    return False
                time.sleep(0.0)
            else:
                return True
