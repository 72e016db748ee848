"""The I/O threads: order, bounds, deadlines, and that every operation is answered."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from disk_store_helpers import hurry

from wicore_trt.kv.disk import io as disk_io
from wicore_trt.kv.disk.io import DiskOperation, IoPool, Outcome


def make(threads: int = 1, queue_limit: int = 4, timeout_s: float = 30.0, chore: Callable = lambda: None) -> IoPool:
    pool = IoPool(threads, queue_limit, timeout_s, chore=chore, end=lambda: None)
    return pool


class Hang:
    """An operation that blocks until it is let go. `seen` collects what `done` was told."""

    def __init__(self) -> None:
        self.started, self.go, self.told = threading.Event(), threading.Event(), threading.Condition()
        self.seen: list[Outcome] = []

    def run(self, op: DiskOperation) -> Outcome:
        self.started.set()
        assert self.go.wait(60)
        return Outcome.OK

    def done(self, outcome: Outcome) -> None:
        with self.told:
            self.seen.append(outcome)
            self.told.notify_all()

    def wait(self, count: int) -> list[Outcome]:
        with self.told:
            assert self.told.wait_for(lambda: len(self.seen) >= count, 60), self.seen
        return self.seen


def test_reads_pass_writes() -> None:
    pool, first, order = make(), Hang(), []
    pool.submit_operation(first.run, first.done)
    first.started.wait(60)
    finished = threading.Semaphore(0)
    for name, urgent in (("write 1", False), ("write 2", False), ("read 1", True), ("read 2", True)):
        assert pool.submit_operation(
            lambda op, name=name: order.append(name) or Outcome.OK, lambda o: finished.release(), urgent=urgent
        )
    first.go.set()
    for _ in range(4):
        assert finished.acquire(timeout=60)
    assert order == ["read 1", "read 2", "write 1", "write 2"]
    pool.close(60)


def test_a_full_queue_refuses_and_reads_have_their_own() -> None:
    pool, hangs = make(queue_limit=2), [Hang() for _ in range(6)]
    assert pool.submit_operation(hangs[0].run, hangs[0].done)
    hangs[0].started.wait(60)
    assert pool.submit_operation(hangs[1].run, hangs[1].done) and pool.submit_operation(hangs[2].run, hangs[2].done)
    assert not pool.submit_operation(hangs[3].run, hangs[3].done)
    assert pool.submit_operation(hangs[4].run, hangs[4].done, urgent=True)
    assert len(pool.live) == 4
    for hang in hangs:
        hang.go.set()
    for hang in (hangs[0], hangs[1], hangs[2], hangs[4]):
        assert hang.wait(1) == [Outcome.OK]
    assert hangs[3].seen == []
    pool.close(60)


def test_a_hang_times_out_then_returns_and_the_queue_behind_it_too() -> None:
    pool, running, queued = make(), Hang(), Hang()
    pool.submit_operation(running.run, running.done)
    assert running.started.wait(60)
    pool.submit_operation(queued.run, queued.done)
    hurry(pool, 0.05)
    assert running.wait(1) == [Outcome.TIMEOUT] and pool.stalled
    refused = Hang()
    assert not pool.submit_operation(refused.run, refused.done), "all threads hang"
    assert queued.wait(2) == [Outcome.TIMEOUT, Outcome.RETURNED] and not queued.started.is_set()
    assert running.seen == [Outcome.TIMEOUT] and len(pool.live) == 1
    running.go.set()
    assert running.wait(2) == [Outcome.TIMEOUT, Outcome.RETURNED]
    again = Hang()
    again.go.set()
    hurry(pool, 30.0)
    assert not pool.stalled and pool.submit_operation(again.run, again.done) and again.wait(1) == [Outcome.OK]
    assert len(pool.live) == 0
    pool.close(60)


def test_who_waits_behind_urgent_ones_is_not_late_while_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve reads of 0.1 s one after the other, and a write that takes 0.2 s, with a limit of 0.5 s, by a clock that
    these move. Who looks for late ones waits by the machine's."""
    now = 0.0
    monkeypatch.setattr(disk_io, "time", SimpleNamespace(monotonic=lambda: now))
    pool, write, last, behind = make(queue_limit=64, timeout_s=0.5), Hang(), Hang(), Hang()

    def read(op: DiskOperation) -> Outcome:
        nonlocal now
        now += 0.1
        time.sleep(0.02)
        with pool._lock:
            pool._watch.notify()
        return Outcome.OK

    told: list[Outcome] = []
    assert pool.submit_operation(behind.run, behind.done, urgent=True) and behind.started.wait(60)
    for begun in (write, last):
        assert pool.submit_operation(begun.run, begun.done)
    for _ in range(12):
        assert pool.submit_operation(read, told.append, urgent=True)
        op = next(reversed(pool._waiting))
        op.deadline += 10.0  # of these none is late itself
    behind.go.set()
    assert write.started.wait(60) and not write.seen and told == [Outcome.OK] * 12 and now > 1.1
    now += 0.2
    write.go.set()
    assert write.wait(1) == [Outcome.OK] and last.started.wait(60)
    now += 0.6
    with pool._lock:
        pool._watch.notify()
    assert last.wait(1) == [Outcome.TIMEOUT], "begun, it has so long and no longer"
    last.go.set()
    assert last.wait(2) == [Outcome.TIMEOUT, Outcome.RETURNED]
    pool.close(60)


def test_a_hanging_chore_stalls_the_pool_as_well() -> None:
    go = threading.Event()
    pool = make(timeout_s=0.05, chore=lambda: go.wait(60))
    pool.request_chore()
    deadline = time.monotonic() + 50
    while not pool.stalled:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    go.set()
    pool.close(60)


def test_a_chore_gets_its_turn_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is never empty must not keep bytes on disk whose time is over."""
    monkeypatch.setattr(disk_io, "CHORE_WAIT_S", 0.0)
    done, over = threading.Event(), threading.Event()
    pool = make(chore=done.set)

    def again(outcome: Outcome) -> None:
        if not over.is_set():
            pool.submit_operation(lambda op: Outcome.OK, again)

    hang = Hang()
    pool.submit_operation(hang.run, hang.done)
    for _ in range(4):
        pool.submit_operation(lambda op: Outcome.OK, again)
    pool.request_chore()
    hang.go.set()
    assert done.wait(60)
    over.set()
    pool.close(60)


def test_close_does_not_wait_for_a_hang() -> None:
    pool, running, queued = make(), Hang(), Hang()
    pool.submit_operation(running.run, running.done)
    running.started.wait(60)
    pool.submit_operation(queued.run, queued.done)
    pool.close(0.1)
    assert queued.seen == [Outcome.FAILED] and running.seen == [Outcome.TIMEOUT]
    assert not pool.submit_operation(queued.run, queued.done)
    running.go.set()
    assert running.wait(2)[-1] is Outcome.RETURNED
    pool.close(60)


def test_an_exception_is_a_failure_and_the_thread_lives_on() -> None:
    pool, after = make(), Hang()

    def broken(op: DiskOperation) -> Outcome:
        raise KeyError("bug")

    def bad_callback(outcome: Outcome) -> None:
        after.done(outcome)
        raise KeyError("bug")

    assert pool.submit_operation(broken, bad_callback) and after.wait(1) == [Outcome.FAILED]
    after.go.set()
    assert pool.submit_operation(after.run, after.done) and after.wait(2)[-1] is Outcome.OK
    pool.close(60)


def test_close_finishes_what_was_accepted() -> None:
    pool, seen = make(threads=2, queue_limit=100), []
    for _ in range(50):
        assert pool.submit_operation(lambda op: time.sleep(0.001) or Outcome.OK, seen.append)
    pool.close(60)
    assert seen == [Outcome.OK] * 50


def test_every_operation_is_answered_once_whatever_its_duration() -> None:
    """Durations around the deadline, so that finishing and expiring race."""
    pool = make(threads=4, queue_limit=1000, timeout_s=0.02)
    answers: list[list[Outcome]] = []
    for _ in range(300):
        seen: list[Outcome] = []
        nap = random.uniform(0.017, 0.022) if random.random() < 0.3 else 0
        if pool.submit_operation(
            lambda op, nap=nap: time.sleep(nap) or Outcome.OK, seen.append, urgent=random.random() < 0.5
        ):
            answers.append(seen)
        if random.random() < 0.2:
            time.sleep(0.005)
    pool.close(60)
    assert len(answers) > 50
    for seen in answers:
        assert seen in ([Outcome.OK], [Outcome.TIMEOUT, Outcome.RETURNED]), seen
    assert len(pool.live) == 0
