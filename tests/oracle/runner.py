"""Many lives: over processes, counted, and what fails made small.

Must not know what a life does. Invariant: a campaign that passes had every life pass and every counter of `REACHED` at
its least number.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from oracle.device import Failure
from oracle.life import live, plan_of

LIFE_S = 120
CHUNK = 20
SHRUNK = 3
"""Failures that are made small; more of them say little."""

REACHED = {
    "load plan": 30, "split plan": 10, "step compute": 100, "step wait": 100, "step drop": 3, "jump": 50,
    "jump after a split": 3, "jump of a parked sequence": 3, "load cancelled": 10, "load with a failed page": 5,
    "prefetch": 5, "wait for a prefix in flight": 100, "preemption": 10, "park": 3, "resume": 3, "step ahead": 500,
    "device eviction: capacity": 500, "host eviction: capacity": 200, "host eviction: quota": 50,
    "host eviction: window": 50, "host eviction: expired": 10, "disk eviction: capacity": 50,
    "disk eviction: quota": 10, "host failure: no room": 50, "host failure: corrupt": 5, "disk failure: corrupt": 5,
    "disk failure: write timeout": 5, "disk failure: no space": 2, "host hit": 10, "disk hit": 5, "device hit": 50,
    "failed of a spoilt entry": 5, "failed logits": 3, "page expired": 20, "ended: cancelled": 20,
    "ended: deadline": 3, "ended: stop": 20, "crash": 10, "copier broke": 1, "start refused by a fault": 1,
    "slab changed hands": 500, "image encoded": 500, "image read": 700,
    "failed image": 5, "step ahead of one that waits for an image": 20,
    "bit flipped on the way to or from the device": 20,
}  # fmt: skip
"""What 200 lives reach at least, by far; a campaign that never goes there proves nothing about it."""


@dataclass
class Failed:
    """A life that failed; `keep` numbers the happenings that it takes."""

    seed: int
    kind: str
    text: str
    real: bool
    keep: list[int] | None = None

    @property
    def command(self) -> str:
        kept = "" if self.keep is None else f" --keep {','.join(map(str, self.keep))}"
        return f"python -m tests.oracle --life {self.seed}{kept}{' --real' if self.real else ''}"

    def __str__(self) -> str:
        return f"{self.kind}: {self.command}\n    {self.text[:1500]}"


@dataclass
class Report:
    lives: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[Failed] = field(default_factory=list)

    def unreached(self) -> list[str]:
        """Counters that are below what so many lives should reach."""
        share = self.lives / 200
        return [
            f"{name}: {self.counts[name]} of {int(least * share)}"
            for name, least in REACHED.items()
            if self.counts[name] < max(1, int(least * share)) and least * share >= 1
        ]

    def __str__(self) -> str:
        rows = [f"  {name:36} {count:>12,}" for name, count in sorted(self.counts.items())]
        head = f"{self.lives:,} lives in {self.seconds:.0f} s, {self.lives / max(self.seconds, 1e-9):.1f} a second, "
        return "\n".join([*rows, head + f"{len(self.failed)} failed", *map(str, self.failed)])


def campaign(lives: int, *, seed: int, jobs: int = 1, real: bool = False, first_only: bool = False) -> Report:
    """Lives of the seeds from `seed` * 1,000,003 on. `first_only`: any failure ends it, and is not made small."""
    report, begun = Report(), time.monotonic()
    first = seed * 1_000_003
    size = 1 if first_only else CHUNK
    chunks = [(at, min(size, first + lives - at), real) for at in range(first, first + lives, size)]
    for part in _over(chunks, jobs):
        report.lives += part.lives
        report.counts += part.counts
        report.failed += part.failed
        if first_only and report.failed:
            break
    report.seconds = time.monotonic() - begun
    kinds: Counter[str] = Counter()
    for failure in () if first_only else report.failed:
        kinds[failure.kind] += 1
        if kinds[failure.kind] == 1 and len(kinds) <= SHRUNK and not real:
            shrink(failure)
    return report


def _over(chunks: Sequence[tuple[int, int, bool]], jobs: int) -> Iterator[Report]:
    if jobs <= 1:
        yield from map(_some, chunks)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_some, chunks)


def _some(chunk: tuple[int, int, bool]) -> Report:
    first, count, real = chunk
    report, before = Report(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # injected faults would fill the log
    try:
        for seed in range(first, first + count):
            report.lives += 1
            failure = fails(seed, None, real=real, counts=report.counts)
            if failure is not None:
                report.failed.append(failure)
    finally:
        logging.disable(before)
    return report


def fails(
    seed: int, keep: list[int] | None, *, real: bool = False, counts: Counter[str] | None = None
) -> Failed | None:
    """How a life fails, or None."""
    try:
        with _Limited(LIFE_S):
            live(seed, keep, counts, real=real)
    except Failure as failure:
        return Failed(seed, failure.kind, str(failure), real, keep)
    except Exception as error:  # the campaign's own mistake is a failure too
        return Failed(seed, type(error).__name__, repr(error), real, keep)
    return None


class _Limited:
    """A life that computes for ever is a failure."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._late)
        signal.alarm(self._seconds)

    def __exit__(self, *error: object) -> None:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, self._before)

    def _late(self, number: int, frame: FrameType | None) -> None:
        raise Failure("hangs", f"not over after {self._seconds} s")


def shrink(failure: Failed, budget: int = 150) -> None:
    """Leave out happenings while the life still fails in the same way; at most `budget` lives."""
    keep = list(range(len(plan_of(failure.seed)[1])))

    def still(candidate: list[int]) -> bool:
        nonlocal budget
        budget -= 1
        found = fails(failure.seed, candidate)
        return found is not None and found.kind == failure.kind

    failure.keep = smaller(keep, still, lambda: budget > 0)
    again = fails(failure.seed, failure.keep)
    failure.text = again.text if again is not None else failure.text


def smaller(keep: list[int], still: Callable[[list[int]], bool], go_on: Callable[[], bool]) -> list[int]:
    """Delta debugging: drop runs of half the length, a quarter, ... down to single ones."""
    size = max(1, len(keep) // 2)
    while go_on():
        at, dropped = 0, False
        while at < len(keep) and go_on():
            candidate = keep[:at] + keep[at + size :]
            if candidate and still(candidate):
                keep, dropped = candidate, True
            else:
                at += size
        if size == 1 and not dropped:
            break
        size = max(1, size // 2)
    return keep


def cores() -> int:
    return len(os.sched_getaffinity(0))
