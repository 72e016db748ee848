"""A prefix on its way from the host or disk to the device, for one sequence.

Pages of the local window at the end come first, then global pages from the back to the front; so what has arrived is
always a suffix of the prefix, and the sequence may compute from the front at the same time until the two meet. Plain
data: slots, page indices and names. Invariant: a sequence jumps over the loaded part only when every local page of
the window and every global page from the meeting point on has arrived.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from wicore_trt.kv.page import Page


@dataclass(frozen=True, slots=True)
class LoadItem:
    """One page to fetch and its device slot; a slot of -1 stops at the host (a prefetch)."""

    page: Page
    slot: int


class PrefixLoad:
    """`tokens` is where the sequence goes on when all has arrived; `stop` its page count. `window` are the device
    slots of local pages [window_first, stop). `chain_group` is the group that the sequence can compute from the front
    while pages arrive. Pages below `floor` are no longer wanted."""

    def __init__(
        self,
        tokens: int,
        stop: int,
        items: Iterable[LoadItem],
        *,
        window_first: int = 0,
        window: Iterable[int] = (),
        chain_group: str = "global",
    ) -> None:
        self.tokens = tokens
        self.stop = stop
        self.window_first = window_first
        self.window = list(window)
        self.floor = 0
        self.todo = deque(items)
        self.in_flight = 0
        self.arrived: Counter[str] = Counter()
        """Chain pages that arrived, by the tier they were in; those that the device had count as well."""
        self.cancelled = False
        self.broken = False
        self._chain = chain_group
        self._missing = {item.page.name: item.page.index for item in self.todo}
        self._windows = sum(item.page.group != chain_group for item in self.todo)
        self._failed_from = 0

    @property
    def finished(self) -> bool:
        """Nothing more will arrive."""
        return self.cancelled or (not self.in_flight and not self.todo)

    def meeting_page(self) -> int:
        """The sequence must compute the pages before this one; from here to `stop` all global pages are there."""
        waiting = [index for (group, _), index in self._missing.items() if group == self._chain]
        return max([self._failed_from, *(index + 1 for index in waiting)], default=0)

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

    def next_item(self) -> LoadItem | None:
        """The next page worth fetching; global pages that the sequence has computed meanwhile are passed over."""
        while self.todo:
            item = self.todo.popleft()
            if item.page.group == self._chain and item.page.index < self.floor:
                self._missing.pop(item.page.name)
                continue
            return item
        return None

    def arrive(self, item: LoadItem, tier: str) -> None:
        self.in_flight -= 1
        self.arrived[tier] += item.page.group == self._chain
        self._missing.pop(item.page.name)
        self._windows -= item.page.group != self._chain

    def fail(self, item: LoadItem) -> None:
        """A page cannot be had. A global one is computed by the sequence, with all before it; without a local one of
        the window there is no place to jump to."""
        self.in_flight -= 1
        self._missing.pop(item.page.name)
        if item.page.group != self._chain:
            self.broken = True
        else:
            self._failed_from = max(self._failed_from, item.page.index + 1)

    def cancel(self) -> None:
        """The sequence does not want it any more; what is in flight will be dropped on arrival."""
        self.cancelled = True
        self.todo.clear()
