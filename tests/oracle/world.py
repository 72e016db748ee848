"""A world without threads or clocks: time passes when somebody waits, and what other threads would do is drawn.

`Virtual` keeps the time and a heap of what will happen. `entered` puts it in the place of clocks, queues and threads
of the product's modules. It must not know requests or pages. Invariant: one seed gives one sequence of happenings.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from queue import Empty
from types import ModuleType
from unittest import mock

from wicore_trt.kv.disk.io import DiskOperation, Outcome
from wicore_trt.kv.disk.native import NativeMover
from wicore_trt.kv.disk.store import DiskStore

PACKAGES = ("wicore_trt.kv.", "wicore_trt.schedule.", "wicore_trt.core.")
NEVER = math.inf


@dataclass
class Speeds:
    """Seconds: of computing a token, of a page over the link, of a page on disk, of a checksum; `noise` is the largest
    factor by which one of them is off; `spike` the chance that it takes 30 times as long."""

    token: float
    link: float
    disk: float
    checksum: float
    noise: float = 1.3
    spike: float = 0.0


class Virtual:
    """The engine's thread is the one that waits; what others do happens meanwhile."""

    virtual = True

    def __init__(self, seed: int, speeds: Speeds) -> None:
        self.rng = random.Random(seed)
        self.speeds = speeds
        self.now = 1000.0
        self.wall_ns = 1_700_000_000 * 10**9
        self.hangs = 0  # so many disk operations from now on hang
        self.hung: list[Callable[[], None]] = []  # what goes on when the disk comes back
        self.others = False
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()
        self.happened = 0

    # --- time ----------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.now

    def later(self, delay: float, work: Callable[[], None]) -> None:
        """Another thread does `work` in so many seconds."""
        if delay != NEVER:
            heapq.heappush(self._heap, (self.now + delay, next(self._serial), work))

    def advance(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        """Let time pass until `over`, at most so many seconds."""
        end = self.now + seconds
        while not over():
            if not self._heap or self._heap[0][0] > end:
                if end != NEVER:
                    self.now = max(self.now, end)
                return over()
            when, _, work = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            self.happened += 1
            before, self.others = self.others, True
            try:
                work()
            finally:
                self.others = before
        return True

    def kill(self) -> None:
        """The process is gone: nothing that it had begun happens any more."""
        self._heap.clear()
        self.hung = []

    def unhang(self) -> None:
        """The disk comes back: what hung goes on."""
        self.hangs, hung, self.hung = 0, self.hung, []
        for work in hung:
            self.later(0.0, work)

    def takes(self, seconds: float) -> float:
        """What `seconds` become this time."""
        noise = self.speeds.noise
        factor = noise ** self.rng.uniform(-1, 1)
        if self.speeds.spike and self.rng.random() < self.speeds.spike:
            factor *= 30
        return seconds * factor

    @contextmanager
    def entered(self) -> Iterator[None]:
        """In here the product's modules meet this world."""
        clock = _Clock(self)
        fakes = {
            (time, "time"): clock,
            (threading, "threading"): _Threading(self),
            (sys.modules["secrets"], "secrets"): _Secrets(self.rng.randrange(1 << 60)),
        }
        with ExitStack() as stack:
            for module in _modules():
                for (real, name), fake in fakes.items():
                    if getattr(module, name, None) is real:
                        stack.enter_context(mock.patch.object(module, name, fake))
            for name, fake in (
                ("SimpleQueue", lambda: Queue(self)),
                ("ThreadPoolExecutor", lambda *args, **kwargs: Hashing(self)),
                ("IoPool", lambda *args, **kwargs: VirtualIoPool(self, *args, **kwargs)),
            ):
                replace_everywhere(stack, name, fake)
            for function in _default_clocks():
                stack.enter_context(_with_defaults(function, clock.monotonic))
            stack.enter_context(mock.patch.object(NativeMover, "start_threads", lambda *args: False))
            stack.enter_context(mock.patch.object(DiskStore, "reads_together", lambda *args: True))
            yield


def _modules() -> list[ModuleType]:
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(PACKAGES)]


def replace_everywhere(stack: ExitStack, name: str, value: object) -> None:
    """Give `name` another value in each of the product's modules that has it; at least one must."""
    places = [module for module in _modules() if name in vars(module)]
    assert places, f"nothing is called {name} any more"
    for module in places:
        stack.enter_context(mock.patch.object(module, name, value))


@cache
def _default_clocks() -> list[Callable]:
    """Functions with time.monotonic among their default arguments."""
    found = []
    for module in _modules():
        for holder in [module, *(v for v in vars(module).values() if isinstance(v, type))]:
            for value in vars(holder).values():
                defaults = [*(getattr(value, "__defaults__", None) or ())]
                defaults += (getattr(value, "__kwdefaults__", None) or {}).values()
                if time.monotonic in defaults and value not in found:
                    found.append(value)
    return found


@contextmanager
def _with_defaults(function: Callable, clock: Callable[[], float]) -> Iterator[None]:
    plain, named = function.__defaults__, function.__kwdefaults__
    function.__defaults__ = plain and tuple(clock if value is time.monotonic else value for value in plain)
    function.__kwdefaults__ = named and {k: clock if v is time.monotonic else v for k, v in named.items()}
    try:
        yield
    finally:
        function.__defaults__, function.__kwdefaults__ = plain, named


class _Clock:
    """In place of the module `time`."""

    def __init__(self, world: Virtual) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now

    perf_counter = time = monotonic

    def time_ns(self) -> int:
        return self._world.wall_ns + int(self._world.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self._world.advance(seconds)


class _Threading:
    """In place of the module `threading`."""

    def __init__(self, world: Virtual) -> None:
        self._world = world

    def get_ident(self) -> int:
        return 2 if self._world.others else 1

    def __getattr__(self, name: str) -> object:
        return getattr(threading, name)


class _Secrets:
    """In place of the module `secrets`."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def token_bytes(self, count: int) -> bytes:
        return self._rng.randbytes(count)

    def randbits(self, bits: int) -> int:
        return self._rng.getrandbits(bits)

    def randbelow(self, limit: int) -> int:
        return self._rng.randrange(limit)


class Queue:
    """In place of SimpleQueue: to wait on it lets time pass."""

    def __init__(self, world: Virtual) -> None:
        self._world = world
        self._items: deque = deque()

    def put(self, item: object) -> None:
        self._items.append(item)

    def get_nowait(self) -> object:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def get(self, timeout: float) -> object:
        self._world.wait(lambda: bool(self._items), timeout)
        return self.get_nowait()

    def empty(self) -> bool:
        return not self._items


class Hashing:
    """In place of the checksum thread: in order, some time later."""

    def __init__(self, world: Virtual) -> None:
        self._world = world
        self._until = 0.0
        self._left = 0

    def submit(self, work: Callable[..., object], *args: object) -> None:
        world = self._world
        self._until = max(self._until, world.now) + world.takes(world.speeds.checksum)
        self._left += 1

        def run() -> None:
            self._left -= 1
            work(*args)

        world.later(self._until - world.now, run)

    def shutdown(self, wait: bool = True) -> None:
        self._world.wait(lambda: not self._left, NEVER)


class VirtualIoPool:
    """In place of the disk's threads. An operation does its work at some moment between its begin and its end; some
    never end."""

    def __init__(
        self, world: Virtual, threads: int, queue_limit: int, timeout_s: float, chore: Callable, end: Callable, **_: int
    ) -> None:
        self._world, self._idle, self._threads = world, threads, threads
        self._limit, self._timeout_s, self._chore, self._end = queue_limit, timeout_s, chore, end
        self._queues: dict[bool, deque[DiskOperation]] = {True: deque(), False: deque()}
        self.live: dict[DiskOperation, None] = {}
        self._running: dict[DiskOperation, None] = {}
        self._nudged = self._chore_runs = self._closing = self._ended = False

    @property
    def stalled(self) -> bool:
        return len(self._running) == self._threads and all(op.timed_out for op in self._running)

    def submit_operation(self, run: Callable, done: Callable, *, urgent: bool = False, **_: int) -> bool:
        queue = self._queues[urgent]
        if self._closing or len(queue) >= self._limit or self.stalled:
            return False
        op = DiskOperation(run, done)
        self.live[op] = None
        queue.append(op)
        self._world.later(self._timeout_s, lambda: self._expire(op))
        self._serve()
        return True

    def request_chore(self) -> None:
        self._nudged = True
        self._serve()

    def close(self, timeout_s: float) -> None:
        self._closing = True
        self._serve()
        if self._world.wait(lambda: self._ended, timeout_s):
            return
        queued = [*self._queues[True], *self._queues[False]]
        for op in queued:
            self.live.pop(op)
            op.finish(Outcome.FAILED)
        self._queues = {True: deque(), False: deque()}
        for op in list(self._running):
            op.expire()

    def _serve(self) -> None:
        while self._idle and (self._queues[True] or self._queues[False]):
            self._begin((self._queues[True] or self._queues[False]).popleft())
        if self._idle and self._nudged and not self._chore_runs and not self._closing:
            self._nudged, self._chore_runs = False, True
            self._begin(DiskOperation(self._run_chore, lambda outcome: None))
        if self._closing and self._idle == self._threads and not self._ended:
            self._ended = True
            self._end()

    def _run_chore(self, op: DiskOperation) -> Outcome:
        self._chore_runs = False
        self._chore()
        return Outcome.OK

    def _begin(self, op: DiskOperation) -> None:
        world = self._world
        self._idle -= 1
        self._running[op] = None
        span = world.takes(world.speeds.disk)
        if world.hangs > 0:
            world.hangs -= 1
            span = world.rng.choice((NEVER, 3 * self._timeout_s))
        outcome = []

        def work() -> None:
            try:
                outcome.append(op.run(op))
            except Exception:
                outcome.append(Outcome.FAILED)

        def finish() -> None:
            self._idle += 1
            self._running.pop(op)
            self.live.pop(op, None)
            op.finish(outcome[0])
            self._serve()

        if span == NEVER:
            world.hung += [work, finish]
        else:
            world.later(world.rng.choice((0.0, 0.5, 1.0)) * span, work)
            world.later(span, finish)

    def _expire(self, op: DiskOperation) -> None:
        if op not in self.live:
            return
        op.expire()
        for queue in self._queues.values():
            if op in queue:
                queue.remove(op)
                self.live.pop(op)
                op.finish(Outcome.RETURNED)
