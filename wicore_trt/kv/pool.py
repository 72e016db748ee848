"""The device pool of one layer group: which page slots are free, used or cached.

Bookkeeping only: slots are integers and keys are bytes; the tensors live in the executor. It must not know requests
or other groups. Invariant (`check_integrity`): every slot is in exactly one of three states, free (no references, no
key), used (references > 0) or cached (no references, indexed under its key), and the index names each key once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class PagePool:
    """Slots 0..num_pages-1 of one layer group with reference counts and a key index.

    Cached slots are taken back least recently released first. A sequence releases its pages tail first, so that
    the pages of a chain leave before their parents and what is left stays reachable.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.evictions = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._key_of: list[bytes | None] = [None] * num_pages
        self._slot_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Slots that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.num_pages - self.available

    def find(self, key: bytes) -> int | None:
        """Slot that holds the page named `key`, or None."""
        return self._slot_of.get(key)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots with one reference each, or None and no change when there are not enough."""
        if count > self.available:
            return None
        slots = []
        for _ in range(count):
            slot = self._free.pop() if self._free else self._evict()
            self._references[slot] = 1
            slots.append(slot)
        return slots

    def acquire(self, slot: int) -> None:
        """Add a reference to a used or cached slot."""
        if self._references[slot] == 0:
            del self._cached[slot]
        self._references[slot] += 1

    def publish(self, slot: int, key: bytes) -> None:
        """Make a used, fully written slot findable. If the key is already held elsewhere, nothing changes."""
        assert self._references[slot] > 0, "only a used page can be published"
        if key not in self._slot_of and self._key_of[slot] is None:
            self._slot_of[key] = slot
            self._key_of[slot] = key

    def release(self, slots: Iterable[int], *, keep: bool = True) -> None:
        """Drop one reference of each slot, in order. A slot nobody uses becomes cached if it was published and
        `keep` is set, else free. Callers pass a chain's tail first."""
        for slot in slots:
            assert self._references[slot] > 0, f"slot {slot} released twice"
            self._references[slot] -= 1
            if self._references[slot]:
                continue
            if keep and self._key_of[slot] is not None:
                self._cached[slot] = None
            else:
                self._forget(slot)
                self._free.append(slot)

    def clear(self) -> int:
        """Free every cached slot; returns how many."""
        count = len(self._cached)
        while self._cached:
            self._free.append(self._evict())
        return count

    def _evict(self) -> int:
        slot, _ = self._cached.popitem(last=False)
        self._forget(slot)
        self.evictions += 1
        return slot

    def _forget(self, slot: int) -> None:
        key = self._key_of[slot]
        if key is not None:
            del self._slot_of[key]
            self._key_of[slot] = None

    def check_integrity(self) -> None:
        """Assert the invariant of this module."""
        free, cached = set(self._free), set(self._cached)
        used = {slot for slot, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a slot is free twice"
        assert not (free & cached or free & used or cached & used), "a slot is in two states"
        assert len(free) + len(cached) + len(used) == self.num_pages, "a slot is lost"
        assert all(self._key_of[slot] is None for slot in free), "a free slot has a key"
        assert all(self._key_of[slot] is not None for slot in cached), "a cached slot has no key"
        assert all(self._key_of[slot] == key for key, slot in self._slot_of.items()), "the index is wrong"
        assert len(self._slot_of) == sum(key is not None for key in self._key_of), "a key is indexed twice"
