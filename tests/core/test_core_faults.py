"""EngineCore and EngineLoop when ids come back, deadlines lapse, executors break and requests race with their ends.

Invariants: I15.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from fakes import make_core

from wicore_trt.core.engine import EngineCore
from wicore_trt.core.loop import EngineLoop
from wicore_trt.runtime.batch import StepResult
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams, TokenOutput


def request(name: str, prompt: list[int], deadline: float | None = None, **params) -> GenerateRequest:
    chosen = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **params}
    return GenerateRequest(name, tuple(prompt), SamplingParams(**chosen), deadline)


def finish(core: EngineCore) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    for _ in range(1000):
        if not core.has_work:
            return outputs
        outputs += core.step()
    raise AssertionError("the engine did not come to rest")


def run_to_the_end(core: EngineCore, *requests: GenerateRequest) -> dict[str, TokenOutput]:
    """The last outputs of requests on a loop whose executor will break."""
    outputs: list[TokenOutput] = []
    loop = EngineLoop(core, outputs.extend, max_waiting=100)
    for one in requests:
        loop.add(one)
    loop.start()
    loop._thread.join(60)
    assert not loop._thread.is_alive() and loop.dead and not loop.live_ids()
    return {o.request_key: o for o in outputs if o.finish_reason is not None}


def test_a_deadline_ends_with_its_request():
    """It neither ends a later request of the same id nor stays in memory until it would have lapsed."""
    now = [0.0]
    core = make_core(clock=lambda: now[0])
    for i in range(20):
        core.add(request("same", [1, 2, i], deadline=5.0, max_tokens=1))
        finish(core)
    assert not core._deadlines
    core.add(request("same", [1, 2, 3]))
    now[0] = 6.0
    assert finish(core)[-1].finish_reason is FinishReason.LENGTH


def test_a_deadline_in_the_step_that_breaks_the_executor_loses_nobody():
    now = [0.0]
    core = make_core(clock=lambda: now[0])
    core.executor.fail_at = 2
    execute = core.executor.execute

    def late(batch) -> StepResult:
        result = execute(batch)
        now[0] = 6.0
        return result

    core.executor.execute = late
    assert set(run_to_the_end(core, request("late", [1, 2], 5.0), request("other", [3, 4]))) == {"late", "other"}


def test_broken_bookkeeping_is_told_to_every_waiter():
    core = make_core()

    def broken(*_, **__):
        raise AssertionError("a bug")

    core.scheduler.manager.free_pages = broken
    last = run_to_the_end(core, *(request(name, [1, 2, 3], max_tokens=2) for name in "abc"))
    assert {name: o.finish_reason for name, o in last.items()} == dict.fromkeys("abc", FinishReason.ERROR)
    assert all("a bug" in o.error for o in last.values())


def test_a_late_abort_does_not_end_the_next_request_of_that_id():
    core, in_step, go_on, ended = make_core(), threading.Event(), threading.Event(), threading.Event()
    execute = core.executor.execute
    reasons: list[FinishReason] = []

    def slow(batch) -> StepResult:
        in_step.set()
        assert go_on.wait(60)
        return execute(batch)

    def sink(outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                reasons.append(output.finish_reason)
                if len(reasons) == 1:
                    loop.add(request("same", [5, 6, 7], max_tokens=3))
                else:
                    ended.set()

    core.executor.execute = slow
    loop = EngineLoop(core, sink, max_waiting=100)
    loop.add(request("same", [1, 2, 3], max_tokens=1))
    loop.start()
    assert in_step.wait(60) and loop.abort("same")  # while its last step runs
    go_on.set()
    assert ended.wait(60)
    loop.stop()
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH]


class Racing(threading.Condition):
    """The lock of a loop. `then` runs at once when it was let go, before whoever held it gets on."""

    def __init__(self) -> None:
        super().__init__()
        self.then = lambda: None

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        then, self.then = self.then, lambda: None
        then()


@pytest.mark.parametrize("before", [0, 1], ids=["empty", "not empty"])
def test_what_comes_while_the_inbox_is_taken_is_taken_once(before):
    """A request that was taken in two turns would be refused in the second one, while it runs."""
    outputs: list[TokenOutput] = []
    core = make_core()
    loop = EngineLoop(core, outputs.extend, max_waiting=100)
    loop._wake = Racing()
    core.add(request("runs", [1, 2, 3]))
    names = ["first"][:before]
    for name in names:
        loop.add(request(name, [4, 5, 6]))
    loop._wake.then = lambda: loop.add(request("late", [7, 8, 9]))
    for _ in range(100):
        loop._take_inbox()
        loop._emit_outputs(core.step())
        assert loop.stats().requests_waiting == loop._count_queued().total() <= len(names) + 1
        if not loop.live_ids():
            break
    ends = [(o.request_key, o.finish_reason) for o in outputs if o.finish_reason is not None]
    assert sorted(ends) == sorted((name, FinishReason.LENGTH) for name in ["runs", *names, "late"])


def test_pages_of_a_sequence_with_bad_logits_are_not_found_again():
    core = make_core(max_batch_tokens=16)
    execute, prompt = core.executor.execute, list(range(40))

    def poisoned(batch) -> StepResult:
        result = execute(batch)
        failed = {found.seq_id: "logits are not finite" for found in result.sampled}
        return StepResult([], failed)

    core.executor.execute = poisoned
    core.add(request("bad", prompt))
    assert finish(core)[-1].finish_reason is FinishReason.ERROR
    core.executor.execute = execute
    core.add(request("good", prompt))
    last = finish(core)[-1]
    assert last.finish_reason is FinishReason.LENGTH and last.usage.cached_tokens == 0
    core.scheduler.check_integrity()


def test_no_more_prompt_tokens_are_found_in_the_cache_than_there_are():
    core = make_core(max_batch_tokens=64)
    core.add(request("a", list(range(33)), n=4, max_tokens=3))
    finish(core)
    stats = core.stats()
    assert 0 < stats.cached_prompt_tokens <= stats.prompt_tokens


def test_a_copier_that_breaks_leaves_neither_device_nor_disk_behind(tmp_path):
    from wicore_trt.config import KVSettings

    kv = KVSettings(host_bytes=1 << 20, disk_path=str(tmp_path / "kv"), disk_bytes=1 << 22, disk_free_bytes=0)
    core, closed = make_core(kv=kv), []
    close = core.executor.close
    core.executor.close = lambda: (closed.append(True), close())
    core.executor.copier.broken = RuntimeError("the bus fell off")
    assert run_to_the_end(core, request("a", [5, 6, 7]))["a"].finish_reason is FinishReason.ERROR
    assert closed
    make_core(kv=kv).close()  # the directory is free


def test_statistics_tell_what_ended_before_the_engine_rests(monkeypatch: pytest.MonkeyPatch):
    """As transfers do that go on without a request."""
    core, left, slept = make_core(), [2], threading.Event()

    def do_housekeeping() -> bool:
        left[0] = max(0, left[0] - 1)
        return left[0] > 0

    def rest_s() -> float:
        slept.set()
        return 60.0

    def defer_stats():
        stats = replace(find_stats()(), steps=left[0])
        return lambda: stats

    find_stats = core.defer_stats
    for function in (do_housekeeping, rest_s, defer_stats):
        monkeypatch.setattr(core, function.__name__, function)
    loop = EngineLoop(core, lambda outputs: None, max_waiting=1)
    assert loop.stats().steps == 2
    loop.start()
    assert slept.wait(60)
    assert loop.stats().steps == 0
    loop.stop(60)
