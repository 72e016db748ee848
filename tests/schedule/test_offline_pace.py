"""Work whose tokens nobody waits for runs in steps as large as their tokens allow; a stream's steps stay short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fakes import FAKE_INFO, FakeTokenizer
from schedule.simulated import Device, Simulated, ask, make_simulated

from wicore_trt.core.assemble import LoadedEngine
from wicore_trt.llm import LLM
from wicore_trt.schedule.step_time import Budget, StepLoad, StepTime
from wicore_trt.types import SamplingParams

H100 = Device(1.75e-2, 5e-5, 1.3e-7, 7.3e-5, 3e-10)
"""27B in 16 bits: 17.5 ms to read the weights, 75 ms for 1,024 tokens of a prompt."""
ROWS, PROMPT, OUTPUT = 32, 1024, 65
DECODE = StepLoad(31, 31 * PROMPT)


def core_of(target_s: float | None = None):
    return make_simulated(Simulated(H100), target_s=target_s, max_batch_tokens=8192, pages=4096)


def batch_s(target_s: float | None, *, awaited: bool) -> float:
    """Seconds that ROWS prompts with OUTPUT tokens each take, behind a batch by which step times are learnt."""
    core, ends = core_of(target_s), [0.0]
    core.set_pace(awaited=awaited)
    for turn in range(2):
        for i in range(ROWS):
            core.add(ask(f"{turn}-{i}", PROMPT, OUTPUT))
        while core.has_work:
            core.step()
        ends.append(core.executor.now)
    return ends[2] - ends[1]


def test_a_batch_that_nobody_reads_is_as_fast_as_without_a_target():
    offline, unlimited, served = (
        batch_s(None, awaited=False),
        batch_s(1000.0, awaited=True),
        batch_s(None, awaited=True),
    )
    assert offline == pytest.approx(unlimited, rel=1e-3) and offline < 0.96 * served, (offline, unlimited, served)


def test_a_target_that_was_set_is_kept_offline_too():
    assert batch_s(0.05, awaited=False) == pytest.approx(batch_s(0.05, awaited=True))


def test_prompts_have_a_whole_step_beside_rows_that_nobody_awaits():
    time, found = StepTime(), []
    time.observe_step(DECODE, 0.024)
    for time.awaited in (False, True):
        budget = Budget(8192 - DECODE.rows)
        budget.set_time(time, DECODE, 32, (64, 128))
        found.append(budget.fit_tokens(0, 8192))
    assert found[0] == 8192 - DECODE.rows and found[1] < 2048


class Words(FakeTokenizer):
    """As many tokens as the text has characters."""

    def encode(self, text: str, **_: object) -> tuple[int, ...]:
        return (5,) * len(text)


def llm_over(core) -> LLM:
    llm = LLM.__new__(LLM)  # without an engine directory
    llm._take_engine(LoadedEngine(core, Words(), replace(FAKE_INFO, max_context_tokens=1 << 17)))
    return llm


def most_beside(core) -> Iterator[int]:
    """Of the steps since the last call, the most tokens that one computed beside a row that decodes."""
    while True:
        steps, core.executor.steps = core.executor.steps, []
        yield max(sum(n for _, n in step) for step in steps if any(n == 1 for _, n in step))


def test_an_llm_generates_in_large_steps_and_streams_in_short_ones():
    core = core_of()
    core.executor.spec = type("Spec", (), {"vocab_size": 97})
    llm, seen = llm_over(core), most_beside(core)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    whole = ["x" * PROMPT] * ROWS
    llm.generate(whole, params)
    assert next(seen) > 6 * PROMPT
    first = llm.stream("x" * PROMPT, params)
    next(first)
    others = [llm.stream(text, params) for text in whole[1:]]
    for one in [*others, first]:
        list(one)
    short = next(seen)
    llm.generate(whole, params)
    assert next(seen) > 6 * PROMPT > 6 * short
