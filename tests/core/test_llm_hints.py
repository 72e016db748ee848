"""Cache hints that are given to an LLM arrive at its engine."""

from __future__ import annotations

from fakes import FAKE_INFO, FakeTokenizer, greedy, make_core

from wicore_trt.core.assemble import LoadedEngine
from wicore_trt.llm import LLM
from wicore_trt.types import CacheHints, CachePriority, CacheStore, SamplingParams


def test_generate_stream_and_chat_pass_hints_on():
    llm = LLM.__new__(LLM)  # without an engine directory
    llm._take_engine(LoadedEngine(make_core(), FakeTokenizer(), FAKE_INFO))
    seen, add = [], llm._core.add
    llm._core.add = lambda request: (seen.append(request.cache), add(request))
    params, hints = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), CacheHints("s", CachePriority.HIGH, 5)
    results = llm.generate(["one", "two"], params, cache=hints)
    assert [list(r[0].token_ids) for r in results] == [
        greedy(llm.tokenizer.encode(text), 4, ignore_eos=True) for text in ("one", "two")
    ]
    assert list(llm.stream("three", params, cache=hints))
    turns = [{"role": "user", "content": "four"}]
    (answer,) = llm.chat(turns, params, cache=hints)
    assert "".join(part.text for part in llm.stream(turns, params)) == answer.text
    assert list(llm.stream([5, 6], params, cache=CacheHints(store=CacheStore.NEVER)))
    assert seen == [hints] * 4 + [CacheHints(), CacheHints(store=CacheStore.NEVER)]
