"""Grammars are built beside the steps: requests that wait for theirs are live, counted, aborted and ended."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from constrained import CharTokenizer, constrained_core
from core.linked import engine_of, way  # noqa: F401 -- each test with an engine here and at the end of a link
from fakes import FAKE_INFO, VOCAB

from wicore_trt.core.loop import EngineLoop
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.errors import InvalidRequestError, QueueFullError, WicoreError
from wicore_trt.grammar.matcher import Grammars
from wicore_trt.types import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TextRequest,
    TokenOutput,
)

CHOICE = SamplingParams(temperature=0.0, constraint=Constraint(ConstraintKind.CHOICE, '["left", "right"]'))


class Slow(Grammars):
    """Builds a grammar when it may."""

    def __init__(self) -> None:
        super().__init__(CharTokenizer(), VOCAB)
        self.begun, self.go = threading.Event(), threading.Event()

    def prepare(self, constraint: Constraint) -> None:
        self.begun.set()
        assert self.go.wait(60)
        if constraint.text == "broken":
            raise InvalidRequestError("no such grammar", field="constraint")
        super().prepare(constraint)


async def engine_over(grammars: Grammars, max_waiting: int = 8) -> TextEngine:
    engine = TextEngine(engine_of(constrained_core(grammars=grammars), max_waiting), CharTokenizer(), FAKE_INFO)
    await engine.start()
    return engine


def asking(name: str, params: SamplingParams = CHOICE) -> TextRequest:
    return TextRequest(name, params, prompt="hello")


async def whole(stream) -> tuple[str, FinishReason]:
    outputs = [output async for output in stream]
    return "".join(output.text for output in outputs), outputs[-1].finish_reason


async def test_others_go_on_while_a_grammar_is_built() -> None:
    slow = Slow()
    engine = await engine_over(slow)
    stream = await engine.submit(asking("a"))
    assert await asyncio.to_thread(slow.begun.wait, 60)
    other = await engine.submit(asking("b", SamplingParams(max_tokens=5, temperature=0.0)))
    await whole(other)
    assert (await engine.engine.stats()).requests_waiting == 1
    slow.go.set()
    text, reason = await whole(stream)
    assert text in ("left", "right") and reason is FinishReason.STOP
    await engine.close()


async def test_an_abort_meanwhile_holds() -> None:
    slow = Slow()
    engine = await engine_over(slow)
    stream = await engine.submit(asking("a", SamplingParams(n=2, constraint=CHOICE.constraint)))
    assert engine.abort_request("a")
    slow.go.set()
    assert {output.finish_reason async for output in stream} == {FinishReason.CANCELLED}
    await engine.close()


async def test_the_end_of_the_engine_ends_what_waits_for_a_grammar() -> None:
    slow = Slow()
    engine = await engine_over(slow)
    stream = await engine.submit(asking("a"))
    closing = asyncio.ensure_future(engine.close())
    try:
        assert await whole(stream) == ("", FinishReason.CANCELLED)
    except WicoreError as error:  # the link ended first
        assert "stopped" in str(error)
    slow.go.set()
    await closing


async def test_what_waits_for_a_grammar_has_its_place_in_the_queue() -> None:
    slow = Slow()
    engine = await engine_over(slow, max_waiting=1)
    stream = await engine.submit(asking("a"))
    with pytest.raises(QueueFullError):
        await engine.submit(asking("b"))
    slow.go.set()
    assert (await whole(stream))[1] is FinishReason.STOP
    await engine.close()


async def test_a_grammar_that_cannot_be_built_ends_its_request() -> None:
    slow = Slow()
    slow.go.set()
    engine = await engine_over(slow)
    broken = SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "broken"))
    stream = await engine.submit(asking("a", broken))
    with pytest.raises(InvalidRequestError, match="no such grammar"):
        await whole(stream)
    assert (await whole(await engine.submit(asking("b"))))[1] is FinishReason.STOP
    await engine.close()


def test_where_no_thread_can_be_started_the_next_constraint_tries_again(monkeypatch) -> None:
    def fails(thread) -> None:
        raise RuntimeError("can't start new thread")

    ended: list[TokenOutput] = []
    loop = EngineLoop(constrained_core(), ended.extend, max_waiting=8)
    loop.start()
    with monkeypatch.context() as patch:
        patch.setattr("wicore_trt.core.loop._DeepThread.start", fails)
        with pytest.raises(RuntimeError, match="can't start"):
            loop.add(GenerateRequest("a", (5, 6), CHOICE))
    assert not loop.live_ids(), "nothing is left of the one that was refused"
    loop.add(GenerateRequest("b", (5, 6), CHOICE))
    deadline = time.monotonic() + 60
    while (loop.live_ids() or not ended or ended[-1].finish_reason is None) and time.monotonic() < deadline:
        time.sleep(0.01)  # the loop counts a sequence as ended before it emits the last output
    assert not loop.live_ids() and ended[-1].finish_reason is FinishReason.STOP
    loop.stop(60)
