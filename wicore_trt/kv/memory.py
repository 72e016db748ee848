"""The device memory of the pools of all layer groups: who gets slots when several groups need some at once.

`Memory` is pools each in memory of its own; `shared_memory.SharedMemory` is one memory for both. It must not know
sequences or tiers. Invariant: `allocate` gives all groups what they ask for or changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from wicore_trt.kv.pool import PagePool
from wicore_trt.model.spec import GLOBAL, LOCAL


class Memory:
    """Pools that share nothing."""

    def __init__(self, pools: Mapping[str, PagePool]) -> None:
        self._pools, self._page_tokens = pools, next(iter(pools.values())).page_tokens
        self.written = [(group, pool.written) for group, pool in pools.items()]
        """How many tokens of the page in a slot are written, by group and slot."""

    @property
    def room(self) -> list[int]:
        """What the pools could give; while no number is larger than before, nothing fits that did not."""
        return [pool.available for pool in self._pools.values()]

    def holds(self, whole: int, local: int, window: int) -> bool:
        """Whether a sequence that has it alone always finds room: `whole` global pages, `local` local ones at most and
        those of a `window` for long."""
        need = {GLOBAL: whole, LOCAL: local}
        return all(need[group] <= pool.num_pages for group, pool in self._pools.items())

    def fits(self, need: Mapping[str, int]) -> bool:
        """Whether all groups can have so many slots at the same time."""
        return all(count <= self._pools[group].available for group, count in need.items())

    def allocate(self, need: Mapping[str, int]) -> dict[str, list[int]] | None:
        """So many slots of each group, or None and no change."""
        if not self.fits(need):
            return None
        return {group: self._pools[group].allocate(count) or [] for group, count in need.items()}

    def wrote(self, tables: Mapping[str, array[int]], begin: int, end: int) -> None:
        """Positions [begin, end) are written in all pages of the tables that hold them. Raises UnwrittenPageError."""
        size = self._page_tokens
        for i in range(begin // size, (end - 1) // size + 1):
            start, stop = max(begin - i * size, 0), min(end - i * size, size)
            for group, pool in self._pools.items():
                if (slot := tables[group][i]) >= 0:
                    pool.wrote(slot, start, stop)

    def start_afresh(self) -> bool:
        """Have all cached pages leave, when a sequence that has the memory alone gets no slots because the pages that
        it found lie in too many slabs. False: it would change nothing."""
        return False

    # --- what the pages of a chain are worth ---------------------------------------------------------------------

    def revive(self, keys: list[bytes]) -> None:
        """A request computes this chain."""

    def released(self, group: str, slots: Iterable[int]) -> None:
        """A sequence let go of these slots, and their pages may have been cached."""

    def ended(self, keys: list[bytes], needed: set[int]) -> None:
        """A request ended; of its chain's local pages only those at the `needed` indices, and those before a branch,
        are where a later one will start."""

    def check_integrity(self) -> None:
        """Assert the invariants."""
        for pool in self._pools.values():
            pool.check_integrity()
