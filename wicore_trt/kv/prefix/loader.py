"""Loads of prefixes from host memory and disk into page tables: look-up, choice, load, jump.

Joins page tables, lower tiers and planner; it must not know steps, budgets or queues. Invariant (I2): a load's slots
belong to the sequence from `begin_load` until `end_load` or `cancel_load`. Pages become findable at the jump, not
before. A jump passes over no token whose page was neither written by the sequence nor brought by the load. A sequence
whose load fails computes what is missing. The probe before the first request changes no slot's content, and a host slot
that it borrows is used by nobody else until its copies are over.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from queue import SimpleQueue

from wicore_trt.arithmetic import div_ceil
from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.prefix.parking import Parking
from wicore_trt.kv.prefix.planner import SLOWER, Candidate, LoadChoice, NextMove, aim_meeting, decide_load, decide_move
from wicore_trt.kv.prefix.rates import DISK_PRIOR, HOST_PRIOR, ComputeRate, Drag, TierMeter, TierRate
from wicore_trt.kv.sequence_pages import PrefixHit, SequencePages
from wicore_trt.kv.tiers.load import LoadItem, PrefixLoad
from wicore_trt.kv.tiers.tiers import LowerTiers
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import Clock

log = logging.getLogger(__name__)

MAX_CANDIDATES = 4
"""Resume points to choose among, the longest first."""
LATE = 2.0
"""A load from disk that takes this many times its estimate counts as measured, so that the next ones do not wait."""
MEASURED_BYTES = 4 << 20
"""Fewer bytes say little of a link."""
PROBE_BYTES, PROBE_READS = 64 << 20, 32
PROBE_SHARE = 0.75
"""Of the host's slots that the probe may borrow: pages may come meanwhile."""
JUMP, WAIT, DROP = NextMove("jump"), NextMove("wait"), NextMove("drop")


@dataclass(slots=True)
class BegunLoad:
    """Load under way, the choices that it began with and has now, and how long its sequence has idled for it."""

    first: LoadChoice
    choice: LoadChoice
    since: float
    from_disk: int
    """Bytes that were on disk."""
    late: bool = False
    idle_s: float = 0.0
    waiting_since: float | None = None
    seen: tuple[int, int] = 0, 0
    came_at: float = 0.0
    """When it was seen last that pages had come or been asked for, and how many lacked and were asked for then."""


class PrefixLoader:
    """Loader of prefixes. `page_bytes` by layer group; `clock` gives seconds."""

    def __init__(
        self, manager: KVCacheManager, tiers: LowerTiers, page_bytes: dict[str, int], clock: Clock = time.monotonic
    ) -> None:
        self.tiers = tiers
        self.decisions: Counter[str] = Counter()
        self.refused = 0
        self.parking = Parking(manager, tiers)
        self._manager = manager
        self._page_bytes = page_bytes
        self._clock = clock
        self.host_meter, self.disk_meter = TierMeter(HOST_PRIOR), TierMeter(DISK_PRIOR)
        self.drag = Drag()
        self._host_read = (0, 0.0)
        self._probed: SimpleQueue[tuple[TierMeter, int, float]] = SimpleQueue()
        self._begun: dict[PrefixLoad, BegunLoad] = {}

    def record_probe(self, meter: TierMeter, count: int, seconds: float) -> None:
        """Record that a probe of `count` bytes took `seconds`, for one of the meters. Any thread."""
        self._probed.put((meter, count, seconds))

    # --- look-up and choice ----------------------------------------------------------------------------------------

    def choose_load(
        self, pages: SequencePages, total: int, hit: PrefixHit, compute: ComputeRate, *, trials: bool = False
    ) -> LoadChoice | None:
        """Choose what to load for a prompt of `total` tokens with a device `hit`, or None. With `trials`, also loads
        that will hardly pay."""
        candidates = self._find_candidates(pages, total, hit)
        if not candidates:
            return None
        now = self._clock()
        while not self._probed.empty():
            meter, count, seconds = self._probed.get_nowait()
            meter.observe_read(count, seconds, now=now)
        wanted = 0  # bytes that loads under way still want of host memory; pages from disk pass the link one by one
        for load, begun in self._begun.items():
            lacking = sum(len(load.missing[group]) * count for group, count in self._page_bytes.items())
            wanted += max(0, lacking - begun.from_disk)
        rates: dict[str, TierRate] = {"host": self.host_meter.tier_rate(queued=wanted, now=now)}
        if self.tiers.disk is not None:
            longest = max(candidate.bytes_from_disk for candidate in candidates)
            ahead = self.tiers.up.reading_bytes + self.tiers.loads.unasked_bytes(longest)
            rates["disk"] = self.disk_meter.tier_rate(queued=ahead, now=now)
        hope = self.disk_meter.hoped_factor(now) if trials else 1.0
        return decide_load(total, hit.tokens, candidates, compute, rates, self.drag.slowdown(now), hope=hope)

    def _find_candidates(self, pages: SequencePages, total: int, hit: PrefixHit) -> list[Candidate]:
        manager, keys = self._manager, pages.keys
        limit = min(len(keys), (total - 1) // manager.page_tokens)
        start, group = hit.tokens // manager.page_tokens, manager.chain_group
        begin = min(start, manager.first_visible_page((start + 1) * manager.page_tokens))
        above = chain(repeat(True, start - begin), map(manager.pools[group].find_slot, keys[start:limit]))
        beside = map(manager.pools[LOCAL].find_slot, keys[begin:limit]) if LOCAL in manager.pools else repeat(None)
        where, windows = self.tiers.find_tiers(keys[begin:limit], above, beside)
        windows = [*repeat(None, begin), *(windows if group == GLOBAL else where)]  # nothing starts before `begin`
        found, where = list[Candidate](), where[start - begin :]
        n = manager.find_longest_window(pages, start + len(where), windows)
        while n > start and len(found) < MAX_CANDIDATES:
            first = manager.first_visible_page(n * manager.page_tokens)
            tiers = Counter(filter(None, windows[first:n]))
            window = {tier: count * self._page_bytes[LOCAL] for tier, count in tiers.items()}
            page_bytes = self._page_bytes[GLOBAL] if group == GLOBAL else 0
            found.append(Candidate(n * manager.page_tokens, where, manager.page_tokens, page_bytes, window))
            n = manager.find_longest_window(pages, n - 1, windows)
        return found

    def prefetch_prefix(self, pages: SequencePages, total: int, hit: PrefixHit, compute: ComputeRate) -> None:
        """Bring what a waiting sequence will load from disk to the host."""
        chosen = self.choose_load(pages, total, hit, compute)
        if chosen is None or not chosen.stop:
            return
        stop = chosen.stop // self._manager.page_tokens
        items = [LoadItem(page, -1) for page in self._missing_pages(pages, hit.tokens, stop)]
        items = [item for item in items if self.tiers.find_tier(*item.page.name) == "disk"]
        if items:
            pages.prefetch = PrefixLoad(0, stop, items)
            pages.prefetch.mark_unread(items)
            self.tiers.loads.begin_load(pages.prefetch)

    def _missing_pages(self, pages: SequencePages, start_tokens: int, stop: int) -> list[Page]:
        """List pages that a load to `stop` needs and the device lacks: the window, then the chain back to front."""
        manager = self._manager
        wanted = []
        if LOCAL in manager.pools:
            first = manager.first_visible_page(stop * manager.page_tokens)
            wanted += [pages.make_page(LOCAL, i) for i in range(first, stop)]
        if manager.chain_group == GLOBAL:
            start = start_tokens // manager.page_tokens
            wanted += [pages.make_page(GLOBAL, i) for i in range(stop - 1, start - 1, -1)]
        return [page for page in wanted if manager.pools[page.group].find_slot(page.key) is None]

    def end_prefetch(self, pages: SequencePages) -> None:
        if pages.prefetch is not None:
            pages.prefetch.cancel_load()
            pages.prefetch = None

    # --- load ----------------------------------------------------------------------------------------------------

    def begin_load(self, pages: SequencePages, chosen: LoadChoice, *, spare: int = 0) -> bool:
        """Begin a chosen load for a sequence whose tables hold the device hit and all global pages of the prompt.
        False, and no change, unless the local pool has room for the window and `spare` more pages."""
        manager, size = self._manager, self._manager.page_tokens
        first, stop = chosen.start // size, chosen.stop // size
        read = list[LoadItem]()  # that are not in host memory
        window, items = self._window_slots(pages, stop, spare, read)
        if window is None:
            return False
        found: dict[int, int] = {}
        if manager.chain_group == GLOBAL:
            pool, table, keys = manager.pools[GLOBAL], pages.tables[GLOBAL], pages.keys
            wanted = range(stop - 1, first - 1, -1)
            slots = zip(wanted, map(pool.find_slot, reversed(keys[first:stop])), strict=True)
            found = {i: slot for i, slot in slots if slot is not None}
            lacking = [i for i in wanted if i not in found] if found else wanted
            items += self._make_items(pages, GLOBAL, lacking, [table[i] for i in lacking], read)
            # beside the table's own slots, which the sequence may write until it jumps
            pool.acquire_slots(found.values())
        absent = {item.page.index for item in items if item.page.group == LOCAL}
        pages.load = load = PrefixLoad(
            chosen.stop, stop, items, first=first if manager.chain_group == GLOBAL else 0,
            window_first=manager.first_visible_page(chosen.stop) if window else stop, window=window,
            found=found, here={GLOBAL: found, LOCAL: set(range(stop - len(window), stop)) - absent},
        )  # fmt: skip
        load.expected, load.failures = pages.keys[:stop], manager.failures
        manager.expect_pages(load.expected)
        load.mark_unread(read)
        from_disk = sum(len(load.unread[group]) * count for group, count in self._page_bytes.items())
        now = self._clock()
        self._begun[load] = BegunLoad(chosen, chosen, now, from_disk, came_at=now)
        self.tiers.loads.begin_load(load)
        return True

    def _make_items(
        self, pages: SequencePages, group: str, places: Sequence[int], slots: Sequence[int], read: list[LoadItem]
    ) -> list[LoadItem]:
        """Make the items that load these pages into these slots, with the identities that the nearest tier has. Those
        that are not in host memory, with a disk, are put into `read`, too."""
        known, keys, items = pages.known[group], pages.keys, list[LoadItem]()
        host, disk = self.tiers.host, self.tiers.disk
        for i, slot in zip(places, slots, strict=True):
            here = host.find_copy(group, keys[i])
            copy = disk.find_copy(group, keys[i]) if here is None and disk is not None else here
            known[i] = page = copy.page if copy is not None and copy.page.tokens else pages.make_page(group, i)
            item = LoadItem(page, slot)
            items.append(item)
            if disk is not None and (here is None or here.being_read):
                read.append(item)
        return items

    def _window_slots(
        self, pages: SequencePages, stop: int, spare: int, read: list[LoadItem]
    ) -> tuple[list[int] | None, list[LoadItem]]:
        """Take slots for the local window before page `stop`; return them and the items that fill those the device
        lacks. None, and no change, unless there is room and `spare` more."""
        manager = self._manager
        if LOCAL not in manager.pools:
            return [], []
        pool = manager.pools[LOCAL]
        wanted = range(manager.first_visible_page(stop * manager.page_tokens), stop)
        found = zip(wanted, map(pool.find_slot, pages.keys[wanted.start : stop]), strict=True)
        held = {i: slot for i, slot in found if slot is not None}
        pool.acquire_slots(held.values())
        lacking = [i for i in wanted if i not in held]
        fresh = pool.allocate_slots(len(lacking)) if len(lacking) + spare <= pool.available_slots else None
        if fresh is None:
            pool.release_slots(held.values())
            return None, []
        items = self._make_items(pages, LOCAL, lacking, fresh, read)
        slots = held | {item.page.index: item.slot for item in items}
        return [slots[i] for i in wanted], items

    def next_move(self, pages: SequencePages, computed: int, *, compute: ComputeRate) -> NextMove:
        """Decide a loading sequence's next move (`planner.decide_move`); a parked one waits for all its pages."""
        load, manager = pages.load, self._manager
        assert load is not None
        size = manager.page_tokens
        if load.failures != manager.failures:
            return DROP  # what has come may have been condemned meanwhile
        if pages.parked is not None:
            return DROP if load.failed else JUMP if load.complete else WAIT
        if load.broken:
            return DROP
        begun, now = self._begun[load], self._clock()
        # after a failure, or when all has come, there is nothing to wait for: what lacks is to be computed
        over = load.failed or load.finished
        if not over and begun.from_disk and not begun.late and now - begun.since > LATE * begun.choice.load_seconds:
            self.disk_meter.observe_overdue(begun.from_disk, now - begun.since, now=now)
            begun.late = True
        if begun.waiting_since is not None:
            begun.idle_s += now - begun.waiting_since
        load.floor = manager.count_pages(computed)
        ready_from = load.meeting_page() * size if load.window_here else begun.choice.stop + 1
        if begun.from_disk and computed < begun.choice.stop:
            seen = sum(map(len, load.missing.values())), load.asked_up_to
            if seen != begun.seen:
                begun.seen, begun.came_at = seen, now
            drag = self.drag.slowdown(now)
            silence = now - begun.came_at  # will go on as long as it has, for all that is known
            idle_s = math.inf if over else begun.idle_s
            slowed, arrival = compute.slow_down(drag), self._expect_arrival(load, silence)
            begun.choice = aim_meeting(
                begun.first, computed, size, slowed, arrival, ready_from=ready_from, idle_s=idle_s
            )  # from the first choice, since that made the promise of how long to wait
            stop = begun.choice.stop
            beside = drag * compute.shared_seconds(computed, min(begun.choice.meet, stop))
            if drag > SLOWER and load.reading and beside > compute.shared_seconds(computed, stop):
                return DROP
        step = decide_move(begun.choice, computed, ready_from, begun.choice.wait_s if over else begun.idle_s)
        if step.action == "compute":  # to the end of a page, since one that was begun is not loaded any more
            step = NextMove("compute", manager.count_pages(computed + step.max_tokens) * size - computed)
        begun.waiting_since = now if step.action == "wait" else None
        return step

    def is_awaited(self, pages: SequencePages, computed: int, step_s: float) -> bool:
        """Say whether a sequence that waited at its last move may wait for its load two more steps, and will one."""
        load, begun = pages.load, self.find_begun(pages)
        if load is None or begun is None or begun.waiting_since is None or load.failures != self._manager.failures:
            return False
        left = begun.choice.wait_s - begun.idle_s - (self._clock() - begun.waiting_since)
        over = load.failed or load.finished
        return not over and left > 2 * step_s and self._expect_arrival(load, 0.0)(computed) > step_s

    def _expect_arrival(self, load: PrefixLoad, least: float) -> Callable[[int], float]:
        """Estimate the seconds from now until all of a load from a token on is on the device, at `least` so many."""
        now, up, each = self._clock(), self.tiers.up, self._page_bytes
        windows, unread = len(load.unread[LOCAL]), sorted(load.unread[GLOBAL])
        window_bytes = windows * each.get(LOCAL, 0)
        asked = min(windows, load.reading) * each.get(LOCAL, 0) + max(0, load.reading - windows) * each.get(GLOBAL, 0)
        ahead = max(0, load.asked_up_to - (up.asked_bytes - up.reading_bytes) - asked)
        before = max(0, up.reading_bytes - asked - ahead) + self.tiers.loads.unasked_bytes(load=load)
        disk = self.disk_meter.tier_rate(queued=ahead, now=now)
        self.tiers.loads.set_read_ahead(disk.bytes_per_s)
        link, missing = self.host_meter.tier_rate(now=now), sorted(load.missing[GLOBAL])

        def arrival(token: int) -> float:
            page = token // self._manager.page_tokens
            pages = len(unread) - bisect_left(unread, page)
            here = len(missing) - bisect_left(missing, page) - pages  # in host memory, but for their copies
            count = window_bytes + pages * each.get(GLOBAL, 0)
            copied = link.read_seconds(max(1, here) * each.get(GLOBAL, 0) + window_bytes)
            count += before * (count > asked)  # what others asked for, or have their turn for, before the rest of it
            return max(least, disk.read_seconds(count) + copied) if count else copied

        return arrival

    def observe_step(self, expected: float, seconds: float) -> None:
        """Learn from a step beside loads from disk: `seconds`, instead of the `expected` ones without."""
        self.drag.observe_step(expected, seconds, now=self._clock())

    @property
    def reads_disk(self) -> bool:
        """True while a sequence has a load with pages from disk."""
        return any(begun.from_disk for begun in self._begun.values())

    @property
    def newest_read_s(self) -> float:
        """Seconds since the newest load with pages from disk began."""
        now = self._clock()
        return min((now - begun.since for begun in self._begun.values() if begun.from_disk), default=0.0)

    def find_begun(self, pages: SequencePages) -> BegunLoad | None:
        """Find the load of a sequence, but for one that resumes."""
        return self._begun.get(pages.load) if pages.load is not None else None

    def end_load(self, pages: SequencePages, computed: int) -> int:
        """Jump to the end of a load that has arrived: put its window and found pages into the tables and publish them.
        Returns the tokens now computed: as before if the load, passing over an unwritten page, is cancelled."""
        load, manager, parked = pages.load, self._manager, pages.parked
        assert load is not None
        missing = self._find_unwritten(pages, load, computed)
        if missing:
            log.error("a load to token %d passes over pages %s that nobody wrote; it is dropped", load.tokens, missing)
            self.refused += 1
            self.cancel_load(pages)
            return computed
        self._fill_tables(pages, load, computed)
        full = min(load.stop, load.tokens // manager.page_tokens)
        private = parked.private if parked is not None else ()
        if pages.failures == manager.failures:
            self._publish_loaded(pages, full, private)
            manager.stop_computing(pages, pages.keys[pages.published : full])
            pages.published = max(pages.published, full)
        if parked is not None:
            self.parking.release_parked(pages)
        else:
            for tier, count in load.arrived.items():
                self.tiers.hit_tokens[tier] += count * manager.page_tokens
            manager.hit_tokens += load.arrived["device"] * manager.page_tokens
        self._forget_load(pages)
        return load.tokens

    def _publish_loaded(self, pages: SequencePages, full: int, private: Collection[tuple[str, int]]) -> None:
        """Publish the first `full` pages. Lower tiers have those that are not `private`."""
        manager, places = self._manager, range(pages.published, full)
        manager.retention.begin_ends(
            [pages.keys[i] for i in places if (manager.chain_group, i) in private], pages.hints
        )
        for group in manager.pools:
            table = pages.tables[group]
            held = [i for i in places if table[i] >= 0]
            manager.publish_pages(pages, group, [i for i in held if (group, i) not in private], saved=True)
            manager.publish_pages(pages, group, [i for i in held if (group, i) in private])

    def _find_unwritten(self, pages: SequencePages, load: PrefixLoad, computed: int) -> list[tuple[str, int]]:
        """Find pages that the tokens before the end of a load need and that are neither written nor here."""
        manager = self._manager
        first = {GLOBAL: computed // manager.page_tokens, LOCAL: load.window_first}
        return [
            (group, i)
            for group in manager.pools
            for i in sorted(set(range(first[group], load.stop)) - load.here[group])
        ]

    def _fill_tables(self, pages: SequencePages, load: PrefixLoad, computed: int) -> None:
        manager, size = self._manager, self._manager.page_tokens
        if GLOBAL in manager.pools:
            pool = manager.pools[GLOBAL]
            table, full = pages.tables[GLOBAL], load.tokens // size
            pool.release_slots([table[i] for i in load.found])
            pages.replace_slots(GLOBAL, load.found)
            load.found.clear()
            pool.fill_slots(table[computed // size : full], size)
            pool.fill_slots(table[max(full, computed // size) : load.stop], load.tokens - full * size)
        if LOCAL in manager.pools:
            manager.replace_window(pages, load.window_first, load.window)
            full = load.tokens // size - load.window_first
            manager.pools[LOCAL].fill_slots(load.window[:full], size)
            manager.pools[LOCAL].fill_slots(load.window[full:], load.tokens % size)
            load.window.clear()

    def cancel_load(self, pages: SequencePages) -> None:
        """Cancel a load, if there is one: its slots go back; pages in flight are dropped on arrival."""
        if pages.load is not None:
            for group, slots in ((LOCAL, pages.load.window), (GLOBAL, pages.load.found.values())):
                if slots:
                    self._manager.pools[group].release_slots(reversed(list(slots)))
            self._forget_load(pages)

    def _forget_load(self, pages: SequencePages) -> None:
        load = pages.load
        assert load is not None
        load.cancel_load()
        # Measure the copies since a load ended last, also when a slow link let none of this one's pages come in time.
        # A single page says little: a busy machine may stop it half-way.
        traffic = self.tiers.movers.host_traffic
        count, seconds = traffic.read_bytes - self._host_read[0], traffic.read_seconds - self._host_read[1]
        if count >= MEASURED_BYTES:
            self._host_read = (traffic.read_bytes, traffic.read_seconds)
            self.host_meter.observe_read(count, seconds, now=self._clock())
        self._manager.stop_expecting(load.expected)
        self._begun.pop(load, None)
        pages.load = None
        for known in pages.known.values():
            known.clear()

    # --- rates ---------------------------------------------------------------------------------------------------

    def observe_disk_read(self, count: int, asked: float, seconds: float, rests: bool) -> None:
        """Learn from a disk read of `count` bytes that ended `seconds` after it was asked for; see `UpTransfers`."""
        self.disk_meter.observe_requested_read(count, asked, seconds, rests=rests, now=self._clock())


def probe_tiers(
    manager: KVCacheManager, tiers: LowerTiers, page_bytes: Mapping[str, int], copied: Callable[[int, float], None]
) -> None:
    """Begin to rate the link by copies into unused slots, told to `copied(bytes, seconds)`, and the disk by reads."""
    group = manager.chain_group
    size, pool, movers = page_bytes[group], manager.pools[group], tiers.movers
    index = tiers.host
    room = int(PROBE_SHARE * index.free_slots) // div_ceil(size, movers.host.slot_bytes)
    count = min(PROBE_BYTES // size, pool.num_pages, room)
    if count * size >= MEASURED_BYTES:
        copier, (buffers, slots) = movers.copier, movers.host.lend_slots(size, count)

        lacking, total = count, 0.0

        def count_copies(digests: Sequence[bytes | None], seconds: float) -> None:
            nonlocal lacking, total
            lacking, total = lacking - len(digests), total + seconds
            if not lacking:
                copied(count * size, total)
                movers.post_report(movers.came_up, index.grant_slots, 0, slots)  # until now a copy could have been late

        for slot in range(count):  # what an unwritten slot holds must stay there, so it goes and comes back
            copier.to_host(group, slot, buffers[slot], lambda digest, seconds: None)
        copier.to_device(group, range(count), buffers, count_copies)
        copier.flush()
    if tiers.disk is not None:
        pages, left = tiers.disk.find_newest(PROBE_READS), manager.retention.seconds_left
        # a page on its way is in use, and the time to live of one that is in use starts anew
        for page in pages:
            if left(page.key) is None:
                tiers.loads.begin_load(PrefixLoad(0, 0, [LoadItem(page, -1)]))
