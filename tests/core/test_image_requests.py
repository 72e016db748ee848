"""Requests with images through TextEngine: threads, tenants, memory, and what is left when clients leave."""

from __future__ import annotations

import asyncio
import gc
import io
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import FAKE_INFO
from PIL import Image
from tiny_images import BOI, EOI, SOFT, TOKENS, write_image_tokenizer

from wicore_trt.core.port import EnginePort
from wicore_trt.core.prompts import ImageLimits
from wicore_trt.core.text_engine import TextEngine, TextStream
from wicore_trt.errors import DeadlineError, InvalidRequestError
from wicore_trt.images import prepare
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    ImageFile,
    ImageInfo,
    SamplingParams,
    TextRequest,
    TokenOutput,
    Usage,
)

SIDE = 56
INFO = replace(FAKE_INFO, max_context_tokens=512, images=ImageInfo(SIDE, TOKENS, BOI, SOFT, EOI))


class Recorder(EnginePort):
    """An engine that takes requests and answers when told."""

    dead = None

    def __init__(self) -> None:
        self.taken: list[GenerateRequest] = []

    async def start(self, sink) -> None:
        self.sink = sink

    async def add(self, request: GenerateRequest) -> None:
        self.taken.append(request)

    def abort(self, request_key: str, index: int | None = None) -> None: ...

    async def stats(self, tenant: str | None = None) -> EngineStats:
        raise NotImplementedError

    async def kv_events(self, tenant, after) -> AsyncGenerator:
        raise NotImplementedError
        yield

    async def stop(self, timeout_s: float) -> None: ...


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_image_tokenizer(path)
    return Tokenizer.from_dir(path)


@pytest.fixture
async def engine(tokenizer: Tokenizer) -> AsyncIterator[TextEngine]:
    engine = TextEngine(Recorder(), tokenizer, INFO, images=ImageLimits(most=4))
    await engine.start()
    yield engine


def make_file(seed: int, side: int = 40) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def ask(count: int = 1, tenant: str = "", **given) -> TextRequest:
    images = tuple(ImageFile(data=make_file(i), field=f"images[{i}]") for i in range(count))
    asked = {"prompt": "<start_of_image>" * count, "images": images, **given}
    return TextRequest(f"{tenant}{count}", SamplingParams(max_tokens=1), tenant=tenant, **asked)


async def submit(engine: TextEngine, request: TextRequest) -> TextStream:
    return await engine.submit(await engine.encode_long_prompt(request))


async def test_a_request_reaches_the_engine_with_its_pixels(engine: TextEngine) -> None:
    assert all(worker.process is not None for worker in prepare._WORKERS), "started with the engine"
    stream = await submit(engine, ask(2))
    [taken] = engine.engine.taken
    assert [len(span.pixels) for span in taken.content] == [SIDE * SIDE * 3] * 2
    assert taken.content[0].digest != taken.content[1].digest
    assert stream.prompt_token_ids == taken.prompt_token_ids and taken.prompt_token_ids.count(SOFT) == 2 * TOKENS
    usage = Usage(len(taken.prompt_token_ids), 1)
    engine.engine.sink([TokenOutput(taken.request_key, 0, (50,), finish_reason=FinishReason.LENGTH, usage=usage)])
    assert [output async for output in stream][-1].usage.prompt_tokens == len(taken.prompt_token_ids)


class Watched(ImageFile):
    """An image with room for weak references."""


async def test_a_client_that_leaves_frees_its_files(engine: TextEngine) -> None:
    holds = [worker.lock for worker in prepare._WORKERS]
    for lock in holds:
        lock.acquire()  # nothing is decoded meanwhile
    try:
        request = ask(4, "a", images=tuple(Watched(data=make_file(i)) for i in range(4)))
        watched = [weakref.ref(image) for image in request.images]
        tasks = [asyncio.ensure_future(engine.encode_long_prompt(request)) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        del request, tasks, task
    finally:
        for lock in holds:
            lock.release()
    for _ in range(3000):
        gc.collect()
        if not any(one() for one in watched):
            break
        await asyncio.sleep(0.02)
    assert not any(one() for one in watched) and not engine.live


async def test_time_passes_while_images_wait(engine: TextEngine) -> None:
    holds = [worker.lock for worker in prepare._WORKERS]
    for lock in holds:
        lock.acquire()
    try:
        with pytest.raises(DeadlineError):
            await engine.encode_long_prompt(ask(1, "late", timeout_s=0.1))
    finally:
        for lock in holds:
            lock.release()


async def test_what_is_wrong_names_its_image(engine: TextEngine) -> None:
    good, bad = ImageFile(data=make_file(0), field="a"), ImageFile(data=b"\x89PNG", field="b")
    for images, field, said in (
        ((good, bad), "b", "cannot be read"),
        ((good, ImageFile(url="https://example.org/x", field="u")), "u", "not fetched here"),
        ((good,) * 5, "a", "at most 4 images"),
        ((good, good, good), "a", "2 places for 3 images"),
    ):
        with pytest.raises(InvalidRequestError, match=said) as caught:
            await submit(engine, ask(2, images=images))
        assert caught.value.field == field
    engine.info = replace(INFO, images=None)
    with pytest.raises(InvalidRequestError, match="text alone") as caught:
        await submit(engine, ask(1))
    assert caught.value.field == "images[0]" and not engine.engine.taken


@pytest.mark.parametrize("why", ["broken", "late", "gone", "long"])
async def test_what_never_reached_the_engine_keeps_nothing_of_its_request(engine: TextEngine, why: str) -> None:
    """Not even until cycles are collected: its images are megabytes, or an open file."""
    holds = [worker.lock for worker in prepare._WORKERS] if why in ("late", "gone") else []
    for lock in holds:
        lock.acquire()

    async def serve(data: bytes) -> weakref.ref[ImageFile]:
        given = {"timeout_s": 0.1} if why == "late" else {"prompt": "<start_of_image>" + "a" * 9000 * (why == "long")}
        request = ask(1, why, images=(Watched(data=data),), **given)
        task = asyncio.ensure_future(engine.encode_long_prompt(request))
        await asyncio.wait([task], timeout=0.1 if why == "gone" else 60)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == (why == "gone") and (task.cancelled() or task.exception())
        return weakref.ref(request.images[0])

    gc.collect()
    gc.disable()
    try:
        kept = await serve(b"\x89PNG" if why == "broken" else make_file(0))
    finally:
        for lock in holds:
            lock.release()
    try:
        for _ in range(3000):  # a thread may have it still
            if kept() is None:
                break
            await asyncio.sleep(0.02)
        assert kept() is None
    finally:
        gc.enable()
