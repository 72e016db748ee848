"""The host tier's memory, and what moves and checks pages in it for both directions.

The index decides which slots a page has; this module cuts memory. It must not know requests, nor decide what moves.
Invariants: no buffer of a page has a byte of a slot that is not the page's; whatever happens on another thread comes
back through the mailbox; seconds of traffic are those of moving alone, so that bytes / seconds is a rate.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from wicore_trt.arithmetic import div_ceil
from wicore_trt.kv.disk.io import Outcome, Probe
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.backing import piece_slots
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.kv.tiers.moves import Checksum, TierCopy
from wicore_trt.runtime.executor import PageCopier

if TYPE_CHECKING:
    from wicore_trt.kv.disk.store import DiskStore

ALIGNMENT = 4096
MAX_WASTE = 0.04
MAX_PARTS = 8
Report = Callable[[], object]
"""Call that the engine thread makes about something that happened on another thread."""


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
        self.page_bytes = page_bytes
        self._piece = piece_slots(slot_bytes)

    def cut_slots(self, slots: Iterable[int]) -> list[memoryview]:
        """Buffers of whole slots, in order; the disk reads and writes these."""
        size = self.slot_bytes
        return [self._slab[slot * size : (slot + 1) * size] for slot in slots]

    def page_parts(self, copy: TierCopy, *, clear: bool = False) -> list[memoryview]:
        """Buffers of the page's bytes in its slots; the device reads and writes these. Slots side by side are one
        part, unless they are of two pieces of memory, which were pinned apart. `clear`: what a page leaves of its
        last slot may hold another tenant's bytes, and goes to disk with it."""
        slots, size, left = copy.slots, self.slot_bytes, self.page_bytes[copy.page.group]
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

    def lend_slots(self, page_bytes: int, count: int) -> tuple[list[list[memoryview]], int]:
        """Lend, before any page is stored, buffers for `count` pages of this size, in the memory of the first slots,
        and how many slots these are. No page gets them before `index.grant_slots`."""
        each = div_ceil(page_bytes, self.slot_bytes)
        self.index.withhold_slots(0, count * each)
        found = [self.cut_slots(range(at * each, (at + 1) * each)) for at in range(count)]
        for parts in found:
            parts[-1] = parts[-1][: page_bytes - (each - 1) * self.slot_bytes]
        return found, count * each


@dataclass(slots=True)
class Traffic:
    """Bytes and seconds towards the device (`read_*`) and into a tier (`write_*`), and failures by cause."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Movers:
    """Copier, checksum thread, mailbox and counts of both directions. `disk` is the index and the store of the disk
    tier, or None. `announce(tier, page)` hears of each page that a tier gained; `checker` is one thread, so that
    checks end in the order in which they begin. Reports go through the mailbox and, sorted by direction, `went_down` or
    `came_up`. `outstanding` moves go on with a report of another thread; of these
    the disk let the time limit of `late` pass."""

    host: HostTier
    disk: tuple[TierIndex, DiskStore] | None
    copier: PageCopier
    announce: Callable[[str, Page], None]
    mailbox: SimpleQueue[tuple[deque[Report], Report]] = field(default_factory=lambda: SimpleQueue())
    went_down: deque[Report] = field(default_factory=deque)
    came_up: deque[Report] = field(default_factory=deque)
    checker: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="wicore-kv-checksum")
    )
    host_traffic: Traffic = field(default_factory=Traffic)
    disk_traffic: Traffic = field(default_factory=Traffic)
    outstanding: int = 0
    late: int = 0

    def take_checksum(self, copy: TierCopy) -> Checksum:
        """Compute the checksum of what a host copy's buffers hold now. Any thread."""
        return (self.copier.digest(self.host.page_parts(copy)), copy.page)

    def probe_copy(self, copy: TierCopy) -> Probe:
        """Have the disk's threads take the digest of what a host copy's buffers hold."""
        return Probe(self.copier.digest, self.host.page_bytes[copy.page.group])

    def is_right(self, copy: TierCopy) -> bool:
        """Check that no bit of a host copy flipped since it was stored. Any thread."""
        return self.take_checksum(copy) == copy.checksum

    def post_report(self, way: deque[Report], apply: Callable[..., object], *found: object) -> None:
        """Have the engine thread call `apply(*found)`, with the reports of `way`. Any thread."""
        self.mailbox.put((way, partial(apply, *found)))

    def post_timed(
        self, way: deque[Report], apply: Callable[..., object], move: object, begun: float, outcome: Outcome
    ) -> None:
        """Post the report of a disk operation that began at `begun`, by `time.perf_counter`."""
        self.post_report(way, apply, move, outcome, time.perf_counter() - begun)
