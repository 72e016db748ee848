"""The page copier on a GPU: slow steps against copies, both directions, pinned and not; and the rates that it reaches.

pytest -q -s tests/runtime/test_page_copier_cuda.py
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from wicore_trt.kv.disk.files import aligned_buffer  # noqa: E402
from wicore_trt.runtime.batch import SequenceSlice, StepBatch  # noqa: E402
from wicore_trt.runtime.page_copier import StreamPageCopier, make_copier  # noqa: E402

PAGE_TOKENS, PAGES = 4, 6
SLOW_CYCLES = 20_000_000
"""About 10 ms, in which a copy that did not wait would be over."""


class World:
    """A pool, a stream of steps, a copier of its own, and a slab of host memory with a buffer for each page."""

    def __init__(
        self, page_bytes: int, pages: int = PAGES, *, pinned: bool = True, default_stream: bool = False
    ) -> None:
        self.pool = torch.zeros((pages, page_bytes), dtype=torch.uint8, device="cuda")
        self.stream = torch.cuda.default_stream() if default_stream else torch.cuda.Stream()
        self.copier = make_copier({"global": self.pool}, PAGE_TOKENS, 0 if default_stream else self.stream.cuda_stream)
        assert isinstance(self.copier, StreamPageCopier)
        self.page_bytes = page_bytes
        self.slab = aligned_buffer(pages * page_bytes)
        self.pinned = pinned and self.copier.pin(self.slab)
        assert self.pinned == pinned
        self.done: list[threading.Event] = []
        torch.cuda.synchronize()

    def parts(self, page: int, pieces: int = 3) -> list[memoryview]:
        begin, size = page * self.page_bytes, -(-self.page_bytes // pieces)
        return [self.slab[begin + a : begin + min(a + size, self.page_bytes)] for a in range(0, self.page_bytes, size)]

    def host(self, page: int) -> Any:
        return torch.frombuffer(self.slab, dtype=torch.uint8)[page * self.page_bytes :][: self.page_bytes]

    def called(self) -> Any:
        self.done.append(happened := threading.Event())
        return lambda *_: happened.set()

    def step(self, slot: int, value: int, *, slow: bool = True) -> None:
        """Writes a page at the end of a slow step."""
        self.copier.begin_step(StepBatch([SequenceSlice(1, [0], 0, {"global": [slot]})]))
        with torch.cuda.stream(self.stream):
            if slow:
                torch.cuda._sleep(SLOW_CYCLES)
            self.pool[slot].fill_(value)

    def wait(self) -> None:
        self.copier.flush()
        assert all(event.wait(20) for event in self.done)


@pytest.mark.parametrize("default_stream", [False, True])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_page_is_copied_after_the_step_that_writes_it(pinned: bool, default_stream: bool) -> None:
    world = World(3 << 20, pinned=pinned, default_stream=default_stream)
    world.copier.to_host("global", 1, world.parts(1), world.called())  # the first copy is slow
    world.wait()
    world.step(2, 77)
    begun = time.perf_counter()
    world.copier.to_host("global", 2, world.parts(0), world.called())
    world.copier.flush()
    if pinned:
        assert time.perf_counter() - begun < 0.005, "the host waited for the step"
    world.wait()
    assert bool((world.host(0) == 77).all())
    world.copier.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_a_page_is_loaded_after_the_step_that_reads_its_slot(pinned: bool) -> None:
    world = World(3 << 20, pinned=pinned)
    world.step(1, 5, slow=False)
    world.host(4).fill_(9)
    with torch.cuda.stream(world.stream):
        torch.cuda._sleep(SLOW_CYCLES)
        seen = world.pool[1].clone()
    world.copier.to_device("global", [1], [world.parts(4)], world.called())
    world.wait()
    torch.cuda.synchronize()
    assert bool((seen == 5).all()) and bool((world.pool[1] == 9).all())
    world.copier.close()


def test_a_step_writes_a_slot_after_its_copies() -> None:
    """Large pages: their copies take longer than the launch of a step."""
    world = World(256 << 20, 2)
    world.step(0, 3, slow=False)
    world.copier.to_host("global", 0, world.parts(0), world.called())
    world.step(0, 4, slow=False)
    world.host(1).fill_(8)
    world.copier.to_device("global", [1], [world.parts(1)], world.called())
    world.step(1, 6, slow=False)
    world.wait()
    torch.cuda.synchronize()
    assert bool((world.host(0) == 3).all())
    assert bool((world.pool[0] == 4).all()) and bool((world.pool[1] == 6).all())
    world.copier.close()


def test_a_slot_is_saved_and_then_loaded() -> None:
    world = World(128 << 20, 2)
    world.step(0, 3)
    world.host(1).fill_(8)
    world.copier.to_host("global", 0, world.parts(0), world.called())
    world.copier.to_device("global", [0], [world.parts(1)], world.called())
    world.wait()
    assert bool((world.host(0) == 3).all()) and bool((world.pool[0] == 8).all())
    world.copier.close()


def test_random_steps_and_copies() -> None:
    """Values follow the order of the calls. A page that is being loaded is not read before `done`."""
    rng = random.Random()
    world = World(1 << 20)
    truth, loading, checks = [0] * PAGES, dict[int, threading.Event](), []
    for _ in range(200):
        slot, value = rng.randrange(PAGES), rng.randrange(256)
        for other in [s for s, event in loading.items() if event.is_set()]:
            del loading[other]
        action = rng.choice(["step", "step", "save", "load"])
        if action == "step":
            world.step(slot, value, slow=rng.random() < 0.1)
            with torch.cuda.stream(world.stream):
                for other in {*range(PAGES)} - {*loading}:
                    checks.append((world.pool[other].clone()[:: 1 << 14], truth[other] if other != slot else value))
            truth[slot] = value
            continue
        buffer = aligned_buffer(1 << 20)
        part = torch.frombuffer(buffer, dtype=torch.uint8)
        if action == "save":
            world.copier.to_host("global", slot, [buffer], world.called())
            checks.append((part, truth[slot]))
        else:
            part.fill_(value)
            world.copier.to_device("global", [slot], [[buffer]], world.called())
            loading[slot], truth[slot] = world.done[-1], value
            world.done[-1].buffer = buffer  # type: ignore[attr-defined]
    world.wait()
    torch.cuda.synchronize()
    for tensor, expected in checks:
        assert bool((tensor == expected).all())
    assert world.pool[:, 0].tolist() == truth
    world.copier.close()


@pytest.mark.parametrize("page_bytes", [98_304, 2_621_440, 13_631_488], ids=["270M", "27B global", "27B local"])
def test_rates(page_bytes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints GB/s of pinned memory; a fifth of the bus or less means that copies do not run beside each other."""
    pages = max(16, (384 << 20) // page_bytes)
    world = World(page_bytes, min(pages, 512))
    pages = len(world.pool)
    found = {}
    copier = world.copier

    def come(group: str, slot: int, parts: list[memoryview], done: Any) -> None:
        copier.to_device(group, [slot], [parts], done)

    for name, copy in (("to host", copier.to_host), ("to device", come)):
        for _ in range(2):  # the first time warms up
            world.done = []
            begun = time.perf_counter()
            for page in range(pages):
                copy("global", page, world.parts(page), world.called())
            asked = time.perf_counter() - begun
            world.wait()
            seconds = time.perf_counter() - begun
        found[name] = (pages * page_bytes / seconds / 1e9, asked / pages * 1e6)
    with capsys.disabled():
        for name, (rate, asked) in found.items():
            print(f"\n{page_bytes:>11,} bytes a page {name}: {rate:.1f} GB/s, {asked:.0f} us of the caller a page")
    world.copier.close()
    if page_bytes > 1 << 20:
        assert min(rate for rate, _ in found.values()) > 10
