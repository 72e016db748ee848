"""A GPU in threads: steps and page copies are put on streams of a device and happen when it gets to them.

Used in place of `FakeExecutor` by `campaign.Stack`. Pages are tensors, copied by `StreamPageCopier`, half a
page at a time, so that whoever reads too early sees half of one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from fakes import FakeExecutor

from wicore_trt.runtime.batch import UNREAD, StepBatch, StepResult
from wicore_trt.runtime.page_copier import StreamPageCopier

DIGEST = 8
"""Bytes of an entry of a page."""


class Event:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(60), "an event that nobody reaches"


class Stream:
    """Work in order: callables, and events to wait for."""

    def __init__(self, lock: Any) -> None:
        self.queue: list[Any] = []
        self._lock = lock

    def record(self) -> Event:
        event = Event()
        self.put(event.happened.set)
        return event

    def wait(self, event: Event) -> None:
        self.put(event)

    def put(self, work: Callable[[], object] | Event) -> None:
        with self._lock:
            self.queue.append(work)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            half = len(target) // 2
            for part in (slice(half), slice(half, None)):
                self.put(lambda to=target[part], of=source[part]: to.copy_(of))

    def run_one(self) -> bool:
        """Whether the head of the queue could run."""
        head = self.queue[0] if self.queue else None
        if head is None or (isinstance(head, Event) and not head.happened.is_set()):
            return False
        self.queue.pop(0)
        if not isinstance(head, Event):
            head()
        return True


class Device:
    """Three streams, steps first, that a thread runs at odds which change."""

    def __init__(self, rng: random.Random) -> None:
        self.lock = threading.RLock()
        self.streams = tuple(Stream(self.lock) for _ in range(3))
        self.open, self._rng, self._odds = True, rng, [1.0] * 3
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        rng = self._rng
        while self.open:
            with self.lock:
                if rng.random() < 0.02:
                    self._odds = [rng.choice((0.02, 1.0, 5.0)) for _ in self.streams]
                order = sorted(range(3), key=lambda n: -(rng.random() ** (1 / self._odds[n])))
                busy = any(self.streams[n].run_one() for n in order)
            if not busy or rng.random() < 0.1:
                time.sleep(0.0003)

    def pin(self, memory: memoryview) -> bool:
        return True

    def unpin_all(self) -> None:
        pass


class _Page:
    """Entries of a page as `FakeExecutor` reads and writes them."""

    def __init__(self, row: torch.Tensor) -> None:
        self._row = row

    def __getitem__(self, i: int) -> bytes:
        return bytes(self._row[DIGEST * i : DIGEST * (i + 1)].numpy())

    def __setitem__(self, i: int, value: bytes) -> None:
        self._row[DIGEST * i : DIGEST * (i + 1)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)


class _Pages:
    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool

    def __getitem__(self, slot: int) -> _Page:
        return _Page(self._pool[slot])


class LateExecutor(FakeExecutor):
    """An `AheadExecutor` whose steps run on the first stream; `lead`: how often it agrees to run ahead. `led` counts
    steps whose token ids came from the step before."""

    def __init__(self, *sizes: Any, seed: int, lead: float = 0.95) -> None:
        super().__init__(*sizes)
        size = DIGEST * self.layout.page_tokens
        pools = {g: torch.zeros((n, size), dtype=torch.uint8) for g, n in self.layout.num_pages.items()}
        self.memory = {g: _Pages(pool) for g, pool in pools.items()}
        self.device, self._rng, self._lead = Device(random.Random(seed)), random.Random(seed + 1), lead
        self.copier = StreamPageCopier(pools, self.layout.page_tokens, self.device.streams, self.device)
        self.led = 0
        self._sampled: dict[int, int] = {}
        self._steps: list[tuple[threading.Event, list[StepResult | BaseException]]] = []

    def submit(self, batch: StepBatch) -> None:
        assert len(self._steps) < 2, "two steps are under way"
        self.led += any(UNREAD in piece.token_ids for piece in batch.slices)
        pieces = [
            replace(p, token_ids=[*p.token_ids], history=[*p.history], pages={g: [*t] for g, t in p.pages.items()})
            for p in batch.slices
        ]
        step, over, result = StepBatch(pieces, batch.measure_attention), threading.Event(), []
        self.copier.begin_step(step)

        def work() -> None:
            try:
                for piece in pieces:
                    if piece.token_ids == [UNREAD]:
                        piece.token_ids = [self._sampled.get(piece.seq_id, 0)]
                        piece.history.extend(piece.token_ids)
                result.append(FakeExecutor.execute(self, step))
                self._sampled = {token.seq_id: token.token_id for token in result[0].tokens}
            except BaseException as error:  # raised where the step is collected
                result.append(error)
            over.set()

        self.device.streams[0].put(work)
        self._steps.append((over, result))

    def collect(self) -> StepResult:
        over, result = self._steps.pop(0)
        assert over.wait(60), "the device is stuck"
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def leads(self, batch: StepBatch) -> bool:
        return self._rng.random() < self._lead

    def execute(self, batch: StepBatch) -> StepResult:
        self.submit(batch)
        return self.collect()

    def close(self) -> None:
        self.copier.close()
        self.device.open = False
        self.device.thread.join()
