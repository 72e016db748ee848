"""When pages of the device are copied to the host: the write policies.

"through": when a page is finished. "selective": when a second request uses it. "back": when more than `threshold` of a
pool's pages are in use or exist on the device alone, the coldest first, and at the latest when the page is evicted.
Whatever the policy, only trusted pages are copied: those that a step with finite logits has read, so that what a
broken step wrote stays on the device. A page that is to be copied is due until `relieve`, which the engine calls while
a step runs: between steps the device has nothing to do. It must not know tokens or windows. Invariant: a slot in
`_unsaved` holds a published page that no lower tier was given, and a slot in `_due` a published page that is trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Literal

from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.pool import PagePool
from wicore_trt.kv.tiers.tiers import HYSTERESIS, LowerTiers

WritePolicy = Literal["through", "selective", "back"]

COPIES_AT_ONCE = 64
"""Copies begun beside a step that is short."""
TOKENS_A_COPY = 16
"""One copy more for so many tokens of the step, which take the device longer than a copy's books take the engine's
thread. Two for the tokens of a page, so that what is due does not grow."""


class CopyDown:
    """Copies from `pools` to `tiers`; without tiers it does nothing."""

    def __init__(
        self, pools: Mapping[str, PagePool], tiers: LowerTiers | None, policy: WritePolicy, threshold: float
    ) -> None:
        self._pools = pools
        self._tiers = tiers
        self._policy = policy
        self._threshold = threshold
        self._unsaved: dict[str, set[int]] = {group: set() for group in pools}
        self._due: dict[tuple[str, int], None] = {}

    def published(self, group: str, slots: Iterable[int]) -> None:
        """Pages became findable that no lower tier has."""
        if self._tiers is not None:
            self._unsaved[group].update(slots)

    def saved(self, group: str, slot: int) -> bool:
        """Whether a lower tier was given this page."""
        return slot not in self._unsaved[group]

    def finished(self, group: str, slot: int) -> None:
        """A trusted page that later requests may want."""
        if self._policy == "through":
            self._copy_soon(group, slot)

    def used_again(self, group: str, slot: int) -> None:
        """A second request uses this trusted page."""
        if self._policy == "selective":
            self._copy_soon(group, slot)

    def evicted(self, group: str, page: Page, slot: int) -> None:
        """A cached page is about to lose its slot."""
        last_chance = (group, slot) in self._due or (self._policy == "back" and slot in self._unsaved[group])
        if self._tiers is not None and last_chance and self._pools[group].trusted(slot):
            self._tiers.down.store_page(page, slot)
        self.forget(group, slot)

    def forget(self, group: str, slot: int) -> None:
        """A slot holds no published page any more."""
        self._unsaved[group].discard(slot)
        self._due.pop((group, slot), None)

    def cleared(self, group: str) -> None:
        """All cached pages of a pool went."""
        pool = self._pools[group]
        gone = [slot for slot in self._unsaved[group] if pool.page(slot) is None]
        gone += [slot for name, slot in self._due if name == group and pool.page(slot) is None]
        for slot in gone:
            self.forget(group, slot)

    def relieve(self, tokens: int = 0) -> None:
        """Beside a step of so many tokens: begin copies that are due, and be below the threshold again if the policy is
        "back"."""
        if self._tiers is None:
            return
        self.begin_due(COPIES_AT_ONCE + tokens // TOKENS_A_COPY)
        if self._policy == "back":
            for group, pool in self._pools.items():
                self._relieve(group, pool)

    @property
    def due(self) -> bool:
        """Whether copies are due that have not begun."""
        return bool(self._due)

    def begin_due(self, count: int | None = None) -> None:
        """Begin copies that are due, `count` at most."""
        for group, slot in list(islice(self._due, count)):
            self._copy(group, slot)

    def _relieve(self, group: str, pool: PagePool) -> None:
        unsaved = self._unsaved[group]
        surplus = pool.used + len(unsaved) - self._threshold * pool.num_pages
        if surplus <= 0 or not unsaved:
            return
        for slot in pool.coldest(min(pool.cached, int(surplus + HYSTERESIS * pool.num_pages) + 1)):
            if slot in unsaved and pool.trusted(slot):
                self._copy(group, slot)

    def _copy_soon(self, group: str, slot: int) -> None:
        pool = self._pools[group]
        if self._tiers is not None and pool.page(slot) is not None and pool.trusted(slot):
            self._due[group, slot] = None

    def _copy(self, group: str, slot: int) -> None:
        """Copy a trusted page to the host."""
        page = self._pools[group].page(slot)
        assert self._tiers is not None and page is not None
        self.forget(group, slot)
        self._tiers.down.store_page(page, slot)

    def check_integrity(self) -> None:
        """Assert the invariant of this module."""
        for group, slots in self._unsaved.items():
            assert all(self._pools[group].page(slot) is not None for slot in slots), "an unsaved slot has no page"
        for group, slot in self._due:
            pool = self._pools[group]
            assert pool.page(slot) is not None and pool.trusted(slot), "a page is due that must not go"
