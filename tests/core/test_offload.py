"""Slow work beside the event loop: few threads, tenants in turn, outcomes to their callers."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from functools import partial

import pytest

from wicore_trt.core import offload
from wicore_trt.core.offload import Offload


async def test_many_short_functions_run_on_two_threads():
    work, seen = Offload(2), set()

    def note(number: int) -> int:
        seen.add(threading.get_ident())
        return number

    asked = (work.run_function(f"tenant{n % 7}" if n % 2 else "", lambda n=n: note(n)) for n in range(300))
    assert await asyncio.gather(*asked) == list(range(300))
    assert len(seen) <= 2 and threading.get_ident() not in seen


async def test_an_error_reaches_its_caller_and_nothing_runs_for_a_caller_who_left():
    work, go, ran = Offload(2), threading.Event(), []
    first = asyncio.ensure_future(work.run_function("a", lambda: go.wait(60)))
    left = asyncio.ensure_future(work.run_function("a", lambda: ran.append("left")))
    await asyncio.sleep(0)
    left.cancel()
    assert await work.run_function("b", lambda: "beside") == "beside"
    go.set()
    assert await first
    with pytest.raises(ZeroDivisionError):
        await work.run_function("a", lambda: 1 // 0)
    assert await work.run_function("a", lambda: "after") == "after" and not ran


async def test_threads_without_work_end_and_others_begin(monkeypatch):
    monkeypatch.setattr(offload, "IDLE_S", 0.02)
    work = Offload(1)
    for _ in range(2):
        ident = await work.run_function("", threading.get_ident)
        end = time.monotonic() + 60
        while any(thread.ident == ident for thread in threading.enumerate()):
            assert time.monotonic() < end
            await asyncio.sleep(0.01)


async def test_what_waits_for_a_caller_who_left_is_let_go_at_once():
    work, go = Offload(2), threading.Event()
    first = asyncio.ensure_future(work.run_function("a", lambda: go.wait(60)))
    held = [{n} for n in range(3)]  # sets, because lists take no weak references
    seen = [weakref.ref(one) for one in held]
    waiting = [asyncio.ensure_future(work.run_function("a", partial(sorted, one))) for one in held]
    del held
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    await asyncio.wait(waiting[::2])
    last = waiting.pop(1)
    del waiting, task
    gc.collect()
    assert [one() is None for one in seen] == [True, False, True]
    go.set()
    assert await first and await last == [1]


async def test_an_error_keeps_nothing_of_what_failed():
    """Not even until cycles are collected: a prompt may be megabytes."""
    work, held = Offload(1), {"no number"}
    seen = weakref.ref(held)

    async def call(task: partial) -> None:
        with pytest.raises(TypeError):
            await work.run_function("a", task)

    gc.disable()
    try:
        await call(partial(int, held))
        del held
        assert await work.run_function("a", int) == 0, "the thread has left the function before"
        assert seen() is None
    finally:
        gc.enable()
