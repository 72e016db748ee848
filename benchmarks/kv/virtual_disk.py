"""A disk, a link to the device and the time of steps, in virtual time, for simulations of the KV tiers.

A disk shares a rate that changes over time among its threads, most reads before writes; each operation takes a latency
more, and now and then one takes long. It must not know who reads. Invariant: one seed gives one sequence of happenings.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import Empty
from typing import Any

from benchmarks.kv.host_costs import HostCosts
from wicore_trt.kv.disk.io import Outcome, PageMove
from wicore_trt.kv.disk.store import QUEUE_LIMIT
from wicore_trt.kv.pages.page import Page
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.executor import CameIn, Done

PAGE_TOKENS, WINDOW = 32, 1024
PAGE_BYTES = {GLOBAL: PAGE_TOKENS * 81_920, LOCAL: PAGE_TOKENS * 425_984}
"""Gemma 3 27B in BF16."""
GPUS = {"h200": (0.011, 4.85e-5), "h100": (0.0144, 4.9e-5)}
"""Seconds of a step in which eight sequences decode behind 8K tokens, and of a token of prompts: FP8 weights."""
BATCH_TOKENS, SLICE_TOKENS = 8192, 256
GRAPH_TOKENS = 1536
"""Of the largest step that is started at once."""
READS_FIRST = 16
"""Reads that go before a write, as in the native library."""
DIGEST = bytes(16)
Told = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class World:
    """True rates of a simulated machine. `disk` are (second, bytes/s from then on), the first at 0; a read takes
    `latency_s` more, and one in `slow_in` takes `slow_s`. Steps are those of a `gpu` (`docs/benchmarks/log.md`),
    `speed` times as fast."""

    disk: tuple[tuple[float, float], ...]
    latency_s: float = 1e-3
    slow_in: int = 0
    slow_s: float = 0.5
    link: float = 46e9
    speed: float = 1.0
    gpu: str = "h200"
    threads: int = 4
    drag: float = 1.0
    """How many times as long a step takes that begins while the disk is read."""
    launch_s: float = 0.0
    """What such a step takes at least for which there is no graph: its launches, beside the threads that read."""
    graph_tokens: int = GRAPH_TOKENS
    page_s: float = 4e-5
    """Of the engine's thread for each page that it asks for, where `host` does not say more."""
    host: HostCosts | None = None
    """Of the engine's thread, which then runs a step ahead of the device and works while that computes."""

    def step_s(self, slices: Sequence[tuple[int, int]]) -> float:
        """Of a step that computes (start, count) of each sequence. On an H200 32K take 1.83 s, 130,000 10.1 s."""
        least_s, token_s = GPUS[self.gpu]
        tokens = sum(n for _, n in slices)
        pairs = sum(n * (start + n / 2) for start, n in slices)
        return (math.hypot(least_s, token_s * tokens) + 4.49e-10 * pairs) / self.speed

    def prefill_s(self, begin: int, end: int) -> float:
        """Of steps as large as they may be."""
        edges = [*range(begin, end, BATCH_TOKENS), end]
        return sum(self.step_s([(a, b - a)]) for a, b in zip(edges, edges[1:], strict=False))


class Events:
    """Events beside the engine's thread, and their times."""

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

    def work(self, ms: float) -> None:
        """Let time pass in which the engine's thread works."""
        self.until(self.now + 1e-3 * ms)

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
    reads: bool


class Disk:
    """A `DiskStore` that moves nothing. Operations under way share the rate; a slow one holds its thread besides."""

    existing_slots, stalled, now = 1 << 40, False, 0.0

    def __init__(self, world: World, events: Events, seed: int) -> None:
        self._world, self._events, self._rng = world, events, random.Random(seed)
        self._queues = {True: deque[_Operation](), False: deque[_Operation]()}
        self._active: dict[_Operation, None] = {}
        self._held = self._reads_since = 0
        self._since, self._version = events.now, 0
        self.ending: Mapping[bytes, int] = {}
        self.read_bytes = self.write_bytes = self.asked = 0
        for when, _ in world.disk[1:]:
            events.at(when, self._turn)

    @property
    def reading(self) -> bool:
        return any(op.reads for op in (*self._active, *self._queues[True]))

    @property
    def queue_depth(self) -> int:
        return len(self._active) + self._held + sum(map(len, self._queues.values()))

    def rate(self, now: float) -> float:
        return [rate for when, rate in self._world.disk if when <= now][-1]

    def reads_together(self, digest: object) -> bool:
        return True

    def read_pages(self, moves: Sequence[PageMove], done: Told) -> bool:
        left = [len(moves)]

        def over(move: PageMove, outcome: Outcome) -> None:
            move.outcome, move.digest = outcome, DIGEST
            if outcome is Outcome.OK:
                self.read_bytes += PAGE_BYTES[move.page.group]
            left[0] -= 1
            if not left[0]:
                done(Outcome.OK)

        if len(self._queues[True]) >= QUEUE_LIMIT:
            return False
        for move in moves:
            self._put(urgent=True, page=move.page, done=partial(over, move), wanted=move.wanted)
        return True

    def write_page(self, page: Page, slots: Sequence[int], parts: object, done: Told, **_: object) -> bool:
        if len(self._queues[False]) >= QUEUE_LIMIT:
            return False
        self._put(urgent=False, page=page, done=done)
        self.write_bytes += PAGE_BYTES[page.group]
        return True

    def _put(
        self, *, urgent: bool, page: Page, done: Callable[[Outcome], None], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        world = self._world
        self.asked += urgent
        if urgent and world.host is not None:
            self._events.work(world.host.ask)
        slow = world.slow_in and self._rng.random() * world.slow_in < 1
        self._queues[urgent].append(
            _Operation(PAGE_BYTES[page.group], world.slow_s if slow else world.latency_s, done, wanted, urgent)
        )
        self._turn()

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
            events.at(events.now + op.slow_s, partial(self._end, op))
        while len(self._active) + self._held < self._world.threads and any(self._queues.values()):
            writes = self._queues[False] and (not self._queues[True] or self._reads_since >= READS_FIRST)
            op = self._queues[not writes].popleft()
            self._reads_since = self._reads_since + 1 if op.reads else 0
            if op.wanted():
                self._active[op] = None
            else:
                op.done(Outcome.UNWANTED)
        self._version += 1
        if self._active:
            least = min(op.left for op in self._active) * len(self._active) / self.rate(events.now)
            events.at(events.now + least, partial(self._due, self._version))

    def _due(self, version: int) -> None:
        if version == self._version:
            self._turn()

    def _end(self, op: _Operation) -> None:
        self._held -= 1
        op.done(Outcome.OK)
        self._turn()

    def erase_slots(self, slots: Sequence[int]) -> None:
        pass

    def stamp_page(self, page: Page, slots: Sequence[int], expires: int) -> None:
        pass

    def get_expiry(self, slots: Sequence[int]) -> int:
        return 0

    def close(self, timeout_s: float) -> None:
        pass


class Link:
    """A `PageCopier` of a device that computes digests: each direction one copy after the other, begun at `flush`."""

    broken: BaseException | None = None
    checks = True
    coded_bytes: Mapping[str, int] = {}

    def __init__(self, world: World, events: Events) -> None:
        self._world, self._events = world, events
        self._free = {"out": 0.0, "in": 0.0}
        self._asked: list[tuple[str, int, Callable[[float], None]]] = []

    def pin(self, memory: memoryview) -> bool:
        return True

    def digest(self, parts: object) -> bytes:
        return DIGEST

    def to_host(self, group: str, slot: int, parts: object, done: Done, *, settled: bool = False) -> None:
        self._work(1, "store")
        self._asked.append(("out", PAGE_BYTES[group], partial(done, DIGEST)))

    def to_device(self, group: str, slots: Sequence[int], pages: object, done: CameIn) -> None:
        self._work(len(slots), "land")
        self._asked.append(("in", len(slots) * PAGE_BYTES[group], partial(done, [DIGEST] * len(slots))))

    def _work(self, pages: int, what: str) -> None:
        if self._world.host is not None:
            self._events.work(pages * getattr(self._world.host, what))

    def flush(self) -> None:
        asked, self._asked = self._asked, []
        for way, size, done in asked:
            took = size / self._world.link
            self._free[way] = max(self._free[way], self._events.now) + took
            self._events.at(self._free[way], partial(done, took))
