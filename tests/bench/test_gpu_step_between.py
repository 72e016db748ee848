"""What lies between graphs is measured by steps that compute what a step computes, in Triton's interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from runtime.triton_cpu import executor_of, small_model  # noqa: E402

from benchmarks.gpu.step_between import between  # noqa: E402
from benchmarks.gpu.step_overlap import captured  # noqa: E402
from wicore_trt.backends.triton.executor import TritonExecutor  # noqa: E402
from wicore_trt.backends.triton.rows import decode_plan  # noqa: E402
from wicore_trt.runtime.batch import SequenceSlice, StepBatch  # noqa: E402
from wicore_trt.types import SamplingParams  # noqa: E402

GREEDY = SamplingParams(temperature=0.0)


def seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@pytest.mark.long
def test_each_measure_runs_the_graph_as_often_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonExecutor, "_prepare_steps", lambda self, sizing=False: None)
    model = small_model(3, num_hidden_layers=1, sliding_window_pattern=1)
    executor, ran = executor_of(model, graphs=True, max_sequences=2, max_batch_tokens=8), 0
    graph = captured(executor, decode_plan(2), executor.model.launcher)

    def count() -> None:
        nonlocal ran
        ran += 1
        graph()

    executor.graphs[2] = count
    batch = StepBatch(
        [
            SequenceSlice(i, [1 + i], 0, {"global": [3 * i], "local": [2 * i]}, sample=True, params=GREEDY)
            for i in range(2)
        ]
    )
    before = executor.execute(batch)
    found = between(executor, batch, decode_plan(2), 2, seconds)
    assert [*found] == ["graph", "upload", "token ids", "results", "event", "graph, again", "ahead"]
    assert min(found.values()) > 0
    assert ran == 1 + len(found) * 2
    assert executor.execute(batch).sampled == before.sampled
