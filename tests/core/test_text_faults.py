"""TextEngine and SequenceText where requests end and begin at once, tokenizers fail, and stop strings must wait."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import replace

import pytest
from fakes import FAKE_INFO, FakeTokenizer, greedy, make_core
from linked import engine_of, way  # noqa: F401 -- a fixture of each test

from wicore_trt.core import prompts
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.core.text_output import SequenceText
from wicore_trt.errors import QueueFullError, WicoreError
from wicore_trt.types import FinishReason, ImageFile, ImageInfo, SamplingParams, TextRequest, TokenOutput, Usage

TOKENIZER = FakeTokenizer()


def params(**kwargs) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **kwargs})


def expected(prompt: str, count: int = 20) -> str:
    return TOKENIZER.decode(greedy(TOKENIZER.encode(prompt), count, ignore_eos=True))


async def started(tokenizer: FakeTokenizer = TOKENIZER, max_waiting: int = 100, **kwargs) -> TextEngine:
    engine = TextEngine(engine_of(make_core(**kwargs), max_waiting), tokenizer, FAKE_INFO)
    await engine.start()
    return engine


async def text_of(stream) -> str:
    async with asyncio.timeout(60):
        return "".join([output.text async for output in stream])


@pytest.mark.parametrize("ended", [False, True])
async def test_an_id_is_free_again_when_its_stream_was_closed(ended):
    """Whether the engine is still at work on the old request, or its last output is on the way to the event loop."""
    engine = await started()
    engine.engine._loop._core.executor.step_s = 0.005
    old = await engine.submit(TextRequest("same", params(max_tokens=100), prompt="old"))
    await anext(old)
    await old.aclose()
    while ended and engine.engine._loop.live_ids():
        time.sleep(0.001)  # not asyncio.sleep: the event loop must not get the last output yet
    new = await engine.submit(TextRequest("same", params(), prompt="new"))
    assert await text_of(new) == expected("new")
    assert not engine.abort_request("same") and not engine._streams and not engine._keys
    await engine.close()


async def test_texts_do_not_wait_for_pictures(monkeypatch):
    """However many tenants send large ones."""
    gate, begun = threading.Event(), threading.Semaphore(0)

    def prepare(image: ImageFile, info: ImageInfo) -> ImageFile:
        begun.release()
        assert gate.wait(60)
        return replace(image, data=b"", pixels=(bytes(3 * info.size**2),), digests=(bytes(32),))

    monkeypatch.setattr(prompts, "prepare_image", prepare)
    monkeypatch.setattr(prompts, "INLINE_CHARS", 4)
    info = replace(FAKE_INFO, images=ImageInfo(2, 1, 5, 6, 7))
    engine = TextEngine(engine_of(make_core(), 100), TOKENIZER, info)
    asked = [
        TextRequest(
            f"{tenant} {n}", params(), prompt="a picture", images=(ImageFile(b"file", crops=True),), tenant=tenant
        )
        for tenant in ("a", "b", "")
        for n in range(3)
    ]
    pictures = [asyncio.create_task(engine.encode_long_prompt(request)) for request in asked]
    await asyncio.to_thread(begun.acquire)
    async with asyncio.timeout(60):
        made = await engine.encode_long_prompt(TextRequest("c", params(), prompt="a text", tenant="c"))
    assert made.prompt_token_ids and not any(task.done() for task in pictures)
    gate.set()
    await asyncio.gather(*pictures, return_exceptions=True)


async def test_a_request_is_aborted_while_its_prompt_is_read(monkeypatch):
    monkeypatch.setattr(prompts, "INLINE_CHARS", 4)
    core = make_core()
    core.executor.step_s = 0.02
    engine = TextEngine(engine_of(core, 100), TOKENIZER, FAKE_INFO)
    await engine.start()
    asked = [TextRequest(name, params(), prompt="a long text") for name in ("a", "b")]
    reading = [asyncio.create_task(engine.encode_long_prompt(request)) for request in asked]
    await asyncio.sleep(0)
    assert engine.abort_request("a") and not engine.abort_request("a", "another tenant")
    reading[1].cancel()  # its client leaves
    await asyncio.gather(*reading, return_exceptions=True)
    *_, last = [output async for output in await engine.submit(reading[0].result())]
    assert last.finish_reason is FinishReason.CANCELLED
    assert not engine.abort_request("a") and not engine.abort_request("b")
    assert await text_of(await engine.submit(asked[1])) == expected("a long text")
    await engine.close()


async def test_a_token_that_cannot_become_text_fails_its_stream_alone():
    class Partial(FakeTokenizer):
        def decode(self, ids, *, skip_special: bool = True) -> str:
            if 33 in ids:
                raise ValueError("odd token")
            return super().decode(ids, skip_special=skip_special)

    rng = random.Random(0)
    prompts: list[list[int]] = []
    while len(prompts) < 6:
        prompt = [rng.randrange(2, 97) for _ in range(5)]
        if (33 in greedy(prompt, 20, ignore_eos=True)) == (len(prompts) % 2 == 0):
            prompts.append(prompt)
    engine = await started(Partial())
    streams = [
        await engine.submit(TextRequest(str(i), params(), prompt_token_ids=tuple(p))) for i, p in enumerate(prompts)
    ]
    results = await asyncio.gather(*map(text_of, streams), return_exceptions=True)
    assert [isinstance(result, WicoreError) for result in results] == [True, False] * 3
    for prompt, text in zip(prompts[1::2], results[1::2], strict=True):
        assert text == TOKENIZER.decode(greedy(prompt, 20, ignore_eos=True))
    await engine.close()


async def test_the_queue_limit_counts_sequences():
    engine = await started(max_waiting=64, max_sequences=1)
    engine.engine._loop._core.executor.step_s = 0.3
    await anext(await engine.submit(TextRequest("first", params(max_tokens=100), prompt="p")))
    for i in range(2):
        await engine.submit(TextRequest(f"{i}", params(n=32), prompt="p"))
    with pytest.raises(QueueFullError):
        await engine.submit(TextRequest("full", params(), prompt="p"))
    await engine.close()


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_a_stop_string_counts_only_after_min_tokens(first):
    """Against a search of the whole text; the alphabet is small, so that matches overlap the boundary."""
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        tokens = [65 + rng.randrange(2) for _ in range(24)]
        stops = tuple("".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
        least, include = rng.randint(0, 12), bool(rng.randrange(2))
        whole = TOKENIZER.decode(tokens)  # one character per token
        ends = [(at + len(s), at) for s in stops for at in range(len(whole)) if whole.startswith(s, at)]
        end, start = min((match for match in ends if match[0] > least), default=(len(whole), len(whole)))
        sequence = SequenceText(
            "a", TOKENIZER, params(stop=stops, min_tokens=least, include_stop=include, max_tokens=24)
        )
        outputs = []
        for i, token in enumerate(tokens, 1):
            last = FinishReason.LENGTH if i == len(tokens) else None
            outputs.append(sequence.push_output(TokenOutput("key", 0, (token,), finish_reason=last, usage=Usage(1, i))))
        shown = [output for output in outputs if output is not None]
        assert "".join(output.text for output in shown) == whole[: end if include else start], seed
        assert shown[-1].usage.completion_tokens == end, seed
        assert shown[-1].finish_reason is (FinishReason.STOP if (end, start) in ends else FinishReason.LENGTH)


def test_a_stop_string_found_at_the_token_limit_is_the_reason():
    """A byte token's text is known only when its run has ended, here by the limit."""

    class Bytes(FakeTokenizer):
        byte_ids = frozenset({33})

    sequence = SequenceText("a", Bytes(), params(stop=("A",), max_tokens=2))
    sequence.push_output(TokenOutput("key", 0, (34,), usage=Usage(1, 1)))
    last = sequence.push_output(TokenOutput("key", 0, (33,), finish_reason=FinishReason.LENGTH, usage=Usage(1, 2)))
    assert (last.text, last.finish_reason, last.stop_reason) == ("", FinishReason.STOP, "A")
