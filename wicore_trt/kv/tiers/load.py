"""A prefix on its way from the host or disk to the device, for one sequence.

Pages of the local window at the end come first, then global pages from the back to the front; so what has arrived is
always a suffix of the prefix, and the sequence may compute from the front at the same time until the two meet. Plain
data: slots, page indices and names; it must not know pools or tiers. Invariant: every global page from
`meeting_page()` to `stop` is here, fetched or found on the device; pages that nobody asked for are not, however many
of those that were asked for have arrived.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from wicore_trt.kv.pages.page import Page
from wicore_trt.model.spec import GLOBAL, LOCAL


@dataclass(frozen=True, slots=True)
class LoadItem:
    """One page to fetch and its device slot; a slot of -1 stops at the host (a prefetch). `wrong` as in `Fetch`."""

    page: Page
    slot: int
    wrong: int = 0


class PrefixLoad:
    """`tokens` is where the sequence goes on when all has arrived, `stop` its page count. Global pages from `first` on
    are asked for; those before it the sequence computes. `window` are the device slots of local pages
    [window_first, stop). `found` maps global pages that the device had to their slots, which are held for the jump.
    `here` are group and index of all pages that the device had. `expected` are the names of all that the manager was
    told to expect, `failures` its count of failed steps at the beginning. The sequence has computed tokens of all
    global pages below `floor`, which are no longer wanted: that a page came wrong is noticed when it is in its slot,
    where it would have spoilt what was computed."""

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
        here: Iterable[tuple[str, int]] = (),
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
        self.todo = deque(items)
        self.in_flight = self.reading = 0
        """Pages asked for, and of these the ones that the disk has not read."""
        self.here = set(here)
        self.arrived = Counter[str]()
        """Global pages that arrived, by the tier they were in, and those found on the device."""
        self.arrived["device"] = len(self.found)
        self.cancelled = False
        self.broken = False
        self._missing = {item.page.name: item.page.index for item in self.todo}
        self._unread: dict[tuple[str, bytes], int] = {}
        self._windows = sum(item.page.group == LOCAL for item in self.todo)
        self._failed_from = 0
        self._passed = 0
        """Global pages before this one were passed over: the last of them may be computed in part."""

    @property
    def finished(self) -> bool:
        """Nothing more will arrive."""
        return self.cancelled or (not self.in_flight and not self.todo)

    def lacking(self, group: str) -> int:
        """Pages of a layer group that are still to arrive."""
        return self._windows if group == LOCAL else len(self._missing) - self._windows

    def meeting_page(self) -> int:
        """The sequence must compute the pages before this one; from here to `stop` all global pages are here."""
        waiting = [index for (group, _), index in self._missing.items() if group == GLOBAL]
        return max([self.first, self._failed_from, self._passed, *(index + 1 for index in waiting)])

    def missing(self, group: str) -> list[int]:
        """Indices of pages of a layer group that are still to arrive."""
        return [index for (of, _), index in self._missing.items() if of == group]

    def unread(self, group: str) -> list[int]:
        """Indices of missing pages of a layer group that the disk is to read, or reads, as far as it is known."""
        return [index for (of, _), index in self._unread.items() if of == group]

    def to_read(self, items: Iterable[LoadItem]) -> None:
        """These pages are not in host memory."""
        self._unread.update((item.page.name, item.page.index) for item in items)

    def bring(self, item: LoadItem) -> None:
        """The page is in host memory, and goes on to the device."""
        self._unread.pop(item.page.name, None)

    @property
    def window_here(self) -> bool:
        """Whether all local pages of the window have arrived."""
        return not self.broken and not self._windows

    @property
    def failed(self) -> bool:
        """Whether any page cannot be had."""
        return self.broken or self._failed_from > 0

    @property
    def complete(self) -> bool:
        """Whether every page has arrived."""
        return not self.failed and not self._missing

    def wanted(self, item: LoadItem) -> bool:
        """Whether the page is still of use: the sequence lives and has computed none of it meanwhile."""
        return not self.cancelled and not (item.page.group == GLOBAL and item.page.index < self.floor)

    def next_item(self) -> LoadItem | None:
        """The next page worth fetching; global pages that the sequence computes meanwhile are passed over."""
        while self.todo:
            item = self.todo.popleft()
            if self.wanted(item):
                return item
            self._pass(item)
        return None

    def arrive(self, item: LoadItem, tier: str) -> None:
        """The page is in its device slot (a prefetch: in host memory); it was in `tier`."""
        self._settle(item)
        self.here.add((item.page.group, item.page.index))
        self.arrived[tier] += item.page.group == GLOBAL
        self._windows -= item.page.group == LOCAL

    def pass_over(self, item: LoadItem) -> None:
        """The page came when it was not `wanted` any more."""
        self.in_flight -= 1
        self._pass(item)

    def _pass(self, item: LoadItem) -> None:
        self._missing.pop(item.page.name)
        self._unread.pop(item.page.name, None)
        if item.page.group == GLOBAL:
            self._passed = max(self._passed, item.page.index + 1)

    def fail(self, item: LoadItem) -> None:
        """A page cannot be had. A global one is computed by the sequence, with all before it; without a local one of
        the window there is no place to jump to."""
        self._settle(item)
        if item.page.group == LOCAL:
            self.broken = True
        else:
            self._failed_from = max(self._failed_from, item.page.index + 1)

    def ask(self, item: LoadItem, *, read: bool) -> None:
        """The page is on its way; to be `read` from disk if it is not in host memory."""
        self.in_flight += 1
        if read:
            self.reading += 1
            self.to_read([item])

    def ask_again(self, item: LoadItem, wrong: int) -> None:
        """There was no room to bring the page just now; its bytes were not its own so many times."""
        self.in_flight -= 1
        self.todo.appendleft(replace(item, wrong=wrong))

    def _settle(self, item: LoadItem) -> None:
        self.in_flight -= 1
        self._missing.pop(item.page.name)
        self._unread.pop(item.page.name, None)

    def cancel(self) -> None:
        """The sequence does not want it any more; what is in flight will be dropped on arrival."""
        self.cancelled = True
        self.todo.clear()
