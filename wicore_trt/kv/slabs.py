"""Slabs: parts of the device memory for KV pages, each owned by one layer group at a time.

A slab holds a whole number of pages of any group. Page n of a group always lies at n times its page size from the
common base, so in slab n // pages[group]. A slab changes groups when none of its pages is used or cached. It must not
know keys or the order of eviction. Invariant (I8) (`check_integrity`): no byte is in two pages that are not free, and
`free_room` says exactly what `take_slots` can give once all cached pages left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from wicore_trt.arithmetic import div_ceil


class Slabs:
    """Slabs, `count` of them; `pages[group]` pages of a group fill one. A pool of its own is one slab. A slab is the
    least common multiple of the page sizes, so no byte is wasted at its end. Gemma 3's pages of 32 tokens in bfloat16
    make slabs of 0.5 (270M) to 65 MiB (27B). One group's pages can keep a slab that the other wants: at most a slab
    less one page for each slab in use."""

    def __init__(self, count: int, pages: Mapping[str, int]) -> None:
        self.count = count
        self.pages = dict(pages)
        self.changes = 0
        """Slabs that went from one group to another."""
        self._owner: list[str | None] = [None] * count
        self._before: list[str | None] = [None] * count
        self._used = [0] * count
        self._free: list[list[int]] = [[] for _ in range(count)]
        self._empty = list(range(count - 1, -1, -1))
        self._owned = dict.fromkeys(pages, 0)
        self._pinned = dict.fromkeys(pages, 0)
        self.used_slots = dict.fromkeys(pages, 0)
        self._loose = dict.fromkeys(pages, 0)
        self.beside = dict.fromkeys(pages, 0)
        """Free slots that are in slabs in use."""
        self._idle: dict[str, dict[int, None]] = {group: {} for group in pages}  # slabs of a group without a used page
        # Slabs with free slots, by whether a page of theirs is used.
        self._partial: dict[str, tuple[OrderedDict[int, None], OrderedDict[int, None]]] = {
            group: (OrderedDict(), OrderedDict()) for group in pages
        }

    # --- what there is -------------------------------------------------------------------------------------------

    def count_slots(self, group: str) -> int:
        """Count the slots of the slabs that a group has or that nobody has."""
        return self.pages[group] * (self._owned[group] + len(self._empty))

    def free_slots(self, group: str) -> int:
        """Count the slots that `take_slots` can give at once, if it may use any slab."""
        return self._loose[group] + self.pages[group] * len(self._empty)

    @property
    def unused_slabs(self) -> int:
        """Slabs without a used page."""
        return self.count - sum(self._pinned.values())

    @property
    def free_room(self) -> list[int]:
        """Slabs without a used page, and by group the slots of slabs in use that are free or cached."""
        return [self.unused_slabs, *(self.pages[g] * self._pinned[g] - self.used_slots[g] for g in self.pages)]

    def available_slots(self, group: str) -> int:
        """Count the slots that a group alone could have when all cached pages leave."""
        return self.pages[group] * (self.unused_slabs + self._pinned[group]) - self.used_slots[group]

    def needed_slabs(self, need: Mapping[str, int]) -> int:
        """Count the slabs without a used page that so many more slots of each group take at least."""
        slabs = 0
        for group, count in need.items():
            beside = self.pages[group] * self._pinned[group] - self.used_slots[group]
            slabs += div_ceil(max(0, count - beside), self.pages[group])
        return slabs

    def can_take(self, need: Mapping[str, int]) -> bool:
        """Say whether all groups can have so many more slots at the same time."""
        return self.needed_slabs(need) <= self.unused_slabs

    def would_pin(self, group: str, count: int) -> int:
        """Count the slabs without a used page that `take_slots` would use."""
        left, slabs = count - self.beside[group], 0
        for slab in self._partial[group][0]:
            if left <= 0:
                break
            left -= len(self._free[slab])
            slabs += 1
        return slabs + div_ceil(max(0, left), self.pages[group])

    def in_use(self, group: str, slot: int) -> bool:
        """Say whether a slot of a group lies in a slab in use."""
        return self._used[slot // self.pages[group]] > 0

    def idle_slots(self, group: str) -> list[int]:
        """List the cached slots of a group's slabs without a used page, slab by slab."""
        size = self.pages[group]
        return [
            slot
            for slab in self._idle[group]
            for slot in sorted(set(range(slab * size, (slab + 1) * size)).difference(self._free[slab]))
        ]

    # --- changes -------------------------------------------------------------------------------------------------

    def take_slots(self, group: str, count: int) -> list[int]:
        """Take `count` <= `free_slots` slots: of slabs in use first, then of cached ones, then of ownerless ones."""
        taken: list[int] = []
        unpinned, pinned = self._partial[group]
        while len(taken) < count:
            if pinned:
                slab = next(iter(pinned))
            elif unpinned:
                slab = next(iter(unpinned))
            else:
                slab = self._take_slab(group)
            free = self._free[slab]
            some = min(len(free), count - len(taken))
            if not self._used[slab]:
                self._enter_use(group, slab)
            taken += reversed(free[-some:])
            del free[-some:]
            self._loose[group] -= some
            self.beside[group] -= some
            self.used_slots[group] += some
            if not self._used[slab]:
                del unpinned[slab]
                if free:
                    pinned[slab] = None
            elif not free:
                del pinned[slab]
            self._used[slab] += some
        return taken

    def pin_slot(self, group: str, slot: int) -> None:
        """Note that a cached slot is used."""
        slab = slot // self.pages[group]
        if not self._used[slab]:
            self._enter_use(group, slab)
            self._move_partial(group, slab, 0)
        self._used[slab] += 1
        self.used_slots[group] += 1

    def unpin_slot(self, group: str, slot: int) -> None:
        """Note that a used slot is cached."""
        slab = slot // self.pages[group]
        self._used[slab] -= 1
        self.used_slots[group] -= 1
        if not self._used[slab]:
            self._pinned[group] -= 1
            self._idle[group][slab] = None
            self.beside[group] -= len(self._free[slab])
            self._move_partial(group, slab, 1)

    def return_slot(self, group: str, slot: int) -> None:
        """Take back a cached slot; a slab whose slots are all free has no owner then."""
        slab = slot // self.pages[group]
        free = self._free[slab]
        free.append(slot)
        self._loose[group] += 1
        self.beside[group] += self._used[slab] > 0
        at = self._partial[group][self._used[slab] > 0]
        at[slab] = None
        if len(free) == self.pages[group]:
            del at[slab]
            self._loose[group] -= len(free)
            self._owned[group] -= 1
            del self._idle[group][slab]
            self._owner[slab], self._before[slab] = None, group
            self._empty.append(slab)

    def _enter_use(self, group: str, slab: int) -> None:
        self._pinned[group] += 1
        self.beside[group] += len(self._free[slab])
        del self._idle[group][slab]

    def _move_partial(self, group: str, slab: int, place: int) -> None:
        partial = self._partial[group]
        if slab in partial[place]:
            del partial[place][slab]
            partial[1 - place][slab] = None

    def _take_slab(self, group: str) -> int:
        slab, size = self._empty.pop(), self.pages[group]
        if self._before[slab] != group:
            self.changes += self._before[slab] is not None
            self._free[slab] = list(range((slab + 1) * size - 1, slab * size - 1, -1))
        self._owner[slab] = group
        self._owned[group] += 1
        self._loose[group] += size
        self._idle[group][slab] = None
        self._partial[group][0][slab] = None
        return slab

    # --- the invariant -------------------------------------------------------------------------------------------

    def check_integrity(self, states: Mapping[str, tuple[set[int], set[int]]]) -> None:
        """Assert the invariant; `states[group]` are the used and the cached slots of a group."""
        assert sorted(self._empty) == [s for s, owner in enumerate(self._owner) if owner is None], "a slab is lost"
        for group, size in self.pages.items():
            used, cached = states[group]
            mine = [slab for slab, owner in enumerate(self._owner) if owner == group]
            free = [slot for slab in mine for slot in self._free[slab]]
            assert len(free) == len(set(free)) == self._loose[group], "a slot is free twice (I8)"
            assert not (set(free) & used or set(free) & cached or used & cached), "a slot is in two states (I8)"
            assert set(free) | used | cached == {slot for s in mine for slot in range(s * size, s * size + size)}, (
                "a slot is lost, or in a slab of others"
            )
            assert all(self._used[s] == sum(slot // size == s for slot in used) for s in mine), "pages are miscounted"
            assert self.used_slots[group] == len(used) and self._owned[group] == len(mine), "slots are miscounted"
            pinned = {slot // size for slot in used}
            assert self._pinned[group] == len(pinned), "slabs in use are miscounted"
            assert set(self._idle[group]) == set(mine) - pinned, "a slab without a used page is lost"
            assert self.beside[group] == sum(slot // size in pinned for slot in free), "free slots are miscounted"
            for place, slabs in enumerate(self._partial[group]):
                assert set(slabs) == {s for s in mine if self._free[s] and (self._used[s] > 0) == place}, "not found"
