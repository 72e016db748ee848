"""KV events: numbered changes of the pages in each tier, for routers and observers.

The engine thread appends changes and calls `publish_step` between steps; other threads read. It must not know the
readers, and no reader can hold up the engine. Invariants: a feed's sequence numbers start at 1 and have no gaps. A
snapshot plus all events after its `sequence` is exactly the pages that the tiers hold. Of a step's events those of
pages that came are first, parents before children; none names a page that came and left. Evictions apart, a tenant's
feed tells nothing of others.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

from msgspec import Struct

from wicore_trt.kv.pages.page import Page
from wicore_trt.model.spec import GLOBAL

MAX_EVENT_LOG_PAGES = 1 << 18
"""Pages that the events which the log of all keeps may name together."""
MAX_EVENT_PAGES = 1024
"""Pages that one event names at most, so that an event fits into one message of any transport."""
TENANT_SHARE = 16
"""A tenant's feed keeps one in so many of the pages' events that the log of all keeps."""


class Stored(Struct, frozen=True, tag=0, array_like=True):
    """Stored pages of one layer group: they can be found in a tier from now on."""

    sequence: int
    tier: str
    group: str
    pages: tuple[Page, ...]


class Removed(Struct, frozen=True, tag=1, array_like=True):
    """Removed keys of one layer group, first the `named` ones, whose pages had tokens. `cause` as in TierStats."""

    sequence: int
    tier: str
    group: str
    keys: tuple[bytes, ...]
    cause: str
    named: int


Event = Stored | Removed
Entry = tuple[str, Page]
"""A tier's name and a page that can be found in it; the page names its group."""


@dataclass(frozen=True, slots=True)
class EventSnapshot:
    """Pages by (tier, layer group) after event `sequence` of the feed that drew `epoch`."""

    sequence: int
    epoch: int
    pages: Mapping[tuple[str, str], tuple[Page, ...]]


_Place = tuple[str, str]
_Changes = dict[_Place, dict[bytes, Page | str]]
"""Of a step, by tier and layer group: pages that came, and causes for which others left, by key."""
_Batch = tuple[_Place, str | None, list[Any]]
"""Pages that came, or keys that left and the cause: the content of an event."""
_TIERS = ("device", "host", "disk")


def _cut_batches(changes: _Changes) -> list[_Batch]:
    """Cut a step's changes into batches, in an order in which each page comes before those that follow it: in all
    tiers, and the global group first. Pages whose parent comes with a later tier alone are told of behind all tiers."""
    came, left = list[_Batch](), list[_Batch]()
    ordered = sorted(changes.items(), key=lambda entry: (entry[0][1], _TIERS.index(entry[0][0])))
    untold = {(place[1], key) for place, found in ordered for key in found if isinstance(found[key], Page)}
    late = list[tuple[_Place, Page]]()
    for place, found in ordered:
        pages = []
        for page in sorted((page for page in found.values() if isinstance(page, Page)), key=attrgetter("index")):
            if not untold.isdisjoint(((page.group, page.parent), (GLOBAL, page.parent))):
                late.append((place, page))
            else:
                untold.discard(page.name)
                pages.append(page)
        came += _cut_batch(place, None, pages)
        causes: dict[str, list[bytes]] = {}
        for key, cause in found.items():
            if isinstance(cause, str):
                causes.setdefault(cause, []).append(key)
        for cause, keys in causes.items():
            left += _cut_batch(place, cause, keys)
    late.sort(key=lambda entry: (entry[0][1], entry[1].index))
    for place, entries in groupby(late, itemgetter(0)):
        came += _cut_batch(place, None, [page for _, page in entries])
    return came + left


def _cut_batch(place: _Place, cause: str | None, items: list[Any]) -> Iterator[_Batch]:
    return ((place, cause, items[i : i + MAX_EVENT_PAGES]) for i in range(0, len(items), MAX_EVENT_PAGES))


class EventFeed:
    """Feed of events about some pages, with its own numbers and epoch, and the pages that they make. For any thread.
    The kept events name at most `limit` pages together; a reader that fell behind takes a snapshot. `pages`, by tier
    and group, are those before the first event."""

    def __init__(self, limit: int, pages: Mapping[tuple[str, str], dict[bytes, Page]] | None = None) -> None:
        self.epoch = 1 + secrets.randbelow(2**64 - 1)  # 0 is left to mean "none seen"
        self._limit = limit
        self._changed = threading.Lock()
        self._events: deque[Event] = deque()
        self._sizes: deque[int] = deque()  # of each event: its pages, and 1 for itself
        self._kept = 0  # their sum
        self.sequence = 0
        """Number of the newest event; 0 before the first."""
        self._pages = dict(pages or {})
        self._listeners: list[Callable[[], None]] = []

    def list_since(self, sequence: int) -> list[Event] | None:
        """List events after `sequence`, oldest first; None (take a snapshot) if some were dropped or it is unknown."""
        with self._changed:
            if not self.sequence - len(self._events) <= sequence <= self.sequence:
                return None
            found = []
            for event in reversed(self._events):
                if event.sequence <= sequence:
                    break
                found.append(event)
        found.reverse()
        return found

    def take_snapshot(self) -> EventSnapshot:
        """Copy all pages, some 20 ms per million; `list_since(snapshot.sequence)` continues without a gap."""
        with self._changed:
            pages = {name: tuple(found.values()) for name, found in self._pages.items() if found}
            return EventSnapshot(self.sequence, self.epoch, pages)

    def add_listener(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` on the engine thread after new events, until the result is called. It must return at once and
        not raise."""
        with self._changed:
            self._listeners.append(listener)

        def end() -> None:
            with self._changed:
                self._listeners.remove(listener)

        return end

    def append_batches(self, batches: list[_Batch]) -> None:
        """Number and show a step's changes, and call the listeners. Engine thread only."""
        with self._changed:
            for (tier, group), cause, items in batches:
                self.sequence += 1
                held = self._pages.setdefault((tier, group), {})
                if cause is None:
                    self._events.append(Stored(self.sequence, tier, group, tuple(items)))
                    held.update((page.key, page) for page in items)
                else:
                    gone = [page for key in items if (page := held.pop(key, None)) is not None]
                    gone.sort(key=lambda page: not page.tokens)
                    keys, named = tuple(page.key for page in gone), sum(bool(page.tokens) for page in gone)
                    self._events.append(Removed(self.sequence, tier, group, keys, cause, named))
                self._sizes.append(1 + len(items))
                self._kept += 1 + len(items)
            while self._kept > self._limit:
                self._events.popleft()
                self._kept -= self._sizes.popleft()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


class KVEventLog(EventFeed):
    """Log: the feed of all pages, for the operator, to which the engine reports. `append_*` and `publish_step` belong
    to the engine thread, the rest to any. If set, `snapshot_source` gives the first `publish_step` all pages of all
    tiers, also those that were on disk."""

    def __init__(self, limit: int = MAX_EVENT_LOG_PAGES) -> None:
        super().__init__(limit)
        self.snapshot_source: Callable[[], Iterable[Entry]] | None = None
        self._pending: _Changes = {}
        self._tenants: dict[bytes, EventFeed] = {}
        self._showing = threading.Lock()  # a feed begins between steps, never in the middle of one

    def tenant_feed(self, tenant: bytes) -> EventFeed:
        """Return the feed of the pages that one tenant made; `tenant` is its tag: `KeyChain.derive_names(who,
        salt).tag`. Its numbers, epoch, tail and the way its events are cut tell nothing of other tenants. A feed is
        made when first asked for and then stays: ask only for tenants that the server knows."""
        with self._showing, self._changed:
            feed = self._tenants.get(tenant)
            if feed is None:
                pages: dict[tuple[str, str], dict[bytes, Page]] = {}
                for name, held in sorted(self._pages.items()):
                    mine = {key: page for key, page in held.items() if page.tenant == tenant}
                    pages |= {name: mine} if mine else {}
                feed = self._tenants[tenant] = EventFeed(self._limit // TENANT_SHARE, pages)
            return feed

    # --- engine thread -------------------------------------------------------------------------------------------

    def append_stored(self, tier: str, *pages: Page) -> None:
        for page in pages:
            self._note_change((tier, page.group), page.key, page)

    def append_removed(self, tier: str, group: str, key: bytes, cause: str) -> None:
        self._note_change((tier, group), key, cause)

    def publish_step(self) -> None:
        """Publish what a step appended. O(appended pages); free when there are none."""
        source, self.snapshot_source = self.snapshot_source, None
        if source is not None:  # events of the pages that are there already, those appended until now among them
            self._pending.clear()
            for tier, page in source():
                self.append_stored(tier, page)
        if self._pending:
            pending, self._pending = self._pending, {}
            with self._showing:
                shares = self._share_by_tenant(pending) if self._tenants else {}
                self.append_batches(_cut_batches(pending))
                for tenant, changes in shares.items():
                    self._tenants[tenant].append_batches(_cut_batches(changes))

    def _note_change(self, place: _Place, key: bytes, change: Page | str) -> None:
        changes = self._pending.setdefault(place, {})
        before = changes.setdefault(key, change)
        if isinstance(before, str) != isinstance(change, str):
            del changes[key]  # it came and left, or left and came again

    def _share_by_tenant(self, pending: _Changes) -> dict[bytes, _Changes]:
        """Split a step's changes among the tenants that have a feed, as cuts of all changes would reveal others."""
        shares: dict[bytes, _Changes] = {}
        for place, changes in pending.items():
            held = self._pages.get(place, {})
            for key, change in changes.items():
                page = change if isinstance(change, Page) else held.get(key)
                if page is not None and page.tenant in self._tenants:
                    shares.setdefault(page.tenant, {}).setdefault(place, {})[key] = change
        return shares
