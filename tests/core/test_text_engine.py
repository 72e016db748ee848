"""TextEngine and EngineLoop on a real event loop and thread, over the checked fake executor."""

from __future__ import annotations

import asyncio
import random

import pytest
from fakes import FAKE_INFO, FakeTokenizer, Gate, greedy, make_core, prompt_logprobs
from linked import engine_of, way  # noqa: F401 -- a fixture of each test

from wicore_trt.core.text_engine import TextEngine
from wicore_trt.errors import EngineDeadError, InvalidRequestError, QueueFullError, UnavailableError, WicoreError
from wicore_trt.types import Completion, FinishReason, SamplingParams, TextRequest

TOKENIZER = FakeTokenizer()
FOREVER = SamplingParams(temperature=0.0, ignore_eos=True)


def params(**kwargs) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **kwargs})


def expected(prompt: str, count: int = 20) -> str:
    return TOKENIZER.decode(greedy(TOKENIZER.encode(prompt), count, ignore_eos=True))


async def started(max_waiting: int = 100, **kwargs) -> TextEngine:
    engine = TextEngine(engine_of(make_core(**kwargs), max_waiting), TOKENIZER, FAKE_INFO)
    await engine.start()
    return engine


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def at_rest(engine: TextEngine) -> None:
    """Wait until the engine thread has ended every sequence, aborts included."""
    await until(lambda: not engine.engine._loop.live_ids())


async def collect(stream):
    outputs = [output async for output in stream]
    assert [o.finish_reason is not None for o in outputs].count(True) == len({o.index for o in outputs})
    return "".join(o.text for o in outputs), outputs[-1]


async def test_many_requests_at_once_each_get_their_own_text():
    engine, rng = await started(), random.Random(1)
    prompts = ["".join(chr(rng.randrange(40, 120)) for _ in range(rng.randint(1, 40))) for _ in range(60)]
    streams = [await engine.submit(TextRequest(str(i), params(), prompt=p)) for i, p in enumerate(prompts)]
    for prompt, (text, last) in zip(prompts, await asyncio.gather(*map(collect, streams)), strict=True):
        assert text == expected(prompt)
        assert last.finish_reason is FinishReason.LENGTH and last.usage.completion_tokens == 20
    await engine.close()


async def test_probabilities_of_a_prompt_arrive_whole_and_first():
    engine = await started(score_rows=3)
    for count in (0, 4):
        asked = TextRequest("a", params(max_tokens=count, prompt_logprobs=2), prompt="a prompt")
        outputs = [output async for output in await engine.submit(asked)]
        done = Completion.from_outputs(outputs)
        assert done.prompt_logprobs == prompt_logprobs(TOKENIZER.encode("a prompt"), 2)
        assert (done.text, done.finish_reason) == (expected("a prompt", count), FinishReason.LENGTH)
    await engine.close()


async def test_a_stop_string_cuts_the_text_and_ends_the_engine_sequence():
    engine = await started()
    whole = expected("hello", 60)
    stop = whole[7:10]
    text, last = await collect(
        await engine.submit(TextRequest("a", params(max_tokens=60, stop=(stop,)), prompt="hello"))
    )
    assert text == whole[: whole.index(stop)]
    assert last.finish_reason is FinishReason.STOP and last.stop_reason == stop
    assert last.usage.completion_tokens == whole.index(stop) + len(stop)
    await at_rest(engine)
    assert (await engine.engine.stats()).requests_running == 0
    await engine.close()


async def test_a_slow_reader_loses_nothing():
    engine = await started()
    stream = await engine.submit(TextRequest("a", params(max_tokens=60), prompt="slow"))
    await at_rest(engine)
    outputs = [output async for output in stream]
    assert len(outputs) < 10 and "".join(o.text for o in outputs) == expected("slow", 60)
    await engine.close()


async def test_closing_a_stream_stops_the_engine_within_a_step():
    engine = await started(max_context=4000, pages={"global": 1000, "local": 1000})
    executor = engine.engine._loop._core.executor
    with Gate(executor) as gate:
        gate.let()
        streams = [await engine.submit(TextRequest(f"{i}", FOREVER, prompt=f"p{i}")) for i in range(5)]
        for stream in streams:
            await anext(stream)
        gate.left = 0
        await until(lambda: gate.waits)
        for stream in streams:
            await stream.aclose()
        await until(lambda: len(engine.engine._loop._inbox) == 5)
        gate.let(2)
        await at_rest(engine)
    steps = len(executor.steps)
    await asyncio.sleep(0.1)
    assert len(executor.steps) == steps, "the engine computes for nobody"
    assert set(executor.released) == set(range(5))
    await engine.close()


async def test_abort_deadline_and_drain_end_streams_with_their_reasons(monkeypatch):
    monkeypatch.setattr("wicore_trt.core.text_engine.LATE_S", 60.0)
    engine = await started(max_context=4000, pages={"global": 1000, "local": 1000})
    engine.engine._loop._core.executor.step_s = 0.005
    streams = {
        name: await engine.submit(TextRequest(name, FOREVER, prompt=name, timeout_s=0.1 if name == "late" else None))
        for name in ("gone", "late", "left")
    }
    await anext(streams["gone"])
    assert engine.abort_request("gone") and not engine.abort_request("unknown")
    assert (await collect(streams["gone"]))[1].finish_reason is FinishReason.CANCELLED
    assert (await collect(streams["late"]))[1].finish_reason is FinishReason.DEADLINE
    assert not await engine.drain(0.05)
    assert (await collect(streams["left"]))[1].finish_reason is FinishReason.CANCELLED
    with pytest.raises(UnavailableError):
        await engine.submit(TextRequest("x", FOREVER, prompt="x"))
    await engine.close()


async def test_a_broken_executor_is_told_to_every_waiter():
    engine = await started(max_sequences=2)
    executor = engine.engine._loop._core.executor
    executor.step_s = 0.005
    streams = [await engine.submit(TextRequest(f"{i}", FOREVER, prompt=f"p{i}")) for i in range(6)]
    executor.fail_at = len(executor.steps) + 2
    for stream in streams:
        with pytest.raises(EngineDeadError, match="^The engine stopped: .*device lost"):
            await collect(stream)
    assert not engine.ready and "device lost" in engine.dead
    with pytest.raises((EngineDeadError, UnavailableError), match="device lost"):
        await engine.submit(TextRequest("x", FOREVER, prompt="x"))
    await engine.close()


async def test_a_sequence_with_bad_logits_fails_alone():
    engine = await started()
    engine.engine._loop._core.executor.poison = {0}
    bad, good = [await engine.submit(TextRequest(name, params(), prompt=name)) for name in ("bad", "good")]
    with pytest.raises(WicoreError, match="not finite"):
        await collect(bad)
    assert (await collect(good))[0] == expected("good")
    await engine.close()


async def test_bad_logits_of_one_sequence_end_its_siblings_too():
    engine = await started(max_context=4000, pages={"global": 1000, "local": 1000})
    executor = engine.engine._loop._core.executor
    executor.step_s, executor.poison = 0.002, {1}
    with pytest.raises(WicoreError, match="not finite"):
        await collect(
            await engine.submit(TextRequest("a", SamplingParams(temperature=0.0, ignore_eos=True, n=3), prompt="abc"))
        )
    await at_rest(engine)
    assert not engine.engine._loop._core.has_work
    await engine.close()


async def test_a_full_queue_and_bad_requests_are_refused_at_once():
    engine = await started(max_waiting=3, max_sequences=1)
    engine.engine._loop._core.executor.step_s = 0.05
    first = await engine.submit(TextRequest("0", FOREVER, prompt="p"))
    await anext(first)
    for i in range(1, 4):
        await engine.submit(TextRequest(f"{i}", FOREVER, prompt="p"))
    for request in (
        TextRequest("1", FOREVER, prompt="p"),
        TextRequest("5", FOREVER),
        TextRequest("5", FOREVER, prompt=""),
        TextRequest("5", FOREVER, prompt="a", prompt_token_ids=(1,)),
        TextRequest("5", FOREVER, prompt_token_ids=()),
    ):
        with pytest.raises(InvalidRequestError):
            await engine.submit(request)
    with pytest.raises(QueueFullError):
        await engine.submit(TextRequest("4", FOREVER, prompt="p"))
    await engine.close()


async def test_n_streams_are_told_apart():
    engine = await started(max_batch_tokens=64)
    outputs = [o async for o in await engine.submit(TextRequest("a", params(n=3), prompt="three"))]
    for index in range(3):
        assert "".join(o.text for o in outputs if o.index == index) == expected("three")
    await engine.close()


async def test_a_thousand_cancelled_streams_leave_nothing_behind():
    engine, rng = await started(max_waiting=2000), random.Random(2)
    for i in range(1000):
        stream = await engine.submit(TextRequest(f"{i}", FOREVER, prompt="pq" * rng.randint(1, 20)))
        if rng.random() < 0.3:
            await anext(stream)
        await stream.aclose()
    assert (await collect(await engine.submit(TextRequest("last", params(), prompt="still here"))))[0] == expected(
        "still here"
    )
    await at_rest(engine)
    assert engine._streams == {}
    assert (await engine.engine.stats()).requests_running == (await engine.engine.stats()).requests_waiting == 0
    engine.engine._loop._core.scheduler.check_integrity()
    await engine.close()
