"""The host tier's memory: one slab of slots, the buffers of a page in it, and the checksum of what they hold.

The index decides which slots a page has; this module only cuts memory. It must not know requests or the disk.
Invariant: a checksum covers the page's identity and every byte of its buffers, so bytes of another page never match.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence

import xxhash

from wicore_trt.arithmetic import div_ceil
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.index import TierCopy, TierIndex

ALIGNMENT = 4096
POPULATE_BYTES = 64 << 20
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


class HostTier:
    """`slab` is page-aligned memory of at least `index.num_slots` * `slot_bytes` bytes; pinned where a GPU reads it.
    `page_bytes` maps layer groups to the bytes of a page."""

    def __init__(self, index: TierIndex, slab: memoryview, slot_bytes: int, page_bytes: Mapping[str, int]) -> None:
        assert len(slab) >= index.num_slots * slot_bytes
        self.index = index
        self.slot_bytes = slot_bytes
        self._slab = slab
        self._page_bytes = page_bytes

    def buffers(self, copy: TierCopy) -> list[memoryview]:
        """The whole slots of a copy, in order; the disk reads and writes these."""
        size = self.slot_bytes
        return [self._slab[slot * size : (slot + 1) * size] for slot in copy.slots]

    def payload(self, copy: TierCopy) -> list[memoryview]:
        """The slots of a copy cut to the page's bytes; the device reads and writes these. Clears the rest of the last
        slot of a copy that is to be written."""
        parts = self.buffers(copy)
        rest = self._page_bytes[copy.page.group] - self.slot_bytes * (len(parts) - 1)
        if rest < self.slot_bytes:
            # what a page leaves of its last slot may hold another tenant's bytes, and goes to disk with it
            if not copy.ready:
                parts[-1][rest:] = bytes(self.slot_bytes - rest)
            parts[-1] = parts[-1][:rest]
        return parts

    def bytes_of(self, page: Page) -> int:
        return self._page_bytes[page.group]


def populate(slab: memoryview) -> None:
    """Have the system back a slab with memory now, in a thread of its own: the first touch of fresh memory costs four
    times a copy, and requests would pay for it. Contents stay; a system that cannot do it does nothing."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(slab))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def work() -> None:
        for offset in range(0, len(slab), POPULATE_BYTES):
            if libc.madvise(address + offset, min(POPULATE_BYTES, len(slab) - offset), MADV_POPULATE_WRITE):
                return

    threading.Thread(target=work, name="wicore-kv-populate", daemon=True).start()


def checksum(page: Page, parts: Sequence[memoryview]) -> bytes:
    """XXH3 (128 bit) over a page's identity and bytes. Runs at memory speed and lets other threads run."""
    state = xxhash.xxh3_128(page.key + page.tenant + page.index.to_bytes(8, "little") + page.group.encode())
    for part in parts:
        state.update(part)
    return state.digest()
