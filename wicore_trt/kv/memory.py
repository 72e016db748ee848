"""Memory of the pools of all layer groups: it allots slots and evicts cached pages for them.

`Memory` is pools that share nothing; `SharedMemory` is one memory for both groups. Must not know sequences or tiers.
Invariant (I8): `allocate_slots` gives all groups what they ask for or changes nothing; all that is unused can be had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, islice

from wicore_trt.arithmetic import least_slabs
from wicore_trt.kv.policy.policy import ChainPolicy
from wicore_trt.kv.pool import PagePool
from wicore_trt.kv.slabs import Slabs
from wicore_trt.model.spec import GLOBAL, LOCAL


class Memory:
    """Pools that share nothing."""

    def __init__(self, pools: Mapping[str, PagePool]) -> None:
        self._pools = pools

    @property
    def free_counts(self) -> list[int]:
        """Slots that the pools could give. While none of them grows, nothing fits that did not fit before."""
        return [pool.available_slots for pool in self._pools.values()]

    def holds_alone(self, whole: int, local: int, window: int) -> bool:
        """Say whether a lone sequence always fits: `whole` global, at most `local` local pages, `window` for long."""
        need = {GLOBAL: whole, LOCAL: local}
        return all(need[group] <= pool.num_pages for group, pool in self._pools.items())

    def can_allocate(self, need: Mapping[str, int]) -> bool:
        """Say whether all groups can have so many slots at the same time."""
        return all(count <= self._pools[group].available_slots for group, count in need.items())

    def allocate_slots(self, need: Mapping[str, int]) -> dict[str, list[int]] | None:
        """Take so many slots of each group, or return None and change nothing."""
        if not self.can_allocate(need):
            return None
        return {group: self._pools[group].allocate_slots(count) or [] for group, count in need.items()}

    def evict_all(self) -> bool:
        """Evict all cached pages, when a lone sequence's hit lies in too many slabs. False if nothing changes."""
        return False

    # --- what the pages of a chain are worth ---------------------------------------------------------------------

    def revive_chain(self, keys: list[bytes]) -> None:
        """Note that a request computes this chain."""

    def spare_orphans(self, group: str, slots: Iterable[int]) -> None:
        """Make cached pages spare that nobody can find, of slots that a sequence released."""

    def spare_windows(self, keys: list[bytes], needed: set[int]) -> None:
        """Make local pages of an ended request spare, but not at `needed` indices nor before a branch."""

    def check_integrity(self) -> None:
        for pool in self._pools.values():
            pool.check_integrity()


class SharedMemory(Memory):
    """Memory in which `pools` of both groups share `slabs`.

    `first_of_window(n)` is the first local page that a request sees which starts behind `n` pages. `policy`, of the
    global group, orders conversations. Pages leave from the end of one, both pages of an index together, since either
    is worthless alone. When that breaks the last window in which a request could start, the global pages down to the
    next window are dead: they leave before any other conversation is touched. Spare local pages leave first of all."""

    def __init__(
        self, slabs: Slabs, pools: Mapping[str, PagePool], policy: ChainPolicy, first_of_window: Callable[[int], int]
    ) -> None:
        super().__init__(pools)
        self.slabs = slabs
        self._policy = policy
        self._first_of_window = first_of_window
        self._dead: dict[bytes, None] = {}
        for group, pool in pools.items():
            pool.make_room = partial(self._make_room, group)

    @property
    def free_counts(self) -> list[int]:
        return self.slabs.free_room

    def holds_alone(self, whole: int, local: int, window: int) -> bool:
        pages = self.slabs.pages
        return least_slabs((whole, pages[GLOBAL]), (local, pages[LOCAL]), window) <= self.slabs.count

    def can_allocate(self, need: Mapping[str, int]) -> bool:
        return self.slabs.can_take(need)

    def allocate_slots(self, need: Mapping[str, int]) -> dict[str, list[int]] | None:
        if not self.slabs.can_take(need):
            return None
        slots, rest = dict[str, list[int]](), dict(need)
        for group, count in need.items():
            del rest[group]
            found = self._pools[group].allocate_slots(count, self.slabs.needed_slabs(rest))
            assert found is not None
            slots[group] = found
        return slots

    def revive_chain(self, keys: list[bytes]) -> None:
        if self._dead:
            for key in keys:
                self._dead.pop(key, None)

    def spare_orphans(self, group: str, slots: Iterable[int]) -> None:
        if group == LOCAL:
            local, found = self._pools[LOCAL], self._pools[GLOBAL].find_slot
            for slot in slots:
                page = local.page_of[slot]
                if page is not None and found(page.key) is None:
                    local.make_spare(page.key)  # without its global page it is found by nobody

    def spare_windows(self, keys: list[bytes], needed: set[int]) -> None:
        after = 0  # pages that are before a branch and in reach of it
        for i in range(len(keys) - 1, -1, -1):
            if self._policy.count_children(keys[i]) > 1:
                after = i + 1 - self._first_of_window(i + 1)
            if i not in needed and after <= 0:
                self._pools[LOCAL].make_spare(keys[i])
            after -= 1

    def evict_all(self) -> bool:
        count = 0
        while self._evict_next():
            count += 1
        return count > 0

    def _make_room(self, group: str, count: int, leave: int) -> None:
        """Evict until a group has `count` free slots, with at least `leave` other slabs without a used page."""
        if self.slabs.free_slots(group) < count:
            self._policy.adapt_capacity()
        while self.slabs.free_slots(group) < count:
            if not self._evict_next():
                raise AssertionError("slots were promised that are not there (I8)")
        room = self.slabs.unused_slabs - leave
        if room < count and self.slabs.would_pin(group, count) > room:
            self._close_up(group, count)

    def _close_up(self, group: str, count: int) -> None:
        """Pack `count` slots into as few more slabs as possible, at any price, as memory is short. It looks at `count`
        pages and at those of slabs without a used page, fewer than `count`: never at all pages."""
        pool, slabs = self._pools[group], self.slabs
        beside = (slot for slot in chain(pool.spare, pool.cached) if slabs.in_use(group, slot))
        for slot in list(islice(beside, max(0, count - slabs.beside[group]))):
            pool.evict_slot(slot)
        if slabs.beside[group] >= count:
            return
        for name in (group, *(other for other in self._pools if other != group)):
            for slot in slabs.idle_slots(name):
                if name != group and slabs.free_slots(group) >= count:
                    return
                self._pools[name].evict_slot(slot)

    def _evict_next(self) -> bool:
        """Evict the page that is worth least; False when nothing is cached."""
        whole, local = self._pools[GLOBAL], self._pools[LOCAL]
        if local.spare:
            local.evict_slot(next(iter(local.spare)))
            return True
        while self._dead:
            key = next(iter(self._dead))
            del self._dead[key]
            slot = whole.find_slot(key)
            if slot is not None and whole.is_cached(slot) and not self._policy.count_children(key):
                self._evict_place(key, slot)
                return True
        victims = self._policy.choose_victims(1)
        if victims:
            slot = whole.find_slot(victims[0])  # type: ignore[arg-type]
            assert slot is not None
            parent = self._evict_place(victims[0], slot)  # type: ignore[arg-type]
            if parent is not None:
                self._mark_dead(parent)
            return True
        # windows of running sequences, and global pages whose children are in use
        for pool in (local, whole):
            if pool.cached:
                pool.evict_slot(next(iter(pool.cached)))
                return True
        return False

    def _evict_place(self, key: bytes, slot: int) -> bytes | None:
        """Evict both pages of an index of a chain; return the key of the page before."""
        whole, local = self._pools[GLOBAL], self._pools[LOCAL]
        page = whole.page_of[slot]
        assert page is not None
        whole.evict_slot(slot)
        beside = local.find_slot(key)
        if beside is not None and local.is_cached(beside):
            local.evict_slot(beside)
        return page.parent

    def _mark_dead(self, key: bytes | None) -> None:
        """Mark pages dead that lie behind the last window of a chain, which now ends at this page."""
        whole, children = self._pools[GLOBAL], 0
        while key is not None:
            slot = whole.find_slot(key)
            if slot is None or not whole.is_cached(slot) or self._policy.count_children(key) != children:
                return
            page = whole.page_of[slot]
            assert page is not None
            if self._starts_here(key, page.index + 1):
                return
            self._dead[key] = None
            key, children = page.parent, 1

    def _starts_here(self, key: bytes | None, count: int) -> bool:
        """Say whether all local pages are there for a start behind `count` pages, of which `key` is the last."""
        whole, local = self._pools[GLOBAL], self._pools[LOCAL]
        if key is None or local.find_slot(key) is None:
            return False  # nearly always
        for _ in range(self._first_of_window(count), count):
            slot = whole.find_slot(key) if key is not None and local.find_slot(key) is not None else None
            if slot is None:
                return False
            page = whole.page_of[slot]
            assert page is not None
            key = page.parent
        return True

    def check_integrity(self) -> None:
        super().check_integrity()
        self.slabs.check_integrity({group: pool.list_states() for group, pool in self._pools.items()})
