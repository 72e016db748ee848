"""An engine for one life: the product's cache, scheduler and core over the campaign's device, watched from outside.

`Stack` builds them in a world and puts poison and counters around pools, host memory and loads. It must not know what
outputs should be. Invariant: hooks only look, count and poison; they change no decision.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fault_injection import FaultPlan, FaultyFiles

from oracle.device import AheadDevice, Copier, Device, Encoder, Failure, LateCopier
from oracle.model import DIGEST, EOS, POISON
from oracle.plan import Setup
from oracle.world import replace_everywhere
from wicore_trt.arithmetic import div_ceil, pages_per_slab
from wicore_trt.config import KVSettings
from wicore_trt.core import assemble_kv
from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.disk.space import Space
from wicore_trt.kv.disk.store import DiskStore
from wicore_trt.kv.manager import CacheOptions, KVCacheManager
from wicore_trt.kv.memory import SharedMemory
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.prefix.rates import TierRate
from wicore_trt.kv.tiers.host import find_coded_geometry
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.schedule.scheduler import Scheduler

SLAB_SLOTS = 16


class OwnFiles(Files):
    """Knows its open descriptors, so that the end of a process can be played."""

    def __init__(self) -> None:
        self.fds: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self.fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.fds.discard(fd)
        super().close(fd)

    def die(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = set()


def least_pages(setup: Setup) -> dict[str, int]:
    """The smallest pools that the product accepts for max_context."""

    def fits(pages: dict[str, int]) -> bool:
        tiers: Any = SimpleNamespace() if setup.host_slots and setup.kv["prefix_cache"] else None
        manager = KVCacheManager(pages, setup.window, KeyChain("", setup.page_tokens), tiers=tiers)
        return manager.can_run(setup.max_context, setup.max_batch_tokens)

    found = dict.fromkeys(setup.groups, 4 * setup.max_context)
    for group in setup.groups:
        low, high = 1, found[group]
        while low < high:
            middle = (low + high) // 2
            if fits({**found, group: middle}):
                high = middle
            else:
                low = middle + 1
        found[group] = low
    return found


def shared_layout(setup: Setup, page_bytes: dict[str, int]) -> KVLayout:
    """One memory for both groups, of the fewest slabs that the product accepts for max_context, and some."""
    slab_pages, count = pages_per_slab(page_bytes), 0
    while True:
        count += 1
        pages = {group: count * size for group, size in slab_pages.items()}
        options = CacheOptions(slab_pages=slab_pages)
        tiers: Any = SimpleNamespace() if setup.host_slots and setup.kv["prefix_cache"] else None
        manager = KVCacheManager(pages, setup.window, KeyChain("", setup.page_tokens), options=options, tiers=tiers)
        if manager.can_run(setup.max_context, setup.max_batch_tokens):
            break
    count += div_ceil(sum(setup.spare.values()), max(slab_pages.values()))
    pages = {group: count * size for group, size in slab_pages.items()}
    return KVLayout(setup.page_tokens, "float32", pages, page_bytes, slab_pages)


@contextmanager
def constants(setup: Setup) -> Iterator[None]:
    """What the planner believes before it has measured, and how much it must see to measure, at the campaign's scale:
    pages are small and time is cheap."""
    page_s = setup.speeds.token * setup.page_tokens
    page_bytes = max(setup.entry_bytes.values()) * setup.page_tokens
    priors = setup.priors
    with ExitStack() as stack:
        for name, value in (
            ("HOST_PRIOR", TierRate(page_bytes / (page_s * priors["link"]), page_s * priors["link"])),
            ("DISK_PRIOR", TierRate(page_bytes / (page_s * priors["disk"]), page_s * priors["disk"])),
            ("PREFILL_PRIOR", (priors["token"], 3e-6 * priors["token"])),
            ("MIN_TOKENS", min(32, max(2, setup.max_batch_tokens // 2))),
            ("MEASURED_BYTES", 6 * page_bytes),
            ("QUEUE_LIMIT", setup.queue_limit),
            ("DISK_THREADS", setup.disk_threads),
            ("DISK_TIMEOUT_S", setup.disk_timeout_s),
            ("DEVICE_THRESHOLD", setup.thresholds[0]),
            ("HOST_THRESHOLD", setup.thresholds[1]),
            ("DiskStore", partial(DiskStore, slab_bytes=SLAB_SLOTS * 8192)),
            ("CacheOptions", partial(CacheOptions, checkpoint_tokens=setup.checkpoint_tokens)),
        ):
            replace_everywhere(stack, name, value)
        yield


@dataclass
class Idle:
    """How long a sequence has waited for a load of so many tokens."""

    tokens: int
    chosen: object
    room: int = 1 << 30
    seconds: float = 0.0
    since: float | None = None


class Stack:
    """`path` is the directory of the disk tier. `counts` gains what happens."""

    def __init__(self, setup: Setup, world, path: Path, plan: FaultPlan, counts: Counter[str]) -> None:
        self.setup, self.world, self.counts, self.plan = setup, world, counts, plan
        self.files = FaultyFiles(plan)
        self.files._system = self._system = OwnFiles()
        self.page_bytes = {g: setup.entry_bytes[g] * setup.page_tokens for g in setup.groups}
        least = least_pages(setup)
        pages = {group: least[group] + setup.spare[group] for group in setup.groups}
        layout = KVLayout(setup.page_tokens, "float32", pages, self.page_bytes)
        if setup.shared:
            layout = shared_layout(setup, self.page_bytes)
        kind = AheadDevice if setup.ahead else Device
        self.device = kind(
            world, setup.model, layout, max_batch_tokens=setup.max_batch_tokens, slice_tokens=setup.slice_tokens
        )
        if setup.image_tokens:
            self.device.images = Encoder(
                world, self.device.bad, slots=setup.image_slots, tokens=setup.image_tokens, seconds=setup.image_s,
                blind=setup.blind,
            )  # fmt: skip
        self.copier = (LateCopier if setup.late else Copier)(self.device, checks=setup.checks, lies=setup.lies)
        self.device.copier = self.copier
        try:
            self.manager, self.loader = assemble_kv.make_cache(
                self._settings(path), layout, setup.window, engine=setup.engine, kernels=self.device.kernels,
                copier=self.copier, files=self.files,
            )  # fmt: skip
        except BaseException:
            self.die()
            raise
        if not self.manager.can_run(setup.max_context, setup.max_batch_tokens):
            raise Failure("fits", f"pools of {pages} were accepted and are not")
        self.scheduler = Scheduler(
            self.manager,
            max_batch_tokens=setup.max_batch_tokens,
            max_sequences=setup.max_sequences,
            loader=self.loader,
            slice_tokens=setup.slice_tokens,
        )
        self.core = EngineCore(
            self.device, self.scheduler, eos_ids=(EOS,), max_context=setup.max_context, clock=world.clock
        )
        self.tiers = self.manager.tiers
        self.loads: list = []
        self.waits: list[float] = []
        self.idle: dict[object, Idle] = {}
        self._poison_pools()
        if self.tiers is not None:
            self._poison_host()
            self._watch_loads()
        self._watch_manager()

    def _settings(self, path: Path) -> KVSettings:
        setup = self.setup
        coded = self.copier.coded_bytes if setup.kv.get("compression") != "none" else {}
        slot_bytes, per_page, *_ = find_coded_geometry(self.page_bytes, coded)
        settings = dict(setup.kv)
        tiers = setup.kv["prefix_cache"]  # without it they are refused
        if setup.host_slots and tiers:
            settings["host_bytes"] = slot_bytes * max(setup.host_slots, 2 * sum(per_page.values()))
        if setup.disk_slots and tiers:
            slots = max(setup.disk_slots, sum(per_page.values()))
            settings |= {
                "disk_path": str(path / "disk"),
                "disk_bytes": Space(slot_bytes, SLAB_SLOTS, setup.page_tokens).bytes_of(slots) + (96 << 10),
                "disk_free_bytes": 0,
            }
            if setup.encrypted:
                key = path / "key"
                key.write_bytes(bytes(range(32)))
                key.chmod(0o600)
                settings["disk_key_file"] = str(key)
        return KVSettings(**settings)

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        try:
            self.core.close()
        finally:
            self.die()

    def die(self) -> None:
        """The process is gone. Real threads would go on with descriptors that others have then."""
        if self.world.virtual:
            self.world.kill()
            self._system.die()

    # --- hooks ---------------------------------------------------------------------------------------------------

    def _poison_pools(self) -> None:
        for group, pool in self.manager.pools.items():
            self._poison_pool(group, pool)

    def _poison_pool(self, group: str, pool) -> None:
        allocate = pool.allocate_slots

        def allocated(count: int, leave: int = 0) -> list[int] | None:
            slots = allocate(count, leave)
            for slot in slots or ():
                self.device.poison(group, slot)
            return slots

        def then_poison(change: Callable) -> Callable:
            def changed(*args, **kwargs):
                before = set().union(*pool.list_states())
                result = change(*args, **kwargs)
                for slot in before.difference(*pool.list_states()):
                    self.device.poison(group, slot)
                return result

            return changed

        pool.allocate_slots = allocated
        for name in ("release_slots", "drop_page"):
            setattr(pool, name, then_poison(getattr(pool, name)))

    def _poison_host(self) -> None:
        host = self.tiers.host
        reserve = host.reserve_copy

        def reserved(page, *slots):
            copy = reserve(page, *slots)
            if copy is not None:
                for part in self.tiers.movers.host.cut_slots(copy.slots):
                    part[:] = POISON * (len(part) // DIGEST)
            return copy

        host.reserve_copy = reserved

    def _watch_loads(self) -> None:
        loader, tiers, counts = self.loader, self.tiers, self.counts
        begin, step, jump, cancel, fetch = (
            loader.begin_load,
            loader.next_move,
            loader.end_load,
            loader.cancel_load,
            tiers.loads.begin_load,
        )

        def begun(pages, chosen, **more):
            there = pages.published * self.setup.page_tokens
            done = begin(pages, chosen, **more)
            counts[f"{chosen.decision} plan" if done else "load without room"] += 1
            if done:
                self.waits.append(chosen.wait_s)
                self.loads.append((pages.load, chosen))
                self.idle[pages.load] = Idle(chosen.stop - there, chosen)
            return done

        def stepped(pages, computed, **company):
            load = pages.load
            action = step(pages, computed, **company)
            counts[f"step {action.action}"] += 1
            if load in self.idle:
                self._bound_idle(self.idle[load], action.action)
            return action

        def jumped(pages, *more):
            chosen = next((chosen for load, chosen in self.loads if load is pages.load), None)
            counts["jump"] += 1
            if pages.parked is not None:
                counts["jump of a parked sequence"] += 1
            elif chosen is not None and chosen.decision == "split":
                counts["jump after a split"] += 1
            return jump(pages, *more)

        def cancelled(pages):
            counts["load cancelled"] += pages.load is not None
            return cancel(pages)

        def fetched(load):
            if any(item.slot < 0 for item in load.todo):
                counts["prefetch"] += 1
                self.loads.append((load, None))
            return fetch(load)

        loader.begin_load, loader.next_move, loader.end_load, loader.cancel_load, tiers.loads.begin_load = (
            begun,
            stepped,
            jumped,
            cancelled,
            fetched,
        )

    def _bound_idle(self, idle: Idle, action: str) -> None:
        """A load may not stall its sequence longer than computing would take under the present load, and some. Where
        the planner cannot know better (nothing measured, speeds that change) it may. Copies that the step itself makes,
        for whomever, stop everything and are no waiting."""
        now, speeds, setup = self.world.clock() - self.copier.seconds, self.world.speeds, self.setup
        if idle.since is not None:
            idle.seconds += now - idle.since
        idle.since = now if action == "wait" else None
        calm = setup.priors["token"] == speeds.token and speeds == setup.speeds and speeds.noise <= 1.3
        room = setup.max_batch_tokens - len(self.scheduler.running)
        if not calm or speeds.spike or room <= 0 or not self.world.virtual:
            return
        idle.room = min(idle.room, room)
        recompute = idle.tokens * speeds.token * setup.max_batch_tokens / idle.room
        slice_s = 2 * setup.max_batch_tokens * speeds.token
        if idle.seconds > 1.6 * recompute + slice_s + 0.011:
            raise Failure(
                "stalls", f"idled {idle.seconds:.4f} s for a load in place of {recompute:.4f} s: {idle.chosen}"
            )

    def _watch_manager(self) -> None:
        manager, counts = self.manager, self.counts
        lookup, drop, follow = manager.find_prefix, manager.drop_page, self.scheduler.schedule_ahead

        def looked(pages, tokens):
            hit = lookup(pages, tokens)
            counts["wait for a prefix in flight"] += hit.in_flight
            return hit

        def dropped(key, cause):
            counts[f"page {cause}"] += 1
            return drop(key, cause)

        def followed(plan):
            found = follow(plan)
            counts["step ahead"] += found is not None
            waiting = [
                s for s in self.scheduler.running if len(s.tokens) - s.computed > 1 and s not in dict(plan.slices)
            ]
            counts["step ahead of one that waits for an image"] += found is not None and bool(waiting)
            return found

        start_afresh = manager.memory.evict_all

        def afresh():
            done = start_afresh()
            counts["started afresh"] += done
            return done

        manager.memory.evict_all = afresh
        manager.find_prefix, manager.drop_page, self.scheduler.schedule_ahead = looked, dropped, followed

    def tally(self) -> None:
        """Count what the statistics of this engine say; once, at its end."""
        stats, counts = self.core.stats(), self.counts
        counts["preemption"] += stats.preemptions
        counts["park"] += stats.kv.parked
        counts["resume"] += stats.kv.resumed
        for tier in stats.kv.tiers:
            counts[f"{tier.tier} hit"] += tier.hit_tokens > 0
            for cause, count in tier.evictions.items():
                counts[f"{tier.tier} eviction: {cause}"] += count
            for cause, count in tier.failures.items():
                counts[f"{tier.tier} failure: {cause}"] += count
        for load, _ in self.loads:
            counts["load with a failed page"] += load.failed
        counts["steps"] += stats.steps
        if self.device.images is not None:
            counts["image encoded"] += self.device.images.begun
            counts["image read"] += self.device.images.reads
        counts["bit flipped on the way to or from the device"] += self.copier.lied
        if isinstance(self.manager.memory, SharedMemory):
            counts["slab changed hands"] += self.manager.memory.slabs.changes

    @contextmanager
    def without_tiers(self) -> Iterator[None]:
        with mock.patch.object(self.manager, "tiers", None):
            yield
