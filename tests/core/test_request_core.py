"""The core over an engine of whole requests: every sequence ends once, whatever the engine does; who is next; stats."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import pytest
from fakes import EOS, VOCAB, tiny_spec

from wicore_trt.core.loop import EngineLoop
from wicore_trt.core.request_core import RequestCore
from wicore_trt.errors import EngineDeadError, EnvironmentUnfitError, InvalidRequestError, WicoreError
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams, TokenOutput


class FakeEngine:
    """A `RequestExecutor` that checks its calls. One token a poll for each sequence; `refuse` are first tokens of
    prompts that it does not take, `fail` of those that end with an error. `stray`: outputs of sequences that are no
    longer there come, too."""

    def __init__(self, max_sequences: int = 3) -> None:
        self.spec, self.kernels, self.max_sequences = tiny_spec(8), "fake", max_sequences
        self.running: dict[tuple[str, int], list[Any]] = {}
        self.submitted: list[str] = []
        self.cancelled: list[tuple[str, int]] = []
        self.refuse: set[int] = set()
        self.fail: set[int] = set()
        self.stray = False
        self.broken: Exception | None = None
        self.closed = False

    def check(self, request: GenerateRequest, stop_ids: tuple[int, ...]) -> None:
        if request.params.logprobs is not None:
            raise InvalidRequestError("logprobs: no.", field="logprobs")

    def submit(self, request: GenerateRequest, index: int, seed: int, stop_ids: tuple[int, ...]) -> None:
        assert not self.closed and len(self.running) < self.max_sequences and 0 <= seed < 1 << 64
        assert (request.request_key, index) not in self.running
        assert (EOS in stop_ids) is not request.params.ignore_eos
        if request.prompt_token_ids[0] in self.refuse:
            raise WicoreError("not taken")
        self.submitted.append(request.request_key)
        self.running[request.request_key, index] = [request, 0]

    def poll(self, timeout_s: float) -> list[TokenOutput]:
        assert not self.closed and timeout_s < 0.1
        if self.broken is not None:
            raise self.broken
        outputs = [TokenOutput(*name, (3,)) for name in self.cancelled[-2:]] if self.stray else []
        for name, state in list(self.running.items()):
            request, state[1] = state[0], state[1] + 1
            reason = FinishReason.LENGTH if state[1] == request.params.max_tokens else None
            if request.prompt_token_ids[0] in self.fail:
                reason = FinishReason.ERROR
            if reason is not None:
                del self.running[name]
            outputs.append(TokenOutput(*name, (state[1],), finish_reason=reason))
        return outputs

    def cancel(self, request_id: str, index: int) -> None:
        self.running.pop((request_id, index), None)
        self.cancelled.append((request_id, index))

    def close(self) -> None:
        self.closed = True


def ask(
    name: str, first: int = 5, *, deadline: float | None = None, priority: int = 0, tenant: str = "", **params: Any
):
    values = {"max_tokens": 4, **params}
    return GenerateRequest(
        name, (first, 6), SamplingParams(**values), deadline=deadline, priority=priority, tenant=tenant
    )  # fmt: skip


def make(engine: FakeEngine | None = None, **changes: Any) -> RequestCore:
    return RequestCore(engine or FakeEngine(), **{"eos_ids": (EOS,), "max_context": 32, **changes})


def drained(core: RequestCore, steps: int = 1000) -> list[TokenOutput]:
    outputs = []
    while core.has_work:
        outputs += core.step()
        steps -= 1
        assert steps, "stuck"
    return outputs


def ends(outputs: list[TokenOutput]) -> list[tuple[str, int, FinishReason]]:
    return [(o.request_key, o.index, o.finish_reason) for o in outputs if o.finish_reason is not None]


def test_sequences_run_and_end_and_others_wait() -> None:
    core = make()
    core.add(ask("a", n=2))
    core.add(ask("b", n=2))
    assert core.count_sequences() == (Counter(), Counter({"": 4}))
    core.step()
    assert core.count_sequences() == (Counter({"": 3}), Counter({"": 1})) and core.stats().requests_waiting == 1
    assert sorted(ends(drained(core))) == [(r, i, FinishReason.LENGTH) for r in "ab" for i in (0, 1)]
    stats = core.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.requests_running) == (8, 16, 0)
    assert stats.requests_finished == {"length": 4} and core.count_sequences() == (Counter(), Counter())


def test_the_first_tokens_tell_how_long_the_engine_had_the_sequence() -> None:
    now = [0.0]
    core = make(FakeEngine(max_sequences=1), clock=lambda: now[0])
    core.add(ask("a"))
    core.add(ask("b"))
    told = []
    while core.has_work:
        now[0] += 1.0
        told += [(o.request_key, o.prefill_s) for o in core.step()]
    assert told == [("a", 0.0), *[("a", None)] * 3, ("b", 0.0), *[("b", None)] * 3]


def test_what_can_never_run_is_refused() -> None:
    core = make()
    for request, field in (
        (GenerateRequest("x", (), SamplingParams()), "prompt"),
        (GenerateRequest("x", (5,) * 32, SamplingParams()), "prompt"),
        (ask("x", VOCAB), "prompt_token_ids"),
        (ask("x", logprobs=1), "logprobs"),
    ):
        with pytest.raises(InvalidRequestError) as found:
            core.validate_request(request)
        assert found.value.field == field


def test_abort_of_one_sequence_of_a_waiting_and_of_a_running_request() -> None:
    core = make()
    core.add(ask("a", n=3))
    core.add(ask("b"))
    core.step()
    assert ends(core.abort("a", 1)) == [("a", 1, FinishReason.CANCELLED)] and "a" in core.sequences
    assert core.executor.cancelled == [("a", 1)]
    assert ends(core.abort("b")) == [("b", 0, FinishReason.CANCELLED)] and "b" not in core.sequences
    assert core.executor.cancelled == [("a", 1)], "the engine never saw b"
    assert core.abort("b") == [] == core.abort("unknown")
    assert len(ends(drained(core))) == 2


def test_a_deadline_ends_what_waits_and_what_runs() -> None:
    now = [0.0]
    core = make(clock=lambda: now[0])
    core.add(ask("a", n=4, deadline=1.0, max_tokens=100))
    core.step()
    now[0] = 1.0
    assert sorted(ends(core.step())) == [("a", i, FinishReason.DEADLINE) for i in range(4)] and not core.has_work


def test_a_request_that_the_engine_does_not_take_fails_alone() -> None:
    core = make()
    core.executor.refuse = {9}
    core.add(ask("bad", 9, n=2))
    core.add(ask("good"))
    outputs = drained(core)
    assert sorted(ends(outputs)) == [
        ("bad", 0, FinishReason.ERROR), ("bad", 1, FinishReason.ERROR), ("good", 0, FinishReason.LENGTH)
    ]  # fmt: skip
    assert {o.error for o in outputs if o.request_key == "bad"} == {"not taken"}


def test_tenants_take_turns_and_priorities_order_a_tenant_s_own() -> None:
    core = make(FakeEngine(max_sequences=1), clock=lambda: 0.0)
    for i in range(3):
        core.add(ask(f"many {i}", tenant="many", priority=-i))
    core.add(ask("one", tenant="one"))
    drained(core)
    assert core.executor.submitted == ["many 2", "one", "many 1", "many 0"]


def test_kv_events_are_refused() -> None:
    with pytest.raises(EnvironmentUnfitError, match="no KV events"):
        make().find_feed("someone")


@pytest.mark.parametrize("seed", range(30))
def test_every_sequence_ends_once(seed: int) -> None:
    """Whatever comes when: requests, aborts, deadlines, errors, refusals, strays."""
    rng, now, core = random.Random(seed), [0.0], None
    core = make(clock=lambda: now[0])
    core.executor.refuse, core.executor.fail, core.executor.stray = {9}, {8}, True
    wanted: Counter[tuple[str, int]] = Counter()
    found: list[TokenOutput] = []
    for number in range(120):
        now[0] += rng.random()
        if rng.random() < 0.5:
            late = now[0] + rng.uniform(0, 6) if rng.random() < 0.3 else None
            n = rng.choice((1, 1, 2, 5))
            core.add(ask(str(number), rng.choice((5, 5, 8, 9)), n=n, deadline=late, max_tokens=rng.randint(1, 6)))
            wanted.update((str(number), i) for i in range(n))
        if rng.random() < 0.3:
            found += core.abort(str(rng.randint(0, number)), rng.choice((None, None, 0, 1)))
        found += core.step()
        assert len(core.executor.running) <= 3
        assert core.stats().requests_running == len(core.executor.running)
    found += drained(core)
    ended: set[tuple[str, int]] = set()
    for output in found:
        assert (output.request_key, output.index) not in ended, "an output after the end"
        if output.finish_reason is not None:
            ended.add((output.request_key, output.index))
    assert ended == {*wanted} and not core.executor.running
    assert sum(core.stats().requests_finished.values()) == len(wanted)


def test_a_broken_engine_ends_all_requests_of_the_loop() -> None:
    engine, outputs, told = FakeEngine(), [], threading.Event()

    def sink(found: list[TokenOutput]) -> None:
        outputs.extend(found)
        if len(ends(outputs)) == 5:
            told.set()

    loop = EngineLoop(make(engine), sink, max_waiting=10)
    for i in range(5):
        loop.add(ask(str(i), max_tokens=100))
    engine.broken = RuntimeError("CUDA error")
    loop.start()
    assert told.wait(60) and {reason for _, _, reason in ends(outputs)} == {FinishReason.ERROR}
    assert loop.dead == "RuntimeError: CUDA error"
    with pytest.raises(EngineDeadError):
        loop.add(ask("more"))
    loop.stop(10)
