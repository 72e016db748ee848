"""The host and disk tiers as the cache manager sees them: where a page is, bring it up, take it down.

Joins the two indexes, the two directions and the mailbox into which other threads put what happened. What came up may
be waited for by the next step (`poll_up`); the books of what went down are kept while a step runs (`poll_down`). All
decisions run on the engine thread. It must not know sequences' page tables or tokens. Invariant (I12): what other
threads report is applied once, in the order of the mailbox for each direction.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from queue import Empty
from typing import TYPE_CHECKING

from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.down import DownTransfers
from wicore_trt.kv.tiers.host import Backing, Movers, Report
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.kv.tiers.moves import CopyState, TierCopy
from wicore_trt.kv.tiers.up import ASKED_BESIDE, IN_MEMORY, TOKENS_ASKED, LoadPump, UpTransfers
from wicore_trt.types import TierStats

if TYPE_CHECKING:
    from wicore_trt.kv.disk.store import DiskStore

RETAIN_S = 0.1
"""How long the engine waits for the checksums of pages to be parked; they run at memory speed."""
RELIEVE_S = 0.05
"""How often the coldest pages of a full host are looked at; nothing is lost before they leave."""
HOST_THRESHOLD = 0.9
"""Share of the host's slots that may hold pages which disk lacks."""
HYSTERESIS = 0.05
"""Once a threshold is passed, cold pages are copied down until the tier is this share below it."""


class LowerTiers:
    """`save_early` as in `DownTransfers`. `host` and `disk` are indexes; without a disk `disk` and `store` are None."""

    def __init__(self, movers: Movers, *, save_early: bool, backing: Backing | None = None) -> None:
        self.movers = movers
        self.up = UpTransfers(movers)
        self.down = DownTransfers(movers, self.up.answer_fetches, save_early=save_early)
        self.loads = LoadPump(movers, self.up)
        self.host: TierIndex = movers.host.index
        self.disk: TierIndex | None = movers.disk[0] if movers.disk is not None else None
        self.store: DiskStore | None = movers.disk[1] if movers.disk is not None else None
        self.indexes = {"host": self.host} | ({"disk": self.disk} if self.disk is not None else {})
        self.hit_tokens: Counter[str] = Counter()
        self.store_again: Callable[[Page], bool] = lambda page: False
        """Copies a page to host memory raw, if the device still has it."""
        self.down.unfit = self._store_unfit
        self.backing = backing
        self._relieve_at = 0.0
        if backing is not None:
            backing.start_threads(partial(movers.post_report, movers.came_up, self.host.grant_slots))

    def _store_unfit(self, page: Page) -> None:
        if not self.store_again(page):
            self.up.refuse_fetches(page.name)

    def find_tier(self, group: str, key: bytes) -> str | None:
        """Find the nearest tier with a page: "host" (or on its way from the device), "reading" (from disk), "disk"."""
        here = self.host.find_copy(group, key)
        if here is not None:
            return "reading" if here.being_read else "host"
        return "disk" if self.disk is not None and self.disk.find_ready(group, key) is not None else None

    def find_tiers(
        self, keys: Sequence[bytes], above: Iterable[object], beside: Iterable[object]
    ) -> tuple[list[str], list[str | None]]:
        """Do `find_tier` for the pages of a chain up to one that no tier has, and for the local ones beside them: None
        where no tier has one. Pages with something in `above`, and in `beside` for local ones, are on the "device"."""
        below = self.disk.find_nodes(keys) if self.disk is not None else repeat(None)
        found, local, ready = list[str](), list[str | None](), CopyState.READY
        for slot, other, here, there in zip(above, beside, self.host.find_nodes(keys), below, strict=False):
            if slot is not None:
                found.append("device")
            elif here is not None and (copy := here.carrier) is not None:
                found.append("reading" if copy.being_read else "host")
            elif there is not None and (copy := there.carrier) is not None and copy.state is ready:
                found.append("disk")
            else:
                break
            if other is not None:
                local.append("device")
            elif here is not None and (copy := here.local) is not None:
                local.append("reading" if copy.being_read else "host")
            else:
                copy = there.local if there is not None else None
                local.append("disk" if copy is not None and copy.state is ready else None)
        return found, local

    def is_writing(self, group: str, key: bytes) -> bool:
        """True while a page is on its way to a tier."""
        copies = (index.find_copy(group, key) for index in self.indexes.values())
        return any(copy is not None and not copy.ready for copy in copies)

    def pin_copies(self, copies: Sequence[TierCopy]) -> bool:
        """Wait until copies that are being stored are there, and keep all of them from leaving
        (`host.release_copies` ends that). False, and none is kept, when one does not arrive in time."""
        end = time.monotonic() + RETAIN_S
        while any(copy.state is CopyState.WRITING for copy in copies) and time.monotonic() < end:
            self.wait_for_report(RETAIN_S)
        if not all(copy.ready for copy in copies):
            return False
        self.host.acquire_copies(copies)
        return True

    def touch_chain(self, keys: Sequence[bytes], signal: Sequence[float] | None) -> None:
        for index in self.indexes.values():
            index.touch_chain(keys, signal)

    def spare_windows(self, group: str, keys: Sequence[bytes], needed: set[int]) -> None:
        """Let the chain's local pages leave first, but for those at the `needed` indices."""
        spare = [key for i, key in enumerate(keys) if i not in needed]
        for index in self.indexes.values():
            index.spare_copies(group, spare)

    def drop_page(self, key: bytes, cause: str) -> None:
        """Forget a page everywhere below the device."""
        for index in self.indexes.values():
            index.drop_key(key, cause)

    def condemn_page(self, key: bytes, cause: str) -> None:
        """Forget a page everywhere below the device, on its way there too; fetches that wait for it fail."""
        for index in self.indexes.values():
            index.drop_key(key, cause, written=True)
        for group in self.host.slots_per_page:
            self.up.refuse_fetches((group, key))

    def drop_private(self, page: Page) -> None:
        """Forget a `private` page in host memory, also one that is still being stored: nobody waits for it."""
        copy = self.host.find_copy(*page.name)
        if copy is not None and copy.ready:
            self.host.drop_copy(copy, "resumed")
        elif copy is not None:
            self.host.abort_copy(copy, "resumed", touched=True)

    @property
    def has_work(self) -> bool:
        """True while anything is under way or to be saved."""
        return bool(self.movers.outstanding or self.down.to_save)

    # --- what other threads reported -----------------------------------------------------------------------------

    def poll_all(self) -> bool:
        """Apply finished transfers, go on with loads, keep the tiers below their thresholds. True if there was news."""
        news = False
        while self.apply_reports() or self.loads.inbox:
            news = True
            self.loads.take_arrivals()
        self.loads.pump_loads()
        self._save_cold()
        return news

    def poll_up(self) -> None:
        """`poll_all` of what the next step may depend on; the rest can wait for `poll_down`."""
        if not self.loads.loads:
            self._apply_up()
        if self.loads.loads or self.loads.inbox:  # a page may come that a load wanted which is over
            self.poll_all()

    def poll_down(self, tokens: int = 0) -> None:
        """`poll_all` of what went down, while a step of `tokens` runs: of loads books and the disk's part go on."""
        self._apply_down()
        if self.movers.copier.checks:  # else pages that were checked here would go to the device
            self._apply_up()
        if self.loads.loads:
            self.loads.pump_loads(ASKED_BESIDE + tokens // TOKENS_ASKED if tokens else IN_MEMORY, beside=True)
        self._save_cold()

    def wait_for_report(self, timeout_s: float) -> None:
        """Sleep until another thread reports something, at most `timeout_s` seconds; then apply what there is."""
        self.movers.copier.flush()
        self.down.hash_copied()
        movers = self.movers
        self._take_reports(0 if movers.went_down or movers.came_up else timeout_s)
        _run_reports(movers.came_up)
        _run_reports(movers.went_down)
        self.down.hash_copied()

    def apply_reports(self) -> bool:
        """Apply what other threads finished; true when there was anything."""
        found = self._apply_up()
        return self._apply_down() or found

    def _apply_up(self) -> bool:
        self._take_reports(0)
        found = _run_reports(self.movers.came_up)
        self.movers.copier.flush()
        return found

    def _apply_down(self) -> bool:
        """Apply what went down, and begin writes to disk. Starts nothing that writes a page of the device."""
        self._take_reports(0)
        found = _run_reports(self.movers.went_down)
        self.down.hash_copied()
        self.down.begin_saves()
        self.movers.copier.flush()
        return found

    def _take_reports(self, timeout_s: float) -> None:
        """Sort what the mailbox has; wait for it at most `timeout_s` seconds. Raises when no copy will end any more."""
        mailbox, broken = self.movers.mailbox, self.movers.copier.broken
        if broken is not None:
            raise RuntimeError(f"Copies of KV pages failed: {broken}.") from broken
        try:
            way, report = mailbox.get(timeout=timeout_s) if timeout_s else mailbox.get_nowait()
            while True:
                way.append(report)
                way, report = mailbox.get_nowait()
        except Empty:
            pass

    def _save_cold(self) -> None:
        """Copy cold pages to disk if the host is too full of pages that are not there."""
        full = self.host.unsaved_slots > HOST_THRESHOLD * self.host.num_slots
        if self.disk is None or not full or time.monotonic() < self._relieve_at:
            return
        self._relieve_at = time.monotonic() + RELIEVE_S
        surplus = self.host.unsaved_slots - int((HOST_THRESHOLD - HYSTERESIS) * self.host.num_slots)
        for copy in self.host.find_cold(surplus):
            self.down.queue_save(copy)

    # --- statistics and the end ----------------------------------------------------------------------------------

    def collect_stats(self) -> tuple[TierStats, ...]:
        """Collect the counts of host and disk."""
        movers, stats = self.movers, list[TierStats]()
        for name, index in self.indexes.items():
            traffic, queue_depth, size = movers.host_traffic, movers.outstanding, movers.host.slot_bytes
            if name == "disk" and self.store is not None:
                traffic, queue_depth = movers.disk_traffic, self.store.queue_depth
            stats.append(
                TierStats(
                    tier=name, capacity_bytes=index.num_slots * size, used_bytes=index.used_slots * size,
                    pinned_bytes=index.pinned_slots * size, pages=dict(index.pages), hit_tokens=self.hit_tokens[name],
                    read_bytes=traffic.read_bytes, read_seconds=traffic.read_seconds,
                    write_bytes=traffic.write_bytes, write_seconds=traffic.write_seconds,
                    evictions=dict(index.evictions), failures=dict(traffic.failures), queue_depth=queue_depth,
                    raw_bytes=sum(count * movers.host.raw_bytes[group] for group, count in index.pages.items()),
                )
            )  # fmt: skip
        return tuple(stats)

    def wait_idle(self, timeout_s: float) -> bool:
        """Poll until nothing is under way or to be saved; for shutdown and tests. False when time runs out."""
        end = time.monotonic() + timeout_s
        while self.has_work:
            self.apply_reports()
            left = end - time.monotonic()
            if left <= 0:
                return False
            if self.movers.outstanding:
                self.wait_for_report(min(left, 0.05))
            elif self.down.to_save:
                time.sleep(min(left, 0.01))
        return True

    def close(self, timeout_s: float) -> None:
        """Let saves end within `timeout_s`, then stop the threads. A hung disk does not hold it up."""
        end = time.monotonic() + timeout_s
        try:
            if self.movers.copier.broken is None:  # else no copy ends any more
                self.wait_idle(timeout_s)
        finally:
            if self.backing is not None:
                self.backing.close()
            self.movers.checker.shutdown(wait=True)
            if self.store is not None:
                self.store.close(max(0.0, end - time.monotonic()))

    def check_integrity(self) -> None:
        for index in self.indexes.values():
            index.check_integrity()


def _run_reports(reports: deque[Report]) -> bool:
    """Apply all reports of one direction; true when there was any."""
    found = bool(reports)
    while reports:
        reports.popleft()()
    return found
