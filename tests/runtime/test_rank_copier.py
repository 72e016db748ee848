"""Copies of pages over several ranks: digests of all parts, told in the order of calls, when every rank has ended."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from wicore_trt.errors import RankError
from wicore_trt.runtime.executor import UNFIT
from wicore_trt.runtime.page_digest import PageDigest
from wicore_trt.runtime.rank_copier import RankedCopier, cut_part

RANKS, PART = 3, 8192


class Device:
    """Pages of one rank; copies end when the test says so, many at a time. It computes digests as a GPU does."""

    checks, broken = True, None

    def __init__(self, rank: int) -> None:
        self.rank, self.pages, self.waiting = rank, dict[int, bytes](), list[Callable[[], None]]()
        self.coded_bytes: dict[str, int] = {}
        self.digest = PageDigest(b"k" * 32, PART).compute_digest

    def pin(self, memory: memoryview) -> bool:
        return True

    def flush(self) -> None:
        pass

    def to_host(self, group: str, slot: int, parts: Sequence[memoryview], done: Any, *, settled: bool = False) -> None:
        at = 0
        for part in parts:
            part[:] = self.pages[slot][at : at + len(part)]
            at += len(part)
        found = self.digest([memoryview(self.pages[slot])])
        self.waiting.append(lambda: done(found, 1.0 + self.rank))

    def to_device(self, group: str, slots: Sequence[int], pages: Sequence[Sequence[memoryview]], done: Any) -> None:
        for slot, parts in zip(slots, pages, strict=True):
            self.pages[slot] = b"".join(map(bytes, parts))
            found = self.digest([memoryview(self.pages[slot])])
            self.waiting.append(lambda found=found: done([found], 0.5))

    def end(self, count: int) -> None:
        for ended in [self.waiting.pop(0) for _ in range(min(count, len(self.waiting)))]:
            ended()


class Others:
    """Group of the other ranks, which obey as `rank_process` does."""

    def __init__(self) -> None:
        self.count, self.devices = RANKS, [Device(rank) for rank in range(RANKS)]
        self.on_copied: Any = None
        self.on_failure: Any = None
        self.copier: RankedCopier | None = None

    def send(self, kind: str, *given: Any, fds: Sequence[int] = ()) -> None:
        for rank in range(1, RANKS):
            self._obey(rank, kind, *given)

    def _obey(self, rank: int, kind: str, *given: Any) -> None:
        if kind != "copies":
            return
        assert self.copier is not None
        slab = self.copier._slab

        def cut(places: Any) -> list[memoryview]:
            return cut_part([slab[at : at + size] for at, size in places], rank, RANKS)

        def report(call: int, digests: Any, seconds: float) -> None:
            self.on_copied(call, rank, digests, seconds)

        for what, call, group, *more in given[0]:
            if what == "out":
                slot, places, _ = more
                self.devices[rank].to_host(group, slot, cut(places), lambda d, s, c=call: report(c, [d], s))
            else:
                slots, pages = more
                self.devices[rank].to_device(group, slots, list(map(cut, pages)), lambda d, s, c=call: report(c, d, s))


@pytest.fixture
def copier() -> RankedCopier:
    group = Others()
    group.copier = RankedCopier(group, group.devices[0], {"global": PART})  # type: ignore[arg-type]
    return group.copier


def end_in_any_order(copier: RankedCopier, rng: random.Random) -> None:
    devices = copier.group.devices  # type: ignore[attr-defined]
    while any(device.waiting for device in devices):
        rng.choice(devices).end(rng.randrange(3))


@pytest.mark.parametrize("seed", range(3))
def test_a_page_is_one_of_all_parts(copier: RankedCopier, seed: int) -> None:
    """Its digest is that of its bytes in host memory, a bit of any rank changes it, and calls end in order."""
    rng, told = random.Random(seed), list[tuple[int, bytes, float]]()
    devices = copier.group.devices  # type: ignore[attr-defined]
    size = RANKS * PART
    slab = copier.map_memory(4 * size)
    for device in devices:
        device.pages = {slot: rng.randbytes(PART) for slot in range(4)}
    pages = [[page[:4096], page[4096:]] for page in (slab[n * size :][:size] for n in range(4))]
    for slot, parts in enumerate(pages):
        copier.to_host("global", slot, parts, lambda digest, seconds, n=slot: told.append((n, digest, seconds)))
    copier.flush()
    end_in_any_order(copier, rng)
    assert copier.checks and [n for n, _, _ in told] == [0, 1, 2, 3] and {s for *_, s in told} == {3.0}
    digests = [digest for _, digest, _ in told]
    assert digests == list(map(copier.digest, pages)) and len({*digests}) == 4
    assert bytes(slab[:size]) == b"".join(device.pages[0] for device in devices)
    wrong = rng.randrange(4)
    slab[wrong * size + rng.randrange(size)] ^= 1 << rng.randrange(8)
    came = list[bytes]()
    copier.to_device("global", [7, 5, 6, 4], pages, lambda found, seconds: came.extend(found))
    copier.flush()
    devices[0].end(4)
    assert not came, "told before all ranks had copied"
    end_in_any_order(copier, rng)
    assert [n for n in range(4) if came[n] != digests[n]] == [wrong]


def test_a_page_is_kept_raw_by_all_ranks_or_none() -> None:
    """Each codes its own part; one that has no code decides for all."""
    group = Others()
    for device in group.devices:
        device.coded_bytes = {"global": 4096}
    copier = group.copier = RankedCopier(group, group.devices[0], {"global": PART})  # type: ignore[arg-type]
    assert copier.coded_bytes == {"global": RANKS * 4096}
    told = list[bytes | None]()
    slab = copier.map_memory(RANKS * PART)
    for device in group.devices:
        device.pages = {slot: bytes(4096) for slot in range(2)}
    for slot in range(2):
        copier.to_host("global", slot, [slab[: RANKS * 4096]], lambda digest, seconds: told.append(digest))
    copier.flush()
    group.devices[1].waiting[-1] = lambda: group.on_copied(2, 1, [UNFIT], 0.0)
    end_in_any_order(copier, random.Random(1))
    assert len(told) == 2 and told[0] != UNFIT and told[1] == UNFIT
    for device in group.devices:
        device.coded_bytes = {"global": 4000}
    again = RankedCopier(group, group.devices[0], {"global": PART})  # type: ignore[arg-type]
    assert not again.coded_bytes, "their digests need whole chunks"


def test_copies_of_a_lost_rank_never_end(copier: RankedCopier) -> None:
    copier.map_memory(4096)
    copier.group.on_failure(RankError("rank 1 has ended"))
    assert isinstance(copier.broken, RankError)
    assert not copier.pin(copier._slab[:4096]), "waited for ranks that are gone"
