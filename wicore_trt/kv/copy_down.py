"""When pages of the device are copied to the host: the write policies.

"through": when a page is finished. "selective": when a second request uses it. "back": when more than `threshold` of a
pool's pages are in use or exist on the device alone, the coldest first, and at the latest when the page is evicted. It
must not know tokens or windows. Invariant: a slot in `_unsaved` holds a published page that no lower tier was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from wicore_trt.kv.page import Page
from wicore_trt.kv.pool import PagePool
from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.kv.tiers import HYSTERESIS, LowerTiers
from wicore_trt.types import CachePriority

WritePolicy = Literal["through", "selective", "back"]


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

    def published(self, group: str, slot: int) -> None:
        """A page became findable that no lower tier has."""
        if self._tiers is not None:
            self._unsaved[group].add(slot)

    def finished(self, pages: SequencePages, group: str, index: int) -> None:
        """A published page that later requests may want."""
        if self._policy == "through":
            self._copy(pages, group, index)

    def used_again(self, pages: SequencePages, group: str, indices: Iterable[int]) -> None:
        """A second request uses these pages."""
        if self._policy == "selective":
            for index in indices:
                self._copy(pages, group, index)

    def evicted(self, group: str, page: Page, slot: int) -> None:
        """A cached page is about to lose its slot."""
        if self._tiers is not None and self._policy == "back" and slot in self._unsaved[group]:
            self._tiers.store(page, slot)
        self.forget(group, slot)

    def forget(self, group: str, slot: int) -> None:
        """A slot holds no published page any more."""
        self._unsaved[group].discard(slot)

    def cleared(self, group: str) -> None:
        """All cached pages of a pool went."""
        self._unsaved[group] = {slot for slot in self._unsaved[group] if self._pools[group].page(slot) is not None}

    def relieve(self) -> None:
        """Between steps: below the threshold again, if the policy is "back"."""
        if self._tiers is None or self._policy != "back":
            return
        for group, pool in self._pools.items():
            unsaved = self._unsaved[group]
            surplus = pool.used + len(unsaved) - self._threshold * pool.num_pages
            if surplus <= 0 or not unsaved:
                continue
            for slot in pool.coldest(min(pool.cached, int(surplus + HYSTERESIS * pool.num_pages) + 1)):
                page = pool.page(slot)
                if slot in unsaved and page is not None:
                    unsaved.discard(slot)
                    self._tiers.store(page, slot)

    def _copy(self, pages: SequencePages, group: str, index: int) -> None:
        slot = pages.tables[group][index]
        if self._tiers is not None and slot >= 0 and pages.hints.priority is not CachePriority.LOW:
            self._unsaved[group].discard(slot)
            self._tiers.store(pages.page(group, index), slot)

    def check_integrity(self) -> None:
        """Assert the invariant of this module."""
        for group, slots in self._unsaved.items():
            assert all(self._pools[group].page(slot) is not None for slot in slots), "an unsaved slot has no page"
