"""Loads from a disk that is not what it was rated: whole requests in virtual time.

The scheduler, the cache, the tiers and the loader are the product's; the device, the link and the disk are those of
`virtual_disk.py`. It must not know how the planner decides. Invariant: one seed gives one sequence of happenings, and
the arms of a comparison (`Arm`) run in the same world.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Literal, cast
from unittest import mock

from benchmarks.kv.host_costs import HostCosts
from benchmarks.kv.virtual_disk import (
    BATCH_TOKENS,
    DIGEST,
    PAGE_BYTES,
    PAGE_TOKENS,
    SLICE_TOKENS,
    WINDOW,
    Disk,
    Events,
    Link,
    Mailbox,
    World,
)
from wicore_trt.arithmetic import pages_per_slab
from wicore_trt.config import KVSettings
from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.manager import CacheOptions, KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.prefix.loader import PrefixLoader
from wicore_trt.kv.prefix.planner import LoadChoice, NextMove
from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.kv.tiers import down, host, up
from wicore_trt.kv.tiers import tiers as tiers_module
from wicore_trt.kv.tiers.host import HostTier, Movers, find_slot_geometry
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.kv.tiers.moves import TierCopy
from wicore_trt.kv.tiers.tiers import LowerTiers
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SampledTokens, StepBatch, StepResult
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.schedule.step_time import StepTime, sum_load
from wicore_trt.types import CacheHints, GenerateRequest, SamplingParams

CHECKPOINT = 4096
GIB = 1 << 30
Arm = Literal["product", "compute", "load"]
"""Who decides: the loader, or one that never loads, or one that loads all there is and waits for it."""


class Device:
    """An `Executor` that takes the time of its steps."""

    spec: Any = None
    kernels, max_batch_tokens, slice_tokens, max_sequences, score_rows = "none", BATCH_TOKENS, SLICE_TOKENS, None, 0
    graph_sizes: ClassVar[dict[int, tuple[int, ...]]] = {}
    images = None

    def __init__(self, world: World, events: Events, copier: Link, layout: KVLayout, disk: Disk) -> None:
        self._world, self._events, self.copier, self.layout = world, events, copier, layout
        self.disk = disk
        self.steps: list[tuple[float, float, list[tuple[int, int]]]] = []

    def execute(self, batch: StepBatch) -> StepResult:
        self.copier.flush()
        slices = [(s.start, len(s.token_ids)) for s in batch.slices]
        begun, seconds = self._events.now, self._world.step_s(slices)
        if self.disk.reading:
            launched = sum(n for _, n in slices) > self._world.graph_tokens
            seconds = max(self._world.drag * seconds, self._world.launch_s * launched)
        self._events.until(begun + seconds)
        self.steps.append((begun, self._events.now, slices))
        return StepResult([SampledTokens(s.seq_id, (7,)) for s in batch.slices if s.sample])

    def release(self, seq_id: int) -> None:
        pass

    def close(self) -> None:
        pass


class AheadDevice(Device):
    """An `AheadExecutor` whose host works, too, as `World.host` has it."""

    def __init__(self, world: World, *given: Any) -> None:
        super().__init__(world, *given)
        self._host = world.host or HostCosts()
        self._under_way, self._ended = deque[tuple[float, float, StepBatch]](), 0.0

    def submit(self, batch: StepBatch) -> None:
        self.copier.flush()
        slices = [(s.start, len(s.token_ids)) for s in batch.slices]
        seconds = self._world.step_s(slices) * (self._world.drag if self.disk.reading else 1.0)
        self._events.work(self._host.step)
        begun, launched = self._events.now, batch.num_tokens > self._world.graph_tokens
        self._events.work(self._host.launch * launched)
        self.steps.append((begun, begun + seconds, slices))
        self._under_way.append((begun, max(seconds, self._events.now - begun), batch))

    def collect(self) -> StepResult:
        begun, seconds, batch = self._under_way.popleft()
        self._ended = max(begun, self._ended) + seconds
        self._events.until(self._ended)
        return StepResult([SampledTokens(s.seq_id, (7,)) for s in batch.slices if s.sample])

    def execute(self, batch: StepBatch) -> StepResult:
        self.submit(batch)
        return self.collect()

    def leads(self, batch: StepBatch) -> bool:
        return all(s.sample for s in batch.slices)


class _Host(HostTier):
    """Without memory."""

    def __init__(self, index: TierIndex, slot_bytes: int) -> None:
        self.index, self.slot_bytes, self.page_bytes, self.raw_bytes = index, slot_bytes, PAGE_BYTES, PAGE_BYTES

    def page_parts(self, copy: TierCopy, *, clear: bool = False) -> list[memoryview]:
        return []

    def cut_slots(self, slots: Iterable[int]) -> list[memoryview]:
        return [memoryview(b"") for _ in slots]


@dataclass(frozen=True, slots=True)
class Sizes:
    """GiB of each tier, and sequences at a time."""

    device: float = 24.0
    host: float = 24.0
    disk: float = 200.0
    sequences: int = 8


class Engine:
    """An engine in a world. `rated`: bytes/s that the disk was measured to give before; None for never. `knows`: it has
    made steps before."""

    def __init__(
        self, world: World, *, arm: Arm = "product", rated: float | None = None, knows: bool = True, seed: int = 0,
        sizes: Sizes = Sizes(),
    ) -> None:  # fmt: skip
        self.world, self.events = world, Events()
        settings = KVSettings()
        slot_bytes, per_page = find_slot_geometry(PAGE_BYTES)

        def books(gib: float) -> TierIndex:
            slots = int(gib * GIB) // slot_bytes
            policy = make_policy(settings.policy, slots // per_page[GLOBAL], page_tokens=PAGE_TOKENS)
            return TierIndex(slots, per_page, policy, primary=GLOBAL)

        self.disk = Disk(world, self.events, seed)
        link = Link(world, self.events)
        movers = Movers(
            _Host(books(sizes.host), slot_bytes), (books(sizes.disk), cast(Any, self.disk)), link,
            announce=lambda tier, page: None, mailbox=cast(Any, Mailbox(self.events)),
        )  # fmt: skip
        movers.checker.shutdown()
        self.tiers = LowerTiers(movers, save_early=True)
        slabs = pages_per_slab(PAGE_BYTES)
        number = int(sizes.device * GIB) // (slabs[GLOBAL] * PAGE_BYTES[GLOBAL])
        layout = KVLayout(PAGE_TOKENS, "bfloat16", {g: number * n for g, n in slabs.items()}, PAGE_BYTES, slabs)
        self.manager = KVCacheManager(
            layout.num_pages,
            WINDOW,
            KeyChain("sim", PAGE_TOKENS, secret=b"s" * 32),
            options=CacheOptions(slab_pages=slabs, checkpoint_tokens=CHECKPOINT),
            policy=make_policy(settings.policy, layout.num_pages[GLOBAL], page_tokens=PAGE_TOKENS),
            tiers=self.tiers,
        )
        self.loader = PrefixLoader(self.manager, self.tiers, PAGE_BYTES, self.events.monotonic)
        self.tiers.up.disk_rate = self.loader.observe_disk_read
        device = Device if world.host is None else AheadDevice
        self.device = device(world, self.events, link, layout, self.disk)
        self.scheduler = Scheduler(
            self.manager,
            max_batch_tokens=BATCH_TOKENS,
            max_sequences=sizes.sequences,
            loader=self.loader,
            slice_tokens=SLICE_TOKENS,
            step_time=StepTime(1.0),
        )
        self.core = EngineCore(
            cast(Any, self.device), self.scheduler, eos_ids=(1,), max_context=131_072, clock=self.events.monotonic
        )
        self._ids = count()
        self._learn(rated, knows=knows)
        if arm != "product":
            self._decide(arm)

    def _learn(self, rated: float | None, *, knows: bool) -> None:
        for size in (2, 8, 20, 60) if knows else ():
            for begin in (0, 32_768):
                slices = [(begin, size * 128)]
                self.scheduler.estimates.learn_step(sum_load(slices), slices, self.world.step_s(slices))
        for size in (4, 64, 4, 256, 16) if rated is not None else ():
            self.loader.record_probe(self.loader.disk_meter, size << 20, 1e-3 + (size << 20) / cast(float, rated))
        for size in (4, 64, 256):
            self.loader.host_meter.observe_read(size << 20, (size << 20) / self.world.link, now=0.0)

    def _decide(self, arm: Arm) -> None:
        """Take the decisions out of the loader's hands."""
        loader = self.loader

        def choose(pages: SequencePages, total: int, hit: Any, compute: Any, **_: Any) -> LoadChoice | None:
            found = loader._find_candidates(pages, total, hit) if arm == "load" else []  # noqa: SLF001
            if not found:
                return None
            stop = max(c.tokens for c in found)
            return LoadChoice(stop, hit.tokens, 1.0, 1.0, "load", hit.tokens, math.inf, math.inf, SLICE_TOKENS)

        def step(pages: SequencePages, computed: int, **_: Any) -> NextMove:
            load = pages.load
            assert load is not None
            if load.failed or load.broken:
                return NextMove("drop")
            here = load.window_here and load.meeting_page() * PAGE_TOKENS <= computed
            return NextMove("jump" if here else "wait")

        loader.choose_load = choose  # type: ignore[method-assign]
        loader.next_move = step  # type: ignore[method-assign]

    def keep(self, tokens: Sequence[int], *, host_pages: int = 0) -> None:
        """Put a prompt on disk as a process before this one left it; the first `host_pages` in host memory as well."""
        pages = SequencePages(self.manager.chain.derive_names("", ""), CacheHints())
        pages.name_pages(tokens)
        full, wanted = len(pages.keys), dict[str, set[int]]()
        ends = {full, *range(CHECKPOINT // PAGE_TOKENS, full + 1, CHECKPOINT // PAGE_TOKENS)}
        wanted[LOCAL] = {i for end in ends for i in range(max(0, end - WINDOW // PAGE_TOKENS), end)}
        wanted[GLOBAL] = set(range(full))
        disk = self.tiers.disk
        assert disk is not None
        for i in range(full):
            for group in (GLOBAL, LOCAL):
                if i in wanted[group]:
                    copy = disk.reserve_copy(pages.make_page(group, i))
                    assert copy is not None
                    disk.commit_copy(copy)
                    if i < host_pages:
                        here = self.tiers.host.reserve_copy(copy.page)
                        assert here is not None
                        here.checksum = (DIGEST, copy.page)
                        self.tiers.host.mark_saved(here)
                        self.tiers.host.commit_copy(here)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In here the tiers meet this engine's clock."""
        with ExitStack() as stack:
            for module in (tiers_module, host, down, up):
                stack.enter_context(mock.patch.object(module, "time", self.events))
            yield

    def ask(self, tokens: Sequence[int], output: int = 1) -> str:
        name = f"r{next(self._ids)}"
        self.events.work(self.world.host.prompt if self.world.host is not None else 0.0)
        self.core.add(GenerateRequest(name, tuple(tokens), SamplingParams(max_tokens=output, ignore_eos=True)))
        return name

    def step(self) -> list[Any]:
        """One step, with what loads cost the engine's thread."""
        before = self.disk.asked
        outputs = self.core.step()
        if outputs and (broken := [o.error for o in outputs if o.error]):
            raise RuntimeError(broken[0])
        if self.world.host is None:
            self.events.until(self.events.now + (self.disk.asked - before) * self.world.page_s)
        return outputs

    def first_tokens(self, prompts: Sequence[tuple[float, Sequence[int]]]) -> list[float]:
        """Seconds to the first token of prompts that come at (second, tokens)."""
        waiting, asked, found = deque(sorted(prompts, key=lambda p: p[0])), dict[str, float](), dict[str, float]()
        while waiting or self.core.has_work:
            while waiting and (waiting[0][0] <= self.events.now or not self.core.has_work):
                when, tokens = waiting.popleft()
                self.events.until(max(when, self.events.now))
                asked[self.ask(tokens)] = when
            for output in self.step():
                if output.token_ids and output.request_key not in found:
                    found[output.request_key] = self.events.now - asked[output.request_key]
        return list(found.values())


@dataclass(frozen=True, slots=True)
class Case:
    """Requests in a world: (second, prefix tokens, pages that are in host memory as well, -1 for a prefix that is
    nowhere), each with 64 new tokens behind its prefix."""

    world: World
    prompts: tuple[tuple[float, int, int], ...]
    rated: float | None = None
    knows: bool = True
    seed: int = 0

    def run(self, arm: Arm) -> tuple[list[float], Engine]:
        rng = random.Random(self.seed)
        engine = Engine(self.world, arm=arm, rated=self.rated, knows=self.knows, seed=self.seed)
        asked = []
        for when, size, hosted in self.prompts:
            tokens = [rng.randrange(10, 9999) for _ in range(size)]
            if hosted >= 0:
                engine.keep(tokens, host_pages=hosted)
            asked.append((when, [*tokens, *(rng.randrange(10, 9999) for _ in range(64))]))
        with engine.running():
            return engine.first_tokens(asked), engine
