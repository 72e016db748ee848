"""Parking: the pages of a preempted sequence wait in host memory until it has slots again.

It must not know steps or queues. Invariants: the host copies of a parked sequence are held from `park_sequence` until
they are released, and others find none that only this sequence can use; full pages alone leave the device, since behind
the tokens of others lie bytes of whoever had the slot before.
"""

from __future__ import annotations

import secrets

from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.sequence_pages import ParkedPages, SequencePages
from wicore_trt.kv.tiers.load import LoadItem, PrefixLoad
from wicore_trt.kv.tiers.tiers import LowerTiers
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import CachePriority, CacheStore


class Parking:
    """Parking of sequences; `parked` and `resumed` count them."""

    def __init__(self, manager: KVCacheManager, tiers: LowerTiers) -> None:
        self.parked = self.resumed = 0
        self._manager = manager
        self._tiers = tiers

    def park_sequence(self, pages: SequencePages, computed: int) -> bool:
        """Keep the full pages of a sequence to be preempted in host memory. False, and no change, unless any may leave
        and all fit."""
        manager, size = self._manager, self._manager.page_tokens
        full = pages.find_start(computed // size)
        if not full or manager.first_visible_page(full * size) < pages.first_local:
            return False
        if pages.hints.store is not CacheStore.ALL:
            return False
        parked = ParkedPages(full * size)
        trusted, secret = min(pages.trusted, full), secrets.token_bytes(24)
        low = pages.hints.priority is CachePriority.LOW  # its pages go to no tier under a name that others find
        for group, pool in manager.pools.items():
            held = parked.pages[group] = {}
            for i in range(manager.first_visible_page(parked.tokens) if group == LOCAL else 0, full):
                slot = pages.tables[group][i]
                if i < trusted and pool.page_of[slot] is not None and not low:
                    held[i] = pages.make_page(group, i)
                else:
                    held[i] = Page(secret + i.to_bytes(8, "little"), group, i, None, pages.names.tag)
                    parked.private.add((group, i))
                copy = self._tiers.down.store_page(held[i], slot, private=(group, i) in parked.private)
                if copy is not None:
                    parked.copies.append(copy)
        pages.parked = parked
        if len(parked.copies) < sum(map(len, parked.pages.values())) or not self._tiers.pin_copies(parked.copies):
            parked.copies = []
            self.release_parked(pages)
            return False
        parked.expected = pages.keys[:full]
        manager.expect_pages(parked.expected)
        self.parked += 1
        return True

    def release_parked(self, pages: SequencePages) -> None:
        """Release the host copies of a parked sequence; private ones leave at once."""
        parked = pages.parked
        if parked is None:
            return
        self._manager.stop_expecting(parked.expected)
        self._tiers.host.release_copies(parked.copies)
        for group, i in parked.private:
            self._tiers.drop_private(parked.pages[group][i])
        pages.parked = None

    def resume_sequence(self, pages: SequencePages) -> bool:
        """Begin to load a parked sequence to the device. False, and no change, when there is no room."""
        parked, manager = pages.parked, self._manager
        assert parked is not None
        slots: dict[str, dict[int, int]] = {}
        items: list[LoadItem] = []
        here: dict[str, list[int]] = {}
        for group, pool in manager.pools.items():
            held = {i: s for i in parked.pages[group] if (s := pool.find_slot(pages.keys[i])) is not None}
            pool.acquire_slots(held.values())
            slots[group] = held
            here[group] = list(held)
        lacking = {group: [i for i in parked.pages[group] if i not in held] for group, held in slots.items()}
        fresh = manager.memory.allocate_slots({group: len(indices) for group, indices in lacking.items()})
        if fresh is None:
            for name, taken in slots.items():
                manager.pools[name].release_slots(taken.values())
            return False
        for group, indices in lacking.items():
            slots[group].update(zip(indices, fresh[group], strict=True))
            items += [LoadItem(parked.pages[group][i], slots[group][i]) for i in indices]
        window = [slots[LOCAL][i] for i in sorted(slots[LOCAL])] if LOCAL in slots else []
        first = manager.first_visible_page(parked.tokens)
        if GLOBAL in slots:
            pages.extend_table(GLOBAL, (slots[GLOBAL][i] for i in sorted(slots[GLOBAL])))
        pages.load = PrefixLoad(
            parked.tokens, manager.count_pages(parked.tokens), items, window_first=first, window=window, here=here
        )
        pages.load.failures = manager.failures
        self._tiers.loads.begin_load(pages.load)
        self.resumed += 1
        return True
