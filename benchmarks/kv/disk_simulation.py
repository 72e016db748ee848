"""Loads from a disk that is not what it was rated: whole requests in virtual time.

The scheduler, the cache, the tiers and the loader are the product's; the device, the link and the disk are modelled
(`World`). A disk shares a rate that changes over time among four threads, reads before writes; each operation takes a
latency more, and now and then one takes long. It must not know how the planner decides. Invariant: one seed gives one
sequence of happenings, and the arms of a comparison (`Arm`) run in the same world.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from queue import Empty
from typing import Any, Literal, cast
from unittest import mock

from wicore_trt.arithmetic import pages_per_slab
from wicore_trt.config import KVSettings
from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.disk.store import QUEUE_LIMIT
from wicore_trt.kv.manager import CacheOptions, KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.by_name import policy_of
from wicore_trt.kv.prefix.loader import PrefixLoader
from wicore_trt.kv.prefix.planner import LoadChoice, NextMove
from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.kv.tiers import tiers as tiers_module
from wicore_trt.kv.tiers import transfers as transfers_module
from wicore_trt.kv.tiers import way_down, way_up
from wicore_trt.kv.tiers.host import HostTier, checksum, slot_geometry
from wicore_trt.kv.tiers.index import TierCopy, TierIndex
from wicore_trt.kv.tiers.tiers import LowerTiers
from wicore_trt.kv.tiers.transfers import Transfers
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SampledToken, StepBatch, StepResult
from wicore_trt.runtime.executor import Done, KVLayout
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.schedule.step_time import StepTime
from wicore_trt.types import CacheHints, GenerateRequest, SamplingParams

PAGE_TOKENS, WINDOW = 32, 1024
PAGE_BYTES = {GLOBAL: PAGE_TOKENS * 81_920, LOCAL: PAGE_TOKENS * 425_984}
"""Gemma 3 27B in BF16."""
BATCH_TOKENS, SLICE_TOKENS = 8192, 256
CHECKPOINT = 4096
DIGEST = bytes(16)
GIB = 1 << 30
Arm = Literal["product", "compute", "load"]
"""Who decides: the loader, or one that never loads, or one that loads all there is and waits for it."""


@dataclass(frozen=True, slots=True)
class World:
    """What is true. `disk` are (second, bytes/s from then on), the first at 0; a read takes `latency_s` more, and one
    in `slow_in` takes `slow_s`. Prefill is that of an H200 (`docs/benchmarks/log.md`), `speed` times as fast."""

    disk: tuple[tuple[float, float], ...]
    latency_s: float = 1e-3
    slow_in: int = 0
    slow_s: float = 0.5
    link: float = 46e9
    speed: float = 1.0
    threads: int = 4
    page_s: float = 4e-5
    """Of the engine's thread for each page that it asks for."""

    def step_s(self, slices: Sequence[tuple[int, int]]) -> float:
        """Of a step that computes (start, count) of each sequence. 32K take 1.83 s and 130,000 tokens 10.1 s."""
        tokens = sum(n for _, n in slices)
        pairs = sum(n * (start + n / 2) for start, n in slices)
        return (math.hypot(0.011, 4.85e-5 * tokens) + 4.49e-10 * pairs) / self.speed

    def prefill_s(self, begin: int, end: int) -> float:
        """Of steps as large as they may be."""
        edges = [*range(begin, end, BATCH_TOKENS), end]
        return sum(self.step_s([(a, b - a)]) for a, b in zip(edges, edges[1:], strict=False))


class Events:
    """What happens beside the engine's thread, and when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def at(self, when: float, work: Callable[[], None]) -> None:
        if when < math.inf:
            heapq.heappush(self._heap, (max(when, self.now), next(self._serial), work))

    def until(self, end: float, over: Callable[[], bool] = lambda: False) -> None:
        while not over() and self._heap and self._heap[0][0] <= end:
            when, _, work = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            work()
        if not over() and end < math.inf:
            self.now = max(self.now, end)

    # in place of the module `time`
    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class Mailbox:
    """A queue; to wait on it lets time pass."""

    def __init__(self, events: Events) -> None:
        self._events, self._items = events, deque[Any]()

    def put(self, item: object) -> None:
        self._items.append(item)

    def get_nowait(self) -> object:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def get(self, timeout: float) -> object:
        self._events.until(self._events.now + timeout, lambda: bool(self._items))
        return self.get_nowait()


@dataclass(eq=False, slots=True)
class _Operation:
    left: float
    slow_s: float
    done: Callable[[Outcome], None]
    wanted: Callable[[], bool]


class Disk:
    """A `PageStore` that moves nothing. Operations under way share the rate; a slow one holds its thread besides."""

    existing_slots, stalled, now = 1 << 40, False, 0.0

    def __init__(self, world: World, events: Events, seed: int) -> None:
        self._world, self._events, self._rng = world, events, random.Random(seed)
        self._queues = {True: deque[_Operation](), False: deque[_Operation]()}
        self._active: dict[_Operation, None] = {}
        self._held = 0
        self._since, self._version = events.now, 0
        self.ending: Mapping[bytes, int] = {}
        self.read_bytes = self.write_bytes = self.asked = 0
        for when, _ in world.disk[1:]:
            events.at(when, self._turn)

    @property
    def queue_depth(self) -> int:
        return len(self._active) + self._held + sum(map(len, self._queues.values()))

    def rate(self, now: float) -> float:
        return [rate for when, rate in self._world.disk if when <= now][-1]

    def read(
        self, page: Page, slots: Sequence[int], parts: object, done: Callable, *, seen: Callable,
        wanted: Callable[[], bool] = lambda: True,
    ) -> bool:  # fmt: skip
        def over(outcome: Outcome) -> None:
            if outcome is Outcome.OK:
                seen()
                self.read_bytes += PAGE_BYTES[page.group]
            done(outcome)

        return self._put(urgent=True, page=page, done=over, wanted=wanted)

    def write(self, page: Page, slots: Sequence[int], parts: object, done: Callable, **_: object) -> bool:
        self.write_bytes += PAGE_BYTES[page.group]
        return self._put(urgent=False, page=page, done=done)

    def _put(
        self, *, urgent: bool, page: Page, done: Callable[[Outcome], None], wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        world = self._world
        if len(self._queues[urgent]) >= QUEUE_LIMIT:
            return False
        self.asked += urgent
        slow = world.slow_in and self._rng.random() * world.slow_in < 1
        self._queues[urgent].append(
            _Operation(PAGE_BYTES[page.group], world.slow_s if slow else world.latency_s, done, wanted)
        )
        self._turn()
        return True

    def _turn(self) -> None:
        """Account for what was moved since, take on what fits, and say when the next one ends."""
        events = self._events
        gone, self._since = events.now - self._since, events.now
        if self._active and gone > 0:
            rate = self.rate(events.now - gone / 2) / len(self._active)
            for op in self._active:
                op.left -= gone * rate
        for op in [op for op in self._active if op.left < 1]:
            del self._active[op]
            self._held += 1
            events.at(events.now + op.slow_s, lambda op=op: self._end(op))
        while len(self._active) + self._held < self._world.threads and any(self._queues.values()):
            op = (self._queues[True] or self._queues[False]).popleft()
            if op.wanted():
                self._active[op] = None
            else:
                op.done(Outcome.UNWANTED)
        self._version += 1
        if self._active:
            least = min(op.left for op in self._active) * len(self._active) / self.rate(events.now)
            events.at(events.now + least, lambda version=self._version: self._due(version))

    def _due(self, version: int) -> None:
        if version == self._version:
            self._turn()

    def _end(self, op: _Operation) -> None:
        self._held -= 1
        op.done(Outcome.OK)
        self._turn()

    def erase(self, slots: Sequence[int]) -> None:
        pass

    def stamp(self, page: Page, slots: Sequence[int], expires: int) -> None:
        pass

    def expires(self, slots: Sequence[int]) -> int:
        return 0

    def close(self, timeout_s: float) -> None:
        pass


class Link:
    """A `PageCopier` of a device that computes digests: each direction one copy after the other, begun at `flush`."""

    broken: BaseException | None = None
    checks = True

    def __init__(self, world: World, events: Events) -> None:
        self._world, self._events = world, events
        self._free = {"out": 0.0, "in": 0.0}
        self._asked: list[tuple[str, int, Done]] = []

    def pin(self, memory: memoryview) -> bool:
        return True

    def digest(self, parts: object) -> bytes:
        return DIGEST

    def to_host(self, group: str, slot: int, parts: object, done: Done) -> None:
        self._asked.append(("out", PAGE_BYTES[group], done))

    def to_device(self, group: str, slot: int, parts: object, done: Done) -> None:
        self._asked.append(("in", PAGE_BYTES[group], done))

    def flush(self) -> None:
        asked, self._asked = self._asked, []
        for way, size, done in asked:
            took = size / self._world.link
            self._free[way] = max(self._free[way], self._events.now) + took
            self._events.at(self._free[way], lambda done=done, took=took: done(DIGEST, took))


class Device:
    """An `Executor` that takes the time of its steps."""

    spec: Any = None
    kernels, max_batch_tokens, slice_tokens, max_sequences, score_rows = "none", BATCH_TOKENS, SLICE_TOKENS, None, 0

    def __init__(self, world: World, events: Events, copier: Link, layout: KVLayout) -> None:
        self._world, self._events, self.copier, self.layout = world, events, copier, layout
        self.steps: list[tuple[float, float, list[tuple[int, int]]]] = []

    def execute(self, batch: StepBatch) -> StepResult:
        self.copier.flush()
        slices = [(s.start, len(s.token_ids)) for s in batch.slices]
        begun = self._events.now
        self._events.until(begun + self._world.step_s(slices))
        self.steps.append((begun, self._events.now, slices))
        return StepResult([SampledToken(s.seq_id, 7) for s in batch.slices if s.sample])

    def release(self, seq_id: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Host(HostTier):
    """Without memory."""

    def __init__(self, index: TierIndex, slot_bytes: int) -> None:
        self.index, self.slot_bytes, self._page_bytes = index, slot_bytes, PAGE_BYTES

    def buffers(self, copy: TierCopy) -> list[memoryview]:
        return []

    def payload(self, copy: TierCopy, *, clear: bool = False) -> list[memoryview]:
        return []

    def _cut(self, slots: Iterable[int]) -> list[memoryview]:
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
        slot_bytes, per_page = slot_geometry(PAGE_BYTES)

        def books(gib: float) -> TierIndex:
            slots = int(gib * GIB) // slot_bytes
            return TierIndex(slots, per_page, policy_of(settings, slots, PAGE_TOKENS), primary=GLOBAL)

        self.disk = Disk(world, self.events, seed)
        link = Link(world, self.events)
        transfers = Transfers(
            _Host(books(sizes.host), slot_bytes), (books(sizes.disk), cast(Any, self.disk)), link, save_early=True
        )
        transfers.movers.checker.shutdown()
        transfers.movers.mailbox = cast(Any, Mailbox(self.events))
        self.tiers = LowerTiers(transfers, threshold=settings.host_threshold)
        slabs = pages_per_slab(PAGE_BYTES)
        number = int(sizes.device * GIB) // (slabs[GLOBAL] * PAGE_BYTES[GLOBAL])
        layout = KVLayout(PAGE_TOKENS, "bfloat16", {g: number * n for g, n in slabs.items()}, PAGE_BYTES, slabs)
        self.manager = KVCacheManager(
            layout.num_pages,
            WINDOW,
            KeyChain("sim", PAGE_TOKENS, secret=b"s" * 32),
            options=CacheOptions(slab_pages=slabs, checkpoint_tokens=CHECKPOINT),
            policy=policy_of(settings, layout.num_pages[GLOBAL], PAGE_TOKENS),
            tiers=self.tiers,
        )
        self.loader = PrefixLoader(self.manager, self.tiers, PAGE_BYTES, self.events.monotonic)
        transfers.up.disk_rate = self.loader.disk_read
        self.device = Device(world, self.events, link, layout)
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
            self.scheduler.observe([(0, size * 128)], self.world.step_s([(0, size * 128)]))
            self.scheduler.observe([(32_768, size * 128)], self.world.step_s([(32_768, size * 128)]))
        for size in (4, 64, 4, 256, 16) if rated is not None else ():
            self.loader.disk_read(size << 20, 1e-3 + (size << 20) / cast(float, rated), 0)
        for size in (4, 64, 256):
            self.loader._host_meter.observe(size << 20, (size << 20) / self.world.link, now=0.0)  # noqa: SLF001

    def _decide(self, arm: Arm) -> None:
        """Take the decisions out of the loader's hands."""
        loader = self.loader

        def choose(pages: SequencePages, total: int, hit: Any, compute: Any, **_: Any) -> LoadChoice | None:
            found = loader._candidates(pages, total, hit) if arm == "load" else []  # noqa: SLF001
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

        loader.choose = choose  # type: ignore[method-assign]
        loader.step = step  # type: ignore[method-assign]

    def keep(self, tokens: Sequence[int], *, host_pages: int = 0) -> None:
        """Put a prompt on disk as a process before this one left it; the first `host_pages` in host memory as well."""
        pages = SequencePages(self.manager.names("", ""), CacheHints())
        pages.name(tokens)
        full, wanted = len(pages.keys), dict[str, set[int]]()
        ends = {full, *range(CHECKPOINT // PAGE_TOKENS, full + 1, CHECKPOINT // PAGE_TOKENS)}
        wanted[LOCAL] = {i for end in ends for i in range(max(0, end - WINDOW // PAGE_TOKENS), end)}
        wanted[GLOBAL] = set(range(full))
        disk = self.tiers.disk
        assert disk is not None
        for i in range(full):
            for group in (GLOBAL, LOCAL):
                if i in wanted[group]:
                    copy = disk.reserve(pages.page(group, i))
                    assert copy is not None
                    disk.commit(copy)
                    if i < host_pages:
                        here = self.tiers.host.reserve(copy.page)
                        assert here is not None
                        here.checksum = checksum(copy.page, DIGEST)
                        self.tiers.host.mark_saved(here)
                        self.tiers.host.commit(here)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In here the tiers meet this engine's clock."""
        with ExitStack() as stack:
            for module in (tiers_module, transfers_module, way_down, way_up):
                stack.enter_context(mock.patch.object(module, "time", self.events))
            yield

    def ask(self, tokens: Sequence[int], output: int = 1) -> str:
        name = f"r{next(self._ids)}"
        self.core.add(GenerateRequest(name, tuple(tokens), SamplingParams(max_tokens=output, ignore_eos=True)))
        return name

    def step(self) -> list[Any]:
        """One step, with what loads cost the engine's thread."""
        before = self.disk.asked
        outputs = self.core.step()
        if outputs and (broken := [o.error for o in outputs if o.error]):
            raise RuntimeError(broken[0])
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
                if output.token_ids and output.request_id not in found:
                    found[output.request_id] = self.events.now - asked[output.request_id]
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
        for when, size, host in self.prompts:
            tokens = [rng.randrange(10, 9999) for _ in range(size)]
            if host >= 0:
                engine.keep(tokens, host_pages=host)
            asked.append((when, [*tokens, *(rng.randrange(10, 9999) for _ in range(64))]))
        with engine.running():
            return engine.first_tokens(asked), engine
