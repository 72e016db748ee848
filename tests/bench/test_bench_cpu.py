"""The CPU comparison: fair turns, ratios against the better peer, goals, and the reference's own scorer."""

from __future__ import annotations

import random
import time
from itertools import count

import pytest
import torch
from fakes import tiny_spec
from parity.tiny import tiny_model

from benchmarks.cpu import decode as cpu
from benchmarks.cpu.decode import BFLOAT16, FLOAT32, OURS
from wicore_trt.bench.bound import MachineRates, ModelCost
from wicore_trt.bench.report import Roof

ROOF = Roof(
    ModelCost.from_dtypes(tiny_spec(8), "bfloat16", "bfloat16", "bfloat16"),
    MachineRates("cpu", 2, 1e6, 1e12, "float32"),
)


@pytest.mark.parametrize("seed", range(3))
def test_the_reference_scores_like_its_own_logits(seed, monkeypatch):
    monkeypatch.setattr(cpu, "ROWS", 7)  # several chunks of rows, the last one short
    model = tiny_model(seed)
    rng = random.Random(seed)
    tokens = [rng.randrange(model.spec.vocab_size) for _ in range(40)]
    first = rng.randint(1, 30)
    logprobs = model.hf_logits(tokens).double().log_softmax(-1)
    expected = [logprobs[i - 1, tokens[i]].item() for i in range(first, 40)]
    assert cpu.transformers_scorer(model.hf)(tokens, first) == pytest.approx(expected, abs=1e-5)


def test_prompts_are_pieces_of_the_text_and_never_repeat():
    text = list(range(100, 400))
    prompts = list(cpu.prompt_source(text, 2, 20))
    assert prompts == list(cpu.prompt_source(text, 2, 20)) and len(prompts) == 280
    assert len({tuple(p) for p in prompts}) == 280 and prompts[0][1:] != text[:19]
    assert all(p[0] == 2 and p[1:] == text[p[1] - 100 :][:19] for p in prompts)


def test_contestants_take_turns_on_the_same_new_prompts(monkeypatch):
    clock, calls = 0.0, []
    costs = {"a": 1.0, "b": 2.0, "c": 4.0}

    def contestant(name):
        def generate(prompts, tokens):
            nonlocal clock
            calls.append((name, tuple(map(tuple, prompts)), tokens))
            clock += 10 * costs[name] + costs[name] * (tokens - 1)

        return generate

    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    prompts = ([n] for n in count())
    result = cpu.time_steps({n: contestant(n) for n in costs}, prompts, batch=2, tokens=5, repeats=3)
    assert result == {n: {"prefill": 10 * c, "step": c} for n, c in costs.items()}
    rounds = [calls[i : i + 6] for i in range(0, len(calls), 6)]
    assert [r[0][0] for r in rounds] == ["a", "b", "c", "a"]
    for turn in rounds:
        assert {name for name, _, _ in turn} == {"a", "b", "c"}
        assert len({(p, n) for _, p, n in turn}) == 2  # one set of prompts for one token, one for all
    assert len({p for _, p, _ in calls}) == 2 * len(rounds)


def results(ours: float, float32: float, bfloat16: float):
    def one(step: float) -> dict[str, float]:
        return {"prefill": 10 * step, "step": step}

    times = {batch: {OURS: one(ours), FLOAT32: one(float32), BFLOAT16: one(bfloat16)} for batch in (1, 8)}
    return cpu.speed_results(times, ROOF, 128, 64)


def quality(difference: float) -> dict[str, float]:
    return {"tokens": 20_000, OURS: 20.0, FLOAT32: 20.0, "difference_percent": difference}


@pytest.mark.parametrize(
    ("steps", "difference", "missed"),
    [
        ((0.02, 0.05, 0.04), -0.49, []),
        ((0.02, 0.05, 0.029), 0.1, ["batch 1: 1.45x of transformers bfloat16, the goal is 1.5x"]),
        ((0.02, 0.021, 0.5), 0.1, ["batch 1: 1.05x of transformers float32", "batch 8: 1.05x of transformers float32"]),
        ((0.02, 0.05, 0.04), 0.51, ["perplexity differs by +0.510 %"]),
        ((0.02, 0.05, 0.04), -0.51, ["perplexity differs by -0.510 %"]),
        ((0.02, 0.05, 0.04), float("nan"), ["perplexity differs by +nan %"]),
    ],
)
def test_goals_are_judged_against_the_better_peer(steps, difference, missed):
    found = cpu.missed_goals(results(*steps), quality(difference))
    assert len(found) == len(missed)
    assert all(sentence.startswith(start) for sentence, start in zip(found, missed, strict=True))


def test_the_table_shows_what_was_measured():
    lines = cpu.markdown(results(0.02, 0.05, 0.04), quality(0.25), "wicore bfloat16").splitlines()
    assert lines[0].startswith("| batch | wicore bfloat16 | tokens/s |")
    assert lines[2].startswith("| 1 | 20.00 ms | 50.0 | ") and "| 50.00 ms | 40.00 ms | 2.00x | 1.5x |" in lines[2]
    assert lines[3].startswith("| 8 | 20.00 ms | 400.0 | ") and lines[3].count("|") == lines[0].count("|")
    assert "+0.250 %" in lines[-1]


def test_generation_is_held_to_its_length():
    """A peer that stops early would look fast."""
    ids = [[5, 6, 7], [7, 8, 9]]
    model = tiny_model(0).hf
    cpu.transformers_generate(model)(ids, 6)

    class Early:
        @staticmethod
        def generate(ids, **_):
            return torch.cat([ids, ids[:, :1]], 1)

    with pytest.raises(AssertionError):
        cpu.transformers_generate(Early)(ids, 6)
