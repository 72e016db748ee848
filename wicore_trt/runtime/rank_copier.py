"""Copier of pages of several ranks, each of which copies its part of a page to or from memory that all ranks map.

Knows pages as bytes, and places in the host tier's memory; must not know steps or processes. Invariants: a page was
copied when all ranks have copied their part; ranks get copies in the order of the calls here, and before any later
step; the digest of a page is one of all parts' digests, so no part can change unseen.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Protocol

from wicore_trt.errors import RankError
from wicore_trt.runtime.cuda_lanes import host_address
from wicore_trt.runtime.executor import UNFIT, CameIn, Done, PageCopier, Parts
from wicore_trt.runtime.page_digest import CHUNK_BYTES, KEY_BYTES, PageDigest

GLANCE_S = 0.25
"""While all ranks lock memory, whether one has failed is looked at so often."""


class Group(Protocol):
    """Processes of ranks, as `ranks` leads them."""

    count: int
    on_copied: Callable[[int, int, Sequence[bytes | None], float], None]
    on_failure: Callable[[RankError], None]

    def send(self, *message: object, fds: Sequence[int] = ()) -> None: ...


@dataclass(slots=True)
class _Pending:
    """Copies of one call: digests by rank of the pages that each has copied; `done` was told of the first `told` of
    `count` pages, and hears next the seconds of the slowest rank."""

    count: int
    digests: list[list[bytes | None]]
    done: CameIn
    seconds: float = 0.0
    told: int = 0


@dataclass(slots=True)
class RankedCopier:
    """Implements `SharedCopier`. Pages are copied to and from the memory of `map_memory` alone. `rank_bytes`: of each
    rank's part of a page, by layer group. GPUs compute digests where all parts are multiples of CHUNK_BYTES, and
    ranks code their parts where those codes are, too; a page is kept raw by all if one part has no code."""

    group: Group
    local: PageCopier
    rank_bytes: Mapping[str, int]
    broken: BaseException | None = None
    checks: bool = False
    coded_bytes: Mapping[str, int] = field(default_factory=dict)
    _slab: memoryview = field(default_factory=lambda: memoryview(b""))
    _address: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _pending: dict[int, _Pending] = field(default_factory=dict)
    _calls: int = 0
    _asked: list[tuple[object, ...]] = field(default_factory=list)
    _digest: PageDigest = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.rank_bytes.values()
        self.checks = self.local.checks and not any(size % CHUNK_BYTES for size in sizes)
        if self.checks and not any(size % CHUNK_BYTES for size in self.local.coded_bytes.values()):
            self.coded_bytes = {group: self.group.count * size for group, size in self.local.coded_bytes.items()}
        self._digest = PageDigest(os.urandom(KEY_BYTES), self.group.count * max(sizes))
        self.group.on_copied, self.group.on_failure = self._end_part, self._break_copies

    def map_memory(self, size: int) -> memoryview:
        """Map `size` zero bytes that all ranks see; call it once."""
        fd = os.memfd_create("wicore-host-tier", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self._slab = memoryview(mmap.mmap(fd, size))
        self._address = host_address(self._slab)
        self.group.send("memory", size, fds=[fd])
        os.close(fd)
        return self._slab

    def pin(self, memory: memoryview) -> bool:
        """Lock part of the shared memory on all ranks. No other copy of it may be under way."""
        locked = threading.Event()
        call = self._begin_call(1, lambda digests, seconds: locked.set())
        self.group.send("pin", call, *self._find_places([memory])[0])
        backed = self.local.pin(memory)
        self._end_part(call, 0, [None], 0.0)
        while not locked.wait(GLANCE_S):
            if self.broken is not None:
                return False
        return backed

    def digest(self, parts: Parts) -> bytes:
        if not self.checks:
            return self._digest.compute_digest(parts)
        count = self.group.count
        return _join_digests([self.local.digest(cut_part(parts, rank, count)) for rank in range(count)])

    def to_host(self, group: str, slot: int, parts: Parts, done: Done, *, settled: bool = False) -> None:
        call = self._begin_call(1, lambda digests, seconds: done(digests[0], seconds))
        self._asked.append(("out", call, group, slot, self._find_places(parts), settled))
        end = partial(self._end_part, call, 0)
        own = cut_part(parts, 0, self.group.count)
        self.local.to_host(group, slot, own, lambda digest, seconds: end([digest], seconds), settled=settled)

    def to_device(self, group: str, slots: Sequence[int], pages: Sequence[Parts], done: CameIn) -> None:
        call = self._begin_call(len(slots), done)
        self._asked.append(("in", call, group, list(slots), list(map(self._find_places, pages))))
        own = [cut_part(parts, 0, self.group.count) for parts in pages]
        self.local.to_device(group, slots, own, partial(self._end_part, call, 0))

    def flush(self) -> None:
        self.send_asked()
        self.local.flush()

    def send_asked(self) -> None:
        """Tell the ranks of copies that they do not know of."""
        if self._asked:
            asked, self._asked = self._asked, []
            self.group.send("copies", asked)

    def _begin_call(self, count: int, done: CameIn) -> int:
        with self._lock:
            self._calls += 1
            self._pending[self._calls] = _Pending(count, [[] for _ in range(self.group.count)], done)
            return self._calls

    def _end_part(self, call: int, rank: int, digests: Sequence[bytes | None], seconds: float) -> None:
        with self._lock:  # held while `done` runs, so that calls end in order
            pending = self._pending[call]
            pending.digests[rank] += digests
            pending.seconds = max(pending.seconds, seconds)
            first, ready = pending.told, min(map(len, pending.digests))
            if ready == first:
                return
            if ready == pending.count:
                del self._pending[call]
            pages = zip(*[told[first:ready] for told in pending.digests], strict=True)
            found = [_join_digests(page) if self.checks else None for page in pages]
            seconds, pending.seconds, pending.told = pending.seconds, 0.0, ready
            pending.done(found, seconds)

    def _break_copies(self, error: RankError) -> None:
        self.broken = error

    def _find_places(self, parts: Parts) -> list[tuple[int, int]]:
        """Find (offset, bytes) of buffers in the shared memory."""
        places = [(host_address(part) - self._address, len(part)) for part in parts]
        assert all(at >= 0 and at + size <= len(self._slab) for at, size in places), "a page lies in shared memory"
        return places


def cut_part(parts: Parts, rank: int, ranks: int) -> list[memoryview]:
    """Cut a rank's part out of the buffers of a page."""
    each, at, found = sum(map(len, parts)) // ranks, 0, list[memoryview]()
    for part in parts:
        piece = part[max(0, rank * each - at) : max(0, (rank + 1) * each - at)]
        if len(piece):
            found.append(piece)
        at += len(part)
    return found


def _join_digests(parts: Sequence[bytes | None]) -> bytes:
    if UNFIT in parts:
        return UNFIT
    return blake2b(b"".join(part or b"" for part in parts), digest_size=16).digest()
