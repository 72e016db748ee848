"""Write policies: they decide when pages are copied from the device to the host.

"through": when a page is full. "selective": when a second request uses it. "back": coldest first, once more than
DEVICE_THRESHOLD of a pool's pages are in use or on the device alone; at the latest at eviction. It must not know tokens
or windows. Invariant (I3): a slot in `unsaved` holds a published page that no lower tier was given. A slot in `due`
holds a published, trusted page: a step with finite logits has read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Literal

from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.pool import PagePool
from wicore_trt.kv.tiers.tiers import HYSTERESIS, LowerTiers

WritePolicy = Literal["through", "selective", "back"]

DEVICE_THRESHOLD = 0.85
"""Share of a pool's pages from which on the policy "back" copies."""
COPIES_AT_ONCE = 64
"""Copies begun beside a step that is short."""
TOKENS_A_COPY = 16
"""A step may make one more copy for so many of its tokens: two for each page, so that what is due does not grow."""


class CopyDown:
    """Copies from `pools` to `tiers`; without tiers it does nothing. `due` are the pages, by group and slot, whose
    copies begin beside a step. `unsaved` are the slots, by group, of published pages that no lower tier was given.
    `kept` are the others, only used by requests whose pages stay on the device."""

    def __init__(self, pools: Mapping[str, PagePool], tiers: LowerTiers | None, policy: WritePolicy) -> None:
        self.due: dict[tuple[str, int], None] = {}
        self._pools = pools
        self._tiers = tiers
        self._policy = policy
        self.unsaved: dict[str, set[int]] = {group: set() for group in pools}
        self.kept: dict[str, set[int]] = {group: set() for group in pools}
        if tiers is not None:
            tiers.store_again = self._copy_raw

    def request_copy(self, group: str, slot: int, policy: WritePolicy) -> None:
        """Copy a page soon if it is trusted and `policy` is the write policy."""
        if policy == self._policy and self._tiers is not None:
            pool = self._pools[group]
            if pool.page_of[slot] is not None and pool.trusted[slot]:
                self.due[group, slot] = None

    def release_kept(self, group: str, slot: int) -> None:
        """Let a page go down that a request uses whose pages may: it is in that request's prompt, too."""
        if slot in self.kept[group]:
            self.kept[group].remove(slot)
            self.unsaved[group].add(slot)

    def copy_evicted(self, group: str, page: Page, slot: int) -> None:
        """Copy a cached page that is about to lose its slot, if it is due or the policy left it to this moment."""
        last_chance = (group, slot) in self.due or (self._policy == "back" and slot in self.unsaved[group])
        if self._tiers is not None and last_chance and self._pools[group].trusted[slot]:
            self._tiers.down.store_page(page, slot)
        self.forget_slot(group, slot)

    def forget_slot(self, group: str, slot: int) -> None:
        """Note that a slot holds no published page any more, or that its copy begins."""
        self.unsaved[group].discard(slot)
        self.kept[group].discard(slot)
        self.due.pop((group, slot), None)

    def begin_copies(self, tokens: int = 0, *, all_due: bool = False) -> None:
        """Begin due copies beside a step of `tokens`; with the policy "back", also get below the threshold."""
        if self._tiers is None:
            return
        for group, slot in list(islice(self.due, None if all_due else COPIES_AT_ONCE + tokens // TOKENS_A_COPY)):
            self._begin_copy(group, slot)
        for group, pool in self._pools.items() if self._policy == "back" and not all_due else ():
            unsaved = self.unsaved[group]
            surplus = pool.used_slots + len(unsaved) - DEVICE_THRESHOLD * pool.num_pages
            count = min(pool.cached_slots, int(surplus + HYSTERESIS * pool.num_pages) + 1)
            for slot in pool.list_coldest(count) if surplus > 0 and unsaved else ():
                if slot in unsaved and pool.trusted[slot]:
                    self._begin_copy(group, slot)

    def _begin_copy(self, group: str, slot: int) -> None:
        page = self._pools[group].page_of[slot]
        assert self._tiers is not None and page is not None
        self.forget_slot(group, slot)
        self._tiers.down.store_page(page, slot)

    def _copy_raw(self, page: Page) -> bool:
        """Copy a page again that turned out to have no code. False: its slot is another's, or there is no room."""
        pool = self._pools[page.group]
        slot = pool.find_slot(page.key)
        if slot is None or not pool.trusted[slot] or self._tiers is None:
            return False
        return self._tiers.down.store_page(page, slot, raw=True) is not None

    def check_integrity(self) -> None:
        for group, slots in self.unsaved.items():
            assert all(self._pools[group].page_of[slot] is not None for slot in slots), "an unsaved slot has no page"
            assert slots.isdisjoint(self.kept[group]), "a page that stays on the device may go down"
        for group, slot in self.due:
            pool = self._pools[group]
            assert pool.page_of[slot] is not None and pool.trusted[slot], "a page is due that must not go (I3)"
