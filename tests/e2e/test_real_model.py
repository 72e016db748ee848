"""Gemma 3 270M, the default engine: the same tokens whatever a request is batched with, and text that makes sense."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Sequence
from pydoc_data.topics import topics

import pytest
from fakes import clear_cache
from tiny_source import write_tiny_source

from wicore_trt import LLM, SamplingParams
from wicore_trt.cli.main import run_command
from wicore_trt.engine.build import build_engine
from wicore_trt.types import GenerateRequest

real = pytest.mark.model

TEXT = " ".join(topics[name] for name in sorted(topics))
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def llm(engine_270m):
    with LLM(engine_270m, scheduler__max_batch_tokens=192, kv__device_bytes="256MiB") as llm:
        yield llm


def prompts(llm: LLM, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Real text, cut at random places; a third of them shares a beginning with another one."""
    rng = random.Random(7)
    made: list[tuple[int, ...]] = []
    for i, length in enumerate(lengths):
        start = rng.randrange(len(TEXT) - 8000)
        ids = tuple(llm.tokenizer.encode(TEXT[start : start + 8000])[:length])
        if i % 3 == 2:
            other = rng.choice(made)
            ids = other[: rng.randint(1, len(other))] + ids[1 : rng.randint(2, 40)]
        made.append(ids)
    return made


def run_together(llm: LLM, requests: dict[str, tuple[int, ...]], arrivals: dict[str, int]) -> dict[str, list[int]]:
    """Step the engine, adding each request at its step."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    step = 0
    while step <= max(arrivals.values()) or llm._core.has_work:
        for name, at in arrivals.items():
            if at == step:
                llm._core.add(GenerateRequest(name, requests[name], params))
        for output in llm._core.step() if llm._core.has_work else []:
            tokens[output.request_key] += output.token_ids
        step += 1
    return tokens


def many_lengths(count: int) -> list[int]:
    rng = random.Random(8)
    return [rng.choice([rng.randint(3, 60), rng.randint(60, 300), rng.randint(500, 900)]) for _ in range(count)]


@real
@pytest.mark.long
@pytest.mark.parametrize(
    ("lengths", "orders"),
    [
        pytest.param((9, 70, 21), 1, id="few"),  # the second one has a page of 64 tokens
        pytest.param(many_lengths(32), 2, id="many"),  # windows of 512 slide
    ],
)
def test_tokens_do_not_depend_on_the_batch(llm, lengths, orders):
    """Requests alone, together, and in random arrival order (which also changes chunks, hits and preemptions)."""
    count, requests = len(lengths), {f"r{i}": ids for i, ids in enumerate(prompts(llm, lengths))}
    alone = {}
    for name, ids in requests.items():
        clear_cache(llm._core.scheduler.manager)  # alone also means without anybody's cached pages
        alone |= run_together(llm, {name: ids}, {name: 0})
    clear_cache(llm._core.scheduler.manager)
    if orders > 1:
        assert run_together(llm, requests, dict.fromkeys(requests, 0)) == alone
    rng = random.Random(11)
    for _ in range(orders):
        order = {name: rng.randrange(2 * count) for name in requests}
        assert run_together(llm, requests, order) == alone
    llm._core.scheduler.check_integrity()


@real
def test_seeded_samples_do_not_depend_on_the_batch(llm):
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=5, max_tokens=6, ignore_eos=True, n=2)
    some = ["The capital of France is", "Once upon a time", "def main():"]
    alone = [[c.token_ids for c in llm.generate(prompt, params)[0]] for prompt in some]
    together = [[c.token_ids for c in completions] for completions in llm.generate(some, params)]
    assert together == alone
    assert len({tuple(c) for c in alone}) == len(some) and alone[0][0] != alone[0][1]


@real
def test_text_makes_sense_and_streams_equal_whole_completions(llm):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    [[whole]] = llm.generate("The capital of France is", params)
    assert "France" in whole.text or "Paris" in whole.text
    assert "".join(o.text for o in llm.stream("The capital of France is", params)) == whole.text
    first, second = llm.stream("The sun is", params), llm.stream("The moon is", params)
    texts = {"sun": next(first).text, "moon": next(second).text}
    texts["sun"] += "".join(o.text for o in first)
    texts["moon"] += "".join(o.text for o in second)
    [[sun], [moon]] = llm.generate(["The sun is", "The moon is"], params)
    assert texts == {"sun": sun.text, "moon": moon.text}


def test_generate_command(tmp_path, monkeypatch, capsys):
    """Of a model of a few letters, which is loaded in no time."""
    engine = build_engine(write_tiny_source(tmp_path / "source"), tmp_path / "engine").path
    command = ["generate", str(engine), "--json", "--max-tokens", "8"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc"), encoding="utf-8"))
    assert run_command(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["completion_tokens"] == 8 and result["finish_reason"] == "length" and result["text"].strip()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert run_command(command) == 1
    said = capsys.readouterr().err
    assert "not UTF-8" in said and "Traceback" not in said
