"""A GPU in threads: steps and page copies are put on streams of a device and happen when it gets to them.

Used in place of `FakeExecutor` by `campaign.Stack`. Pages are tensors, copied by `StreamPageCopier`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from fakes import AheadFakeExecutor
from lanes import Coder, Digests, Lane

from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.plugins.code_layout import PageCode
from wicore_trt.runtime.batch import StepBatch, StepResult
from wicore_trt.runtime.page_copier import StreamPageCopier, make_digest
from wicore_trt.runtime.page_digest import PageDigest

DIGEST = 8
"""Bytes of an entry of a page."""
CODES = {GLOBAL: PageCode(4, 32, 64), LOCAL: PageCode(8, 32, 64)}
"""Of pages of 16 and 32 KiB."""
NOISY = 20
"""One entry of so many makes its page one that has no code."""


class Device:
    """Four streams, steps first, that a thread runs at odds which change. `kind`: of the two that copy, which the last
    one is behind."""

    def __init__(self, rng: random.Random, kind: Callable[..., Lane] = Lane) -> None:
        self.lock = threading.RLock()
        self.streams = (Lane(lock=self.lock), kind(lock=self.lock), kind(lock=self.lock), Lane(lock=self.lock))
        self.open, self._rng, self._odds = True, rng, [1.0] * 4
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        rng = self._rng
        while self.open:
            with self.lock:
                if rng.random() < 0.02:
                    self._odds = [rng.choice((0.02, 1.0, 5.0)) for _ in self.streams]
                order = sorted(range(4), key=lambda n: -(rng.random() ** (1 / self._odds[n])))
                busy = any(self.streams[n].run_one() for n in order)
            if not busy or rng.random() < 0.1:
                time.sleep(0.0003)

    def pin(self, memory: memoryview) -> bool:
        return True

    def unpin_all(self) -> None:
        self.open = False  # the copier is closed: else the thread would look for work to the end of the run


class _Page:
    """Entries of a page as `FakeExecutor` reads and writes them. The rest of a large page follows from them."""

    def __init__(self, row: torch.Tensor, size: int) -> None:
        self._row, self._each, self._first = row, (row.numel() - DIGEST * size) // size, DIGEST * size

    def __getitem__(self, i: int) -> bytes:
        value, at = bytes(self._row[DIGEST * i : DIGEST * (i + 1)].numpy()), self._first + self._each * i
        if self._each and bytes(self._row[at : at + self._each].numpy()) != self._fill(value):
            return b"torn"
        return value

    def __setitem__(self, i: int, value: bytes) -> None:
        at = self._first + self._each * i
        self._row[DIGEST * i : DIGEST * (i + 1)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        if self._each:
            self._row[at : at + self._each] = torch.frombuffer(bytearray(self._fill(value)), dtype=torch.uint8)

    def _fill(self, value: bytes) -> bytes:
        noisy = sum(value) % NOISY == 0
        return random.Random(value).randbytes(self._each) if noisy else value[:1] * self._each


class _Pages:
    def __init__(self, pool: torch.Tensor, size: int) -> None:
        self._pool, self._size = pool, size

    def __getitem__(self, slot: int) -> _Page:
        return _Page(self._pool[slot], self._size)


def code_pages() -> dict[str, Any]:
    """What makes a `LateExecutor` one that codes its pages."""
    return {"digests": Digests, "coder": Coder}


class LateExecutor(AheadFakeExecutor):
    """An `AheadExecutor` whose steps run on the first stream. `lane`: makes a stream that copies; `digests`: what
    computes digests on the device, given how; none by default; `coder`: what codes pages, which are large then."""

    def __init__(
        self,
        *sizes: Any,
        seed: int,
        lane: Callable[..., Lane] = Lane,
        digests: Callable[[PageDigest], Any] = lambda digest: None,
        coder: Callable[[Mapping[str, PageCode]], Coder] | None = None,
    ) -> None:
        super().__init__(*sizes, seed=seed)
        tokens, groups = self.layout.page_tokens, self.layout.num_pages
        if coder is not None:
            self.layout = replace(self.layout, page_bytes={g: CODES[g].raw_bytes for g in groups})
        pools = {g: torch.zeros((n, self.layout.page_bytes[g]), dtype=torch.uint8) for g, n in groups.items()}
        self.memory = {g: _Pages(pool, tokens) for g, pool in pools.items()}
        self.device, digest = Device(random.Random(seed + 1), lane), make_digest(pools)
        self.copier = StreamPageCopier(
            pools, self.layout.page_tokens, self.device.streams, self.device, digests=digests(digest), digest=digest,
            coder=coder({g: CODES[g] for g in groups}) if coder is not None else None,
        )  # fmt: skip
        self._under_way: list[tuple[threading.Event, list[StepResult | BaseException]]] = []

    def submit(self, batch: StepBatch) -> None:
        assert len(self._under_way) < 2, "a third step in flight"
        step, over, result = self.taken(batch), threading.Event(), []
        self.copier.begin_step(step)

        def work() -> None:
            try:
                result.append(self.computed(step))
            except BaseException as error:  # raised where the step is collected
                result.append(error)
            over.set()

        self.device.streams[0].put(work)
        self._under_way.append((over, result))

    def collect(self) -> StepResult:
        over, result = self._under_way.pop(0)
        assert over.wait(60), "the device is stuck"
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def close(self) -> None:
        self.copier.close()
        self.device.thread.join()
