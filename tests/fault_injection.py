"""Faults on purpose, for tests and campaigns: a `Files` that lies, fails, hangs and loses, by a seeded plan.

`FaultPlan` decides which call goes wrong and counts what was done; `FaultyFiles` does it. Damage to a directory that
no store holds is in disk_damage.py. It must not know pages or what a store makes of a fault. Invariant: every fault is
counted under its name when, and only when, it was done.
"""

from __future__ import annotations

import enum
import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from wicore_trt.kv.disk.files import ALIGN, Files, aligned_buffer, move_buffers


def by_turns(kinds: Iterable[enum.Enum], first: int) -> list[Any]:
    """`kinds` as parameters of a test, every second one from `first` on in each run and the others in the long profile.
    The store alone and a whole engine begin with different ones, so that each run meets every kind."""
    import pytest  # a campaign on a GPU's machine does without

    long = ([], [pytest.mark.long])
    return [pytest.param(kind, id=kind.name.lower(), marks=long[(n - first) % 2]) for n, kind in enumerate(kinds)]


class Fault(enum.Enum):
    """What can go wrong in one call. The value's first word is the call it belongs to."""

    READ_BIT_FLIP = "read bit flip"
    READ_MISDIRECTED = "read of another place"
    READ_SHORT = "read short"
    READ_EIO = "read error"
    READ_HANG = "read hangs"
    WRITE_BIT_FLIP = "write bit flip"
    WRITE_TORN = "write torn"
    """Only a prefix lands; the caller is told that all of it did."""
    WRITE_LOST = "write lost"
    """Nothing lands; the caller is told that all of it did."""
    WRITE_MISDIRECTED = "write to another place"
    WRITE_SWAPPED = "write swapped with the next"
    """This write and the next one of the same file and size land in each other's place."""
    WRITE_SHORT = "write short"
    WRITE_EIO = "write error"
    WRITE_NO_SPACE = "write without space"
    WRITE_HANG = "write hangs"
    ALLOCATE_NO_SPACE = "allocate without space"
    ALLOCATE_EIO = "allocate error"
    OPEN_EIO = "open error"
    REPLACE_EIO = "replace error"
    REPLACE_LOST = "replace lost"
    UNLINK_EIO = "unlink error"
    TRUNCATE_EIO = "truncate error"
    STATVFS_FULL = "statvfs says full"

    @property
    def call(self) -> str:
        return self.value.split()[0]


_OF_CALL: dict[str, tuple[Fault, ...]] = {
    call: tuple(fault for fault in Fault if fault.call == call) for call in {fault.call for fault in Fault}
}


class FaultPlan:
    """Which calls go wrong: `rates` gives each fault's chance per call, `arm` makes it certain for the next ones.

    `counts` says what was done. `hang_s`: longest that a hung call blocks; `release` ends all of them at once. `only`
    restricts faults to files by name. Safe to use from many threads; one thread and one seed give one sequence.
    """

    def __init__(
        self,
        rates: Mapping[Fault, float] | None = None,
        *,
        seed: int = 0,
        hang_s: float = 60.0,
        only: Callable[[str], bool] | None = None,
    ) -> None:
        self.rates = dict(rates or {})
        self.counts: Counter[Fault] = Counter()
        self.active = True
        self.random = random.Random(seed)
        self._armed: Counter[Fault] = Counter()
        self._hang_s = hang_s
        self._released = threading.Event()
        self._only = only
        self._lock = threading.Lock()

    def arm(self, fault: Fault, times: int = 1) -> None:
        with self._lock:
            self._armed[fault] += times

    def release(self) -> None:
        """Let every hung call go on, and no later one hang."""
        self._released.set()

    def draw(self, call: str, name: str) -> Fault | None:
        """The fault of this call on a file of this name, if any; counted."""
        with self._lock:
            if not self.active or (self._only is not None and not self._only(name)):
                return None
            faults = _OF_CALL[call]
            fault = next((f for f in faults if self._armed[f] > 0), None)
            if fault is not None:
                self._armed[fault] -= 1
            else:
                at = self.random.random()
                for fault in faults:
                    at -= self.rates.get(fault, 0.0)
                    if at < 0:
                        break
                else:
                    return None
            self.counts[fault] += 1
            return fault

    def below(self, limit: int) -> int:
        """A random number in [0, limit)."""
        with self._lock:
            return self.random.randrange(limit)

    def hang(self) -> None:
        self._released.wait(self._hang_s)


class FaultyFiles(Files):
    """`Files` in which `plan` decides what goes wrong."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self._system = Files()
        self._names: dict[int, str] = {}
        self._held: dict[int, tuple[int, memoryview]] = {}  # by descriptor: a write that waits for its partner
        self._lock = threading.Lock()

    def open(self, path: Path, flags: int) -> int:
        self._may_fail("open", path.name)
        fd = self._system.open(path, flags)
        self._names[fd] = path.name
        return fd

    def close(self, fd: int) -> None:
        self._settle(fd)
        self._names.pop(fd, None)
        self._system.close(fd)

    def replace(self, source: Path, target: Path) -> None:
        fault = self.plan.draw("replace", target.name)
        if fault is Fault.REPLACE_EIO:
            raise _error(fault)
        if fault is None:
            self._system.replace(source, target)

    def unlink(self, path: Path) -> None:
        self._may_fail("unlink", path.name)
        self._system.unlink(path)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._may_fail("truncate", self._name(fd))
        self._system.truncate(fd, nbytes)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._may_fail("allocate", self._name(fd))
        self._system.allocate(fd, offset, nbytes)

    def free_bytes(self, path: Path) -> int:
        return 0 if self.plan.draw("statvfs", path.name) else self._system.free_bytes(path)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        fault = self.plan.draw("read", self._name(fd))
        if fault is Fault.READ_EIO:
            raise _error(fault)
        if fault is Fault.READ_HANG:
            self.plan.hang()
        if fault is Fault.READ_MISDIRECTED:
            offset = self._elsewhere(fd, offset, _total(buffers))
        if fault is Fault.READ_SHORT:
            buffers = self._shortened(buffers)
        count = self._system.preadv(fd, buffers, offset)
        if fault is Fault.READ_BIT_FLIP and count > 0:
            flip_bit(buffers, self.plan.below(count * 8))
        return count

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        fault, total = self.plan.draw("write", self._name(fd)), _total(buffers)
        if fault in (Fault.WRITE_EIO, Fault.WRITE_NO_SPACE):
            raise _error(fault)
        if fault is Fault.WRITE_HANG:
            self.plan.hang()
        if fault in (None, Fault.WRITE_HANG):
            with self._lock:
                held = self._held.pop(fd, None)
            if held is None:
                return self._system.pwritev(fd, buffers, offset)
            return self._write_swapped(fd, held, (offset, _copy(buffers)))
        if fault is Fault.WRITE_SHORT:
            return self._system.pwritev(fd, self._shortened([memoryview(buffer) for buffer in buffers]), offset)
        if fault is Fault.WRITE_SWAPPED:
            self._settle(fd)
            with self._lock:
                self._held[fd] = offset, _copy(buffers)
        elif fault is not Fault.WRITE_LOST:
            self._write_wrongly(fault, fd, _copy(buffers), offset)
        return total

    def _write_wrongly(self, fault: Fault | None, fd: int, data: memoryview, offset: int) -> None:
        if fault is Fault.WRITE_BIT_FLIP:
            flip_bit([data], self.plan.below(len(data) * 8))
        elif fault is Fault.WRITE_TORN:
            # The whole range is written, old bytes behind the cut, as O_DIRECT takes no cut inside a block.
            cut, old = self.plan.below(len(data)), aligned_buffer(len(data))
            with suppress(OSError):  # a file that is only written has no old bytes to keep
                self._system.preadv(fd, [old], offset)
            data[cut:] = old[cut:]
        elif fault is Fault.WRITE_MISDIRECTED:
            offset = self._elsewhere(fd, offset, len(data))
        move_buffers(self._system.pwritev, fd, [data], offset)

    def _write_swapped(self, fd: int, first: tuple[int, memoryview], second: tuple[int, memoryview]) -> int:
        """Both writes, each in the other's place when they are of one size."""
        places = (second[0], first[0]) if len(first[1]) == len(second[1]) else (first[0], second[0])
        move_buffers(self._system.pwritev, fd, [first[1]], places[0])
        move_buffers(self._system.pwritev, fd, [second[1]], places[1])
        return len(second[1])

    def _settle(self, fd: int) -> None:
        """A held write that found no partner is done late: reordered, not swapped."""
        with self._lock:
            held = self._held.pop(fd, None)
        if held is not None:
            move_buffers(self._system.pwritev, fd, [held[1]], held[0])

    def _elsewhere(self, fd: int, offset: int, nbytes: int) -> int:
        """Another block of the file at which `nbytes` fit, or one behind its end."""
        size = self._system.fstat(fd).st_size
        places = max(0, size - nbytes) // ALIGN + 1
        place = self.plan.below(places) * ALIGN
        return place if place != offset else (offset + ALIGN) % (places * ALIGN) if places > 1 else offset + ALIGN

    def _shortened(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """A prefix of whole blocks (O_DIRECT), or of one byte and more when there is only one block."""
        total = _total(buffers)
        unit = ALIGN if total > ALIGN else 1
        left = (1 + self.plan.below(max(1, (total - 1) // unit))) * unit
        short = []
        for buffer in buffers:
            short.append(buffer[:left])
            left = max(0, left - len(buffer))
        return short

    def _name(self, fd: int) -> str:
        return self._names.get(fd, "")

    def _may_fail(self, call: str, name: str) -> None:
        fault = self.plan.draw(call, name)
        if fault is not None:
            raise _error(fault)


def _error(fault: Fault) -> OSError:
    code = errno.ENOSPC if fault in (Fault.WRITE_NO_SPACE, Fault.ALLOCATE_NO_SPACE) else errno.EIO
    return OSError(code, f"{os.strerror(code)} (injected: {fault.value})")


def _total(buffers: Sequence[memoryview | bytes]) -> int:
    return sum(len(buffer) for buffer in buffers)


def _copy(buffers: Sequence[memoryview | bytes]) -> memoryview:
    """All bytes in one buffer that O_DIRECT takes."""
    data, at = aligned_buffer(max(1, _total(buffers))), 0
    for buffer in buffers:
        data[at : at + len(buffer)] = buffer
        at += len(buffer)
    return data[:at]


def flip_bit(buffers: Sequence[memoryview], bit: int) -> None:
    """Flip one bit, counted from the first bit of the first buffer."""
    at = bit // 8
    for buffer in buffers:
        if at < len(buffer):
            buffer[at] ^= 1 << bit % 8
            return
        at -= len(buffer)


def flip_host_bits(slab: memoryview, rng: random.Random, bits: int = 1) -> list[int]:
    """Flip `bits` different random bits of host memory (a slab of pages); returns their positions."""
    places = rng.sample(range(len(slab) * 8), bits)
    for place in places:
        flip_bit([slab], place)
    return places
