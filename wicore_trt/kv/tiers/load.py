"""A prefix on its way from the host or disk to the device, for one sequence.

Pages of the local window at the end come first, then global pages from the back to the front; so what has arrived is
always a suffix of the prefix, and the sequence may compute from the front at the same time until the two meet. Plain
data: slots, page indices and names; it must not know pools or tiers. Invariant: every global page from
`meeting_page()` to `stop` is here, fetched or found on the device; pages that nobody asked for are not, however many
of those that were asked for have arrived.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from wicore_trt.kv.pages.page import Page
from wicore_trt.model.spec import GLOBAL, LOCAL

T = TypeVar("T")


class LoadItem(NamedTuple):
    """Page to fetch and its device slot; a slot of -1 stops at the host (a prefetch)."""

    page: Page
    slot: int


class PrefixLoad:
    """`tokens` is where the sequence goes on when all has arrived, `stop` its page count. Global pages from `first` on
    are asked for; those before it the sequence computes. `window` are the device slots of local pages [window_first,
    stop). `found` maps global pages that the device had to their slots, which are held for the jump. No two items are
    of one group and index. `here` are, by group, the indices of pages that the device had or that have arrived. `wrong`
    counts how often what came was not the page, by group and index. `expected` are the names of all that the manager
    was told to expect, `failures` its count of failed steps at the beginning. The sequence has computed tokens of all
    global pages below `floor`, which are no longer wanted. `turn` is its place among loads that read from disk, the
    smallest first; its requests end among the first `asked_up_to` bytes asked of the disk."""

    def __init__(
        self,
        tokens: int,
        stop: int,
        items: Iterable[LoadItem],
        *,
        first: int = 0,
        window_first: int = 0,
        window: Iterable[int] = (),
        found: Mapping[int, int] | None = None,
        here: Mapping[str, Iterable[int]] | None = None,
    ) -> None:
        self.tokens = tokens
        self.first = first
        self.stop = stop
        self.window_first = window_first
        self.window = list(window)
        self.found = dict(found or {})
        self.expected: Sequence[bytes] = ()
        self.failures = 0
        self.floor = 0
        self.turn = (False, 0)
        self.asked_up_to = 0
        self.todo = deque(items)
        self.in_flight = self.reading = 0
        """Pages asked for, and of these the ones that the disk has not read."""
        self.here: dict[str, set[int]] = {group: set((here or {}).get(group, ())) for group in (GLOBAL, LOCAL)}
        self.wrong = Counter[tuple[str, int]]()
        self.arrived = Counter[str]()
        """Global pages that arrived, by the tier they were in, and those found on the device."""
        self.arrived["device"] = len(self.found)
        self.cancelled = False
        self.broken = False
        pages = [item.page for item in self.todo]
        self.missing = {group: {page.index for page in pages if page.group == group} for group in self.here}
        """By group, the indices of pages that are still to arrive."""
        assert len(pages) == sum(map(len, self.missing.values())), "a page is asked for twice"
        self.unread: dict[str, set[int]] = {group: set() for group in self.here}
        """Of these, those that the disk is to read, or reads, as far as it is known."""
        self._order = sorted(self.missing[GLOBAL])
        """Missing global pages, and some before the last of them that are not missing any more."""
        self._failed_from = 0
        self._passed = 0
        """Global pages before this one were passed over: the last of them may be computed in part."""

    @property
    def finished(self) -> bool:
        """Nothing more will arrive."""
        return self.cancelled or (not self.in_flight and not self.todo)

    def meeting_page(self) -> int:
        """The sequence must compute the pages before this one; from here to `stop` all global pages are here."""
        order, missing = self._order, self.missing[GLOBAL]
        while order and order[-1] not in missing:
            order.pop()
        return max(self.first, self._failed_from, self._passed, order[-1] + 1 if order else 0)

    def mark_unread(self, items: Iterable[LoadItem]) -> None:
        """Note that these pages are not in host memory."""
        for item in items:
            self.unread[item.page.group].add(item.page.index)

    @property
    def window_here(self) -> bool:
        """True when all local pages of the window have arrived."""
        return not self.broken and not self.missing[LOCAL]

    @property
    def failed(self) -> bool:
        """True when some page cannot be had."""
        return self.broken or self._failed_from > 0

    @property
    def complete(self) -> bool:
        """True when every page has arrived."""
        return not self.failed and not any(self.missing.values())

    def is_wanted(self, item: LoadItem) -> bool:
        """True while the page is of use: the sequence lives and has computed none of it meanwhile."""
        return not self.cancelled and not (item.page.group == GLOBAL and item.page.index < self.floor)

    def take_next_item(self) -> LoadItem | None:
        """Take the next page worth fetching; global pages that the sequence computes meanwhile are passed over."""
        while self.todo:
            item = self.todo.popleft()
            if self.is_wanted(item):
                return item
            self._skip_item(item)
        return None

    def take_next_run(self, count: int, ready: Callable[[str, bytes], T | None]) -> tuple[list[LoadItem], list[T]]:
        """Take the next pages worth fetching, `count` at most, and what `ready(group, key)` says of each. A page ends
        the run if `ready` says None, it is of another layer group than the first, or it does not go to the device."""
        items, found, todo, group = list[LoadItem](), list[T](), self.todo, ""
        while todo and len(items) < count:
            page, slot = item = todo[0]
            if slot < 0 or (page.group != group and items):
                break
            group = page.group
            if page.index < self.floor and not self.is_wanted(item):
                self._skip_item(todo.popleft())
                continue
            copy = ready(group, page.key)
            if copy is None:
                break
            items.append(todo.popleft())
            found.append(copy)
        return items, found

    def note_arrival(self, items: Sequence[LoadItem], tier: str) -> None:
        """Note that pages of one layer group came from `tier` to their device slots, or by a prefetch to the host."""
        group, indices = items[0].page.group, [item.page.index for item in items]
        self.in_flight -= len(items)
        self.missing[group].difference_update(indices)
        self.unread[group].difference_update(indices)
        self.here[group].update(indices)
        self.arrived[tier] += len(items) * (group == GLOBAL)

    def drop_arrival(self, item: LoadItem) -> None:
        """Note a page that came when it was not wanted any more."""
        self.in_flight -= 1
        self._skip_item(item)

    def _skip_item(self, item: LoadItem) -> None:
        self._remove_missing(item.page)
        if item.page.group == GLOBAL:
            self._passed = max(self._passed, item.page.index + 1)

    def fail_item(self, item: LoadItem) -> None:
        """Note that a page cannot be had. A global one is computed by the sequence, with all before it; without a local
        one of the window there is no place to jump to."""
        self.in_flight -= 1
        self._remove_missing(item.page)
        if item.page.group == LOCAL:
            self.broken = True
        else:
            self._failed_from = max(self._failed_from, item.page.index + 1)

    def postpone_item(self, item: LoadItem) -> None:
        """Put a page back for which there was no room just now."""
        self.in_flight -= 1
        self.todo.appendleft(item)

    def _remove_missing(self, page: Page) -> None:
        self.missing[page.group].remove(page.index)
        self.unread[page.group].discard(page.index)

    def cancel_load(self) -> None:
        """Give the load up; what is in flight will be dropped on arrival."""
        self.cancelled = True
        self.todo.clear()
