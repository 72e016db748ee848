"""A host tier whose memory is locked piece by piece while it serves."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from pathlib import Path

import pytest
from campaign import Stack
from copiers import PlainCopier
from fakes import make_core

from wicore_trt.config import KVSettings
from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.kv.tiers import host as module
from wicore_trt.kv.tiers.host import Backing

SLOT = 4096


def test_pieces_are_locked_once_and_told_of_when_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(20):
        slots, piece, pieces = random.randint(1, 40), random.randint(1, 15), random.randint(1, 3)
        monkeypatch.setattr(module, "PIECE_BYTES", piece * SLOT + random.choice((0, 17)))
        monkeypatch.setattr(module, "STEP_BYTES", random.randint(1, 3) * SLOT)
        monkeypatch.setattr(module, "FIRST_PIECES", pieces)
        slab, lock, pinned = aligned_buffer(slots * SLOT), threading.Lock(), []

        def pin(memory: memoryview, lock=lock, pinned=pinned) -> bool:
            with lock:
                pinned.append(memory)
            return not pinned[1:] or random.random() < 0.7  # what cannot be locked later is of use all the same

        slab[::SLOT] = bytes(range(slots))
        backing, told = Backing(slab, SLOT, pin), []
        assert backing.locked and backing.ready == min(pieces * piece, slots)
        assert sum(memory.nbytes for memory in pinned) == backing.ready * SLOT
        busy = random.random() < 0.5
        backing.working = lambda busy=busy: busy

        def tell(first: int, stop: int, lock=lock, told=told) -> None:
            with lock:
                told.extend(range(first, stop))

        backing.start_threads(tell)
        for thread in backing._threads:
            thread.join()
        assert sorted(told) == list(range(backing.ready, slots))
        assert sum(memory.nbytes for memory in pinned) == slots * SLOT
        assert bytes(slab[::SLOT]) == bytes(range(slots)), "contents stay"
        backing.close()


def test_memory_that_cannot_be_locked_is_of_use_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", SLOT)
    monkeypatch.setattr(module, "FIRST_PIECES", 1)
    calls, told = [], []

    def pin(memory: memoryview) -> bool:
        calls.append(memory)
        if len(calls) > 1:
            raise MemoryError
        return True

    backing = Backing(aligned_buffer(30 * SLOT), SLOT, pin)
    backing.start_threads(lambda first, stop: told.extend(range(first, stop)))
    for thread in backing._threads:
        thread.join()
    assert sorted(told) == list(range(1, 30))


def test_memory_that_need_not_be_locked_is_of_use_at_once() -> None:
    backing = Backing(aligned_buffer(9 * SLOT), SLOT, lambda memory: False)
    backing.start_threads(lambda first, stop: pytest.fail("nothing is to be told"))
    assert backing.ready == 9 and not backing.locked
    backing.close()


def test_a_tier_that_is_closed_waits_for_no_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", SLOT)
    monkeypatch.setattr(module, "FIRST_PIECES", 1)
    begun, go = [], threading.Event()

    def pin(memory: memoryview) -> bool:
        begun.append(memory)
        assert len(begun) == 1 or go.wait(60)
        return True

    backing = Backing(aligned_buffer(500 * SLOT), SLOT, pin)
    backing.start_threads(lambda first, stop: None)
    closing = threading.Thread(target=backing.close)
    while len(begun) < 2:
        time.sleep(0.001)
    closing.start()
    assert backing._closed.wait(60)
    go.set()
    closing.join(60)
    assert not closing.is_alive() and len(begun) == 2


def test_memory_is_taken_in_small_steps_and_by_fewer_beside_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of clearing and pieces of locking, one after the other; all threads clear only while the engine is idle."""
    monkeypatch.setattr(module, "count_cores", lambda: 8)
    monkeypatch.setattr(module, "PIECE_BYTES", 8 * SLOT)
    monkeypatch.setattr(module, "STEP_BYTES", 2 * SLOT)
    lock, inside, most, sizes = threading.Condition(), {"clear": 0, "pin": 0}, {"clear": 0, "pin": 0}, set()

    def busy(what: str, count: int) -> None:
        with lock:
            inside[what] += 1
            most[what] = max(most[what], inside[what])
            sizes.add((what, count))
            lock.notify_all()
            if what == "clear" and not working:  # however slowly threads begin
                assert lock.wait_for(lambda: most["clear"] > 2, 60)
        time.sleep(0.001)
        with lock:
            inside[what] -= 1

    def pin(memory: memoryview) -> bool:
        busy("pin", memory.nbytes)
        return True

    for working in (True, False):
        most.update(clear=0, pin=0)
        backing = Backing(aligned_buffer(400 * SLOT), SLOT, pin)
        monkeypatch.setattr(backing, "_advise_system", lambda begin, count, advice: busy("clear", count))
        backing.working = lambda working=working: working
        begun = time.perf_counter()
        backing.start_threads(lambda first, stop: None)
        for thread in backing._threads:
            thread.join()
        seconds = time.perf_counter() - begun
        assert most["pin"] == 1 and (most["clear"] <= 2) == working, most
        rests = (400 - module.FIRST_PIECES * 8) // 8 * module.LOCKING_REST * 0.001
        assert not working or seconds > rests, "there was no rest"
    assert sizes == {("clear", 2 * SLOT), ("pin", 8 * SLOT)}


def test_who_closes_waits_for_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", SLOT)
    monkeypatch.setattr(module, "LOCKING_REST", 1e9)
    backing = Backing(aligned_buffer(500 * SLOT), SLOT, lambda memory: True)
    backing.working = lambda: True
    backing.start_threads(lambda first, stop: None)
    time.sleep(0.05)
    backing.close()  # or this would not end


def test_conversations_are_right_while_the_tier_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 16 * SLOT)
    monkeypatch.setattr(module, "FIRST_PIECES", 1)
    held = threading.Semaphore(1)

    def pin(self: PlainCopier, memory: memoryview) -> bool:
        return held.acquire(timeout=60)

    monkeypatch.setattr(PlainCopier, "pin", pin)
    stack = Stack(tmp_path, seed=3, host_slots=300)
    index = stack.tiers.host
    sizes = []
    for _ in range(30):
        stack.serve(2)
        index.check_integrity()
        sizes.append(index.num_slots - index.inspect().withheld_slots)
        held.release()
    for _ in range(40):
        held.release()
    while index.inspect().withheld_slots:
        stack.tiers.wait_for_report(0.05)
    assert sizes[0] == 16 and stack.wrong == 0
    stack.serve(4)
    stack.check_idle()
    stack.close()


def test_an_engine_that_was_closed_goes_without_the_collector() -> None:
    """Who opens one after the other, as benchmarks do, would else find the device full."""
    core = make_core(kv=KVSettings(host_bytes=1 << 20))
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(core)
        core.close()
        del core
        assert gone() is None
    finally:
        gc.enable()
