"""The native mover against Python's: the same outcomes and the same bytes on disk for the same operations."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from disk_store_helpers import SLOT, buffers, content, hurry, make_page, open_store, read_page, wait_for
from native_calls import calls_of

from wicore_trt.kv.disk import native
from wicore_trt.kv.disk.files import Files, aligned_buffer
from wicore_trt.kv.disk.io import Outcome, PageMove, Probe
from wicore_trt.kv.disk.native import NativeMover
from wicore_trt.kv.disk.store import DiskStore
from wicore_trt.plugins.cpu_library import open_library
from wicore_trt.runtime.page_digest import PageDigest

pytestmark = pytest.mark.skipif(open_library() is None, reason="the native library was not built")
PIECE = 1 << 19
"""Bytes that native threads check at a time, and move at a time where the file system is in memory."""
MEMORY = Path("/dev/shm")


class Both:
    """Make two equal stores, for slots of so many bytes."""

    def __init__(self, path: Path, slot_bytes: int) -> None:
        self.size, self.path = slot_bytes, path
        stride = slot_bytes + 4096
        self.stores = [
            open_store(
                path / name, slot_bytes=slot_bytes, limit_bytes=(1 << 20) + 40 * stride, slab_bytes=16 * stride,
                native=name == "native",
            )
            for name in ("native", "python")
        ]  # fmt: skip
        assert [isinstance(store._mover, NativeMover) for store in self.stores] == [True, False]

    def files(self) -> list[dict[str, bytes]]:
        """Read the files of both movers."""
        return [
            {path.name: path.read_bytes() for path in sorted((self.path / name).rglob("[is][nl]*"))}
            for name in ("native", "python")
        ]


@pytest.fixture(params=[SLOT, 3 * SLOT, PIECE, PIECE + SLOT, 3 * PIECE - SLOT])
def both(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    monkeypatch.setattr("time.time_ns", lambda: 1 << 60)  # write ids, the same for both, count on from here
    in_memory = request.param == 3 * PIECE - SLOT and os.access(MEMORY, os.W_OK)
    with tempfile.TemporaryDirectory(dir=MEMORY if in_memory else tmp_path) as folder:
        found = Both(Path(folder), request.param)
        yield found
        for store in found.stores:
            store.close()


def test_both_do_the_same(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes, some of bytes that changed since their digest, reads of what is there and what is not, erased slots; each
    read begins with poison in its buffers. In the end the files have the same bytes."""
    seed = random.randrange(1 << 30)
    choose, size = random.Random(seed), both.size
    digest = PageDigest(choose.randbytes(32), 5 * size)
    known: dict[tuple[int, ...], int] = {}
    for step in range(60 if size < PIECE else 12):
        slots = tuple(choose.sample(range(30), choose.choice([1, 2, 3])))
        slots = tuple(range(slots[0], slots[0] + len(slots))) if choose.random() < 0.5 else slots
        page, action = make_page(step if choose.random() < 0.8 else step // 2), choose.random()
        if known and choose.random() < 0.7 and action > 0.5:
            slots, step = choose.choice(list(known.items()))
            page = make_page(step)
        nbytes = len(slots) * size - 4 * choose.randrange(size // 4)
        probe, outcomes = Probe(digest.compute_digest, nbytes), []
        data = choose.randbytes(len(slots) * size)
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        right = digest.compute_digest([memoryview(data)[:nbytes]])
        expected = right if choose.random() < 0.8 else bytes(16)
        for store in both.stores:
            if action < 0.5:
                write = partial(store.write_page, probe=probe, expected=expected, expires=(step % 2) << 31)
                outcomes.append((wait_for(write, page, slots, buffers(parts)), b""))
            elif action < 0.95:
                target, seen = [aligned_buffer(size) for _ in slots], [b""]
                for buffer in target:
                    buffer[:] = b"\xa5" * size
                outcome = wait_for(partial(read_page, store, probe=probe, seen=seen.append), page, slots, target)
                found = b"".join(target) if outcome is Outcome.OK else b""
                assert outcome is not Outcome.OK or seen[-1] == digest.compute_digest([memoryview(found)[:nbytes]])
                outcomes.append((outcome, found))
            else:
                store.erase_slots(slots)
        assert outcomes[1:] == outcomes[:1] or not outcomes, f"step {step}, seed {seed}"
        if action < 0.5 and outcomes[0][0] is Outcome.OK:
            known[slots] = page.index
    for store in both.stores:
        store.close()
    mine, oracle = both.files()
    assert mine == oracle and len(mine) > 1, f"seed {seed}"


def test_what_one_wrote_the_other_reads_unless_a_bit_changed(both: Both) -> None:
    page, size = make_page(1), both.size
    parts = [content(1, part, nbytes=size) for part in range(2)]
    for store in both.stores:
        assert wait_for(store.write_page, page, (3, 4), buffers(parts)) is Outcome.OK
    home = [path.parent for path in sorted(both.path.rglob("slab-00000"))]
    for one, other in (home, home[::-1]):
        for name in ("slab-00000", "index"):
            (other / name).write_bytes((one / name).read_bytes())
    at, stride = 3 * (size + 4096), size + 4096
    places = [0, 230, 290, 300, 4079, 4080, 4095, 4096, stride - 1, stride, 2 * stride - 1, stride + size // 2]
    for store, folder in zip(both.stores, home, strict=True):  # native's first
        for place in [None, *places, *(random.randrange(2 * stride) for _ in range(4))]:
            flip(folder, place, at)
            target = [aligned_buffer(size) for _ in parts]
            outcome = wait_for(read_page, store, page, (3, 4), target)
            assert outcome is (Outcome.OK if place is None else Outcome.CORRUPT), place
            assert place is not None or [bytes(part) for part in target] == parts
            flip(folder, place, at)


def test_pages_that_are_read_together_have_each_an_end_of_its_own(both: Both) -> None:
    """Of seven one is not what was asked for, one has changed, one is not wanted, and one was erased."""
    size, digest = both.size, PageDigest(b"k" * 32, both.size)
    pages = [make_page(number) for number in range(7)]
    outcomes = {2: Outcome.CORRUPT, 3: Outcome.CORRUPT, 4: Outcome.UNWANTED, 5: Outcome.CORRUPT}
    for store, name in zip(both.stores, ("native", "python"), strict=True):
        for number, page in enumerate(pages):
            part = content(number, 0, nbytes=size)
            assert wait_for(store.write_page, page, (number,), buffers([part])) is Outcome.OK
        (slab,) = (both.path / name).rglob("slab-00000")
        flip(slab.parent, 4096 + size // 2, 3 * (size + 4096))
        store.erase_slots((5,))
        moves = [
            PageMove(make_page(9) if number == 2 else page, (number,), buffers([b"\xa5" * size]))
            for number, page in enumerate(pages)
        ]
        moves[4].wanted = lambda: False
        for move in moves:
            move.probe = Probe(digest.compute_digest, size)
        assert wait_for(store.read_pages, moves) is Outcome.OK
        assert [move.outcome for move in moves] == [outcomes.get(number, Outcome.OK) for number in range(7)]
        for number in sorted({*range(7)} - set(outcomes)):
            part = content(number, 0, nbytes=size)
            assert bytes(moves[number].parts[0]) == part
            assert moves[number].digest == digest.compute_digest([memoryview(part)])
        assert {bytes(moves[number].parts[0]) for number in (4, 5)} == {b"\xa5" * size}


def flip(folder: Path, place: int | None, at: int) -> None:
    """Change one bit of the slots behind `at`."""
    if place is not None:
        with (folder / "slab-00000").open("r+b") as file:
            file.seek(at + place)
            byte = file.read(1)[0]
            file.seek(at + place)
            file.write(bytes([byte ^ 1 << place % 8]))


class Gate(Files):
    """Reads wait, or writes."""

    def __init__(self, *, writes: bool = False) -> None:
        self.open_again, self.writes = threading.Event(), writes
        self.waiting, self.counts = 0, threading.Lock()

    def preadv(self, fd: int, buffers: object, offset: int) -> int:
        self._wait(not self.writes)
        return os.preadv(fd, buffers, offset)  # type: ignore[arg-type]

    def pwritev(self, fd: int, buffers: object, offset: int) -> int:
        self._wait(self.writes)
        return os.pwritev(fd, buffers, offset)  # type: ignore[arg-type]

    def _wait(self, held: bool) -> None:
        with self.counts:
            self.waiting += held
        assert not held or self.open_again.wait(60)


def test_no_read_waits_for_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for those under way nor for those that wait."""
    monkeypatch.setattr(native, "find_calls", calls_of)
    files = Gate(writes=True)
    files.open_again.set()
    store, ends = open_store(tmp_path, files=files, threads=3), list[Outcome]()
    assert wait_for(store.write_page, make_page(0), (0,), buffers([content(0, 0)])) is Outcome.OK
    files.open_again.clear()
    files.waiting = 0
    for number in range(1, 8):
        assert store.write_page(make_page(number), (number,), buffers([content(number, 0)]), ends.append)
    wait_until(lambda: files.waiting == 2 and len(store._mover._moves) == 7)  # type: ignore[attr-defined]
    target = aligned_buffer(SLOT)
    assert wait_for(read_page, store, make_page(0), (0,), [target]) is Outcome.OK and bytes(target) == content(0, 0)
    assert files.waiting == 2 and not ends
    files.open_again.set()
    wait_until(lambda: ends == [Outcome.OK] * 7)
    store.close()


def open_gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, threads: int, pages: int) -> tuple[DiskStore, Gate]:
    """Open a store with native threads that holds pages 0, 1, ..., and files that let nothing through from here on."""
    monkeypatch.setattr(native, "find_calls", calls_of)
    files = Gate()
    files.open_again.set()
    store: DiskStore = open_store(tmp_path, files=files, threads=threads)
    for number in range(pages):
        assert wait_for(store.write_page, make_page(number), (number,), buffers([content(number, 0)])) is Outcome.OK
    files.open_again.clear()
    files.waiting = 0
    return store, files


def test_a_late_read_keeps_its_buffer_and_one_that_did_not_begin_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, files = open_gated(tmp_path, monkeypatch, threads=1, pages=2)
    assert isinstance(store._mover, NativeMover)
    told, targets = [[], []], buffers([b"p" * SLOT] * 2)
    for number in range(2):  # the second is with the threads of the library, too
        assert read_page(store, make_page(number), (number,), [targets[number]], told[number].append)
    while files.waiting < 1 or len(store._mover._moves) < 2:
        time.sleep(0.001)
    hurry(store._pool, 0.05)
    wait_until(lambda: told == [[Outcome.TIMEOUT], [Outcome.TIMEOUT, Outcome.RETURNED]])
    assert store.stalled and store.queue_depth == 1 and len(store._mover._moves) == 1
    files.open_again.set()
    wait_until(lambda: told[0] == [Outcome.TIMEOUT, Outcome.RETURNED])
    assert bytes(targets[0]) == content(0, 0), "it came late, into a buffer that was still its own"
    hurry(store._pool, 30.0)
    again = aligned_buffer(SLOT)
    assert wait_for(read_page, store, make_page(0), (0,), [again]) is Outcome.OK, "behind the one that was dropped"
    assert bytes(targets[1]) == b"p" * SLOT and len(told[1]) == 2 and files.waiting == 2
    store.close()


def test_one_run_that_hangs_in_all_threads_stalls_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, files = open_gated(tmp_path, monkeypatch, threads=2, pages=3)
    pool = store._pool
    told = list[Outcome]()
    run = [PageMove(make_page(i), (i,), buffers([b"p" * SLOT])) for i in range(3)]
    assert store.read_pages(run, told.append)
    wait_until(lambda: files.waiting == 2)
    assert not store.stalled, "nothing is late"
    hurry(pool, 0.05)
    wait_until(lambda: told == [Outcome.TIMEOUT])
    wait_until(lambda: store.stalled)
    assert not store.read_pages([PageMove(make_page(2), (2,), buffers([b"p" * SLOT]))], told.append)
    hurry(pool, 30.0)
    files.open_again.set()
    wait_until(lambda: told == [Outcome.TIMEOUT, Outcome.RETURNED])
    assert not store.stalled and wait_for(store.read_pages, run) is Outcome.OK
    assert [bytes(move.parts[0]) for move in run] == [content(number, 0) for number in range(3)]
    store.close()


def test_late_pages_that_were_read_together_keep_their_buffers_until_the_last_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read hangs, and two runs wait behind it: the one that began with it keeps its buffers, the other does not."""
    store, files = open_gated(tmp_path, monkeypatch, threads=1, pages=3)
    told = [list[Outcome](), list[Outcome]()]
    runs = [[PageMove(make_page(i), (i,), buffers([b"p" * SLOT])) for i in range(3)] for _ in range(2)]
    for run, ends in zip(runs, told, strict=True):
        assert store.read_pages(run, ends.append)
    wait_until(lambda: files.waiting == 1)
    hurry(store._pool, 0.05)
    wait_until(lambda: told == [[Outcome.TIMEOUT], [Outcome.TIMEOUT, Outcome.RETURNED]])
    assert store.stalled and store.queue_depth == 1 and len(store._mover._moves) == 1  # type: ignore[attr-defined]
    files.open_again.set()
    wait_until(lambda: told[0] == [Outcome.TIMEOUT, Outcome.RETURNED])
    assert bytes(runs[0][0].parts[0]) == content(0, 0), "it came late, into a buffer that was still its own"
    assert {bytes(move.parts[0]) for run in runs for move in run} == {content(0, 0), b"p" * SLOT}
    hurry(store._pool, 30.0)
    assert wait_for(store.read_pages, runs[1]) is Outcome.OK and told[1] == [Outcome.TIMEOUT, Outcome.RETURNED]
    assert [bytes(move.parts[0]) for move in runs[1]] == [content(number, 0) for number in range(3)]
    store.close()


def test_who_asks_waits_for_no_disk_whatever_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of several ranks, whose digests the library cannot take."""
    monkeypatch.setattr(native, "find_calls", calls_of)
    files, ends = Gate(), list[Outcome]()
    files.open_again.set()
    store, probe = open_store(tmp_path, files=files, threads=2), Probe(lambda parts: b"d" * 16, SLOT)
    write = partial(store.write_page, probe=probe, expected=b"d" * 16)
    assert wait_for(write, make_page(0), (0,), buffers([content(0, 0)])) is Outcome.OK
    files.open_again.clear()
    targets = [aligned_buffer(SLOT) for _ in range(6)]
    for target in targets:
        assert read_page(store, make_page(0), (0,), [target], ends.append, probe=probe)
    assert not ends
    files.open_again.set()
    wait_until(lambda: len(ends) == 6)
    assert ends == [Outcome.OK] * 6 and {bytes(target) for target in targets} == {content(0, 0)}
    store.close()


def test_a_thread_that_does_not_start_fails_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no thread left, a move ends, and a later one starts the thread."""
    start, refused = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "wicore-disk" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    store = open_store(tmp_path, threads=1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    write = partial(store.write_page, probe=Probe(lambda parts: b"d" * 16, SLOT), expected=b"d" * 16)
    assert wait_for(write, make_page(0), (0,), buffers([content(0, 0)])) is Outcome.FAILED
    assert wait_for(write, make_page(0), (0,), buffers([content(0, 0)])) is Outcome.OK and refused
    store.close()


OPEN_TOO_MANY = """
import ctypes, pathlib, resource
from wicore_trt.plugins.cpu_library import open_library
library = open_library()
library.wicore_disk_open.restype = ctypes.c_void_p
bound = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (24 << 20)
resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
print(library.wicore_disk_open(ctypes.c_int64(1000), None, None))
"""


def test_threads_that_do_not_start_do_not_end_the_process() -> None:
    """The library says so, and those that did start end."""
    ran = subprocess.run([sys.executable, "-c", OPEN_TOO_MANY], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "None\n"), ran.stderr


def test_a_late_move_that_no_thread_began_gives_its_buffer_back_whatever_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a disk that hangs would keep host memory for all that was asked of it."""
    monkeypatch.setattr(native, "find_calls", calls_of)
    files, probe = Gate(), Probe(lambda parts: b"d" * 16, SLOT)
    files.open_again.set()
    store: DiskStore = open_store(tmp_path, files=files, threads=1)
    assert isinstance(store._mover, NativeMover)
    assert wait_for(store.write_page, make_page(0), (0,), buffers([content(0, 0)])) is Outcome.OK
    files.open_again.clear()
    files.waiting, told, targets = 0, [[], []], buffers([b"p" * SLOT] * 2)
    for number in range(2):
        assert read_page(store, make_page(0), (0,), [targets[number]], told[number].append, probe=probe)
    wait_until(lambda: files.waiting == 1)
    hurry(store._pool, 0.05)
    wait_until(lambda: told == [[Outcome.TIMEOUT], [Outcome.TIMEOUT, Outcome.RETURNED]])
    files.open_again.set()
    wait_until(lambda: told[0] == [Outcome.TIMEOUT, Outcome.RETURNED])
    hurry(store._pool, 30.0)
    again = aligned_buffer(SLOT)
    assert wait_for(partial(read_page, store, probe=probe), make_page(0), (0,), [again]) is Outcome.OK
    assert bytes(targets[1]) == b"p" * SLOT and len(told[1]) == 2 and files.waiting == 2
    store.close()


def test_a_write_waits_for_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_calls", calls_of)
    files, ends, begun = Gate(), list[str](), list[bool]()
    files.open_again.set()
    store = open_store(tmp_path, files=files, threads=1)
    begin = store._mover.begin
    monkeypatch.setattr(
        store._mover, "begin", lambda moves, *rest: (begin(moves, *rest), begun.append(moves[0].write))[0]
    )
    assert wait_for(store.write_page, make_page(0), (0,), buffers([content(0, 0)])) is Outcome.OK
    files.open_again.clear()
    begun.clear()
    for _ in range(60):
        target = [aligned_buffer(SLOT)]
        assert read_page(store, make_page(0), (0,), target, lambda outcome: ends.append("read"))
    assert store.write_page(make_page(1), (1,), buffers([content(1, 0)]), lambda outcome: ends.append("write"))
    wait_until(lambda: True in begun)
    files.open_again.set()
    wait_until(lambda: len(ends) == 61)
    assert ends.index("write") == 16  # kReadsFirst; by one thread, which reports in the order of its moves
    store.close()


def wait_until(true: object) -> None:
    end = time.monotonic() + 60
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.001)
