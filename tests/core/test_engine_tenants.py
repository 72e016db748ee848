"""Several tenants on one engine: ids, counts and places of each are its own. Requests that the engine cannot take."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import FAKE_INFO, FakeTokenizer, greedy, make_core
from linked import engine_of, way  # noqa: F401 -- a fixture of each test

from wicore_trt.config import KVSettings
from wicore_trt.core.limits import Limits
from wicore_trt.core.loop import EngineLoop
from wicore_trt.core.prompts import INLINE_CHARS
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.errors import DeadlineError, InvalidRequestError, QueueFullError, WicoreError
from wicore_trt.types import (
    CacheHints,
    Constraint,
    ConstraintKind,
    ContentSpan,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TextRequest,
)

TOKENIZER = FakeTokenizer()
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
FOREVER = SamplingParams(temperature=0.0, ignore_eos=True)


async def started(max_waiting: int = 100, **kwargs) -> TextEngine:
    engine = TextEngine(engine_of(make_core(**kwargs), max_waiting), TOKENIZER, FAKE_INFO)
    await engine.start()
    return engine


def text_request(name: str, tenant: str = "", prompt: str = "hello", params=GREEDY, **kwargs) -> TextRequest:
    return TextRequest(name, params, prompt=prompt, tenant=tenant, **kwargs)


async def last_of(stream):
    return [output async for output in stream][-1]


async def test_two_tenants_use_one_request_id_at_once_and_neither_aborts_the_other():
    engine = await started(max_context=4000, pages={"global": 1000, "local": 1000})
    engine.engine._loop._core.executor.step_s = 0.005  # so that alice is not done when bob is
    a = await engine.submit(text_request("turn-7", "alice", params=FOREVER))
    b = await engine.submit(text_request("turn-7", "bob", prompt="other"))
    with pytest.raises(InvalidRequestError, match="in use"):
        await engine.submit(text_request("turn-7", "alice"))
    assert not engine.abort_request("turn-7", "carol") and not engine.abort_request("turn-7")
    assert (await last_of(b)).finish_reason is FinishReason.LENGTH
    assert not engine.abort_request("turn-7", "bob")
    assert engine.abort_request("turn-7", "alice")
    assert (await last_of(a)).finish_reason is FinishReason.CANCELLED
    assert not engine._keys
    await engine.close()


async def test_counts_of_a_tenant_are_of_its_own_requests():
    engine = await started()
    for i in range(3):
        await last_of(await engine.submit(text_request(f"a{i}", "alice", prompt="the same prompt")))
    before = await engine.read_tenant_stats("bob")
    assert before.prompt_tokens == before.generated_tokens == 0 and not before.requests_finished
    await last_of(await engine.submit(text_request("b", "bob", params=dataclasses.replace(GREEDY, n=2))))
    alice, bob, all_of_it = (
        await engine.read_tenant_stats("alice"),
        await engine.read_tenant_stats("bob"),
        await engine.engine.stats(),
    )
    assert alice.prompt_tokens == 45 and alice.generated_tokens == 60 and alice.requests_finished == {"length": 3}
    assert bob.prompt_tokens == 10 and bob.generated_tokens == 40 and bob.requests_finished == {"length": 2}
    assert alice.cached_prompt_tokens > 0
    assert alice.cached_prompt_tokens + bob.cached_prompt_tokens == all_of_it.cached_prompt_tokens
    for mine in (alice, bob):
        assert not (mine.pools or mine.steps or mine.step_seconds or mine.preemptions or mine.kv.tiers)
    assert all_of_it.generated_tokens == 100
    await engine.close()


def request(name: str, tenant: str = "", n: int = 1) -> GenerateRequest:
    return GenerateRequest(name, (5, 6, 7), dataclasses.replace(GREEDY, n=n), tenant=tenant)


def test_a_tenant_that_floods_leaves_half_of_the_queue_and_n_counts():
    loop = EngineLoop(make_core(), lambda outputs: None, max_waiting=64)  # not started: everything waits
    for i in range(32):
        loop.add(request(f"a{i}", "flood"))
    with pytest.raises(QueueFullError, match="no room in the queue"):
        loop.add(request("more", "flood"))
    loop.add(request("polite", "polite"))
    with pytest.raises(QueueFullError):
        loop.add(request("wide", "third", n=32))
    loop.add(request("less wide", "third", n=15))
    assert [loop.stats(who).requests_waiting for who in ("third", "flood", "nobody")] == [15, 32, 0]
    assert loop.stats().requests_waiting == 48
    loop.add(request("the operator", "", n=16))  # who has no tenant's share may take all
    with pytest.raises(QueueFullError, match="no room in the queue"):
        loop.add(request("nothing left", "", n=1))
    with pytest.raises(InvalidRequestError) as error:
        EngineLoop(make_core(), lambda outputs: None, max_waiting=4).add(request("never", n=5))
    assert error.value.field == "n"


@pytest.mark.parametrize("why", ["queue", "wait", "images"])
def test_a_refusal_keeps_nothing_of_its_request(monkeypatch: pytest.MonkeyPatch, why: str):
    """Not even until cycles are collected: its images are an open file."""
    core = make_core()
    core.executor.images = SimpleNamespace(slots=1, tokens=2, pixel_bytes=1000)
    monkeypatch.setattr("wicore_trt.core.loop.MAX_PIXELS", 0 if why == "images" else 16_000)
    loop = EngineLoop(core, lambda outputs: None, max_waiting=1 if why == "queue" else 64)
    if why == "wait":
        core.limits = Limits(max_queue_s=1.0)
        loop._outlook = dataclasses.replace(loop._outlook, token_s=1.0)
    if why != "images":
        loop.add(dataclasses.replace(request("long"), prompt_token_ids=(5,) * 60))
    pixels = np.zeros(1000, np.uint8)
    kept = weakref.ref(pixels)
    gc.disable()
    try:
        with contextlib.suppress(QueueFullError):
            seen = ContentSpan(0, 2, bytes(32), memoryview(pixels))
            loop.add(dataclasses.replace(request("more"), content=(seen,), deadline=core.clock() + 0.5))
            raise AssertionError("taken")
        del pixels, seen
        assert kept() is None
    finally:
        gc.enable()


def test_images_of_live_requests_have_bounded_room_and_tenants_a_share_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("wicore_trt.core.loop.MAX_PIXELS", 16_000)
    core = make_core()
    core.executor.images = SimpleNamespace(slots=1, tokens=2, pixel_bytes=1000)
    loop = EngineLoop(core, lambda outputs: None, max_waiting=64)

    def seeing(name: str, tenant: str) -> GenerateRequest:
        return dataclasses.replace(request(name, tenant), content=(ContentSpan(0, 2, bytes(32), bytes(1000)),))

    for i in range(8):
        loop.add(seeing(f"a{i}", "flood"))
    with pytest.raises(QueueFullError, match="no room for the images"):
        loop.add(seeing("more", "flood"))
    loop.add(request("text", "flood"))
    for i in range(8):
        loop.add(seeing(f"b{i}", ""))
    with pytest.raises(QueueFullError, match="no room for the images"):
        loop.add(seeing("last", ""))


BAD = {
    "cache_salt": {"cache_salt": "\ud800"},
    "priority": {"priority": 10**400},
    "prompt_token_ids": {"prompt_token_ids": (3.0, 4.0, 5.0), "prompt": None},
    "timeout_s": {"timeout_s": float("nan")},
    "session": {"cache": {"session": "\ud800"}},
}


@pytest.mark.parametrize("field", BAD)
async def test_a_bad_request_fails_in_its_own_thread_and_the_others_go_on(field):
    engine = await started(kv=KVSettings(host_bytes=200 * 4096))
    innocent = await engine.submit(text_request("innocent", params=dataclasses.replace(GREEDY, max_tokens=100)))
    given = {"prompt": "abcdefgh"} | BAD[field]
    with pytest.raises(InvalidRequestError) as error:
        if "cache" in given:
            given["cache"] = CacheHints(**given["cache"])
        await engine.submit(TextRequest("bad", GREEDY, **given))
    assert error.value.field == field
    numbers = await engine.submit(TextRequest("numpy", GREEDY, prompt_token_ids=np.array([40, 41, 42])))
    assert (await last_of(numbers)).usage.completion_tokens == 20
    assert (await last_of(innocent)).usage.completion_tokens == 100 and engine.dead is None
    await engine.close()


@pytest.mark.parametrize("where", ["find_prefix", "push", "second push", "derive_names"])
async def test_a_request_that_the_engine_cannot_take_fails_alone(where, monkeypatch):
    """Whatever raises while it is queued; what was queued of it leaves the queue."""
    engine = await started(kv=KVSettings(host_bytes=200 * 4096), max_sequences=1)
    core = engine.engine._loop._core
    manager, waiting = core.scheduler.manager, core.scheduler.waiting
    in_step, go_on = threading.Event(), threading.Event()
    execute = core.executor.execute

    def slow(batch):
        in_step.set()
        assert go_on.wait(60)
        return execute(batch)

    core.executor.execute = slow
    innocent = await engine.submit(text_request("innocent", params=dataclasses.replace(GREEDY, max_tokens=50)))
    assert await asyncio.to_thread(in_step.wait, 60)
    push, pushed = waiting.push_sequence, []

    def broken_push(sequence):
        pushed.append(sequence)
        if where == "push" or len(pushed) == 2:
            raise RuntimeError("injected")
        push(sequence)

    def broken(*args):
        raise RuntimeError("injected")

    if "push" in where:
        monkeypatch.setattr(waiting, "push_sequence", broken_push)
    else:
        monkeypatch.setattr(manager.chain if where == "derive_names" else manager, where, broken)
    stream = await engine.submit(text_request("bad", prompt="a b c d e f g h", params=dataclasses.replace(GREEDY, n=3)))
    go_on.set()
    with pytest.raises(WicoreError, match="could not be queued"):
        await last_of(stream)
    monkeypatch.undo()
    core.executor.execute = execute
    assert (await last_of(innocent)).usage.completion_tokens == 50
    again = await engine.submit(text_request("bad"))
    assert [t for o in [await last_of(again)] for t in o.token_ids] and engine.dead is None
    assert not len(waiting) and not core.sequences and not engine.engine._loop.live_ids()
    core.scheduler.check_integrity()
    await engine.close()


class SlowTokenizer(FakeTokenizer):
    """Takes long for every text, until it is told to go on."""

    def __init__(self) -> None:
        self.go_on, self.begun, self.most = threading.Event(), [], 0

    def encode(self, text, *, add_bos=True, max_tokens=None):
        self.begun.append(text)
        assert self.go_on.wait(60)
        return super().encode(text[:20])


async def test_long_texts_are_tokenized_beside_the_event_loop_a_few_at_a_time_and_tenants_in_turn():
    engine = await started()
    engine.tokenizer = slow = SlowTokenizer()
    long = "x" * (INLINE_CHARS + 1)
    asked = [text_request(f"f{i}", "flood", prompt=long) for i in range(20)]
    floods = [asyncio.ensure_future(engine.encode_long_prompt(request)) for request in asked]
    await asyncio.sleep(0)
    polite = asyncio.ensure_future(engine.encode_long_prompt(text_request("p", "polite", prompt=long + "polite")))
    async with asyncio.timeout(60):
        while len(slow.begun) < 2:
            await asyncio.sleep(0.005)
    assert sorted(map(len, slow.begun)) == [len(long), len(long) + 6], "one of each tenant, and the loop turns"
    floods[5].cancel()
    slow.go_on.set()
    assert len((await polite).prompt_token_ids) == 20
    done = await asyncio.gather(*floods, return_exceptions=True)
    assert sum(isinstance(one, TextRequest) for one in done) == 19
    said = [{"role": "user", "content": "x" * 100}]
    chat = TextRequest("c", messages=said, params=GREEDY)
    for short in (text_request("s"), chat):
        assert await engine.encode_long_prompt(short) is short, "sooner than a thread would begin"
    for more in (said * (INLINE_CHARS // 100 + 1), [{**said[0], "content": [{"type": "text", "text": "x"}]}]):
        assert (await engine.encode_long_prompt(dataclasses.replace(chat, messages=more))).messages is None
    await engine.close()


@pytest.mark.parametrize("blocked", ["text", "constraint"])
async def test_a_timeout_passes_while_a_request_waits_for_a_thread(blocked):
    """For one that works or for its turn; what is left of the time is the engine's."""
    engine = await started()
    engine.tokenizer = slow = SlowTokenizer()
    long = "x" * (INLINE_CHARS + 1)
    others = [asyncio.ensure_future(engine.encode_long_prompt(text_request(t, t, prompt=long))) for t in "ab"]
    async with asyncio.timeout(60):
        while len(slow.begun) < 2:
            await asyncio.sleep(0.005)
    timed = dataclasses.replace(text_request("c", "c", prompt=long), timeout_s=0.05)
    if blocked == "constraint":
        params = dataclasses.replace(GREEDY, constraint=Constraint(ConstraintKind.REGEX, "a"))
        timed = dataclasses.replace(timed, prompt="short", params=params)
    with pytest.raises(DeadlineError):
        await engine.encode_long_prompt(timed)
    assert len(slow.begun) == 2 and not slow.go_on.is_set()
    slow.go_on.set()
    await asyncio.gather(*others)
    in_time = await engine.encode_long_prompt(dataclasses.replace(timed, timeout_s=60.0))
    assert 0.0 < in_time.timeout_s < 60.0
    await engine.close()


async def test_the_uptime_goes_on_between_steps():
    engine = await started()
    first = (await engine.engine.stats()).uptime_s
    await asyncio.sleep(0.02)
    assert (await engine.engine.stats()).uptime_s >= first + 0.02
    await engine.close()


async def test_a_reply_reports_the_tokens_of_its_own_tenant():
    engine = await started()
    stream = await engine.submit(text_request("a", "alice"))
    tokens = [t for o in [o async for o in stream] for t in o.token_ids]
    assert tokens == greedy(TOKENIZER.encode("hello"), 20, ignore_eos=True)
    await engine.close()
