"""Probe of the link to the device and of the disk, before the first request.

It moves pages that nobody needs, or that are kept on disk. Invariant: no slot's content changes, and a borrowed host
slot is used by nobody else until its copies are over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.kv.tiers.load import LoadItem, PrefixLoad
from wicore_trt.kv.tiers.tiers import LowerTiers

MEASURED_BYTES = 4 << 20
"""Fewer bytes say little of a link."""
PROBE_BYTES, PROBE_READS = 64 << 20, 8
PROBE_SHARE = 0.75
"""Of the host's slots that the probe may borrow: pages may come meanwhile."""


def probe_tiers(
    manager: KVCacheManager, tiers: LowerTiers, page_bytes: Mapping[str, int], copied: Callable[[int, float], None]
) -> None:
    """Begin to rate the link by copies into unused slots, and the disk by bringing some of its pages to host memory.
    For the link, any thread calls `copied(bytes, seconds)`."""
    group = manager.chain_group
    size, pool, movers = page_bytes[group], manager.pools[group], tiers.movers
    index = tiers.host
    room = int(PROBE_SHARE * index.free_slots) // index.slots_per_page[group]
    count = min(PROBE_BYTES // size, pool.num_pages, room)
    if count * size >= MEASURED_BYTES:
        copier, (buffers, slots) = movers.copier, movers.host.lend_slots(size, count)

        lacking, total = count, 0.0

        def count_copies(digests: Sequence[bytes | None], seconds: float) -> None:
            nonlocal lacking, total
            lacking, total = lacking - len(digests), total + seconds
            if not lacking:
                copied(count * size, total)
                movers.post_report(movers.came_up, index.grant_slots, 0, slots)  # until now a copy could have been late

        for slot in range(count):  # what an unwritten slot holds must stay there, so it goes and comes back
            copier.to_host(group, slot, buffers[slot], lambda digest, seconds: None)
        copier.to_device(group, range(count), buffers, count_copies)
        copier.flush()
    if tiers.disk is not None:
        pages, left = tiers.disk.find_newest(PROBE_READS), manager.retention.seconds_left
        # a page on its way is in use, and the time to live of one that is in use starts anew
        for page in pages:
            if left(page.key) is None:
                tiers.loads.begin_load(PrefixLoad(0, 0, [LoadItem(page, -1)]))
