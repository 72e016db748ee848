"""The host tier's memory: one slab of slots, and the buffers of a page in it.

The index decides which slots a page has; this module only cuts memory. It must not know requests or the disk.
Invariant: no buffer of a page has a byte of a slot that is not the page's.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from wicore_trt.arithmetic import div_ceil
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.index import TierCopy, TierIndex

log = logging.getLogger(__name__)

ALIGNMENT = 4096
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


MAX_WASTE = 0.04
MAX_PARTS = 8


def slot_geometry(page_bytes: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """Bytes of a slot and the slots that a page of each group takes.

    A slot is the smallest page or an equal part of it, rounded up to 4,096 bytes: the largest such that no group's page
    wastes more than MAX_WASTE of its bytes by rounding up to slots; failing that, the one that wastes least.
    """
    choices = []
    for parts in range(1, MAX_PARTS + 1):
        slot_bytes = div_ceil(min(page_bytes.values()), parts * ALIGNMENT) * ALIGNMENT
        slots = {group: div_ceil(count, slot_bytes) for group, count in page_bytes.items()}
        waste = max(slots[group] * slot_bytes / count - 1 for group, count in page_bytes.items())
        if waste <= MAX_WASTE:
            return slot_bytes, slots
        choices.append((waste, slot_bytes, slots))
    return min(choices, key=lambda choice: choice[0])[1:]


def piece_slots(slot_bytes: int) -> int:
    """Slots that lie in one piece of memory, which is pinned as a whole."""
    return max(1, PIECE_BYTES // slot_bytes)


class HostTier:
    """`slab` is page-aligned memory of at least `index.num_slots` * `slot_bytes` bytes; pinned where a GPU reads it.
    `page_bytes` maps layer groups to the bytes of a page."""

    def __init__(self, index: TierIndex, slab: memoryview, slot_bytes: int, page_bytes: Mapping[str, int]) -> None:
        assert len(slab) >= index.num_slots * slot_bytes
        self.index = index
        self.slot_bytes = slot_bytes
        self._slab = slab
        self._page_bytes = page_bytes
        self._piece = piece_slots(slot_bytes)

    def buffers(self, copy: TierCopy) -> list[memoryview]:
        """The whole slots of a copy, in order; the disk reads and writes these."""
        return self._cut(copy.slots)

    def payload(self, copy: TierCopy, *, clear: bool = False) -> list[memoryview]:
        """The page's bytes in its slots; the device reads and writes these. Slots side by side are one part, unless
        they are of two pieces of memory, which were pinned apart. `clear`: what a page leaves of its last slot may hold
        another tenant's bytes, and goes to disk with it."""
        slots, size, left = copy.slots, self.slot_bytes, self._page_bytes[copy.page.group]
        if len(slots) == 1 and not clear:
            begin = slots[0] * size
            return [self._slab[begin : begin + left]]
        end = (slots[-1] + 1) * size
        unused = len(slots) * size - left
        if clear and unused:
            self._slab[end - unused : end] = bytes(unused)
        parts, first = [], 0
        for i, slot in enumerate(slots):
            following = slots[i + 1] if i + 1 < len(slots) else -1
            if following != slot + 1 or following % self._piece == 0:
                begin = slots[first] * size
                count = min(left, (i + 1 - first) * size)
                parts.append(self._slab[begin : begin + count])
                left -= count
                first = i + 1
        return parts

    def scratch(self, page_bytes: int, count: int) -> tuple[list[list[memoryview]], int]:
        """Before any page is stored: buffers for `count` pages of this size, in the memory of the first slots, and how
        many slots these are. No page gets them before `index.grow` says that they are used no more."""
        each = div_ceil(page_bytes, self.slot_bytes)
        self.index.withhold(0, count * each)
        found = [self._cut(range(at * each, (at + 1) * each)) for at in range(count)]
        for parts in found:
            parts[-1] = parts[-1][: page_bytes - (each - 1) * self.slot_bytes]
        return found, count * each

    def _cut(self, slots: Iterable[int]) -> list[memoryview]:
        size = self.slot_bytes
        return [self._slab[slot * size : (slot + 1) * size] for slot in slots]

    def bytes_of(self, page: Page) -> int:
        return self._page_bytes[page.group]


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
        self._advise(0, len(slab), MADV_HUGEPAGE)
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
            for _ in range(1, FIRST_PIECES):
                if (begin := next(self._left, None)) is not None:
                    self._take(begin)
                    self.ready = self._stop(begin) // slot_bytes

    def start(self, tell: Callable[[int, int], None]) -> None:
        """Go on with the rest; `tell(first, stop)` hears, in a thread, of slots that are locked."""
        self._tell = tell
        begun = self.ready * self._slot_bytes if self.locked else 0
        pieces = div_ceil(len(self._slab) - begun, self._piece)
        for number in range(min(pieces, BACKERS, os.cpu_count() or 1)):
            thread = threading.Thread(target=self._work, name=f"wicore-kv-memory-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop after the steps and the piece that are under way."""
        self._closed.set()
        self.working = lambda: False  # what it asked holds an engine
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                begin = next(self._left, None)
            if begin is None:
                return
            if self._take(begin) and self.locked:
                self._tell(begin // self._slot_bytes, self._stop(begin) // self._slot_bytes)

    def _stop(self, begin: int) -> int:
        """Where the piece ends that begins here."""
        return min(begin + self._piece, len(self._slab))

    def _take(self, begin: int) -> bool:
        """Clear a piece and lock it; false when there was no time for it."""
        stop = self._stop(begin)
        for at in range(begin, stop, STEP_BYTES):
            with self._clearing if self.working() else nullcontext():
                if self._closed.is_set():
                    return False
                self._advise(at, min(STEP_BYTES, stop - at), MADV_POPULATE_WRITE)
        if not self.locked:
            return True
        with self._locking, self._resting():
            if self._closed.is_set():
                return False
            try:
                self._pin(self._slab[begin:stop])  # what cannot be locked is of use all the same: copies of it are slow
            except Exception:
                log.exception("host memory for KV pages was not locked")
        return True

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """Rest after what is done here, if the engine has work."""
        begun = time.perf_counter()
        yield
        if self.working():
            self._closed.wait(LOCKING_REST * (time.perf_counter() - begun))

    def _advise(self, begin: int, count: int, advice: int) -> None:
        """A system that cannot do it does nothing."""
        self._madvise(self._address + begin, count, advice)
