"""What the KV tiers gained and lost, numbered, for routers and observers.

The engine thread tells the log of pages as they come and go and calls `publish` between steps; other threads read. The
log must not know who listens, and nobody who listens can hold up the engine: the log keeps a bounded tail of events and
the set of pages that all events together make, and who fell behind the tail starts again from that set. Invariants:
sequence numbers have no gaps and start at 1; a snapshot with all events after its `sequence` applied is exactly the
pages that the tiers hold. An event is idempotent: storing a page that is there, or removing one that is not, changes
nothing.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wicore_trt.kv.page import Page

MAX_EVENT_PAGES = 1024
"""Pages that one event names at most, so that an event fits into one message of any transport."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages of one layer group that can be found in a tier from now on."""

    sequence: int
    tier: str
    group: str
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Keys of one layer group that left a tier. `cause` is that of TierStats.evictions or .failures."""

    sequence: int
    tier: str
    group: str
    keys: tuple[bytes, ...]
    cause: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """A tier that holds no page of any group any more."""

    sequence: int
    tier: str


Event = Stored | Removed | Cleared
Entry = tuple[str, Page]
"""A tier's name and a page that can be found in it; the page names its group."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All pages, by (tier, layer group), after event `sequence` of the process that drew `epoch`."""

    sequence: int
    epoch: int
    pages: Mapping[tuple[str, str], tuple[Page, ...]]


@dataclass(slots=True)
class _Batch:
    """Changes of one kind within one step; `group` is None for a cleared tier, `cause` for all but removed pages."""

    tier: str
    group: str | None
    cause: str | None
    items: list[Any]  # pages that came, keys that left

    def event(self, sequence: int) -> Event:
        if self.group is None:
            return Cleared(sequence, self.tier)
        if self.cause is None:
            return Stored(sequence, self.tier, self.group, tuple(self.items))
        return Removed(sequence, self.tier, self.group, tuple(self.items), self.cause)


class KVEventLog:
    """`limit` is the number of pages that the kept events may name together; older events are dropped.

    `append_*` and `publish` belong to the engine thread, all else to any thread. The first `publish` calls
    `snapshot_source`, if it is set, for all pages of all tiers: what an earlier process left on disk.
    """

    def __init__(self, limit: int) -> None:
        self.epoch = 1 + secrets.randbelow(2**64 - 1)  # 0 is left to mean "none seen"
        self.snapshot_source: Callable[[], Iterable[Entry]] | None = None
        self._limit = limit
        self._pending: list[_Batch] = []
        self._open: dict[tuple[str, str], _Batch] = {}  # the newest batch of each tier and group in this step
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._kept_pages = 0
        self._sequence = 0
        self._pages: dict[tuple[str, str], dict[bytes, Page]] = {}  # by tier and group
        self._listeners: list[Callable[[], None]] = []

    # --- engine thread -------------------------------------------------------------------------------------------

    def append_stored(self, tier: str, page: Page) -> None:
        """A page can be found in a tier."""
        self._batch(tier, page.group, None).append(page)

    def append_removed(self, tier: str, group: str, key: bytes, cause: str) -> None:
        """A page left a tier."""
        self._batch(tier, group, cause).append(key)

    def append_cleared(self, tier: str) -> None:
        """A tier forgot all its pages."""
        for name in [name for name in self._open if name[0] == tier]:
            del self._open[name]
        self._pending.append(_Batch(tier, None, None, []))

    def publish(self) -> None:
        """End of a step: number and show what was appended. O(appended pages); nothing at all when there are none."""
        if self.snapshot_source is not None:
            self._begin(self.snapshot_source)
        if self._pending:
            self._show()

    def _begin(self, source: Callable[[], Iterable[Entry]]) -> None:
        """Make events of the pages that are there already, those appended until now among them."""
        self.snapshot_source = None
        self._pending.clear()
        self._open.clear()
        for tier, page in source():
            self.append_stored(tier, page)

    def _batch(self, tier: str, group: str, cause: str | None) -> list[Any]:
        # Sets of other tiers and groups are independent, so batches keep the order within their own set only. That
        # makes one event of pages that arrive in turn from two groups.
        batch = self._open.get((tier, group))
        if batch is None or batch.cause != cause or len(batch.items) >= MAX_EVENT_PAGES:
            batch = self._open[tier, group] = _Batch(tier, group, cause, [])
            self._pending.append(batch)
        return batch.items

    def _show(self) -> None:
        pending, self._pending = self._pending, []
        self._open.clear()
        first = self._sequence + 1  # only this thread writes it
        events = [batch.event(number) for number, batch in enumerate(pending, first)]
        with self._changed:
            self._events.extend(events)
            self._sequence += len(events)
            self._kept_pages += sum(map(_size, events))
            while self._kept_pages > self._limit:
                self._kept_pages -= _size(self._events.popleft())
            for event in events:
                self._apply(event)
            listeners = list(self._listeners)
            self._changed.notify_all()
        for listener in listeners:
            listener()

    def _apply(self, event: Event) -> None:
        if isinstance(event, Stored):
            self._pages.setdefault((event.tier, event.group), {}).update((page.key, page) for page in event.pages)
        elif isinstance(event, Removed):
            pages = self._pages.get((event.tier, event.group), {})
            for key in event.keys:
                pages.pop(key, None)
        else:
            self._pages = {name: pages for name, pages in self._pages.items() if name[0] != event.tier}

    # --- any thread ----------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._sequence

    def since(self, sequence: int) -> list[Event] | None:
        """Events after number `sequence`, oldest first. None when some of them were dropped, or `sequence` is beyond
        the newest (it is of another epoch): take a snapshot."""
        with self._changed:
            if not self._reaches(sequence):
                return None
            found = []
            for event in reversed(self._events):
                if event.sequence <= sequence:
                    break
                found.append(event)
        found.reverse()
        return found

    def wait(self, sequence: int, timeout: float) -> bool:
        """Sleep until there is an event after number `sequence`; false after `timeout` seconds without one."""
        with self._changed:
            return self._changed.wait_for(lambda: self._sequence > sequence, timeout)

    def snapshot(self) -> Snapshot:
        """All pages now; `since(snapshot.sequence)` goes on from there without a gap. Some 20 ms per million pages."""
        with self._changed:
            pages = {name: tuple(found.values()) for name, found in self._pages.items() if found}
            return Snapshot(self._sequence, self.epoch, pages)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Have `listener` called on the engine thread after each new event; it must return at once and not raise.
        Returns the function that ends this."""
        with self._changed:
            self._listeners.append(listener)

        def end() -> None:
            with self._changed:
                self._listeners.remove(listener)

        return end

    def _reaches(self, sequence: int) -> bool:
        """Whether all events after `sequence` are kept."""
        return self._sequence - len(self._events) <= sequence <= self._sequence


def _size(event: Event) -> int:
    """What an event counts against the limit: its pages, and 1 for itself."""
    if isinstance(event, Stored):
        return 1 + len(event.pages)
    return 1 + len(event.keys) if isinstance(event, Removed) else 1
