"""Page transfers between device, host and disk, and what becomes of them.

Joins the way down and the way up with the mailbox into which other threads put what happened; `poll` and `wait` apply
it. What came up may be waited for by the next step (`poll_up`); the books of what went down are kept while a step runs
on the device (`poll_down`). All decisions run on the engine thread. It must not know requests or tokens. Invariant: a
page is handed to the device only after its bytes matched its identity, and no buffer is reused while anything may still
read or write it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, assert_never

from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.kv.disk.page_store import PageStore
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.host import Backing, HostTier
from wicore_trt.kv.tiers.index import TierCopy, TierIndex
from wicore_trt.kv.tiers.movers import Movers, Traffic
from wicore_trt.kv.tiers.moves import (
    Backed,
    Check,
    Checked,
    Copied,
    Fetch,
    Hashed,
    HaveRead,
    Over,
    Place,
    Placed,
    Report,
    Saved,
)
from wicore_trt.kv.tiers.way_down import WayDown
from wicore_trt.kv.tiers.way_up import WayUp
from wicore_trt.runtime.executor import PageCopier

if TYPE_CHECKING:
    from wicore_trt.kv.disk.store import DiskStore


def open_transfers(
    index: Callable[[str, int], TierIndex],
    num_slots: int,
    slot_bytes: int,
    page_bytes: Mapping[str, int],
    store: DiskStore | None,
    copier: PageCopier,
    *,
    save_early: bool,
    stored: Callable[[str, Page], None] = lambda tier, page: None,
) -> Transfers:
    """Transfers over a fresh slab of `num_slots` host slots, pinned if the copier can, and over what `store` recovers.
    The host tier grows while its memory is pinned. `index(tier, slots)` makes the books of "host" and "disk"; the rest
    as in `Transfers`."""
    slab = aligned_buffer(num_slots * slot_bytes)
    backing = Backing(slab, slot_bytes, copier.pin)
    books = index("host", num_slots)
    if backing.ready < num_slots:
        books.withhold(backing.ready, num_slots)
    host = HostTier(books, slab, slot_bytes, page_bytes)
    disk = None
    if store is not None:
        books = index("disk", store.num_slots)
        books.restore(store.recover())
        disk = (books, store)
    return Transfers(host, disk, copier, save_early=save_early, stored=stored, backing=backing)


class Transfers:
    """`disk` is the index and the store of the disk tier, or None. `save_early`: copy host pages to disk as soon as
    they are stored, not only when the host fills up. `stored` is told of each page that a tier gained. `down.expires(
    key)` says when a page's time is over, in seconds since 1970, 0 for never."""

    def __init__(
        self,
        host: HostTier,
        disk: tuple[TierIndex, PageStore] | None,
        copier: PageCopier,
        *,
        save_early: bool,
        stored: Callable[[str, Page], None] = lambda tier, page: None,
        backing: Backing | None = None,
    ) -> None:
        checker = ThreadPoolExecutor(1, thread_name_prefix="wicore-kv-checksum")
        self.movers = Movers(host, disk, copier, stored, SimpleQueue(), checker)
        self.down = WayDown(self.movers, save_early=save_early)
        self.up = WayUp(self.movers)
        self._went_down, self._came_up = deque[Report](), deque[Report]()
        self._backing = backing
        if backing is not None:
            backing.start(lambda first, stop: self.movers.mailbox.put(Backed(first, stop)))

    def yield_to(self, working: Callable[[], bool]) -> None:
        """While `working()`, which any thread may call, memory for the host tier is taken slowly."""
        if self._backing is not None:
            self._backing.working = working

    @property
    def host(self) -> HostTier:
        return self.movers.host

    @property
    def disk(self) -> tuple[TierIndex, PageStore] | None:
        return self.movers.disk

    @property
    def host_traffic(self) -> Traffic:
        return self.movers.host_traffic

    @property
    def disk_traffic(self) -> Traffic:
        return self.movers.disk_traffic

    @property
    def outstanding(self) -> int:
        """Moves that a report of another thread goes on with."""
        return self.down.outstanding + self.up.outstanding

    @property
    def going_on(self) -> bool:
        """Whether any move will end soon: the disk has not let the time limit of all of them pass."""
        return self.outstanding > self.down.late + self.up.late

    @property
    def busy(self) -> bool:
        """Whether anything is under way or to be saved."""
        return bool(self.outstanding or self.down.to_save)

    # --- what a tier's user asks for -----------------------------------------------------------------------------

    def store(self, page: Page, slot: int, *, private: bool = False) -> TierCopy | None:
        """Copy a finished device page to the host, unless it is there. None when there is no room for it. A `private`
        page is not saved to disk nor announced."""
        return self.down.store(page, slot, private=private)

    def save(self, copy: TierCopy) -> None:
        """Have a host page written to disk when its turn comes; a page that leaves the host before is not."""
        self.down.save(copy)

    def fetch(
        self, page: Page, inbox: deque[Fetch], wanted: Callable[[], bool] = lambda: True, wrong: int = 0
    ) -> Fetch | None:
        """Bring a page to the host; it is put into `inbox` when it is HERE or FAILED, maybe at once.
        None when the disk's queue or the host is full just now. `wanted` and `wrong` as in `Fetch`."""
        return self.up.fetch(page, inbox, wanted, wrong)

    def check(self, copies: Sequence[TierCopy], over: Over) -> None:
        """Compare what host copies, which are held, have in their buffers; `over` as in `Check`. For copies that no
        fetch brought, where the device does not do it."""
        self.up.check(Check(copies, over))

    def place(self, copies: Sequence[TierCopy], slots: Sequence[int], over: Over = lambda places, right: None) -> None:
        """Copy pages that are in host memory, of one layer group, held and checked unless the device does that, into
        device slots, soon; `over` as in `Place`."""
        self.up.place(Place(copies, over), slots)

    def release(self, fetch: Fetch) -> None:
        """Nobody wants a fetched page any more: let go of its host copy, now or when it gets here."""
        self.up.release(fetch)

    def refuse(self, key: bytes) -> None:
        """Tell those who wait for the copies of a page, which were dropped, that it cannot be had."""
        for group in self.host.index.slots_per_page:
            self.up.refuse((group, key))

    # --- what other threads reported -----------------------------------------------------------------------------

    def poll(self) -> bool:
        """Apply what other threads finished; true when there was anything."""
        found = self.poll_up()
        return self.poll_down() or found

    def poll_up(self) -> bool:
        """`poll` of what a load may wait for."""
        self._check_copier()
        self._take_reports(0)
        found = bool(self._came_up)
        while self._came_up:
            self._apply(self._came_up.popleft())
        self.movers.copier.flush()
        return found

    def poll_down(self) -> bool:
        """`poll` of what went down, and begin writes to disk. Starts nothing that writes a page of the device."""
        self._check_copier()
        self._take_reports(0)
        found = bool(self._went_down)
        while self._went_down:
            self._apply(self._went_down.popleft())
        self.down.hash_copied()
        self.down.save_some()
        self.movers.copier.flush()
        return found

    def wait(self, timeout_s: float) -> None:
        """Sleep until another thread reports something, at most `timeout_s` seconds; then apply what there is."""
        self._check_copier()
        self.movers.copier.flush()
        self.down.hash_copied()
        self._take_reports(0 if self._went_down or self._came_up else timeout_s)
        for reports in (self._came_up, self._went_down):
            while reports:
                self._apply(reports.popleft())
        self.down.hash_copied()

    def _take_reports(self, timeout_s: float) -> None:
        """Sort what the mailbox has; wait for it at most `timeout_s` seconds."""
        mailbox = self.movers.mailbox
        try:
            report = mailbox.get(timeout=timeout_s) if timeout_s else mailbox.get_nowait()
            while True:
                (self._went_down if isinstance(report, Copied | Hashed | Saved) else self._came_up).append(report)
                report = mailbox.get_nowait()
        except Empty:
            pass

    def _apply(self, report: Report) -> None:
        match report:
            case Copied():
                if self.down.copied(report.move, report.digest, report.seconds):
                    self.up.answer(report.move.copy)
            case Hashed():
                for move, found in zip(report.moves, report.checksums, strict=True):
                    if self.down.stored(move, found):
                        self.up.answer(move.copy)
            case Saved():
                self.down.saved(report.move, report.outcome, report.seconds)
            case HaveRead():
                if self.up.have_read(report.move, report.outcome, report.seconds):
                    self.up.answer(report.move.copy)
            case Checked():
                self.up.checked(report.move, report.right)
            case Placed():
                self.up.placed(report.move, report.digests, report.seconds)
            case Backed():
                self.host.index.grow(report.first, report.stop)
            case _:
                assert_never(report)

    def _check_copier(self) -> None:
        """Raise when no copy will end any more, or who waits for one would wait for ever."""
        if self.movers.copier.broken is not None:
            raise RuntimeError("Copies of KV pages failed on the device.") from self.movers.copier.broken

    # --- the end -------------------------------------------------------------------------------------------------

    def wait_idle(self, timeout_s: float) -> bool:
        """Poll until nothing is under way or to be saved; for shutdown and tests. False when time runs out."""
        end = time.monotonic() + timeout_s
        while self.busy:
            self.poll()
            left = end - time.monotonic()
            if left <= 0:
                return False
            if self.outstanding:
                self.wait(min(left, 0.05))
            elif self.down.to_save:
                time.sleep(min(left, 0.01))
        return True

    def close(self, timeout_s: float) -> None:
        """Let saves end within `timeout_s`, then stop the threads. A hung disk does not hold it up."""
        end = time.monotonic() + timeout_s
        try:
            self.wait_idle(timeout_s)
        finally:
            if self._backing is not None:
                self._backing.close()
            self.movers.checker.shutdown(wait=True)
            if self.disk is not None:
                self.disk[1].close(max(0.0, end - time.monotonic()))
