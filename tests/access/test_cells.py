"""Numbers that several processes share: nothing is lost while all are well, and nobody waits for one that is not."""

from __future__ import annotations

import fcntl
import os
import signal
import time

import pytest

from wicore_trt.access.keys import Identity
from wicore_trt.access.rates import Rates
from wicore_trt.core import cells
from wicore_trt.core.cells import SharedCells, shared_memory
from wicore_trt.core.limits import Hints
from wicore_trt.errors import RateLimitError

pytestmark = pytest.mark.forks


def forked(work) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(work() or 0)
        finally:
            os._exit(code)
    return pid


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_forks_add_is_all_there(monkeypatch):
    monkeypatch.setattr(cells, "PATIENCE_S", 60.0)
    shared = SharedCells(shared_memory())

    def add() -> None:
        for number in range(2000):
            pair = shared.pair(("x", number % 7), 0.0, 5.0)
            with shared.held(), shared.held():
                pair[0] += 1

    pids = [forked(add) for _ in range(3)]
    assert [code_of(pid) for pid in pids] == [0, 0, 0]
    pairs = [shared.pair(("x", number), 9.0, 9.0) for number in range(7)]
    assert sum(pair[0] for pair in pairs) == 6000 and {pair[1] for pair in pairs} == {5.0}


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_nobody_waits_for_a_process_that_stands_still_with_the_lock(number):
    shared = SharedCells(shared_memory())

    def hold() -> None:
        with shared.held():
            os.kill(os.getpid(), number)

    pid = forked(hold)
    os.waitpid(pid, os.WUNTRACED)
    begun = time.monotonic()
    with shared.held():
        shared.pair(("x",), 0.0, 0.0)[0] = 1.0
    assert time.monotonic() - begun < 5.0
    if number == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    fcntl.lockf(shared._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free


def test_who_begins_later_finds_what_is_there():
    memory = shared_memory()
    SharedCells(memory).pair(("x", b"y"), 3.0, 4.0)[0] = 5.0
    assert list(SharedCells(memory).pair(("x", b"y"), 1.0, 2.0)) == [5.0, 4.0]


def test_names_that_find_no_room_are_this_process_s_own(monkeypatch):
    monkeypatch.setattr(cells, "PLACES", 4)
    shared = SharedCells(shared_memory())
    pairs = [shared.pair((name,), float(name), 0.0) for name in range(10)]
    assert [pair[0] for pair in pairs] == [float(name) for name in range(10)]
    pairs[9][0] = 5.0
    assert shared.pair((9,), 0.0, 0.0)[0] == 5.0


def test_a_rate_is_of_all_forks_together_and_so_are_times_to_retry():
    shared, who = SharedCells(shared_memory()), Identity("alice")

    def taken() -> int:
        rates, count = Rates(10, 1000, cells=shared), 0
        try:
            while True:
                rates.take(who, 10).settle(10)
                count += 1
        except RateLimitError:
            return count

    counts = [code_of(forked(taken)) for _ in range(4)]
    assert counts[0] >= 10 and 10 <= sum(counts) <= 12, counts  # it fills by one in 6 s
    assert Rates(10, 1000, cells=shared).allowances(who)["tokens"].remaining in range(880, 920)
    told = [Hints(shared).retry_s("alice", 100.0, 1.0, 2.0) for _ in range(6)]
    assert all(2 * place + 1 <= at <= (2 * place + 1) * 1.25 for place, at in enumerate(told))
