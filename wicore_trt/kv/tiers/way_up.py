"""The way up: pages of the disk to host memory, and of host memory to whoever asked for them or to the device.

Pages in host memory go to the device many at a time; one whose bytes are wrong fails alone. Runs on the engine thread
but for what it hands to the movers. It must not know loads or sequences. Invariant: who has pages placed hears that one
is right only after its bytes matched its identity, whichever way they came, and hears of each; each fetch ends. Where
the device computes digests, they are those on the device; elsewhere of bytes in host memory before they go.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress

from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.index import CopyState, TierCopy
from wicore_trt.kv.tiers.movers import Movers
from wicore_trt.kv.tiers.moves import Check, Checked, Fetch, HaveRead, Place, Placed, Read, Stage

MAX_WRONG = 2
"""A page whose bytes were wrong so often is given up: it may be the way to the device that changes them."""


class WayUp:
    """Of `asked_bytes`, all that the disk was ever asked for, `reading_bytes` are not here yet. `disk_rate(bytes,
    asked, seconds, rests)` hears how long after it was asked, by `time.perf_counter`, a read was over, and whether the
    disk has none to do now."""

    def __init__(self, movers: Movers) -> None:
        self.outstanding = self.late = 0
        self.asked_bytes = self.reading_bytes = 0
        self.disk_rate: Callable[[int, float, float, bool], None] = lambda count, asked, seconds, rests: None
        self.waiting: dict[tuple[str, bytes], list[Fetch]] = {}
        self._movers = movers

    def fetch(self, page: Page, inbox: deque[Fetch], wanted: Callable[[], bool], wrong: int) -> Fetch | None:
        """See `Transfers.fetch`."""
        fetch = Fetch(page, inbox, wanted=wanted, wrong=wrong)
        return fetch if self._begin(fetch) else None

    def _begin(self, fetch: Fetch) -> bool:
        """Bring a page to host memory and check it; false when the disk's queue or the host is full just now."""
        index = self._movers.host.index
        copy = index.get(*fetch.page.name)
        if copy is None:
            return self._read(fetch)
        if copy.ready:
            fetch.copy = copy
            index.acquire([copy])
            if self._movers.copier.checks:
                self._here(fetch)
                return True
            fetch.go(Stage.CHECKING)
            self.outstanding += 1
            self._movers.checker.submit(self._check, fetch, [copy])
        else:
            self.waiting.setdefault(fetch.page.name, []).append(fetch)
        return True

    def _begin_again(self, fetch: Fetch) -> None:
        """`_begin` of one that was under way; where there is no room whoever asked has to ask again."""
        if not self._begin(fetch):
            fetch.crowded = True
            self._fail(fetch)

    def _check(self, move: Fetch | Check, copies: Sequence[TierCopy]) -> None:
        self._movers.mailbox.put(Checked(move, [self._movers.is_right(copy) for copy in copies]))

    def check(self, move: Check) -> None:
        """See `Transfers.check`."""
        self.outstanding += len(move.copies)
        self._movers.checker.submit(self._check, move, move.copies)

    def checked(self, move: Fetch | Check, right: Sequence[bool]) -> None:
        """Its bytes match its identity, or the page is looked for elsewhere."""
        self.outstanding -= len(right)
        if isinstance(move, Check):
            move.go(Stage.ENDED)
            self._tell(move, 0, right)
            return
        if right[0]:
            self._here(move)
            return
        assert move.copy is not None
        self._corrupt(move.copy)
        move.copy = None
        move.go(Stage.WAITING)
        move.wrong += 1
        if move.wrong > MAX_WRONG:
            self._fail(move)
        else:
            self._begin_again(move)

    def _corrupt(self, copy: TierCopy) -> None:
        """The host's bytes of a page that was held are not the page's any more, or others came to the device."""
        index = self._movers.host.index
        self._movers.host_traffic.failures["corrupt"] += 1
        if copy.ready:
            index.drop(copy, "corrupt")
        index.release([copy])

    def _here(self, fetch: Fetch) -> None:
        fetch.go(Stage.HERE)
        if fetch.unwanted:
            self.release(fetch)
        else:
            fetch.inbox.append(fetch)

    def _fail(self, fetch: Fetch) -> None:
        fetch.go(Stage.FAILED)
        fetch.inbox.append(fetch)

    def answer(self, copy: TierCopy) -> None:
        """Who waits for a page that was just stored or read gets it; it needs no second check."""
        for fetch in self.waiting.pop(copy.page.name, ()):
            self._movers.host.index.acquire([copy])
            fetch.copy = copy
            self._here(fetch)

    def refuse(self, name: tuple[str, bytes]) -> None:
        """Who waits for a page cannot have it."""
        for fetch in self.waiting.pop(name, ()):
            self._fail(fetch)

    def release(self, fetch: Fetch) -> None:
        """See `Transfers.release`."""
        if fetch.stage in (Stage.WAITING, Stage.CHECKING):
            fetch.unwanted = True
        elif fetch.stage is Stage.HERE:
            self._movers.host.index.release([fetch.held])
            fetch.go(Stage.RELEASED)

    # --- to the device -------------------------------------------------------------------------------------------

    def place(self, move: Place, slots: Sequence[int]) -> None:
        """See `Transfers.place`."""
        self.outstanding += len(move.copies)
        pages = list(map(self._movers.host.payload, move.copies))
        self._movers.copier.to_device(move.copies[0].page.group, slots, pages, partial(self._post_placed, move))

    def _post_placed(self, move: Place, digests: Sequence[bytes | None], seconds: float) -> None:
        self._movers.mailbox.put(Placed(move, digests, seconds))

    def placed(self, move: Place, digests: Sequence[bytes | None], seconds: float) -> None:
        """Later steps see the next pages of a move, those that are right ones."""
        first, count, host = move.told, len(digests), self._movers.host
        copies = move.copies[first : first + count]
        move.told += count
        if move.told == len(move.copies):
            move.go(Stage.ENDED)
        self.outstanding -= count
        self._movers.host_traffic.read(count * host.bytes_of(copies[0].page), seconds)
        right = [
            digest is None or (digest, copy.page) == copy.checksum for digest, copy in zip(digests, copies, strict=True)
        ]
        host.index.release(copies if all(right) else compress(copies, right))
        self._tell(move, first, right)

    def _tell(self, move: Check | Place, first: int, right: Sequence[bool]) -> None:
        """Drop copies that are not right, and say of all of them, from the `first` on, what they are."""
        places = range(first, first + len(right))
        if not all(right):
            wrong = [place for place, good in zip(places, right, strict=True) if not good]
            for place in wrong:
                self._corrupt(move.copies[place])
            move.over(wrong, False)
        move.over(places if all(right) else list(compress(places, right)), True)

    # --- from disk -----------------------------------------------------------------------------------------------

    def _read(self, fetch: Fetch) -> bool:
        """Have a page read to host memory; false when the disk's queue or the host is full just now."""
        movers, page = self._movers, fetch.page
        source = movers.disk[0].get(*page.name) if movers.disk is not None else None
        if movers.disk is None or source is None or not source.ready or movers.disk[1].stalled:
            self._fail(fetch)
            return True
        index, store = movers.disk
        copy = movers.host.index.reserve(page)
        if copy is None:
            return False
        index.acquire([source])
        copy.origin = "disk"
        move = Read(copy, source, time.perf_counter())
        done, seen = partial(self._post_read, move), partial(self._seen, copy)
        wanted = partial(self._wanted, page.name)
        self.waiting.setdefault(page.name, []).append(fetch)  # first, because the disk's thread may ask at once
        if not store.read(page, source.slots, movers.host.buffers(copy), done, seen=seen, wanted=wanted):
            index.release([source])
            movers.host.index.abort(copy, "queue full")
            self._wait_no_more(fetch)
            return False
        self.outstanding += 1
        self.asked_bytes += movers.host.bytes_of(page)
        self.reading_bytes += movers.host.bytes_of(page)
        return True

    def _wait_no_more(self, fetch: Fetch) -> None:
        name = fetch.page.name
        self.waiting[name].remove(fetch)
        if not self.waiting[name]:
            del self.waiting[name]

    def _wanted(self, name: tuple[str, bytes]) -> bool:
        """Whether anybody waits for a page that is to be read. Asked on the disk's thread: who comes later, or after
        it was asked, gets what `have_read` makes of it."""
        return any(fetch.wanted() and not fetch.unwanted for fetch in tuple(self.waiting.get(name, ())))

    def _seen(self, copy: TierCopy) -> None:
        copy.checksum = self._movers.checksum(copy)  # on the disk's thread, which has the time

    def _post_read(self, move: Read, outcome: Outcome) -> None:
        self._movers.mailbox.put(HaveRead(move, outcome, time.perf_counter() - move.asked))

    def have_read(self, move: Read, outcome: Outcome, seconds: float) -> bool:
        """What became of a read; true when the page is here."""
        movers, copy, source = self._movers, move.copy, move.source
        assert movers.disk is not None
        index, host = movers.disk[0], movers.host.index
        late, returned = outcome is Outcome.TIMEOUT, outcome is Outcome.RETURNED
        move.go(Stage.LATE if late else Stage.ENDED)
        self.outstanding -= not late
        self.late += late - returned
        if returned:
            index.release([source])
            host.reclaim(copy)
            return False
        count = movers.host.bytes_of(copy.page)
        self.reading_bytes -= count
        if late or outcome is Outcome.OK:  # one that failed may have ended at once
            self.disk_rate(count, move.asked, seconds, not self.reading_bytes)
        if outcome is Outcome.OK:
            index.release([source])
            movers.disk_traffic.read_bytes += count
            movers.disk_traffic.read_seconds += seconds
            host.mark_saved(copy)
            host.commit(copy)
            if copy.ready:
                movers.stored("host", copy.page)
            return copy.ready
        waited_for = copy.state is CopyState.WRITING
        if outcome is Outcome.UNWANTED:
            index.release([source])
            host.abort(copy, "unwanted")
            if waited_for:
                self._left_out(copy.page.name)
            return False
        cause = outcome.name.lower()
        movers.disk_traffic.failures["read timeout" if late else cause] += 1
        host.abort(copy, cause, touched=late)
        if not late:
            if source.ready:
                index.drop(source, cause)
            index.release([source])
        if waited_for:
            self.refuse(copy.page.name)
        return False

    def _left_out(self, name: tuple[str, bytes]) -> None:
        """A page was not read, as nobody waited for it. Who came since has it read after all."""
        for fetch in self.waiting.pop(name, ()):
            if fetch.unwanted or not fetch.wanted():
                self._fail(fetch)
            else:
                self._begin_again(fetch)
