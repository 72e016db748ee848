"""An LLM as people use it: from several threads, after its end, and with the forms of prompts that vLLM takes."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes import FAKE_INFO, FakeTokenizer, greedy, make_core

from wicore_trt.core.assemble import LoadedEngine
from wicore_trt.errors import InvalidRequestError, WicoreError
from wicore_trt.llm import LLM
from wicore_trt.types import SamplingParams

TOKENS = FakeTokenizer()


def make_llm() -> LLM:
    llm = LLM.__new__(LLM)  # without an engine directory
    llm._take_engine(LoadedEngine(make_core(), TOKENS, FAKE_INFO))
    return llm


def asked(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def wanted(text: str, count: int) -> list[int]:
    return greedy(TOKENS.encode(text), count, ignore_eos=True)


def test_threads_share_an_engine_whose_steps_are_made_by_one_at_a_time():
    llm, inside = make_llm(), threading.Lock()
    step = llm._core.step

    def alone():
        assert inside.acquire(blocking=False), "two threads step"
        try:
            return step()
        finally:
            inside.release()

    llm._core.step = alone

    def use(number: int) -> None:
        for turn in range(10):
            text, count = "abcdefgh"[number] * (turn + 1), 3 + (number + turn) % 5
            if number % 2:
                found = [token for part in llm.stream(text, asked(count)) for token in part.token_ids]
            else:
                [[completion]] = llm.generate(text, asked(count))
                found = list(completion.token_ids)
            assert found == wanted(text, count)
            next(llm.stream(text, asked(50)))  # and is dropped
            gc.collect() if turn == 5 else llm.stats()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(use, number) for number in range(8)]:
            done.result(60)
    assert not llm._inboxes and not llm._core.has_work


def test_what_is_closed_says_so():
    llm = make_llm()
    stream = llm.stream("one", asked(50))
    next(stream)
    llm.close()
    llm.close()
    for use in (lambda: next(stream), lambda: llm.generate("one"), llm.stats, lambda: list(llm.stream("one"))):
        with pytest.raises(WicoreError, match="This LLM was closed"):
            use()


def test_prompts_are_dicts_too_and_each_has_its_parameters():
    llm = make_llm()
    prompts = [{"prompt": "one"}, {"prompt_token_ids": [5, 6]}, "three", [7, 8]]
    ids = [TOKENS.encode("one"), [5, 6], TOKENS.encode("three"), [7, 8]]
    found = llm.generate(prompts, [asked(n) for n in (2, 3, 4, 5)])
    assert [list(c.token_ids) for [c] in found] == [
        greedy(tokens, n, ignore_eos=True) for tokens, n in zip(ids, (2, 3, 4, 5), strict=True)
    ]
    [[alone]] = llm.generate({"prompt": "one"}, asked(2))
    assert alone == found[0][0]
    streamed = [t for part in llm.stream({"prompt_token_ids": [5, 6]}, asked(3)) for t in part.token_ids]
    assert streamed == list(found[1][0].token_ids)
    for prompts, params, field in (
        (["a", "b"], [asked(1)], "params"),
        ("a", ["x"], "params"),
        ("a", 3, "params"),
        ([{"text": "a"}], None, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, None, "prompt"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, None, "prompt"),
        ([{"role": "user", "content": "a"}], None, "prompt"),
        ({"prompt": 5}, None, "prompt"),
        ({"prompt_token_ids": "ab"}, None, "prompt_token_ids"),
        ({"prompt_token_ids": 5}, None, "prompt_token_ids"),
        ([["a"]], None, "prompt_token_ids"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate(prompts, params)
        assert caught.value.field == field, (prompts, params)


def test_request_ids_differ_in_threads_that_are_switched_often():
    llm, interval = make_llm(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            taken = pool.map(lambda _: [next(llm._ids) for _ in range(3000)], range(8))
            assert len({name for names in taken for name in names}) == 24_000
    finally:
        sys.setswitchinterval(interval)
