"""The host and disk tiers as the cache manager sees them: where a page is, bring it up, take it down.

Holds the two indexes and the transfers between them, pumps the loads of sequences, and copies cold pages down when a
tier fills up. It must not know sequences' page tables or tokens. Invariant: the number of pages under way for one
load is bounded, and a load ends, whatever the disk does: each page arrives or fails within the I/O timeout.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter

from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.index import CopyState, TierCopy, TierIndex
from wicore_trt.kv.tiers.load import LoadItem, PrefixLoad
from wicore_trt.kv.tiers.movers import Traffic
from wicore_trt.kv.tiers.moves import Fetch, Stage
from wicore_trt.kv.tiers.transfers import Transfers
from wicore_trt.kv.tiers.way_up import MAX_WRONG
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import TierStats

IN_FLIGHT, MOST_IN_FLIGHT, AHEAD_S = 192, 448, 0.3
"""Pages of one load that are asked of the disk at the same time: enough for its queue during a step (27B: 0.5 GB), few
enough that others have their turn; more of them where it is known to read more in so many seconds."""
IN_MEMORY = 1024
"""The same for pages in host memory. Arrivals are applied between steps, so this bounds what a step's time brings."""
AT_ONCE = 64
"""Pages in host memory that are sent to the device with one call, and heard of with one report."""
RETAIN_S = 0.1
"""How long the engine waits for the checksums of pages to be parked; they run at memory speed."""
RELIEVE_S = 0.05
"""How often the coldest pages of a full host are looked at; nothing is lost before they leave."""
HYSTERESIS = 0.05
"""Once a threshold is passed, cold pages are copied down until the tier is this share below it."""


class LowerTiers:
    """`threshold` is the share of the host's slots that may hold pages which disk lacks."""

    def __init__(self, transfers: Transfers, *, threshold: float) -> None:
        self.transfers = transfers
        self.host: TierIndex = transfers.host.index
        self.disk: TierIndex | None = transfers.disk[0] if transfers.disk is not None else None
        self.hit_tokens: Counter[str] = Counter()
        self._threshold = threshold
        self._loads: list[PrefixLoad] = []  # by their turns
        self._fetching: dict[Fetch, tuple[PrefixLoad, LoadItem, bool]] = {}  # and whether the disk is asked for it
        self._inbox: deque[Fetch] = deque()
        self._relieve_at = 0.0
        self._in_flight = IN_FLIGHT
        self._disk_taken = False

    @property
    def indexes(self) -> dict[str, TierIndex]:
        return {"host": self.host} | ({"disk": self.disk} if self.disk is not None else {})

    def where(self, group: str, key: bytes) -> str | None:
        """The nearest tier that has a page: "host" (or on its way there from the device), "reading" (on its way there
        from disk), "disk" or None."""
        here = self.host.get(group, key)
        if here is not None:
            return "reading" if here.being_read else "host"
        return "disk" if self.disk is not None and self.disk.ready(group, key) is not None else None

    def identities(self, group: str, keys: Iterable[bytes]) -> list[Page | None]:
        """What a tier knows these pages as."""
        found, host = list[Page | None](), self.host.get
        for key in keys:
            copy = host(group, key)
            if copy is None and self.disk is not None:
                copy = self.disk.get(group, key)
            found.append(copy.page if copy is not None else None)
        return found

    def finder(self, group: str, above: Callable[[bytes], object]) -> Callable[[bytes], bool]:
        """Whether a tier has a page of a layer group, or `above` knows it."""
        where = self.where
        return lambda key: above(key) is not None or where(group, key) is not None

    def reach(self, group: str, keys: Iterable[bytes], above: Callable[[bytes], object]) -> list[str]:
        """`where` the pages of a chain are, up to one that no tier has; "device" for those that `above` knows."""
        found, where = list[str](), self.where
        for key in keys:
            tier = "device" if above(key) is not None else where(group, key)
            if tier is None:
                break
            found.append(tier)
        return found

    def writing(self, group: str, key: bytes) -> bool:
        """Whether a page is on its way to a tier."""
        copies = (index.get(group, key) for index in self.indexes.values())
        return any(copy is not None and not copy.ready for copy in copies)

    def store(self, page: Page, slot: int, *, private: bool = False) -> TierCopy | None:
        """Copy a device page to the host; None when there is no room. A `private` one goes no further."""
        return self.transfers.store(page, slot, private=private)

    def retain(self, copies: Sequence[TierCopy]) -> bool:
        """Wait until copies that are being stored are there, and keep all of them from leaving (`host.release` ends
        that). False, and none is kept, when one does not arrive in time."""
        end = time.monotonic() + RETAIN_S
        while any(copy.state is CopyState.WRITING for copy in copies) and time.monotonic() < end:
            self.transfers.wait(RETAIN_S)
        if not all(copy.ready for copy in copies):
            return False
        self.host.acquire(copies)
        return True

    def touch(self, keys: Sequence[bytes], signal: Sequence[float] | None) -> None:
        for index in self.indexes.values():
            index.touch(keys, signal)

    def spare_windows(self, group: str, keys: Sequence[bytes], needed: set[int]) -> None:
        """Of the chain's local pages, all but those at the `needed` indices may leave first."""
        for index in self.indexes.values():
            index.spare(group, [key for i, key in enumerate(keys) if i not in needed])

    def branches(self, keys: Sequence[bytes]) -> set[int]:
        """The places of those keys from which several chains go on in some tier."""
        return {i for index in self.indexes.values() for i in index.policy.branches(keys)}

    def drop(self, key: bytes, cause: str) -> None:
        """Forget a page everywhere below the device."""
        for index in self.indexes.values():
            index.drop_key(key, cause)

    def condemn(self, key: bytes, cause: str) -> None:
        """Forget a page everywhere below the device, on its way there too; who waits for it does not get it."""
        for index in self.indexes.values():
            index.condemn(key, cause)
        self.transfers.refuse(key)

    def drop_private(self, page: Page) -> None:
        """Forget a `private` page in host memory, also one that is still being stored: nobody waits for it."""
        copy = self.host.get(*page.name)
        if copy is not None and copy.ready:
            self.host.drop(copy, "resumed")
        elif copy is not None:
            self.host.abort(copy, "resumed", touched=True)

    def clear(self) -> None:
        """Forget every page that is not in use."""
        for index in self.indexes.values():
            for copy in list(index.copies()):
                if copy.ready:
                    index.drop(copy, "cleared")

    # --- loads ---------------------------------------------------------------------------------------------------

    def begin(self, load: PrefixLoad) -> None:
        """Start fetching the pages of a load; `poll` goes on with it."""
        load.turn = (not load.tokens, _size(self.unread_bytes(load)))
        insort(self._loads, load, key=attrgetter("turn"))
        self._pump()

    def read_ahead(self, bytes_per_s: float) -> None:
        """The disk reads so fast: ask it for as much as it needs to have."""
        page_bytes = self.transfers.host.slot_bytes * min(self.host.slots_per_page.values())
        self._in_flight = max(IN_FLIGHT, min(MOST_IN_FLIGHT, int(AHEAD_S * bytes_per_s / page_bytes)))

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    def poll(self) -> bool:
        """Apply finished transfers, go on with loads, keep the tiers below their thresholds. True if there was news."""
        news = False
        while self.transfers.poll() or self._inbox:
            news = True
            self._take_in()
        self._pump()
        self._relieve()
        return news

    def poll_up(self) -> None:
        """`poll` of what the next step may depend on; the rest can wait for `poll_down`."""
        if self._loads or self._inbox:
            self.poll()
        else:
            self.transfers.poll_up()

    def poll_down(self) -> None:
        """`poll` of what went down, while a step runs: goes on with no load, so that nothing comes into a page that the
        step writes."""
        self.transfers.poll_down()
        self._relieve()

    def unread_bytes(self, load: PrefixLoad) -> int:
        """What a load lacks and the disk has to read, as far as it is known."""
        slots = sum(len(load.unread(group)) * count for group, count in self.host.slots_per_page.items())
        return slots * self.transfers.host.slot_bytes

    def unasked_bytes(self, count: int = 0, load: PrefixLoad | None = None) -> int:
        """What those loads have not asked the disk for yet that have their turn there before `load`, or before a new
        one of `count` bytes."""
        found = 0
        for other in self._loads:
            if other is load or (load is None and other.turn > (0, _size(count))):
                break
            found += max(0, self.unread_bytes(other) - self._asked_bytes(other)) * (not other.cancelled)
        return found

    def _asked_bytes(self, load: PrefixLoad) -> int:
        """What the disk reads for a load now: windows, whose pages may be larger, come before all else."""
        slots, windows = self.host.slots_per_page, min(load.reading, len(load.unread(LOCAL)))
        asked = windows * slots.get(LOCAL, 0) + (load.reading - windows) * slots.get(GLOBAL, 0)
        return asked * self.transfers.host.slot_bytes

    def _pump(self) -> None:
        self._disk_taken = False
        for load in self._loads:
            while load.in_flight < IN_MEMORY and not load.cancelled and self._ask(load):
                self._take_in()
        self._loads = [load for load in self._loads if not load.finished]
        self.transfers.movers.copier.flush()

    def _ask(self, load: PrefixLoad) -> bool:
        """Ask for the next pages of a load: for many that are in host memory, or for one. False: not now."""
        items, copies = load.next_run(min(AT_ONCE, IN_MEMORY - load.in_flight), self.host.ready)
        if items:
            load.in_flight += len(items)
            self.host.acquire(copies)
            if self.transfers.movers.copier.checks:
                self._place(load, items, copies)
            else:
                self.transfers.check(copies, partial(self._checked, load, items, copies))
            return True
        item = load.next_item()
        if item is None:
            return False
        here = self.where(*item.page.name) == "host"
        if not here and (self._disk_taken or load.reading >= self._in_flight):
            self._disk_taken = True  # those behind it in the order would only come between
            load.todo.appendleft(item)
            return False
        if self._fetch(load, item, here):
            load.in_flight += 1
        elif self.transfers.going_on:
            load.todo.appendleft(item)
            return False
        else:  # nothing will make room
            load.in_flight += 1
            load.fail(item)
            return False
        return True

    def _fetch(self, load: PrefixLoad, item: LoadItem, here: bool) -> bool:
        """Bring a page to host memory, where it is or will be when it is `here`, else from disk. False: there is no
        room just now."""
        wrong = load.wrong[item.page.group, item.page.index]
        fetch = self.transfers.fetch(item.page, self._inbox, partial(load.wanted, item), wrong)
        if fetch is None:
            return False
        if not here:
            load.reading += 1
            load.asked_up_to = self.transfers.up.asked_bytes
            load.to_read([item])
        self._fetching[fetch] = (load, item, not here)
        return True

    def _checked(
        self, load: PrefixLoad, items: list[LoadItem], copies: list[TierCopy], places: Sequence[int], right: bool
    ) -> None:
        """What became of pages in host memory: see `Check`. Right ones go on, if they are wanted still."""
        wanted = [place for place in places if load.wanted(items[place])]
        if right and wanted:
            self._place(load, [items[place] for place in wanted], [copies[place] for place in wanted])
        for place in places:
            if not load.wanted(items[place]):
                load.pass_over(items[place])
                self.host.release([copies[place]] * right)
            elif not right:
                self._look_elsewhere(load, items[place])

    def _place(self, load: PrefixLoad, items: list[LoadItem], copies: list[TierCopy]) -> None:
        """Send pages of one layer group in host memory, which are held, to the device."""
        load.bring(items)
        self.transfers.place(copies, [item.slot for item in items], partial(self._over, load, items, copies))

    def _over(
        self, load: PrefixLoad, items: list[LoadItem], copies: list[TierCopy], places: Sequence[int], right: bool
    ) -> None:
        """What became of pages that were sent to the device: see `Place`."""
        came: dict[str, list[LoadItem]] = {}
        for place in places:
            copy = copies[place]
            came.setdefault(copy.origin or "host", []).append(items[place])
            copy.origin = ""
        for tier, found in came.items():
            wanted, others = load.sorted_out(found)
            for item in others:
                load.pass_over(item)
            if right and wanted:
                load.arrive(wanted, tier)
            elif not right:
                for item in wanted:
                    self._look_elsewhere(load, item)

    def _look_elsewhere(self, load: PrefixLoad, item: LoadItem) -> None:
        """What came to the device was not the page, and the host has it no more."""
        place = (item.page.group, item.page.index)
        load.wrong[place] += 1
        if load.wrong[place] > MAX_WRONG:
            load.fail(item)
        elif not self._fetch(load, item, self.where(*item.page.name) == "host"):
            load.ask_again(item)

    def _take_in(self) -> None:
        """Go on with what arrived in host memory."""
        here: dict[tuple[PrefixLoad, str], list[tuple[LoadItem, TierCopy]]] = {}
        while self._inbox:
            fetch = self._inbox.popleft()
            load, item, read = self._fetching.pop(fetch)
            load.reading -= read
            if fetch.stage is Stage.HERE and item.slot >= 0 and load.wanted(item):
                here.setdefault((load, item.page.group), []).append((item, fetch.take()))
                continue
            if fetch.stage is Stage.FAILED and fetch.crowded and load.wanted(item):
                load.wrong[item.page.group, item.page.index] = fetch.wrong
                load.ask_again(item)
            elif fetch.stage is Stage.FAILED and load.wanted(item):
                load.fail(item)
            elif item.slot < 0 and fetch.stage is Stage.HERE:
                load.arrive([item], "host")
            else:
                load.pass_over(item)
            self.transfers.release(fetch)
        for (load, _), found in here.items():
            self._place(load, [item for item, _ in found], [copy for _, copy in found])

    def _relieve(self) -> None:
        """Copy cold pages to disk if the host is too full of pages that are not there."""
        full = self.host.unsaved_slots > self._threshold * self.host.num_slots
        if self.disk is None or not full or time.monotonic() < self._relieve_at:
            return
        self._relieve_at = time.monotonic() + RELIEVE_S
        surplus = self.host.unsaved_slots - int((self._threshold - HYSTERESIS) * self.host.num_slots)
        for copy in self.host.cold(surplus):
            self.transfers.save(copy)

    # --- statistics ----------------------------------------------------------------------------------------------

    def stats(self) -> tuple[TierStats, ...]:
        """Host and disk."""
        return tuple(
            _tier_stats(name, index, self.transfers, self.hit_tokens[name]) for name, index in self.indexes.items()
        )

    def check_integrity(self) -> None:
        for index in self.indexes.values():
            index.check_integrity()


def _size(count: int) -> int:
    """Loads of sizes between the same powers of four have their turns at the disk as they come, before all larger ones:
    shared among them it would bring none any sooner."""
    return count.bit_length() // 2


def _tier_stats(name: str, index: TierIndex, transfers: Transfers, hit_tokens: int) -> TierStats:
    traffic: Traffic = transfers.host_traffic if name == "host" else transfers.disk_traffic
    size = transfers.host.slot_bytes
    store = transfers.disk[1] if transfers.disk is not None else None
    return TierStats(
        tier=name, capacity_bytes=index.num_slots * size, used_bytes=index.used_slots * size,
        pinned_bytes=index.held_slots * size,
        pages={group: index.pages[group] for group in index.slots_per_page}, hit_tokens=hit_tokens,
        read_bytes=traffic.read_bytes, read_seconds=traffic.read_seconds, write_bytes=traffic.write_bytes,
        write_seconds=traffic.write_seconds, evictions=dict(index.evictions), failures=dict(traffic.failures),
        queue_depth=transfers.outstanding if name == "host" or store is None else store.queue_depth,
    )  # fmt: skip
