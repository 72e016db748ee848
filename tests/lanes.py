"""Streams of a device for `StreamPageCopier`, as queues that run when a test says so: work, and events to wait for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from benchmarks.gpu.page_code import decode_pages, encode_pages
from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.plugins.code_layout import SEAL_BYTES, SEAL_KEY, PageCode
from wicore_trt.runtime.page_digest import PageDigest


class Event:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(60), "an event that nobody reaches"

    def seconds_after(self, earlier: Event) -> float:
        assert earlier.happened.is_set() and self.happened.is_set()
        return 0.0


class Lane:
    """Work waits in a queue until somebody runs it. Copies take two operations, so that whoever looks too early sees
    half of one. `waits` False forgets events; `lock` guards the queue where a thread runs it."""

    def __init__(self, *, waits: bool = True, lock: Any = None) -> None:
        self.queue: list[Callable[[], object] | Event] = []
        self._waits, self._lock = waits, lock or nullcontext()

    def put(self, work: Callable[[], object] | Event) -> None:
        with self._lock:
            self.queue.append(work)

    def record(self) -> Event:
        event = Event()
        self.put(event.happened.set)
        return event

    def wait(self, event: Event) -> None:
        if self._waits:
            self.put(event)

    def copy(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        for target, source, count in pieces:
            half = count // 2
            for at, size in ((0, half), (half, count - half)):
                self.put(lambda to=target + at, of=source + at, size=size: ctypes.memmove(to, of, size))

    def run_one(self) -> bool:
        """Whether the head of the queue could run."""
        head = self.queue[0] if self.queue else None
        if head is None or (isinstance(head, Event) and not head.happened.is_set()):
            return False
        self.queue.pop(0)
        if not isinstance(head, Event):
            head()
        return True

    def run_all(self) -> None:
        """All that can run."""
        while self.run_one():
            pass


class AtOnce:
    """A `page_copier.Starter` without a thread."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def shutdown(self) -> None:
        pass


class Digests:
    """Digests of pages, computed when the lane gets there."""

    def __init__(self, digest: PageDigest) -> None:
        self._digest = digest

    def ask(self, lane: Lane, pages: Sequence[tuple[int, int]]) -> Any:
        return lambda lane: self.start(lane, pages)

    def start(self, lane: Lane, pages: Sequence[tuple[int, int]]) -> Callable[[], Sequence[bytes]]:
        found: list[bytes] = []
        for address, count in pages:
            page = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
            lane.put(lambda page=page: found.append(self._digest.compute_digest([page])))
        return lambda: found


class Coder:
    """Codes pages on the CPU when the lane gets there, in staging for so many pages, of rubbish at first."""

    def __init__(self, codes: Mapping[str, PageCode], pages: int = 3) -> None:
        self.codes, largest = codes, max(code.coded_bytes for code in codes.values())
        self._digest = PageDigest(SEAL_KEY, max(code.raw_bytes for code in codes.values()))
        self.staging_bytes = pages * largest
        self._memory = aligned_buffer(3 * self.staging_bytes)
        self._memory[:] = b"\x5a" * len(self._memory)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        out, *into = (first + i * self.staging_bytes for i in range(3))
        self.staging = ((out,), tuple(into))

    def encode(self, lane: Lane, pages: Sequence[tuple[str, int, int]]) -> Any:
        return lambda lane: self._put(lane, pages, self.encode_one)

    def decode(self, lane: Lane, pages: Sequence[tuple[str, int, int]]) -> Any:
        return lambda lane: self._put(lane, pages, self.decode_one)

    def _put(self, lane: Lane, pages: Sequence[tuple[str, int, int]], work: Any) -> Callable[[], Sequence[bytes]]:
        seals: list[bytes] = []
        assert len({staged for *_, staged in pages}) == len(pages)
        for group, address, staged in pages:
            code = self.codes[group]
            page, coded = _memory_at(address, code.raw_bytes), _memory_at(staged, code.coded_bytes)
            lane.put(lambda code=code, page=page, coded=coded: seals.append(work(code, page, coded)))
        return lambda: seals

    def encode_one(self, code: PageCode, page: memoryview, coded: memoryview) -> bytes:
        seal = self._digest.compute_digest([page])
        made, _ = encode_pages(code, np.frombuffer(page, "<u2")[None])
        coded[:] = made[0].tobytes()
        coded[-SEAL_BYTES:] = seal
        return seal

    def decode_one(self, code: PageCode, page: memoryview, coded: memoryview) -> bytes:
        page[:] = decode_pages(code, np.frombuffer(coded, np.uint8)[None])[0].tobytes()
        return self._digest.compute_digest([page])


def _memory_at(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")
