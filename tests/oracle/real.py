"""The world as it is: real threads, real clocks, delays in milliseconds. For races, which `Virtual` cannot have.

Same face as `world.Virtual`. Invariant: nothing here reproduces exactly; a failure's seed is a place to look.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from oracle.world import Speeds

MOST_S = 0.002
"""No single delay is longer: what is drawn for a world without waiting would take minutes."""


class Real:
    virtual = False

    def __init__(self, seed: int, speeds: Speeds) -> None:
        self.rng = random.Random(seed)
        self.speeds = speeds
        self.wall_ns = 0
        self.hangs = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()
        self._change = threading.Condition()
        self._open = True
        threading.Thread(target=self._run, name="oracle-device", daemon=True).start()

    @property
    def now(self) -> float:
        return time.monotonic()

    def clock(self) -> float:
        return time.monotonic()

    def later(self, delay: float, work: Callable[[], None]) -> None:
        with self._change:
            heapq.heappush(self._heap, (time.monotonic() + min(delay, MOST_S), next(self._serial), work))
            self._change.notify()

    def advance(self, seconds: float) -> None:
        if self.rng.random() < 0.2:
            time.sleep(min(seconds, MOST_S))

    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not over() and time.monotonic() < end:
            time.sleep(MOST_S / 10)
        return over()

    def takes(self, seconds: float) -> float:
        return min(seconds, MOST_S) * self.rng.random()

    def kill(self) -> None:
        with self._change:
            self._heap.clear()

    def unhang(self) -> None:
        pass

    def end(self) -> None:
        with self._change:
            self._open = False
            self._change.notify()

    @contextmanager
    def entered(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.end()

    def _run(self) -> None:
        while True:
            with self._change:
                while self._open and not (self._heap and self._heap[0][0] <= time.monotonic()):
                    self._change.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
                if not self._open:
                    return
                _, _, work = heapq.heappop(self._heap)
            work()
