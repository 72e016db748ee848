"""KV events: numbered changes of the pages in each tier, for routers and observers.

The engine thread appends changes and calls `publish_step` between steps; other threads read. It must not know the
readers, and no reader can hold up the engine. Invariants: a feed's sequence numbers start at 1 and have no gaps. A
snapshot plus all events after its `sequence` is exactly the pages that the tiers hold. Events are idempotent. A
tenant's feed is what it would be if nobody else used the server, evictions apart.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from wicore_trt.kv.pages.page import Page

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
    """Removed keys of one layer group. `cause` is that of TierStats.evictions or .failures."""

    sequence: int
    tier: str
    group: str
    keys: tuple[bytes, ...]
    cause: str


Event = Stored | Removed
Entry = tuple[str, Page]
"""A tier's name and a page that can be found in it; the page names its group."""


@dataclass(frozen=True, slots=True)
class EventSnapshot:
    """Pages by (tier, layer group) after event `sequence` of the feed that drew `epoch`."""

    sequence: int
    epoch: int
    pages: Mapping[tuple[str, str], tuple[Page, ...]]


@dataclass(slots=True)
class _Batch:
    """Changes of one kind within one step; only removed pages have a `cause`."""

    tier: str
    group: str
    cause: str | None
    items: list[Any]  # pages that came, keys that left


class EventFeed:
    """Feed of events about some pages, with its own numbers and epoch, and the pages that they make. For any thread. It
    keeps a bounded tail: the kept events name at most `limit` pages together. A reader that fell behind the tail takes
    a snapshot. `pages`, by tier and group, are those before the first event."""

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
        """List events after number `sequence`, oldest first. None when some were dropped, or `sequence` is beyond the
        newest (of another epoch): take a snapshot."""
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
        """Call `listener` on the engine thread after each new event, until the returned function is called. It must
        return at once and not raise."""
        with self._changed:
            self._listeners.append(listener)

        def end() -> None:
            with self._changed:
                self._listeners.remove(listener)

        return end

    def append_batches(self, batches: list[_Batch]) -> None:
        """Number and show a step's changes, and call the listeners. Engine thread only."""
        with self._changed:
            for batch in batches:
                self.sequence += 1
                tier, group, items = batch.tier, batch.group, tuple(batch.items)
                held = self._pages.setdefault((tier, group), {})
                if batch.cause is None:
                    self._events.append(Stored(self.sequence, tier, group, items))
                    for page in items:
                        held[page.key] = page
                else:
                    self._events.append(Removed(self.sequence, tier, group, items, batch.cause))
                    for key in items:
                        held.pop(key, None)
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
    tiers, as an earlier process may have left some on disk."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.snapshot_source: Callable[[], Iterable[Entry]] | None = None
        self._pending: list[_Batch] = []
        self._open: dict[tuple[str, str], _Batch] = {}  # the newest batch of each tier and group in this step
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
        begun = 0
        while begun < len(pages):
            items = self._open_batch(tier, pages[0].group, None)
            end = begun + MAX_EVENT_PAGES - len(items)
            items += pages[begun:end]
            begun = end

    def append_removed(self, tier: str, group: str, key: bytes, cause: str) -> None:
        self._open_batch(tier, group, cause).append(key)

    def publish_step(self) -> None:
        """Publish what a step appended. O(appended pages); free when there are none."""
        source, self.snapshot_source = self.snapshot_source, None
        if source is not None:  # events of the pages that are there already, those appended until now among them
            self._pending.clear()
            self._open.clear()
            for tier, page in source():
                self.append_stored(tier, page)
        if self._pending:
            pending, self._pending = self._pending, []
            self._open.clear()
            with self._showing:
                shares = self._share_by_tenant(pending) if self._tenants else {}
                self.append_batches(pending)
                for tenant, batches in shares.items():
                    self._tenants[tenant].append_batches(batches)

    def _open_batch(self, tier: str, group: str, cause: str | None) -> list[Any]:
        # Sets of other tiers and groups are independent, so batches keep the order within their own set only. That
        # makes one event of pages that arrive in turn from two groups.
        batch = self._open.get((tier, group))
        if batch is None or batch.cause != cause or len(batch.items) >= MAX_EVENT_PAGES:
            batch = self._open[tier, group] = _Batch(tier, group, cause, [])
            self._pending.append(batch)
        return batch.items

    def _share_by_tenant(self, pending: list[_Batch]) -> dict[bytes, list[_Batch]]:
        """Split a step's changes among the tenants that have a feed, cut by their own changes alone: an order or cuts
        of all tenants' changes would reveal others."""
        owners = {page.key: page.tenant for batch in pending if batch.cause is None for page in batch.items}
        shares: dict[bytes, list[_Batch]] = {}
        for batch in sorted(pending, key=lambda batch: (batch.tier, batch.group)):
            name = batch.tier, batch.group, batch.cause
            held = self._pages.get((batch.tier, batch.group), {})
            for item in batch.items:
                page = item if batch.cause is None else held.get(item)
                owner = page.tenant if page is not None else owners.get(item)
                if owner not in self._tenants:
                    continue
                mine = shares.setdefault(owner, [])
                last = mine[-1] if mine else None
                if last is None or (last.tier, last.group, last.cause) != name or len(last.items) >= MAX_EVENT_PAGES:
                    mine.append(last := _Batch(*name, []))
                last.items.append(item)
        return shares
