"""Memory for the host tier, taken from the system and locked piece by piece, in threads beside what serves.

It must not know pages or slots' contents. Invariant: a slot is announced only when its memory is locked, and contents
stay as they are.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from typing import Any

from wicore_trt.arithmetic import div_ceil

log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Locked at once: what the engine asks of the device meanwhile may wait for as long as that takes, some milliseconds,
which a step that was started ahead hides."""
FIRST_PIECES = 8
"""Locked before anything is served."""
STEP_BYTES = 4 << 20
"""Cleared at once: the map of the process's memory is locked meanwhile, and who asks the system for memory waits."""
BACKERS = 8
"""Threads while the engine is idle: clearing memory takes a core each."""
CLEARERS = 3
"""Of them that clear at once while the engine has work, on machines of so many times four cores; fewer on smaller ones.
One of them gave 0.6 GB/s on an H100's machine: conversations wrote twice as much, and were lost."""
LOCKING_REST = 1.0
"""While the engine has work, the rest after locking, in times of what that took."""
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module


def piece_slots(slot_bytes: int) -> int:
    """Slots that lie in one piece of memory, which is pinned as a whole."""
    return max(1, PIECE_BYTES // slot_bytes)


class Backing:
    """Has the system put memory behind a slab, in threads, piece by piece, and lock it: the first touch of fresh memory
    costs four times a copy, and tens of GiB take long. Contents stay.

    What serves meanwhile must not feel it. Clearing holds the lock of the process's map of memory, so it is done in
    small steps; locking holds the driver's lock, so one thread does it at a time, and for a small piece. While the
    engine has work, fewer threads clear, and locking rests in between."""

    def __init__(self, slab: memoryview, slot_bytes: int, pin: Callable[[memoryview], bool]) -> None:
        """Takes the first pieces at once. `locked`: `pin`, which any thread may call, locked them, so that a slot is of
        use once `start` has told of it; else memory is of use before it is there, and nothing is told."""
        self.working: Callable[[], bool] = lambda: False
        """Whether the engine has work. Any thread asks."""
        self._slab, self._slot_bytes, self._pin = slab, slot_bytes, pin
        self._piece = piece_slots(slot_bytes) * slot_bytes
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(slab))
        self._madvise: Any = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._advise_system(0, len(slab), MADV_HUGEPAGE)
        self._left = iter(range(0, len(slab), self._piece))
        self._lock, self._locking = threading.Lock(), threading.Lock()
        self._clearing = threading.Semaphore(max(1, min(CLEARERS, (os.cpu_count() or 1) // 4)))
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._tell: Callable[[int, int], None] = lambda first, stop: None
        first = self._slab[: self._piece]
        self.locked = pin(first)
        self.ready = len(slab) // slot_bytes
        """Slots that are of use now."""
        if self.locked:
            next(self._left)
            self.ready = len(first) // slot_bytes
            for begin in islice(self._left, FIRST_PIECES - 1):
                self._take_piece(begin)
                self.ready = self._find_end(begin) // slot_bytes

    def start_threads(self, tell: Callable[[int, int], None]) -> None:
        """Go on with the rest; `tell(first, stop)` hears, in a thread, of slots that are locked."""
        self._tell = tell
        begun = self.ready * self._slot_bytes if self.locked else 0
        pieces = div_ceil(len(self._slab) - begun, self._piece)
        for number in range(min(pieces, BACKERS, os.cpu_count() or 1)):
            thread = threading.Thread(target=self._take_pieces, name=f"wicore-kv-memory-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop after the steps and the piece that are under way."""
        self._closed.set()
        self.working = lambda: False  # what it asked holds an engine
        for thread in self._threads:
            thread.join()

    def _take_pieces(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                begin = next(self._left, None)
            if begin is None:
                return
            if self._take_piece(begin) and self.locked:
                self._tell(begin // self._slot_bytes, self._find_end(begin) // self._slot_bytes)

    def _find_end(self, begin: int) -> int:
        """Find the end of the piece that begins here."""
        return min(begin + self._piece, len(self._slab))

    def _take_piece(self, begin: int) -> bool:
        """Clear a piece and lock it; false when there was no time for it."""
        stop = self._find_end(begin)
        for at in range(begin, stop, STEP_BYTES):
            with self._clearing if self.working() else nullcontext():
                if self._closed.is_set():
                    return False
                self._advise_system(at, min(STEP_BYTES, stop - at), MADV_POPULATE_WRITE)
        if not self.locked:
            return True
        with self._locking:
            if self._closed.is_set():
                return False
            begun = time.perf_counter()
            try:
                self._pin(self._slab[begin:stop])  # what cannot be locked is of use all the same: copies of it are slow
            except Exception:
                log.exception("host memory for KV pages was not locked")
            if self.working():
                self._closed.wait(LOCKING_REST * (time.perf_counter() - begun))
        return True

    def _advise_system(self, begin: int, count: int, advice: int) -> None:
        """A system that cannot do it does nothing."""
        self._madvise(self._address + begin, count, advice)
