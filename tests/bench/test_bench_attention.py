"""The attention benches: replay counts tokens as an engine would, signals are means over samples, tables are right."""

from __future__ import annotations

import random

import pytest

from benchmarks.kv import attention_trace
from benchmarks.kv.attention import ablation_table, cost_table
from benchmarks.kv.attention_trace import PageNames, TouchedChain, _mean_masses, replay_policy
from wicore_trt.kv.policy.a2cr import A2CRPolicy, A2CRWeights


def request(chain: list[int], signal: list[float] | None = None) -> TouchedChain:
    return TouchedChain(len(chain), 4 * len(chain), chain, {1: signal, 32: None})


def test_pages_have_equal_names_when_their_prefixes_are_equal() -> None:
    names = PageNames(2)
    first, second = names.chain([1, 2, 3, 4, 5]), names.chain([1, 2, 3, 4, 3, 4])
    assert len(first) == 2 and second[:2] == first and second[2] != first[1]
    assert names.chain([9, 9, 3, 4])[1] not in second


def test_masses_are_means_over_the_samples_that_saw_the_page() -> None:
    assert _mean_masses([], 3) is None
    assert _mean_masses([[1.0, 3.0], [2.0, 1.0, 5.0]], 4) == [1.5, 2.0, 5.0, 1.0]


def test_replay_counts_the_leading_pages_that_are_there() -> None:
    trace = [request([1, 2]), request([1, 2, 3]), request([7, 8, 9, 10]), request([1])]
    assert replay_policy(trace, "lru", 4, 4) == pytest.approx(2 * 4 / 40)
    assert replay_policy(trace, "belady", 4, 4) == pytest.approx(3 * 4 / 40)


def test_attention_reaches_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two chains of nearly equal age and use, the one with the higher mass stays."""
    monkeypatch.setattr(
        attention_trace,
        "make_policy",
        lambda _, capacity, **__: A2CRPolicy(capacity, A2CRWeights(decay=capacity * 1e-3)),
    )
    for kept in (0, 1):
        masses = [[0.1], [9.0]] if kept else [[9.0], [0.1]]
        trace = [request([i], masses[i]) for i in (0, 1)] + [request([5], [1.0]), request([kept], [1.0])]
        assert replay_policy(trace, "a2cr", 2, 4, 1) == pytest.approx(4 / 16)
        assert replay_policy(trace, "a2cr", 2, 4) == pytest.approx(kept * 4 / 16), (
            "without attention the older one leaves"
        )


def test_tables() -> None:
    rng = random.Random(1)
    trace = [request([0, rng.randrange(1, 30)], [1.0, rng.random()]) for _ in range(60)]
    table = ablation_table([trace, trace], 4)
    assert "2 workloads, 120 requests" in table and table.count("\n| ") == 9
    text, worst = cost_table([(1, 100, 0.01, 0.012), (8, 100, 0.02, 0.021)])
    assert worst == pytest.approx(0.2 / 32) and "| 1 | 100 | 10.00 ms | 12.00 ms | 0.62 % |" in text
