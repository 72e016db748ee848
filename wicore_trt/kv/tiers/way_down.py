"""The way down: pages of the device to host memory, and of host memory to disk.

Runs on the engine thread but for what it hands to the movers. It must not know who wants a page. Invariant: a host
copy is READY only with the checksum of its bytes, and only bytes that still match it are written to disk; no buffer is
used again while a copy or the disk may touch it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.index import CopyState, TierCopy
from wicore_trt.kv.tiers.movers import Movers
from wicore_trt.kv.tiers.moves import Copied, Hashed, Save, Saved, Stage, Store
from wicore_trt.kv.tiers.stored import Checksum

SAVING_SHARE = 4
"""Writes to disk hold at most one in so many of the host's slots, or what the device stores would find no room."""
BAD_WRITES, PAUSE_S = 8, 30.0
"""After this many failed disk writes in a row, write nothing for so many seconds; slots that the file system has no
space for are tried again after as long."""


class WayDown:
    """`save_early`: copy host pages to disk as soon as they are stored, not only when the host fills up."""

    def __init__(self, movers: Movers, *, save_early: bool) -> None:
        self.outstanding = self.late = 0
        self.to_save: OrderedDict[TierCopy, None] = OrderedDict()
        self.saving_slots = 0
        self.no_space: list[int] = []
        self.no_writes_before = 0.0
        self.expires: Callable[[bytes], int] = lambda key: 0
        self._movers = movers
        self._save_early = save_early
        self._to_hash: list[Store] = []
        self._bad_writes = 0
        self._space_at = 0.0

    # --- device to host ------------------------------------------------------------------------------------------

    def store(self, page: Page, slot: int, *, private: bool) -> TierCopy | None:
        """See `Transfers.store`."""
        movers, index = self._movers, self._movers.host.index
        copy = index.get(page.group, page.key)
        if copy is not None:
            return copy
        copy = index.reserve(page)
        if copy is None:
            movers.host_traffic.failures["no room"] += 1
            return None
        if private:
            copy.private = True
            index.mark_saved(copy)
        move = Store(copy)
        self.outstanding += 1
        parts = movers.host.payload(copy, clear=True)
        # a page that others may find was trusted, so the step that wrote it has ended; a private one is still written
        movers.copier.to_host(page.group, slot, parts, partial(self._post_copied, move), settled=not private)
        return copy

    def _post_copied(self, move: Store, digest: bytes | None, seconds: float) -> None:
        self._movers.mailbox.put(Copied(move, digest, seconds))

    def copied(self, move: Store, digest: bytes | None, seconds: float) -> bool:
        """Its bytes are in host memory; true when it is ready."""
        page = move.copy.page
        self._movers.host_traffic.wrote(self._movers.host.bytes_of(page), seconds)
        if digest is not None:
            return self.stored(move, (digest, page))
        move.go(Stage.CHECKING)
        self._to_hash.append(move)
        return False

    def hash_copied(self) -> None:
        """Hand what was copied since to the checksum thread, all at once: waking it costs more than one page."""
        if self._to_hash:
            moves, self._to_hash = self._to_hash, []
            self._movers.checker.submit(self._hash, moves)

    def _hash(self, moves: list[Store]) -> None:
        self._movers.mailbox.put(Hashed(moves, [self._movers.checksum(move.copy) for move in moves]))

    def stored(self, move: Store, found: Checksum) -> bool:
        """The end of a store; false when its copy was dropped meanwhile."""
        move.go(Stage.ENDED)
        self.outstanding -= 1
        copy, index = move.copy, self._movers.host.index
        copy.checksum = found
        index.commit(copy)
        if not copy.ready:
            return False
        if not copy.saved:
            self._movers.stored("host", copy.page)
            if self._movers.disk is None:
                index.mark_saved(copy)
            elif self._save_early:
                self.save(copy)
        return True

    # --- host to disk --------------------------------------------------------------------------------------------

    def save(self, copy: TierCopy) -> None:
        """See `Transfers.save`."""
        assert self._movers.disk is not None
        if not copy.saved:
            self.to_save[copy] = None
            if len(self.to_save) > 2 * self._movers.host.index.num_slots:  # while disks hang, most have left
                self.to_save = OrderedDict.fromkeys(copy for copy in self.to_save if copy.ready)

    def save_some(self) -> None:
        """Begin writes to disk as long as there is room for them."""
        movers, now = self._movers, time.monotonic()
        if movers.disk is None:
            return
        index = movers.disk[0]
        if self.no_space and now >= self._space_at:
            index.give_back(self.no_space)
            self.no_space = []
        if now < self.no_writes_before:
            return
        while self.to_save:
            copy = next(iter(self.to_save))
            if copy.ready and not copy.saved and index.get(*copy.page.name) is None and not self._begin(copy):
                return
            del self.to_save[copy]
            if copy.ready:
                movers.host.index.mark_saved(copy)

    def _begin(self, copy: TierCopy) -> bool:
        """Begin to write a host copy, if the disk tier has room; false when it must wait for its turn."""
        movers = self._movers
        assert movers.disk is not None
        index, store = movers.disk
        if self.saving_slots > movers.host.index.num_slots // SAVING_SHARE:
            return False
        target = index.reserve(copy.page)
        if target is None:
            movers.disk_traffic.failures["no room"] += 1
            return True
        move = Save(copy, target, self.expires(copy.page.key))
        done, right = partial(self._post_saved, move, time.perf_counter()), partial(movers.is_right, copy)
        parts = movers.host.buffers(copy)
        if not store.write(copy.page, target.slots, parts, done, right=right, expires=move.expires):
            index.abort(target, "queue full")
            return False
        movers.host.index.acquire([copy])
        self.outstanding += 1
        self.saving_slots += len(copy.slots)
        return True

    def _post_saved(self, move: Save, begun: float, outcome: Outcome) -> None:
        self._movers.mailbox.put(Saved(move, outcome, time.perf_counter() - begun))

    def saved(self, move: Save, outcome: Outcome, seconds: float) -> None:
        """What became of a write to disk."""
        movers, copy, target = self._movers, move.copy, move.target
        assert movers.disk is not None
        index, store = movers.disk
        if outcome is Outcome.TIMEOUT:
            move.go(Stage.LATE)
            self.late += 1
            movers.disk_traffic.failures["write timeout"] += 1
            index.abort(target, "timeout", touched=True)
            self._write_failed()
            return  # RETURNED will follow
        move.go(Stage.ENDED)
        self.outstanding -= 1
        self.saving_slots -= len(copy.slots)
        movers.host.index.release([copy])
        if outcome is Outcome.RETURNED:
            self.late -= 1
            store.erase(target.slots)
            index.reclaim(target)
        elif outcome is Outcome.OK and target.state is CopyState.LOST:
            store.erase(target.slots)  # it was dropped meanwhile, and the store has just acknowledged it
            index.reclaim(target)
        elif outcome is Outcome.OK:
            self._bad_writes = 0
            movers.disk_traffic.write_bytes += movers.host.bytes_of(copy.page)
            movers.disk_traffic.write_seconds += seconds
            index.commit(target)
            if target.ready and (now := self.expires(copy.page.key)) != move.expires:
                store.stamp(copy.page, target.slots, now)
            movers.stored("disk", copy.page)
        elif outcome is Outcome.NO_SPACE:
            # The file system is full below our limit. Neither these slots can be had for now nor any that do not exist
            # yet; the others hold pages that can go.
            movers.disk_traffic.failures["no space"] += 1
            index.abort(target, "no space")
            self.no_space += index.set_aside(store.existing_slots, target.slots)
            self._space_at = time.monotonic() + PAUSE_S
        elif outcome is Outcome.CORRUPT:
            movers.host_traffic.failures["corrupt"] += 1
            index.abort(target, "corrupt")
            if copy.ready:
                movers.host.index.drop(copy, "corrupt")
        else:
            movers.disk_traffic.failures["write error"] += 1
            index.abort(target, "failed")
            self._write_failed()

    def _write_failed(self) -> None:
        self._bad_writes += 1
        if self._bad_writes >= BAD_WRITES:
            self._bad_writes = 0
            self.no_writes_before = time.monotonic() + PAUSE_S
            self.to_save.clear()
