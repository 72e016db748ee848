"""Pages that move in runs, in a world of one thread: whatever comes late, wrong, in parts or to nobody, each token is
right, each request ends, and each page comes back."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from math import lcm
from types import SimpleNamespace
from unittest import mock

import pytest
from fakes import clear_cache
from one_thread import EOS, Checker, Device, Disk, Mailbox, World, answer, page_bytes

from wicore_trt.arithmetic import div_ceil
from wicore_trt.config import KVSettings
from wicore_trt.core import assemble_kv
from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.prefix import parking
from wicore_trt.kv.tiers import down, host, open_tiers, tiers, up
from wicore_trt.kv.tiers.host import find_slot_geometry
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams


class Campaign:
    """One engine and its traffic. `restart` keeps the disk."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size, self.window, self.longest = rng.choice([1, 2, 4]), rng.choice([2, 8, 24]), rng.choice([60, 200])
        self.batch, self.slice = rng.choice([16, 48, 128]), rng.choice([4, 16])
        sizes = {g: self.size * 64 * rng.choice([1, 2, 3, 5]) * rng.choice([1, 8]) for g in (GLOBAL, LOCAL)}
        whole, unit = div_ceil(self.longest, self.size), lcm(*sizes.values())
        slabs = {group: unit // size for group, size in sizes.items()} if rng.random() < 0.5 else None
        least = (whole + div_ceil(self.window, self.size) + 3) * rng.choice([1, 1, 2])
        count = sum(div_ceil(least, slabs[g]) for g in sizes) + 3 if slabs else 0
        pages = {g: count * slabs[g] if slabs else least for g in sizes}
        self.layout = KVLayout(self.size, "fake", pages, sizes, slabs)
        slot_bytes, each = find_slot_geometry(sizes)
        self.kv = KVSettings(
            host_bytes=slot_bytes * whole * sum(each.values()) * rng.choice([1, 4]), disk_path="/none", salt="x" * 32,
            write_policy=rng.choice(["through", "back", "selective"]),
        )  # fmt: skip
        self.disk_slots = whole * sum(each.values()) * rng.choice([1, 6])
        self.known, self.kept, self.seen = [[7] * (self.longest // 2)], {}, Counter[str]()
        self.right: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.names: dict[bytes, tuple[int, ...]] = {}
        self.open()

    def open(self) -> None:
        rng, self.world = self.rng, World(self.rng)
        self.device = Device(self.world, self.layout, self.window, self.batch, self.slice)
        disk = Disk(self.world, self.disk_slots, self.kept)
        self.device.odds, disk.odds = rng.choice([0.0, 0.02, 0.1]), rng.choice([0.0, 0.02, 0.1])
        clock, reports = self.world.clock, Mailbox(self.world)
        with ExitStack() as changed:
            changed.enter_context(mock.patch.object(host, "SimpleQueue", lambda: reports))
            changed.enter_context(mock.patch.object(host, "ThreadPoolExecutor", lambda *_, **__: Checker(self.world)))
            changed.enter_context(mock.patch.multiple(assemble_kv, time=clock, rate_reads=lambda *_: None))
            changed.enter_context(mock.patch.multiple(open_tiers, Backing=NoBacking, DiskStore=lambda *_, **__: disk))
            self.manager, self.loader = assemble_kv.make_cache(
                self.kv, self.layout, self.window, engine="fake", kernels="fake", copier=self.device
            )
        self.loader._clock, self.tiers = clock.monotonic, self.manager.tiers
        self.patches = ExitStack()
        self.patches.enter_context(mock.patch.object(parking, "secrets", SimpleNamespace(token_bytes=rng.randbytes)))
        for module in (tiers, host, down, up):
            self.patches.enter_context(mock.patch.object(module, "time", clock))
        self.scheduler = Scheduler(
            self.manager, max_batch_tokens=self.batch, max_sequences=rng.choice([3, 8]), loader=self.loader,
            slice_tokens=self.slice,
        )  # fmt: skip
        self.scheduler.prefill.observe_step([(0, 64)], 64 * rng.choice([1.0, 1.0, 1e-2, 1e-4]))
        self.scheduler.prefill.observe_step = lambda *_: None
        self.core = EngineCore(
            self.device, self.scheduler, eos_ids=(EOS,), max_context=self.longest, clock=clock.monotonic
        )
        self.device.tokens_of = lambda seq_id: next(s.tokens for s in self.scheduler.running if s.seq_id == seq_id)

    def add(self) -> None:
        rng, name = self.rng, f"r{len(self.seen)}-{sum(self.seen.values())}"
        known = rng.choice(self.known)
        known = known[: rng.randrange(1, len(known) + 1)] if rng.random() < 0.3 else known
        prompt = [*known, *(rng.randrange(2, 97) for _ in range(rng.choice([1, 3, 30])))][: self.longest - 8]
        self.right[name], self.got[name] = answer(prompt, 6), []
        self.core.add(
            GenerateRequest(name, tuple(prompt), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        )
        self.known = [*self.known, prompt + self.right[name]][-6:]
        self.seen["requests"] += 1

    def take(self, outputs: list) -> None:
        for output in outputs:
            got, right = self.got[output.request_key], self.right[output.request_key]
            got += output.token_ids
            assert got == right[: len(got)], "a wrong token"
            if (reason := output.finish_reason) is not None:
                assert reason is not FinishReason.LENGTH or got == right
                assert reason is not FinishReason.ERROR or "finite" in output.error, output.error
                del self.got[output.request_key], self.right[output.request_key]

    def step(self) -> None:
        running = [s.seq_id for s in self.scheduler.running]
        self.device.poison = {self.rng.choice(running)} if running and self.rng.random() < 0.005 else set()
        self.take(self.core.step())
        for sequence in self.scheduler.running:
            for i, key in enumerate(sequence.pages.keys):
                if key not in self.names:
                    self.names[key] = tuple(sequence.tokens[: (i + 1) * self.size])

    def forget(self) -> None:
        """What the device caches, and sometimes what host memory has, in use or not."""
        self.manager.tiers = None
        clear_cache(self.manager)
        self.manager.tiers = self.tiers
        for copy in list(self.tiers.host.iterate_copies()) if self.rng.random() < 0.3 else ():
            if copy.ready:
                self.seen["dropped in use"] += copy.readers > 0
                self.tiers.host.drop_copy(copy, "test")

    def settle(self) -> None:
        for _ in range(20_000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.right, f"lost or stuck: {sorted(self.right)}"
        tiers = self.tiers
        for _ in range(20_000):
            self.core.do_housekeeping()
            if not (tiers.movers.outstanding or self.tiers.loads.loads or any(self.world.lanes.values())):
                break
            tiers.wait_for_report(0.01)
        assert (
            not tiers.movers.outstanding
            and not self.tiers.loads.fetching
            and not tiers.up.waiting
            and not self.loader._begun
        )
        assert not any(pool.used_slots for pool in self.manager.pools.values()), "a page leaks"
        for index in self.tiers.indexes.values():
            assert not index.inspect().lost_copies and all(
                copy.ready and not copy.readers for copy in index.iterate_copies()
            )
        self.check()

    def check(self) -> None:
        """Books, and the bytes of pages that can be found on the device."""
        self.scheduler.check_integrity()
        for group, pool in self.manager.pools.items():
            for page in pool.list_pages():
                if page.key in self.names and self.rng.random() < 0.3:
                    right = page_bytes(group, self.names[page.key], self.size, self.layout.page_bytes[group])
                    assert bytes(self.device.page(group, pool.find_slot(page.key))) == right
                    self.seen["pages compared"] += 1

    def restart(self) -> None:
        self.take(self.core.abort_all())
        self.close()
        self.open()

    def close(self) -> None:
        self.core.close(self.rng.choice([0.0, 4.0]))
        while self.world.one():
            pass
        self.patches.close()
        self.seen += self.world.seen
        self.seen += Counter(preempted=self.scheduler.preemptions, split=self.loader.decisions["split"])
        self.seen += Counter({f"hits {tier}": count for tier, count in self.tiers.hit_tokens.items()})

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            act = self.rng.random()
            if act < 0.2 and len(self.right) < 10:
                self.add()
            elif act < 0.22 and self.right:
                self.take(self.core.abort(self.rng.choice(list(self.right))))
            elif act < 0.27:
                self.forget()
            elif act < 0.28:
                self.settle()
            elif act < 0.283:
                self.restart()
            else:
                self.step()
        self.settle()
        self.close()


class NoBacking:
    """Memory of the host tier that is there."""

    locked = False

    def __init__(self, slab: memoryview, slot_bytes: int, pin: object) -> None:
        self.ready = len(slab) // slot_bytes

    def start_threads(self, tell: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (8, 16))])
def test_runs_bring_right_pages_lose_nobody_and_leak_nothing(first: int) -> None:
    seen = Counter[str]()
    for seed in range(first, first + 8):
        campaign = Campaign(seed)
        campaign.run(250)
        seen += campaign.seen
    for what in (
        "runs of some",
        "preempted",
        "flipped on the way up",
        "hits host",
        "hits disk",
        "disk returned",
        "dropped in use",
    ):
        assert seen[what], f"{what} was not reached: {seen}"
