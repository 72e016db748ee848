"""The host tier's memory, and what moves and checks pages in it for both directions.

The memory is taken from the system and locked piece by piece, in threads beside what serves. It must not know requests,
nor decide what moves. Invariants: a slot is announced only when its memory is locked, and contents stay; no buffer of a
page has a byte of a slot that is not its own; what happens on another thread comes back through the mailbox; traffic in
seconds is of moving alone.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from wicore_trt.arithmetic import div_ceil
from wicore_trt.cores import count_cores
from wicore_trt.kv.disk.io import Outcome, Probe
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.kv.tiers.moves import Checksum, TierCopy
from wicore_trt.runtime.executor import PageCopier

if TYPE_CHECKING:
    from wicore_trt.kv.disk.store import DiskStore

log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Bytes locked at once: the engine's calls to the device may wait for that, some milliseconds."""
FIRST_PIECES = 8
"""Pieces locked before anything is served."""
STEP_BYTES = 4 << 20
"""Bytes cleared at once: the process's memory map is locked meanwhile, and requests for memory wait."""
BACKERS = 8
"""Threads while the engine is idle: clearing memory takes a core each."""
CLEARERS = 3
"""Threads that clear at once while the engine has work; fewer where there are fewer than four cores for each."""
LOCKING_REST = 1.0
"""While the engine has work, the rest after locking, in times of what that took."""
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module

ALIGNMENT = 4096
MAX_WASTE = 0.02
MAX_PARTS = 8
Sizes = Mapping[str, int]
"""Bytes by layer group."""
Report = Callable[[], object]
"""Call that the engine thread makes about something that happened on another thread."""


def count_piece_slots(slot_bytes: int) -> int:
    """Slots that lie in one piece of memory, which is pinned as a whole."""
    return max(1, PIECE_BYTES // slot_bytes)


class Backing:
    """Has the system put memory behind a slab, in threads, piece by piece, and lock it: the first touch of fresh memory
    costs four times a copy. Clearing holds the lock of the process's map of memory, so it is done in small steps;
    locking holds the driver's lock, so one thread does it at a time. While the engine has work, fewer threads clear,
    and locking rests in between."""

    def __init__(self, slab: memoryview, slot_bytes: int, pin: Callable[[memoryview], bool]) -> None:
        """Takes the first pieces at once. `locked`: `pin`, which any thread may call, locked them, so that a slot is of
        use once `start` has told of it; else memory is of use before it is there, and nothing is told."""
        self.working: Callable[[], bool] = lambda: False
        """Whether the engine has work. Any thread asks."""
        self._slab, self._slot_bytes, self._pin = slab, slot_bytes, pin
        self._piece = count_piece_slots(slot_bytes) * slot_bytes
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(slab))
        self._madvise: Any = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._advise_system(0, len(slab), MADV_HUGEPAGE)
        self._left = iter(range(0, len(slab), self._piece))
        self._lock, self._locking = threading.Lock(), threading.Lock()
        self._clearing = threading.Semaphore(max(1, min(CLEARERS, count_cores() // 4)))
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
        for number in range(min(pieces, BACKERS, count_cores())):
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


def find_slot_geometry(page_bytes: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """Bytes of a slot and the slots that a page of each group takes. A slot is the smallest page or an equal part of
    it, rounded up to 4,096 bytes: the largest such that no group's page wastes more than MAX_WASTE of its bytes by
    rounding up to slots; failing that, the one that wastes least."""
    choices = []
    for parts in range(1, MAX_PARTS + 1):
        slot_bytes = div_ceil(min(page_bytes.values()), parts * ALIGNMENT) * ALIGNMENT
        slots = {group: div_ceil(count, slot_bytes) for group, count in page_bytes.items()}
        waste = max(slots[group] * slot_bytes / count - 1 for group, count in page_bytes.items())
        if waste <= MAX_WASTE:
            return slot_bytes, slots
        choices.append((waste, slot_bytes, slots))
    return min(choices, key=lambda choice: choice[0])[1:]


class CodedGeometry(NamedTuple):
    """Slots of tiers that keep pages coded: `slots` a page by layer group, of `slot_bytes`; `raw_slots` of one that is
    kept raw. `page_bytes` are a page's, coded where the group has a code that saves slots."""

    slot_bytes: int
    slots: dict[str, int]
    raw_slots: dict[str, int]
    page_bytes: dict[str, int]


def find_coded_geometry(raw_bytes: Mapping[str, int], coded_bytes: Mapping[str, int]) -> CodedGeometry:
    """Find the slots of pages of `raw_bytes`, whose code takes `coded_bytes` where the group has one. The number of a
    page's slots tells whether it is coded, so a code that saves no slot is left out."""
    page_bytes = dict(raw_bytes) | dict(coded_bytes)
    slot_bytes, slots = find_slot_geometry(page_bytes)
    raw_slots = {group: div_ceil(count, slot_bytes) for group, count in raw_bytes.items()}
    useless = [group for group in coded_bytes if raw_slots[group] == slots[group]]
    if useless:
        return find_coded_geometry(raw_bytes, {g: n for g, n in coded_bytes.items() if g not in useless})
    return CodedGeometry(slot_bytes, slots, raw_slots, page_bytes)


class HostTier:
    """`slab` is page-aligned memory of at least `index.num_slots` * `slot_bytes` bytes; pinned where a GPU reads it.
    `page_bytes` maps layer groups to the bytes of a page as it is kept, `raw_bytes` to those of one that is not coded.
    """

    def __init__(
        self, index: TierIndex, slab: memoryview, slot_bytes: int, page_bytes: Sizes, raw_bytes: Sizes | None = None
    ) -> None:
        assert len(slab) >= index.num_slots * slot_bytes
        self.index = index
        self.slot_bytes = slot_bytes
        self._slab = slab
        self.page_bytes, self.raw_bytes = page_bytes, raw_bytes or page_bytes
        self._piece = count_piece_slots(slot_bytes)

    def bytes_of(self, copy: TierCopy) -> int:
        """Count the bytes that a host copy has of its page: of its code, unless it takes more slots than that."""
        group = copy.page.group
        coded = len(copy.slots) == self.index.slots_per_page[group]
        return (self.page_bytes if coded else self.raw_bytes)[group]

    def cut_slots(self, slots: Iterable[int]) -> list[memoryview]:
        """Buffers of whole slots, in order; the disk reads and writes these."""
        size = self.slot_bytes
        return [self._slab[slot * size : (slot + 1) * size] for slot in slots]

    def page_parts(self, copy: TierCopy, *, clear: bool = False) -> list[memoryview]:
        """Buffers of the page's bytes in its slots; the device reads and writes these. Slots side by side are one
        part, unless they are of two pieces of memory, which were pinned apart. `clear`: what a page leaves of its
        last slot may hold another tenant's bytes, and goes to disk with it."""
        slots, size, left = copy.slots, self.slot_bytes, self.bytes_of(copy)
        end, unused = (slots[-1] + 1) * size, len(slots) * size - left
        if clear and unused:
            self._slab[end - unused : end] = bytes(unused)
        together = slots[-1] - slots[0] == len(slots) - 1  # they are sorted: `TierIndex.reserve_copy`
        if together and slots[0] // self._piece == slots[-1] // self._piece:
            begin = slots[0] * size
            return [self._slab[begin : begin + left]]
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
    `came_up`. `outstanding` moves go on with a report of another thread; `late` ones passed the disk's limit."""

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
        return Probe(self.copier.digest, self.host.bytes_of(copy))

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
