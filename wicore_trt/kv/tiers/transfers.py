"""Page transfers between device, host and disk, and what becomes of them.

Joins the tiers' books (`TierIndex`) with what moves bytes: the device's copier, a checksum thread and the disk store.
All decisions run on the engine thread; other threads only post what happened, and `poll` applies it. It must not know
requests or tokens. Invariant: a page is handed to the device only after its bytes matched its identity, and no buffer
is reused while anything may still read or write it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.disk.page_store import PageStore
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.host import HostTier, checksum
from wicore_trt.kv.tiers.index import CopyState, TierCopy, TierIndex
from wicore_trt.kv.tiers.traffic import Clocked, Traffic, at_home
from wicore_trt.runtime.executor import PageCopier

Arrival = Callable[[TierCopy | None], None]
"""Called on the engine thread with an acquired copy whose bytes were verified, or None when the page cannot be had."""

SAVING_SHARE = 4
"""Writes to disk hold at most one in so many of the host's slots, or what the device stores would find no room."""
BAD_WRITES, PAUSE_S = 8, 30.0
"""After this many failed disk writes in a row, write nothing for so many seconds; slots that the file system has no
space for are tried again after as long."""


class Transfers:
    """`disk` is the index and the store of the disk tier, or None. `save_early`: copy host pages to disk as soon as
    they are stored, not only when the host fills up. `stored` is told of each page that a tier gained.
    `disk_rate(bytes, seconds, bytes ahead)` hears how long a read took; `expires(key)` says when a page's time is over,
    in seconds since 1970, 0 for never."""

    def __init__(
        self,
        host: HostTier,
        disk: tuple[TierIndex, PageStore] | None,
        copier: PageCopier,
        *,
        save_early: bool,
        stored: Callable[[str, Page], None] = lambda tier, page: None,
    ) -> None:
        self.host = host
        self.disk = disk
        self.copier = copier
        self.host_traffic, self.disk_traffic = Traffic(), Traffic()
        self._save_early = save_early
        self._stored = stored
        self.disk_rate: Callable[[int, float, int], None] = lambda count, seconds, queued: None
        self.expires: Callable[[bytes], int] = lambda key: 0
        self.reading_bytes = 0
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="wicore-kv-checksum")
        self._to_hash: list[TierCopy] = []
        self._waiters: dict[tuple[str, bytes], list[Arrival]] = {}
        self._to_save: OrderedDict[TierCopy, None] = OrderedDict()
        self._saving_slots = 0
        self._bad_writes = 0
        self._no_writes_before = 0.0
        self._no_space: list[TierCopy] = []
        self._space_at = 0.0
        self.outstanding = 0

    @property
    def busy(self) -> bool:
        """Whether anything is under way or to be saved."""
        return bool(self.outstanding or self._to_save)

    def poll(self) -> bool:
        """Apply what other threads finished; true when there was anything."""
        self._check_copier()
        found = False
        with suppress(Empty):
            while True:
                self._events.get_nowait()()
                found = True
        self._hash_copied()
        self._save_some()
        return found

    def _check_copier(self) -> None:
        """Raise when no copy will end any more, or who waits for one would wait for ever."""
        if self.copier.broken is not None:
            raise RuntimeError("Copies of KV pages failed on the device.") from self.copier.broken

    def wait_idle(self, timeout_s: float) -> bool:
        """Poll until nothing is under way or to be saved; for shutdown and tests. False when time runs out."""
        end = time.monotonic() + timeout_s
        while self.busy:
            self.poll()
            left = end - time.monotonic()
            if left <= 0:
                return False
            if self.outstanding:
                try:
                    self._events.get(timeout=min(left, 0.05))()
                except Empty:
                    continue
            elif self._to_save:
                time.sleep(min(left, 0.01))
        return True

    def close(self, timeout_s: float) -> None:
        """Let saves end within `timeout_s`, then stop the threads. A hung disk does not hold it up."""
        end = time.monotonic() + timeout_s
        try:
            self.wait_idle(timeout_s)
        finally:
            self._hashing.shutdown(wait=True)
            if self.disk is not None:
                self.disk[1].close(max(0.0, end - time.monotonic()))

    # --- device to host ------------------------------------------------------------------------------------------

    def store(self, page: Page, slot: int, *, private: bool = False) -> TierCopy | None:
        """Copy a finished device page to the host, unless it is there. None when there is no room for it. A `private`
        page is not saved to disk nor announced."""
        index = self.host.index
        copy = index.get(page.group, page.key)
        if copy is None:
            copy = index.reserve(page)
            if copy is None:
                self.host_traffic.failures["no room"] += 1
                return None
            if private:
                index.mark_saved(copy)
            self.outstanding += 1
            begun = time.perf_counter()
            self.copier.to_host(
                page.group, slot, self.host.payload(copy), self._home(partial(self._copied, copy, begun))
            )
        return copy

    def _home(self, event: Clocked) -> Callable[[], None]:
        return at_home(event, self._post)

    def _copied(self, copy: TierCopy, begun: float, ended: float) -> None:
        self.host_traffic.wrote(self.host.bytes_of(copy.page), begun, ended)
        self._to_hash.append(copy)

    def _hash_copied(self) -> None:
        """Hand what was copied since to the checksum thread, all at once: waking it costs more than one page."""
        if self._to_hash:
            copies, self._to_hash = self._to_hash, []
            self._hashing.submit(self._hash, copies)

    def _hash(self, copies: list[TierCopy]) -> None:
        digests = [checksum(copy.page, self.host.buffers(copy)) for copy in copies]
        self._post(partial(self._hashed_all, copies, digests))

    def _hashed_all(self, copies: list[TierCopy], digests: list[bytes]) -> None:
        for copy, digest in zip(copies, digests, strict=True):
            self._hashed(copy, digest)

    def _hashed(self, copy: TierCopy, digest: bytes) -> None:
        self.outstanding -= 1
        copy.checksum = digest
        self.host.index.commit(copy)
        if not copy.ready:
            return  # it was dropped meanwhile
        if not copy.saved:
            self._stored("host", copy.page)
            if self.disk is None:
                self.host.index.mark_saved(copy)
            elif self._save_early:
                self.save(copy)
        self._answer(copy)

    def refuse(self, key: bytes) -> None:
        """Tell those who wait for the copies of a page, which were dropped, that it cannot be had."""
        for group in self.host.index.slots_per_page:
            for arrival in self._waiters.pop((group, key), ()):
                arrival(None)

    def _answer(self, copy: TierCopy) -> None:
        """Tell those who wait for a page that was just written or read, and so needs no second check."""
        for arrival in self._waiters.pop(copy.page.name, ()):
            self.host.index.acquire(copy)
            arrival(copy)

    # --- host to disk --------------------------------------------------------------------------------------------

    def save(self, copy: TierCopy) -> None:
        """Have a host page written to disk when its turn comes; a page that leaves the host before is not."""
        assert self.disk is not None
        if not copy.saved:
            self._to_save[copy] = None
            if len(self._to_save) > 2 * self.host.index.num_slots:  # while disks hang, most have left
                self._to_save = OrderedDict.fromkeys(copy for copy in self._to_save if copy.ready)

    def _save_some(self) -> None:
        if self._no_space and self.disk is not None and time.monotonic() >= self._space_at:
            for unwritten in self._no_space:
                self.disk[0].reclaim(unwritten)
            self._no_space = []
        if self.disk is None or not self._to_save or time.monotonic() < self._no_writes_before:
            return
        index, store = self.disk
        while self._to_save:
            copy = next(iter(self._to_save))
            if copy.ready and not copy.saved and index.get(*copy.page.name) is None:
                if self._saving_slots > self.host.index.num_slots // SAVING_SHARE:
                    return
                target = index.reserve(copy.page)
                if target is None:
                    self.disk_traffic.failures["no room"] += 1
                else:
                    expires = self.expires(copy.page.key)
                    done = partial(self._post_saved, copy, target, expires, time.perf_counter())
                    right, parts = partial(self._is_right, copy), self.host.buffers(copy)
                    if not store.write(copy.page, target.slots, parts, done, right=right, expires=expires):
                        index.abort(target, "queue full")
                        return
                    self.host.index.acquire(copy)
                    self.outstanding += 1
                    self._saving_slots += len(copy.slots)
            del self._to_save[copy]
            if copy.ready:
                self.host.index.mark_saved(copy)

    def _is_right(self, copy: TierCopy) -> bool:
        """Whether no bit of a host page flipped: sealed for the disk it would look right from then on."""
        return checksum(copy.page, self.host.buffers(copy)) == copy.checksum

    def _post_saved(self, copy: TierCopy, target: TierCopy, expires: int, begun: float, outcome: Outcome) -> None:
        self._post(partial(self._saved, copy, target, expires, outcome, time.perf_counter() - begun))

    def _saved(self, copy: TierCopy, target: TierCopy, expires: int, outcome: Outcome, seconds: float) -> None:
        assert self.disk is not None
        index, store = self.disk
        if outcome is Outcome.TIMEOUT:
            self.disk_traffic.failures["write timeout"] += 1
            index.abort(target, "timeout", touched=True)
            self._write_failed()
            return  # RETURNED will follow
        self.outstanding -= 1
        self._saving_slots -= len(copy.slots)
        self.host.index.release(copy)
        if outcome is Outcome.RETURNED:
            store.erase(target.slots)
            index.reclaim(target)
        elif outcome is Outcome.OK and target.state is CopyState.LOST:
            store.erase(target.slots)  # it was dropped meanwhile, and the store has just acknowledged it
            index.reclaim(target)
        elif outcome is Outcome.OK:
            self._bad_writes = 0
            self.disk_traffic.write_bytes += self.host.bytes_of(copy.page)
            self.disk_traffic.write_seconds += seconds
            index.commit(target)
            if target.ready and (now := self.expires(copy.page.key)) != expires:
                store.stamp(copy.page, target.slots, now)
            self._stored("disk", copy.page)
        elif outcome is Outcome.NO_SPACE:
            # The file system is full below our limit. These slots cannot be had for now; others hold pages that can go.
            self.disk_traffic.failures["no space"] += 1
            index.abort(target, "no space", touched=True)
            self._no_space.append(target)
            self._space_at = time.monotonic() + PAUSE_S
        elif outcome is Outcome.CORRUPT:
            self.host_traffic.failures["corrupt"] += 1
            index.abort(target, "corrupt")
            if copy.ready:
                self.host.index.drop(copy, "corrupt")
        else:
            self.disk_traffic.failures["write error"] += 1
            index.abort(target, "failed")
            self._write_failed()

    def _write_failed(self) -> None:
        self._bad_writes += 1
        if self._bad_writes >= BAD_WRITES:
            self._bad_writes = 0
            self._no_writes_before = time.monotonic() + PAUSE_S
            self._to_save.clear()

    # --- towards the device --------------------------------------------------------------------------------------

    def fetch(self, page: Page, arrival: Arrival) -> bool:
        """Bring a page to the host, verify it and call `arrival`. False, and no call, when the disk's queue or the
        host is full just now."""
        copy = self.host.index.get(page.group, page.key)
        if copy is None:
            return self._read(page, arrival)
        if copy.ready:
            self.host.index.acquire(copy)
            self.outstanding += 1
            self._hashing.submit(self._verify, copy, arrival)
        else:
            self._waiters.setdefault(page.name, []).append(arrival)
        return True

    def _verify(self, copy: TierCopy, arrival: Arrival) -> None:
        self._post(partial(self._verified, copy, arrival, self._is_right(copy)))

    def _verified(self, copy: TierCopy, arrival: Arrival, right: bool) -> None:
        self.outstanding -= 1
        if right:
            arrival(copy)
            return
        self.host_traffic.failures["corrupt"] += 1
        if copy.ready:
            self.host.index.drop(copy, "corrupt")
        self.host.index.release(copy)
        if not self.fetch(copy.page, arrival):
            arrival(None)

    def to_device(self, copy: TierCopy, slot: int, done: Callable[[], None]) -> None:
        """Copy an acquired, verified host page into a device slot."""
        self.outstanding += 1
        placed = self._home(partial(self._placed, copy, time.perf_counter(), done))
        self.copier.to_device(copy.page.group, slot, self.host.payload(copy), placed)

    def _placed(self, copy: TierCopy, begun: float, done: Callable[[], None], ended: float) -> None:
        self.outstanding -= 1
        self.host_traffic.read(self.host.bytes_of(copy.page), begun, ended)
        done()

    def wait(self, timeout_s: float) -> None:
        """Sleep until another thread posts something, at most `timeout_s` seconds; then apply it."""
        self._check_copier()
        self._hash_copied()
        try:
            event = self._events.get(timeout=timeout_s)
        except Empty:
            return
        event()
        self._hash_copied()

    def _read(self, page: Page, arrival: Arrival) -> bool:
        source = self.disk[0].get(page.group, page.key) if self.disk is not None else None
        if self.disk is None or source is None or not source.ready or self.disk[1].stalled:
            arrival(None)
            return True
        index, store = self.disk
        copy = self.host.index.reserve(page)
        if copy is None:
            return False
        index.acquire(source)
        copy.origin = "disk"
        done = partial(self._post_read, copy, source, time.perf_counter(), self.reading_bytes)
        if not store.read(page, source.slots, self.host.buffers(copy), done):
            index.release(source)
            self.host.index.abort(copy, "queue full")
            return False
        self.outstanding += 1
        self.reading_bytes += self.host.bytes_of(page)
        self._waiters[page.name] = [arrival]
        return True

    def _post_read(self, copy: TierCopy, source: TierCopy, begun: float, queued: int, outcome: Outcome) -> None:
        if outcome is Outcome.OK:
            copy.checksum = checksum(copy.page, self.host.buffers(copy))  # on the disk's thread, which has the time
        self._post(partial(self._have_read, copy, source, outcome, time.perf_counter() - begun, queued))

    def _have_read(self, copy: TierCopy, source: TierCopy, outcome: Outcome, seconds: float, queued: int) -> None:
        assert self.disk is not None
        index, host = self.disk[0], self.host.index
        if outcome is Outcome.RETURNED:
            self.outstanding -= 1
            index.release(source)
            host.reclaim(copy)
            return
        count = self.host.bytes_of(copy.page)
        self.reading_bytes -= count
        self.disk_rate(count, seconds, queued)
        if outcome is Outcome.OK:
            self.outstanding -= 1
            index.release(source)
            self.disk_traffic.read_bytes += count
            self.disk_traffic.read_seconds += seconds
            host.mark_saved(copy)
            host.commit(copy)
            if copy.ready:
                self._stored("host", copy.page)
                self._answer(copy)
            return
        late = outcome is Outcome.TIMEOUT
        self.disk_traffic.failures["read timeout" if late else outcome.name.lower()] += 1
        waited_for = copy.state is CopyState.WRITING
        host.abort(copy, outcome.name.lower(), touched=late)
        if not late:
            self.outstanding -= 1
            if source.ready:
                index.drop(source, outcome.name.lower())
            index.release(source)
        if waited_for:
            for arrival in self._waiters.pop(copy.page.name, ()):
                arrival(None)

    def _post(self, event: Callable[[], None]) -> None:
        self._events.put(event)
