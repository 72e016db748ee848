"""The host tier's memory: one slab of slots, the buffers of a page in it, and the checksum of what they hold.

The index decides which slots a page has; this module only cuts memory. It must not know requests or the disk.
Invariant: a checksum covers the page's identity and every byte of its buffers, so bytes of another page never match.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

from wicore_trt.arithmetic import div_ceil
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.index import TierCopy, TierIndex

log = logging.getLogger(__name__)

ALIGNMENT = 4096
PIECE_BYTES = 256 << 20
BACKERS = 8
"""Threads: clearing memory takes a core each."""
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
    costs four times a copy, and tens of GiB take long. Contents stay."""

    def __init__(self, slab: memoryview, slot_bytes: int, pin: Callable[[memoryview], bool]) -> None:
        """Takes the first piece at once. `locked`: `pin`, which any thread may call, locked it, so that a slot is of
        use once `start` has told of it; else memory is of use before it is there, and nothing is told."""
        self._slab, self._slot_bytes, self._pin = slab, slot_bytes, pin
        self._piece = piece_slots(slot_bytes) * slot_bytes
        self._advise(0, len(slab), MADV_HUGEPAGE)
        self._left = iter(range(0, len(slab), self._piece))
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._tell: Callable[[int, int], None] = lambda first, stop: None
        first = self._slab[: self._piece]
        self.locked = pin(first)
        if self.locked:
            next(self._left)
        self.ready = len(first) // slot_bytes if self.locked else len(slab) // slot_bytes
        """Slots that are of use now."""

    def start(self, tell: Callable[[int, int], None]) -> None:
        """Go on with the rest; `tell(first, stop)` hears, in a thread, of slots that are locked."""
        self._tell = tell
        pieces = div_ceil(len(self._slab), self._piece) - self.locked
        for number in range(min(pieces, BACKERS, os.cpu_count() or 1)):
            thread = threading.Thread(target=self._work, name=f"wicore-kv-memory-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop after the pieces that are under way."""
        with self._lock:
            self._left = iter(range(0))
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                begin = next(self._left, None)
            if begin is None:
                return
            piece = self._slab[begin : begin + self._piece]
            self._advise(begin, len(piece), MADV_POPULATE_WRITE)
            if self.locked:
                try:
                    self._pin(piece)  # what cannot be locked is of use all the same: copies of it are slow
                except Exception:
                    log.exception("host memory for KV pages was not locked")
                self._tell(begin // self._slot_bytes, (begin + len(piece)) // self._slot_bytes)

    def _advise(self, begin: int, count: int, advice: int) -> None:
        """A system that cannot do it does nothing."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._slab))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        libc.madvise(address + begin, count, advice)


def checksum(page: Page, digest: bytes) -> bytes:
    """Of a page's identity and the digest of its bytes."""
    state = blake2b(digest, digest_size=16, key=page.key, person=b"wicore-kv-page")
    state.update(page.tenant + page.index.to_bytes(8, "little") + page.group.encode())
    return state.digest()
