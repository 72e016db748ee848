"""The attention benches: replay counts tokens as an engine would, signals are means over samples, tables are right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny_source import write_tiny_source

from benchmarks.kv import attention_trace, on_gpu
from benchmarks.kv.attention import ablation_table, cost_table
from benchmarks.kv.attention_trace import PageNames, TouchedChain, _mean_masses, replay_policy
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.core import engine as core_engine
from wicore_trt.engine.build import build_engine
from wicore_trt.kv.policy.a2cr import A2CRPolicy
from wicore_trt.runtime.batch import StepBatch, StepResult


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
        lambda _, capacity, **__: A2CRPolicy(capacity, capacity * 1e-3),
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


@pytest.mark.long
def test_the_gpu_bench_measures_as_often_as_its_rows_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rehearsed with a tiny engine on the CPU."""
    monkeypatch.setattr(on_gpu, "PROMPT_TOKENS", range(10, 60))
    execute, kept = TorchExecutor.execute, core_engine.ATTENTION_STEPS
    seen: dict[int, list[bool]] = {}

    def executed(self: TorchExecutor, batch: StepBatch) -> StepResult:
        result = execute(self, batch)
        assert bool(result.attention) is batch.measure_attention
        seen.setdefault(core_engine.ATTENTION_STEPS, []).append(batch.measure_attention)
        return result

    monkeypatch.setattr(TorchExecutor, "execute", executed)
    build_engine(write_tiny_source(tmp_path / "source"), tmp_path / "engine", page_tokens=8)
    given = {"executor__device": "cpu", "kv__device_bytes": 1 << 20, "scheduler__max_context": 128}
    rows = on_gpu.masses(tmp_path / "engine", ((2, 40), (1, 17)), "auto", 40, **given)
    assert [r["measured"] for r in rows] == [*on_gpu.MEASURED] * 2 and {r["sequences"] for r in rows} == {1, 2}
    assert all(r["steps"] > 70 and r["mean_ms"] > 0 for r in rows) and rows[0]["share"] == "+0.00%"
    assert kept == core_engine.ATTENTION_STEPS and "| never |" in on_gpu.table(rows)
    assert all(seen[1]) and not any(seen[1 << 62]) and 4 <= sum(seen[32]) <= len(seen[32]) // 32 + 4
