"""Makes the KV cache of one engine from settings: pools, policies, tiers, and their connections.

Must not know models. Invariant: all that KV values depend on enters the names of pages and the namespace on disk.
"""

from __future__ import annotations

import sys
import time
from functools import partial

from wicore_trt.config import KVSettings
from wicore_trt.kv.disk.claim import derive_secret
from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.disk.format import Namespace
from wicore_trt.kv.disk.io import rate_reads
from wicore_trt.kv.disk.store import DISK_THREADS
from wicore_trt.kv.events import KVEventLog
from wicore_trt.kv.manager import CacheOptions, KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.prefix.loader import PrefixLoader, probe_tiers
from wicore_trt.kv.tiers.moves import TierCopy
from wicore_trt.kv.tiers.open_tiers import open_tiers
from wicore_trt.kv.tiers.retention import Retention
from wicore_trt.kv.tiers.tiers import LowerTiers
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.request_fields import MAX_TTL_S
from wicore_trt.runtime.executor import KVLayout, PageCopier

SWITCH_S = 1e-4
"""After so long a thread of this process lets another one run that waits for the interpreter."""


def make_cache(
    settings: KVSettings,
    layout: KVLayout,
    window: int,
    *,
    engine: str,
    kernels: str,
    copier: PageCopier,
    files: Files | None = None,
) -> tuple[KVCacheManager, PrefixLoader | None]:
    """Make the cache of an engine with fingerprint `engine` that `kernels` compute; `files` makes the disk tier's
    system calls. Raises ConfigError for settings that fit no page, EnvironmentUnfitError for an unusable disk tier."""
    events = KVEventLog()
    chain_group = GLOBAL if GLOBAL in layout.num_pages else LOCAL
    tiers, store = None, None
    if settings.host_bytes:
        namespace = Namespace(
            engine, kernels, layout.page_tokens, {g: layout.page_bytes[g] for g in layout.num_pages}, layout.kv_dtype
        )
        tiers = open_tiers(
            settings, namespace, chain_group, copier,
            announce=events.append_stored, left=partial(_note_eviction, events), files=files,
        )  # fmt: skip
        store = tiers.store
    secret = derive_secret(settings.salt) if settings.salt else store.secret if store is not None else None
    policy = None
    if GLOBAL in layout.num_pages:
        policy = make_policy(settings.policy, layout.num_pages[GLOBAL], page_tokens=layout.page_tokens)
    manager = KVCacheManager(
        layout.num_pages, window, KeyChain(f"{engine}/{kernels}", layout.page_tokens, secret=secret),
        options=CacheOptions(
            prefix_cache=settings.prefix_cache,
            write_policy=settings.write_policy,
            measure_attention=settings.policy == "a2cr",
            slab_pages=layout.slab_pages,
        ),
        policy=policy, tiers=tiers, events=events, retention=Retention(settings.pin_s, time.monotonic),
    )  # fmt: skip
    loader = None
    if tiers is not None:
        # the threads that move pages run a few lines at a time, and would wait 5 ms for each beside a busy engine
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        loader = PrefixLoader(manager, tiers, dict(tiers.movers.host.page_bytes))
        tiers.up.disk_rate = loader.observe_disk_read
        _keep_times(manager.retention, tiers)
        probe_tiers(manager, tiers, layout.page_bytes, partial(loader.record_probe, loader.host_meter))
        if store is not None and settings.disk_path and tiers.disk is not None and not tiers.disk.find_newest(1):
            spare = min(settings.disk_bytes // 16, store.spare_bytes)
            rate_reads(settings.disk_path, spare, DISK_THREADS, partial(loader.record_probe, loader.disk_meter))
    return manager, loader


def _keep_times(retention: Retention, tiers: LowerTiers) -> None:
    """Write times to live to the disk tier as they change, and restore those of an earlier process."""
    if tiers.movers.disk is None:
        return
    books, store = tiers.movers.disk
    for key, end in store.ending.items():
        retention.restore_end(key, min(end - store.now, MAX_TTL_S))

    def find_end(left: float | None) -> int:
        return 0 if left is None else max(1, int(store.now + left))

    def stamped(key: bytes, left: float | None) -> None:
        end = find_end(left)
        for group in books.slots_per_page:
            copy = books.find_copy(group, key)
            if copy is not None and copy.ready:
                known = store.get_expiry(copy.slots)
                # skip most writes for pages in constant use: an earlier end on disk only matters after a restart
                if not known or not end or end < known or known - store.now < (left or 0.0) / 2:
                    store.stamp_page(copy.page, copy.slots, end)

    tiers.down.expires = lambda key: find_end(retention.seconds_left(key))
    retention.stamped = stamped


def _note_eviction(events: KVEventLog, tier: str, copy: TierCopy, cause: str) -> None:
    if copy.found:  # a copy that was never found was never announced
        events.append_removed(tier, copy.page.group, copy.page.key, cause)
