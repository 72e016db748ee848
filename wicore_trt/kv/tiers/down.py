"""The way down: pages of the device to host memory, and of host memory to disk.

Runs on the engine thread, but for the movers. Must not know who wants a page. Invariant (I5): a host copy is READY only
with the checksum of its bytes, and only bytes that match it are written to disk; no buffer is used again while others
may touch it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.host import Movers
from wicore_trt.kv.tiers.moves import Checksum, CopyState, Save, Stage, Store, TierCopy
from wicore_trt.runtime.executor import UNFIT

SAVING_SHARE = 4
"""Writes to disk hold at most one in so many of the host's slots, or what the device stores would find no room."""
BAD_WRITES, PAUSE_S = 8, 30.0
"""After so many failed disk writes in a row none begins for so many seconds; slots without space wait as long."""


class DownTransfers:
    """`stored(copy)` hears of each page that came to host memory. `save_early`: copy host pages to disk as soon as they
    are stored. `expires(key)` says when a page's time is over, in seconds since 1970, 0 for never."""

    def __init__(self, movers: Movers, stored: Callable[[TierCopy], None], *, save_early: bool) -> None:
        self.to_save: OrderedDict[TierCopy, None] = OrderedDict()
        self.saving_slots = 0
        self.no_writes_before = self.no_space_before = 0.0
        self.expires: Callable[[bytes], int] = lambda key: 0
        self.unfit: Callable[[Page], None] = lambda page: None
        """Hears of a page that has no code, and is not in host memory therefore."""
        self._movers = movers
        self._stored = stored
        self._save_early = save_early
        self._to_hash: list[Store] = []
        self._bad_writes = 0
        self._no_space: list[int] = []

    # --- device to host ------------------------------------------------------------------------------------------

    def store_page(self, page: Page, slot: int, *, private: bool = False, raw: bool = False) -> TierCopy | None:
        """Copy a finished device page to the host, unless it is there. None when there is no room for it. A `private`
        page is not saved to disk nor announced, and never coded: if it did not fit it would be lost with its slot."""
        movers, index = self._movers, self._movers.host.index
        copy = index.find_copy(page.group, page.key)
        if copy is not None:
            return copy
        copy = index.reserve_copy(page, index.raw_slots[page.group] if raw or private else 0)
        if copy is None:
            movers.host_traffic.failures["no room"] += 1
            return None
        if private:
            copy.found = None
            index.mark_saved(copy)
        move = Store(copy)
        movers.outstanding += 1
        parts = movers.host.page_parts(copy, clear=True)
        # a page that others may find was trusted, so the step that wrote it has ended; a private one is still written
        copied = partial(movers.post_report, movers.went_down, self.apply_copied, move)
        movers.copier.to_host(page.group, slot, parts, copied, settled=not private)
        return copy

    def apply_copied(self, move: Store, digest: bytes | None, seconds: float) -> None:
        """Go on with a page whose bytes are in host memory; `digest` and `seconds` as in `executor.Done`."""
        page, traffic = move.copy.page, self._movers.host_traffic
        traffic.write_bytes += self._movers.host.bytes_of(move.copy)
        traffic.write_seconds += seconds
        if digest == UNFIT:
            self._refuse_code(move)
        elif digest is not None:
            self._end_stores([move], [(digest, page)])
        else:
            move.enter_stage(Stage.CHECKING)
            self._to_hash.append(move)

    def _refuse_code(self, move: Store) -> None:
        """Give up a copy whose page has no code, which may be stored raw."""
        movers, copy = self._movers, move.copy
        move.enter_stage(Stage.ENDED)
        movers.outstanding -= 1
        movers.host_traffic.failures["unfit"] += 1
        dropped = copy.state is CopyState.LOST
        movers.host.index.abort_copy(copy, "unfit")
        if not dropped:
            self.unfit(copy.page)

    def hash_copied(self) -> None:
        """Hand what was copied since to the checksum thread, all at once: waking it costs more than one page."""
        if self._to_hash:
            moves, self._to_hash = self._to_hash, []
            self._movers.checker.submit(self._hash_stores, moves)

    def _hash_stores(self, moves: list[Store]) -> None:
        found = [self._movers.take_checksum(move.copy) for move in moves]
        self._movers.post_report(self._movers.went_down, self._end_stores, moves, found)

    def _end_stores(self, moves: Sequence[Store], checksums: Sequence[Checksum]) -> None:
        movers, index = self._movers, self._movers.host.index
        movers.outstanding -= len(moves)
        for move, found in zip(moves, checksums, strict=True):
            move.enter_stage(Stage.ENDED)
            copy = move.copy
            copy.checksum = found
            index.commit_copy(copy)
            if not copy.ready:  # it was dropped meanwhile
                continue
            if not copy.saved:
                movers.announce("host", copy.page)
                if movers.disk is None:
                    index.mark_saved(copy)
                elif self._save_early:
                    self.queue_save(copy)
            self._stored(copy)

    # --- host to disk --------------------------------------------------------------------------------------------

    def queue_save(self, copy: TierCopy) -> None:
        """Have a host page written to disk when its turn comes; a page that leaves the host before is not."""
        assert self._movers.disk is not None
        if not copy.saved:
            self.to_save[copy] = None
            if len(self.to_save) > 2 * self._movers.host.index.num_slots:  # while disks hang, most have left
                self.to_save = OrderedDict.fromkeys(copy for copy in self.to_save if copy.ready)

    def begin_saves(self) -> None:
        """Begin writes to disk as long as there is room for them."""
        movers, now = self._movers, time.monotonic()
        if movers.disk is None:
            return
        index = movers.disk[0]
        if self._no_space and now >= self.no_space_before:
            index.give_back(self._no_space)
            self._no_space = []
        if now < self.no_writes_before:
            return
        while self.to_save:
            copy = next(iter(self.to_save))
            wanted = copy.ready and not copy.saved and index.find_copy(*copy.page.name) is None
            if wanted and not self._begin_save(copy):
                return
            del self.to_save[copy]
            if copy.ready:
                movers.host.index.mark_saved(copy)

    def _begin_save(self, copy: TierCopy) -> bool:
        """Begin to write a host copy, if the disk tier has room; false when it must wait for its turn."""
        movers = self._movers
        assert movers.disk is not None
        index, store = movers.disk
        if self.saving_slots > movers.host.index.num_slots // SAVING_SHARE:
            return False
        target = index.reserve_copy(copy.page, len(copy.slots))
        if target is None:
            movers.disk_traffic.failures["no room"] += 1
            return True
        move = Save(copy, target, self.expires(copy.page.key))
        done = partial(movers.post_timed, movers.went_down, self.end_save, move, time.perf_counter())
        parts, (digest, whose) = movers.host.cut_slots(copy.slots), copy.checksum or (b"", None)
        if not store.write_page(
            copy.page, target.slots, parts, done,
            probe=movers.probe_copy(copy), expected=digest if whose == copy.page else b"", expires=move.expires,
        ):  # fmt: skip
            index.abort_copy(target, "queue full")
            return False
        movers.host.index.acquire_copies([copy])
        movers.outstanding += 1
        self.saving_slots += len(copy.slots)
        return True

    def end_save(self, move: Save, outcome: Outcome, seconds: float) -> None:
        """Note what became of a write to disk; RETURNED follows a TIMEOUT."""
        movers, copy, target = self._movers, move.copy, move.target
        assert movers.disk is not None
        index, store = movers.disk
        if outcome is Outcome.TIMEOUT:
            move.enter_stage(Stage.LATE)
            movers.late += 1
            movers.disk_traffic.failures["write timeout"] += 1
            index.abort_copy(target, "timeout", touched=True)
            self._count_bad_write()
            return
        move.enter_stage(Stage.ENDED)
        movers.outstanding -= 1
        self.saving_slots -= len(copy.slots)
        movers.host.index.release_copies([copy])
        if outcome is Outcome.RETURNED or (outcome is Outcome.OK and target.state is CopyState.LOST):
            movers.late -= outcome is Outcome.RETURNED
            store.erase_slots(target.slots)  # also what was dropped meanwhile and acknowledged just now
            index.reclaim_slots(target)
        elif outcome is Outcome.OK:
            self._bad_writes = 0
            movers.disk_traffic.write_bytes += movers.host.bytes_of(copy)
            movers.disk_traffic.write_seconds += seconds
            index.commit_copy(target)
            if target.ready and (now := self.expires(copy.page.key)) != move.expires:
                store.stamp_page(copy.page, target.slots, now)
            movers.announce("disk", copy.page)
        elif outcome is Outcome.NO_SPACE:
            # The file system is full below our limit. Neither these slots can be had for now nor any that do not exist
            # yet; the others hold pages that can go.
            movers.disk_traffic.failures["no space"] += 1
            index.abort_copy(target, "no space")
            self._no_space += index.set_aside(store.existing_slots, target.slots)
            self.no_space_before = time.monotonic() + PAUSE_S
        elif outcome is Outcome.CORRUPT:
            movers.host_traffic.failures["corrupt"] += 1
            index.abort_copy(target, "corrupt")
            if copy.ready:
                movers.host.index.drop_copy(copy, "corrupt")
        else:
            movers.disk_traffic.failures["write error"] += 1
            index.abort_copy(target, "failed")
            self._count_bad_write()

    def _count_bad_write(self) -> None:
        self._bad_writes += 1
        if self._bad_writes >= BAD_WRITES:
            self._bad_writes = 0
            self.no_writes_before = time.monotonic() + PAUSE_S
            self.to_save.clear()
