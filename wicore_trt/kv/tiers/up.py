"""The way up: pages of the disk to host memory, and of host memory to the device, for the loads of sequences.

Pages in host memory go to the device many at a time; one whose bytes are wrong fails alone. Runs on the engine thread
but for what it hands to the movers. It must not know page tables or tokens. Invariants (I5): an upload is reported as
right only after its bytes matched its identity; each fetch and each load ends. Where the device computes digests, they
are those on the device; elsewhere of bytes in host memory before they go.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, filterfalse
from operator import attrgetter

from wicore_trt.kv.disk.io import Outcome, PageMove
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.host import Movers
from wicore_trt.kv.tiers.load import LoadItem, PrefixLoad
from wicore_trt.kv.tiers.moves import ChecksumJob, CopyState, Fetch, OnVerdict, Read, Stage, TierCopy, Upload
from wicore_trt.model.spec import GLOBAL, LOCAL

MAX_WRONG = 2
"""A page whose bytes were wrong so often is given up: it may be the way to the device that changes them."""
IN_FLIGHT, MOST_IN_FLIGHT, AHEAD_S = 192, 448, 0.3
"""Pages of a load asked of the disk at once; more where it is known to read more in the last number's seconds."""
IN_MEMORY = 1024
"""Pages of a load under way from host memory. Arrivals are applied between steps: it bounds those of a step's time."""
TOGETHER, SLOTS_TOGETHER = 16, 64
"""Pages that the disk is asked for with one call, and heard of with one report, and most of their slots (32 MB)."""
AT_ONCE = 64
"""Pages in host memory that are sent to the device with one call, and heard of with one report."""
ASKED_FIRST, ASKED_BESIDE, TOKENS_ASKED = 16, 96, 16
"""Pages that the disk is asked for while the device waits; beside a step; and tokens of it for one page more."""


class UpTransfers:
    """Fetches, reads, checks and uploads. The disk was asked for `asked_bytes` so far, and still reads
    `reading_bytes`. `disk_rate(bytes, asked, seconds, rests)` hears how long after it was asked, by
    `time.perf_counter`, a read was over, and whether the disk has none to do now."""

    def __init__(self, movers: Movers) -> None:
        self.asked_bytes = self.reading_bytes = 0
        self.disk_rate: Callable[[int, float, float, bool], None] = lambda count, asked, seconds, rests: None
        self.waiting: dict[tuple[str, bytes], list[Fetch]] = {}
        self._movers = movers

    def fetch_page(self, page: Page, inbox: deque[Fetch]) -> Fetch | None:
        """Bring a page to the host, and put it into `inbox` when HERE or FAILED. None if the disk's queue or the host
        is full just now."""
        fetch = Fetch(page, inbox)
        return fetch if self.begin_fetches([fetch]) else None

    def begin_fetches(self, fetches: Sequence[Fetch]) -> int:
        """Bring one page to host memory and check it, or many that are not there; say of how many of the first that
        was begun or failed, fewer than all when the disk's queue or the host is full just now."""
        index, fetch = self._movers.host.index, fetches[0]
        copy = index.find_copy(*fetch.page.name)
        if copy is None:
            return self._begin_reads(fetches)
        if copy.ready:
            fetch.copy = copy
            index.acquire_copies([copy])
            if self._movers.copier.checks:
                self._end_fetch(fetch)
                return 1
            fetch.enter_stage(Stage.CHECKING)
            self.check_copies([copy], partial(self._end_fetch_check, fetch))
        else:
            self.waiting.setdefault(fetch.page.name, []).append(fetch)
        return 1

    def _fetch_again(self, fetch: Fetch) -> None:
        """Begin a fetch that was under way; where there is no room it has to be asked for again."""
        if not self.begin_fetches([fetch]):
            fetch.crowded = True
            self._fail_fetch(fetch)

    def check_copies(self, copies: Sequence[TierCopy], on_verdict: OnVerdict) -> None:
        """Compare the buffers of held host copies, where the device does not; `on_verdict` as in `ChecksumJob`."""
        self._movers.outstanding += len(copies)
        self._movers.checker.submit(self._run_check, ChecksumJob(copies, on_verdict))

    def _run_check(self, move: ChecksumJob) -> None:
        right = list(map(self._movers.is_right, move.copies))
        self._movers.post_report(self._movers.came_up, self._apply_checked, move, right)

    def _apply_checked(self, move: ChecksumJob, right: Sequence[bool]) -> None:
        self._movers.outstanding -= len(right)
        move.enter_stage(Stage.ENDED)
        self._tell_verdicts(move, 0, right)

    def _end_fetch_check(self, fetch: Fetch, places: Sequence[int], right: bool) -> None:
        """Go on with a page whose bytes match its identity, or look for it elsewhere; arguments as in `ChecksumJob`."""
        if right and places:
            self._end_fetch(fetch)
        elif not right:
            fetch.copy = None
            fetch.enter_stage(Stage.WAITING)
            fetch.wrong += 1
            if fetch.wrong > MAX_WRONG:
                self._fail_fetch(fetch)
            else:
                self._fetch_again(fetch)

    def _drop_corrupt(self, copy: TierCopy) -> None:
        """Forget a held page whose bytes in host memory are not its own any more, or came otherwise to the device."""
        index = self._movers.host.index
        self._movers.host_traffic.failures["corrupt"] += 1
        if copy.ready:
            index.drop_copy(copy, "corrupt")
        index.release_copies([copy])

    def _end_fetch(self, fetch: Fetch) -> None:
        fetch.enter_stage(Stage.HERE)
        if fetch.unwanted:
            self.release_fetch(fetch)
        else:
            fetch.inbox.append(fetch)

    def _fail_fetch(self, fetch: Fetch) -> None:
        fetch.enter_stage(Stage.FAILED)
        fetch.inbox.append(fetch)

    def answer_fetches(self, copy: TierCopy, *, held: bool = False) -> None:
        """Give a page that was just stored or read, so needs no check, to the fetches for it. `held`: they hold it."""
        for fetch in self.waiting.pop(copy.page.name, ()):
            if not held:
                self._movers.host.index.acquire_copies([copy])
            fetch.copy = copy
            self._end_fetch(fetch)

    def refuse_fetches(self, name: tuple[str, bytes]) -> None:
        """End the fetches that wait for a page which cannot be had."""
        for fetch in self.waiting.pop(name, ()):
            self._fail_fetch(fetch)

    def release_fetch(self, fetch: Fetch) -> None:
        """Let go of the host copy of a fetched page that nobody wants any more, now or when it gets here."""
        if fetch.stage in (Stage.WAITING, Stage.CHECKING):
            fetch.unwanted = True
        elif fetch.stage is Stage.HERE:
            self._movers.host.index.release_copies([fetch.take_copy()])

    # --- to the device -------------------------------------------------------------------------------------------

    def upload_pages(
        self, copies: Sequence[TierCopy], slots: Sequence[int], on_verdict: OnVerdict = lambda places, right: None
    ) -> None:
        """Copy held pages of one layer group, checked unless the device does that, into device slots; see `Upload`."""
        move, movers = Upload(copies, on_verdict), self._movers
        movers.outstanding += len(copies)
        pages = list(map(movers.host.page_parts, copies))
        movers.copier.to_device(
            copies[0].page.group, slots, pages, partial(movers.post_report, movers.came_up, self.apply_uploaded, move)
        )

    def apply_uploaded(self, move: Upload, digests: Sequence[bytes | None], seconds: float) -> None:
        """Note the next pages of a move, which later steps see where they are right ones."""
        first, count, host, traffic = move.told, len(digests), self._movers.host, self._movers.host_traffic
        copies = move.copies[first : first + count]
        move.told += count
        if move.told == len(move.copies):
            move.enter_stage(Stage.ENDED)
        self._movers.outstanding -= count
        traffic.read_bytes += sum(map(host.bytes_of, copies))
        traffic.read_seconds += seconds
        right = [
            digest is None or (digest, copy.page) == copy.checksum for digest, copy in zip(digests, copies, strict=True)
        ]
        host.index.release_copies(copies if all(right) else compress(copies, right))
        self._tell_verdicts(move, first, right)

    def _tell_verdicts(self, move: ChecksumJob | Upload, first: int, right: Sequence[bool]) -> None:
        """Drop copies that are not right, and say of all of them, from the `first` on, what they are."""
        places = range(first, first + len(right))
        if not all(right):
            wrong = [place for place, good in zip(places, right, strict=True) if not good]
            for place in wrong:
                self._drop_corrupt(move.copies[place])
            move.on_verdict(wrong, False)
        move.on_verdict(places if all(right) else list(compress(places, right)), True)

    # --- from disk -----------------------------------------------------------------------------------------------

    def _begin_reads(self, fetches: Sequence[Fetch]) -> int:
        """Have pages that are not in host memory read; returns as `begin_fetches`."""
        movers, move = self._movers, Read([], [], [], time.perf_counter())
        if movers.disk is None or movers.disk[1].stalled:
            self._fail_fetch(fetches[0])
            return 1
        index, store = movers.disk
        for fetch in fetches:
            page, name = fetch.page, fetch.page.name
            source = index.find_ready(*name)
            copy = movers.host.index.reserve_copy(page, len(source.slots)) if source is not None else None
            if source is None or copy is None:
                break
            copy.origin = "disk"
            parts, wanted = movers.host.cut_slots(copy.slots), partial(self._is_wanted, name)
            move.copies.append(copy)
            move.sources.append(source)
            move.pages.append(PageMove(page, source.slots, parts, movers.probe_copy(copy), wanted))
            self.waiting.setdefault(name, []).append(fetch)  # first, because the disk's thread may ask at once
        begun = len(move.copies)
        if not begun and source is None:
            self._fail_fetch(fetches[0])
            return 1
        index.acquire_copies(move.sources)
        done = partial(movers.post_timed, movers.came_up, self._end_read, move, move.asked)
        if not begun or not store.read_pages(move.pages, done):
            index.release_copies(move.sources)
            for fetch, copy in zip(fetches, move.copies, strict=False):
                movers.host.index.abort_copy(copy, "queue full")
                self.waiting[fetch.page.name].remove(fetch)
                if not self.waiting[fetch.page.name]:
                    del self.waiting[fetch.page.name]
            return 0
        movers.outstanding += begun
        count = sum(map(movers.host.bytes_of, move.copies))
        self.asked_bytes += count
        self.reading_bytes += count
        return begun

    def _is_wanted(self, name: tuple[str, bytes]) -> bool:
        """Check, on the disk's thread, whether a fetch waits for a page; `_end_read` answers later ones."""
        return any(fetch.wanted() and not fetch.unwanted for fetch in tuple(self.waiting.get(name, ())))

    def _end_read(self, move: Read, outcome: Outcome, seconds: float) -> None:
        """Note what became of reads. RETURNED follows a TIMEOUT; at OK each page has its own outcome."""
        movers, copies = self._movers, move.copies
        assert movers.disk is not None
        index, host = movers.disk[0], movers.host.index
        late, returned = outcome is Outcome.TIMEOUT, outcome is Outcome.RETURNED
        move.enter_stage(Stage.LATE if late else Stage.ENDED)
        movers.outstanding -= 0 if late else len(copies)
        movers.late += (late - returned) * len(copies)
        if returned:
            index.release_copies(move.sources)
            for copy in copies:
                host.reclaim_slots(copy)
            return
        came = [page.outcome if outcome is Outcome.OK else outcome for page in move.pages]
        right = [found is Outcome.OK for found in came]
        sizes = list(map(movers.host.bytes_of, copies))
        count = sum(compress(sizes, right))
        self.reading_bytes -= sum(sizes)
        if late or count:  # one that failed may have ended at once
            self.disk_rate(sum(sizes) if late else count, move.asked, seconds, not self.reading_bytes)
        movers.disk_traffic.read_bytes += count
        movers.disk_traffic.read_seconds += seconds * sum(right)
        index.release_copies(compress(move.sources, right))
        for copy, source, page, found in zip(copies, move.sources, move.pages, came, strict=True):
            if found is Outcome.OK:
                copy.checksum = (page.digest, copy.page)
                self._commit_read(copy)
            else:
                self._fail_read(copy, source, found)

    def _commit_read(self, copy: TierCopy) -> None:
        """Give a page that was read to the fetches that wait for it, which hold it from here on."""
        host, waited_for = self._movers.host.index, copy.state is CopyState.WRITING
        host.mark_saved(copy)
        host.commit_copy(copy, len(self.waiting.get(copy.page.name, ())) if waited_for else 0)
        if copy.ready:
            self._movers.announce("host", copy.page)
            self.answer_fetches(copy, held=True)

    def _fail_read(self, copy: TierCopy, source: TierCopy, outcome: Outcome) -> None:
        movers, waited_for, late = self._movers, copy.state is CopyState.WRITING, outcome is Outcome.TIMEOUT
        assert movers.disk is not None
        index, host, cause = movers.disk[0], movers.host.index, outcome.name.lower()
        if outcome is Outcome.UNWANTED:
            index.release_copies([source])
            host.abort_copy(copy, cause)
            for fetch in self.waiting.pop(copy.page.name, ()) if waited_for else ():
                if fetch.unwanted or not fetch.wanted():
                    self._fail_fetch(fetch)
                else:  # it came since, and the page is read after all
                    self._fetch_again(fetch)
            return
        movers.disk_traffic.failures["read timeout" if late else cause] += 1
        host.abort_copy(copy, cause, touched=late)
        if not late:
            if source.ready:
                index.drop_copy(source, cause)
            index.release_copies([source])
        if waited_for:
            self.refuse_fetches(copy.page.name)


class LoadPump:
    """The loads of sequences under way: asks `up` for their pages, and sends them on to the device. Invariant: the
    pages of one load under way are bounded, and each arrives or fails within the I/O timeout, so that a load ends."""

    def __init__(self, movers: Movers, up: UpTransfers) -> None:
        self.asked_first = IN_MEMORY
        """Pages that the disk is asked for between steps. Fewer only where steps run beside this thread."""
        self.inbox: deque[Fetch] = deque()
        self.fetching: dict[Fetch, tuple[PrefixLoad, LoadItem, bool]] = {}  # and whether the disk is asked for it
        self.loads: list[PrefixLoad] = []  # by their turns
        self._movers = movers
        self._host = movers.host.index
        self._up = up
        self._in_flight, self._may_ask = IN_FLIGHT, 0
        most = TOGETHER if movers.disk is not None and movers.disk[1].reads_together(movers.copier.digest) else 1
        slots = self._host.slots_per_page
        self._together = {group: max(1, min(most, SLOTS_TOGETHER // count)) for group, count in slots.items()}

    def begin_load(self, load: PrefixLoad) -> None:
        """Start fetching the pages of a load; `pump_loads` goes on with it."""
        load.turn = (not load.tokens, _size_class(self.unread_bytes(load)))
        insort(self.loads, load, key=attrgetter("turn"))
        self.pump_loads()

    def set_read_ahead(self, bytes_per_s: float) -> None:
        """Ask a disk that reads so fast for as much as it needs to have."""
        page_bytes = self._movers.host.slot_bytes * min(self._host.slots_per_page.values())
        self._in_flight = max(IN_FLIGHT, min(MOST_IN_FLIGHT, int(AHEAD_S * bytes_per_s / page_bytes)))

    def unread_bytes(self, load: PrefixLoad) -> int:
        """Count the bytes that a load lacks and the disk has to read, as far as it is known."""
        slots = sum(len(load.unread[group]) * count for group, count in self._host.slots_per_page.items())
        return slots * self._movers.host.slot_bytes

    def unasked_bytes(self, count: int = 0, load: PrefixLoad | None = None) -> int:
        """Count the bytes not asked of the disk yet by loads before `load`, or before a new one of `count` bytes."""
        slots, found = self._host.slots_per_page, 0
        for other in self.loads:
            if other is load or (load is None and other.turn > (0, _size_class(count))):
                break
            windows = min(other.reading, len(other.unread[LOCAL]))  # their pages, maybe larger, come before all else
            asked = windows * slots.get(LOCAL, 0) + (other.reading - windows) * slots.get(GLOBAL, 0)
            unasked = self.unread_bytes(other) - asked * self._movers.host.slot_bytes
            found += max(0, unasked) * (not other.cancelled)
        return found

    def pump_loads(self, asks: int | None = None, *, beside: bool = False) -> None:
        """Ask for more pages of each load, of the disk for `asks` of them, or `asked_first`. `beside` a step nothing
        goes to the device."""
        if asks is None:  # a disk that reads is asked for more beside the step that begins now
            asks = 0 if self.asked_first < IN_MEMORY and self._up.reading_bytes else self.asked_first
        self._may_ask = asks
        for load in self.loads:
            while load.in_flight < IN_MEMORY and not load.cancelled and self._ask_next(load, beside):
                if not beside:
                    self.take_arrivals()
        self.loads = list(filterfalse(attrgetter("finished"), self.loads))
        self._movers.copier.flush()

    def _ask_next(self, load: PrefixLoad, beside: bool) -> bool:
        """Ask for the next pages of a load: for many that are in host memory, or for one. False: not now."""
        items, copies = load.take_next_run(min(AT_ONCE, IN_MEMORY - load.in_flight), self._host.find_ready)
        if items and beside:
            load.todo.extendleft(reversed(items))
            return False
        if items:
            load.in_flight += len(items)
            self._host.acquire_copies(copies)
            if self._movers.copier.checks:
                self._upload_items(load, items, copies)
            else:
                self._up.check_copies(copies, partial(self._end_check, load, items, copies))
            return True
        item = load.take_next_item()
        if item is None:
            return False
        here, room = self._in_host(item.page), min(self._in_flight - load.reading, self._may_ask)
        if not here and room <= 0:
            self._may_ask = 0  # those behind it in the order would only come between
            load.todo.appendleft(item)
            return False
        items, todo = [item], load.todo
        room = 1 if self._host.find_copy(*item.page.name) is not None else min(room, self._together[item.page.group])
        while len(items) < room and todo and todo[0].page.group == item.page.group and load.is_wanted(todo[0]):
            if self._host.find_copy(*todo[0].page.name) is not None:
                break
            items.append(todo.popleft())
        begun = self._fetch_items(load, items, here)
        load.in_flight += begun
        todo.extendleft(reversed(items[begun:]))
        if not begun and self._movers.outstanding == self._movers.late:  # no move will end soon, and make room
            load.in_flight += 1
            load.fail_item(todo.popleft())
        return begun > 0

    def _in_host(self, page: Page) -> bool:
        """True for a page in host memory, or on its way there from the device."""
        copy = self._host.find_copy(*page.name)
        return copy is not None and not copy.being_read

    def _fetch_items(self, load: PrefixLoad, items: Sequence[LoadItem], here: bool) -> int:
        """Bring pages to host memory, unless they are `here` already; say for how many of the first there was room."""
        fetches = list[Fetch]()
        for item in items:
            wrong = load.wrong[item.page.group, item.page.index] if load.wrong else 0
            fetches.append(Fetch(item.page, self.inbox, wrong=wrong, wanted=partial(load.is_wanted, item)))
        begun = self._up.begin_fetches(fetches)
        for fetch, item in zip(fetches[:begun], items, strict=False):
            self.fetching[fetch] = (load, item, not here)
        if not here and begun:
            self._may_ask -= begun
            load.reading += begun
            load.asked_up_to = self._up.asked_bytes
            load.mark_unread(items[:begun])
        return begun

    def _end_check(
        self, load: PrefixLoad, items: list[LoadItem], copies: list[TierCopy], places: Sequence[int], right: bool
    ) -> None:
        """Go on with pages in host memory that were checked; the arguments as in `ChecksumJob`."""
        wanted = [place for place in places if load.is_wanted(items[place])]
        if right and wanted:
            self._upload_items(load, [items[place] for place in wanted], [copies[place] for place in wanted])
        for place in places:
            if not load.is_wanted(items[place]):
                load.drop_arrival(items[place])
                self._host.release_copies([copies[place]] * right)
            elif not right:
                self._look_elsewhere(load, items[place])

    def _upload_items(self, load: PrefixLoad, items: list[LoadItem], copies: list[TierCopy]) -> None:
        """Send pages of one layer group in host memory, which are held, to the device."""
        load.unread[items[0].page.group].difference_update([item.page.index for item in items])
        self._up.upload_pages(copies, [item.slot for item in items], partial(self._end_upload, load, items, copies))

    def _end_upload(
        self, load: PrefixLoad, items: list[LoadItem], copies: list[TierCopy], places: Sequence[int], right: bool
    ) -> None:
        """Note pages that were sent to the device; the arguments as in `Upload`."""
        came: dict[str, list[LoadItem]] = {}
        for place in places:
            copy = copies[place]
            came.setdefault(copy.origin or "host", []).append(items[place])
            copy.origin = ""
        for tier, found in came.items():
            wanted = list(filter(load.is_wanted, found))
            for item in found if len(wanted) < len(found) or not right else ():
                if not load.is_wanted(item):
                    load.drop_arrival(item)
                elif not right:
                    self._look_elsewhere(load, item)
            if right and wanted:
                load.note_arrival(wanted, tier)

    def _look_elsewhere(self, load: PrefixLoad, item: LoadItem) -> None:
        """Fetch a page again whose bytes were wrong, and that the host has no more."""
        place = (item.page.group, item.page.index)
        load.wrong[place] += 1
        if load.wrong[place] > MAX_WRONG:
            load.fail_item(item)
        elif not self._fetch_items(load, [item], self._in_host(item.page)):
            load.postpone_item(item)

    def take_arrivals(self) -> None:
        """Go on with what arrived in host memory."""
        here: dict[tuple[PrefixLoad, str], list[tuple[LoadItem, TierCopy]]] = {}
        while self.inbox:
            fetch = self.inbox.popleft()
            load, item, read = self.fetching.pop(fetch)
            load.reading -= read
            if fetch.stage is Stage.HERE and item.slot >= 0 and load.is_wanted(item):
                here.setdefault((load, item.page.group), []).append((item, fetch.take_copy()))
                continue
            if fetch.stage is Stage.FAILED and fetch.crowded and load.is_wanted(item):
                load.wrong[item.page.group, item.page.index] = fetch.wrong
                load.postpone_item(item)
            elif fetch.stage is Stage.FAILED and load.is_wanted(item):
                load.fail_item(item)
            elif item.slot < 0 and fetch.stage is Stage.HERE:
                load.note_arrival([item], "host")
            else:
                load.drop_arrival(item)
            self._up.release_fetch(fetch)
        for (load, _), found in here.items():
            self._upload_items(load, [item for item, _ in found], [copy for _, copy in found])


def _size_class(count: int) -> int:
    """Class a load: those between the same powers of four read from disk as they come, before all larger ones."""
    return count.bit_length() // 2
