"""What room in full memory costs: Python calls, counted, in memories of several sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from wicore_trt.kv.memory import SharedMemory
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.policy import LRUPolicy
from wicore_trt.kv.pool import PagePool
from wicore_trt.kv.slabs import Slabs
from wicore_trt.model.spec import GLOBAL, LOCAL

SLAB = {GLOBAL: 5, LOCAL: 4}


class Full:
    """Memory of `count` slabs, all of global pages; slot n is page n % 5 of slab n // 5."""

    def __init__(self, count: int) -> None:
        self.slabs = Slabs(count, SLAB)
        policy = LRUPolicy(count * SLAB[GLOBAL])
        self.pools = {
            group: PagePool(count * size, 1, policy if group == GLOBAL else None, slabs=self.slabs, group=group)
            for group, size in SLAB.items()
        }
        self.memory = SharedMemory(self.slabs, self.pools, policy, lambda pages: max(0, pages - 2))
        found = self.memory.allocate_slots({GLOBAL: count * SLAB[GLOBAL]})
        assert found is not None
        self.slots = found[GLOBAL]

    def let_go(self, chosen: Callable[[int, int], bool], *, cached: bool) -> None:
        """Release pages by (slab, place in it), to be cached or free."""
        pool = self.pools[GLOBAL]
        slots = [slot for slot in self.slots if chosen(*divmod(slot, SLAB[GLOBAL]))]
        if cached:
            for slot in slots:
                pool.write_tokens(slot, 0, 1)
                pool.publish_slots([slot], [Page(slot.to_bytes(8, "big"), GLOBAL, 0, None, b"")])
        pool.release_slots(slots)

    def calls(self, need: dict[str, int]) -> int:
        """Function calls that an allocation takes."""
        count = 0

        def called(frame: object, event: str, what: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(called)
        try:
            found = self.memory.allocate_slots(need)
        finally:
            sys.setprofile(None)
        assert found is not None and {group: len(slots) for group, slots in found.items()} == need
        self.memory.check_integrity()
        return count


def page_of_each(count: int) -> int:
    """One slab has no used page, and both groups want it: the cached pages beside used ones must do."""
    full = Full(count)
    full.let_go(lambda slab, place: slab == 0 or place > 0, cached=True)
    return full.calls({GLOBAL: 1, LOCAL: 1})


def all_that_is_left(count: int) -> int:
    """Most slabs have a free slot, and the cached pages are in the last ones: per page, and a chunk for the rest."""
    full = Full(count)
    full.let_go(lambda slab, place: slab < 2, cached=True)
    full.let_go(lambda slab, place: 2 <= slab < count - 6 and place == 4, cached=False)
    full.let_go(lambda slab, place: slab >= count - 6 and place > 0, cached=True)
    return full.calls({GLOBAL: full.slabs.free_slots(GLOBAL) + 8, LOCAL: 1}) // count


@pytest.mark.parametrize("case", [page_of_each, all_that_is_left])
def test_room_in_full_memory_costs_no_more_where_memory_is_larger(case):
    assert case(800) <= 1.5 * case(50)
