"""Opens the tiers that settings ask for: memory of the host tier, files of the disk tier, and the books of both.

Must not know what pages hold. Invariant: nothing moves before memory and the disk's directory are this process's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from wicore_trt.config import KVSettings
from wicore_trt.errors import ConfigError
from wicore_trt.kv.disk.cipher import PageCipher, load_key_file
from wicore_trt.kv.disk.files import Files, aligned_buffer
from wicore_trt.kv.disk.format import Namespace
from wicore_trt.kv.disk.store import DISK_THREADS, DISK_TIMEOUT_S, QUEUE_LIMIT, DiskStore
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.tiers.host import Backing, HostTier, Movers, find_coded_geometry
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.kv.tiers.moves import TierCopy
from wicore_trt.kv.tiers.tiers import LowerTiers
from wicore_trt.memory import check_room
from wicore_trt.plugins.code_layout import FORMAT
from wicore_trt.runtime.executor import PageCopier, SharedCopier


def open_tiers(
    settings: KVSettings,
    namespace: Namespace,
    primary: str,
    copier: PageCopier,
    *,
    announce: Callable[[str, Page], None] = lambda tier, page: None,
    left: Callable[[str, TierCopy, str], None] = lambda tier, copy, cause: None,
    files: Files | None = None,
) -> LowerTiers:
    """Open a host tier of `settings.host_bytes`, pinned if the copier can, which grows while its memory is pinned; and,
    with `settings.disk_path`, a disk tier with the pages of `namespace` that are there. Layer group `primary` has every
    page of a chain. `announce(tier, page)` and `left(tier, copy, cause)` hear of what a tier gains and loses; `files`
    makes the disk's system calls. Raises ConfigError for sizes that hold no page or more than this machine has;
    also for a code that the engine lacks. Raises EnvironmentUnfitError for a disk directory that cannot be used."""
    coded, raw_bytes = copier.coded_bytes if settings.compression != "none" else {}, dict(namespace.layout)
    slot_bytes, slots_per_page, raw_slots, page_bytes = find_coded_geometry(raw_bytes, coded)
    if slots_per_page != raw_slots:
        namespace = replace(namespace, code=FORMAT)
    elif settings.compression == "lossless":
        raise ConfigError(
            f"kv.compression = lossless, but this engine has no code for its pages of {namespace.kv_dtype}.",
            fix="Leave it out. Engines of backend triton on GPUs code bfloat16 pages of 16, 32, 48, ... tokens.",
        )
    num_slots = settings.host_bytes // slot_bytes
    if num_slots < 2 * sum(slots_per_page.values()):
        raise ConfigError(
            f"kv.host_bytes = {settings.host_bytes:,} holds {num_slots} slots of {slot_bytes:,} bytes: too few.",
            fix="Raise kv.host_bytes, or set it to 0; `wicore kv plan` says how much is useful.",
        )
    check_room(num_slots * slot_bytes, "kv.host_bytes", "Lower it (--kv-host-bytes) to {room} at most.")

    def make_index(slots: int, on_evict: Callable[[TierCopy, str], None]) -> TierIndex:
        most = max(1, slots // slots_per_page[primary])
        policy = make_policy(settings.policy, most, page_tokens=namespace.page_tokens)
        quota, pin_share = settings.tenant_quota, settings.pin_share
        return TierIndex(
            slots, slots_per_page, policy, primary=primary, raw_slots=raw_slots, quota=quota, pin_share=pin_share,
            on_evict=on_evict,
        )  # fmt: skip

    disk = None
    if settings.disk_path is not None:
        key = settings.disk_key_file
        store = DiskStore(
            Path(settings.disk_path), namespace=namespace, slot_bytes=slot_bytes, limit_bytes=settings.disk_bytes,
            free_bytes=settings.disk_free_bytes, threads=DISK_THREADS, queue_limit=QUEUE_LIMIT,
            timeout_s=DISK_TIMEOUT_S, cipher=None if key is None else PageCipher(load_key_file(key)), files=files,
        )  # fmt: skip

        def erase_copy(copy: TierCopy, cause: str) -> None:
            left("disk", copy, cause)
            store.erase_slots(copy.slots)

        disk = (make_index(store.num_slots, erase_copy), store)
    index = make_index(num_slots, partial(left, "host"))
    allocate = copier.map_memory if isinstance(copier, SharedCopier) else aligned_buffer
    slab = allocate(num_slots * slot_bytes)
    backing = Backing(slab, slot_bytes, copier.pin)
    if backing.ready < num_slots:
        index.withhold_slots(backing.ready, num_slots)
    if disk is not None:
        disk[0].restore_pages(disk[1].recover_pages())
    movers = Movers(HostTier(index, slab, slot_bytes, page_bytes, raw_bytes), disk, copier, announce)
    return LowerTiers(movers, save_early=settings.write_policy == "through", backing=backing)
