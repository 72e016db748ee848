"""Replays with overlapping launches against ordered ones, in Triton's interpreter: who comes too early is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install wicore-trt[triton]")

from runtime.triton_cpu import executor_of, small_model  # noqa: E402

from wicore_trt.bench.gpu_step_overlap import overlapping, replay_problems  # noqa: E402
from wicore_trt.plugins.aot import CompiledKernel  # noqa: E402
from wicore_trt.plugins.launch import Launcher  # noqa: E402
from wicore_trt.plugins.layout import Launch  # noqa: E402
from wicore_trt.runtime.batch import SequenceSlice, StepBatch  # noqa: E402
from wicore_trt.types import SamplingParams  # noqa: E402

GREEDY = SamplingParams(temperature=0.0)


class Hasty:
    """`Launcher` that swaps one dependent launch in a hundred with the one in front of it, as a missing wait might."""

    def __init__(self, inner: Launcher) -> None:
        self._inner, self.count = inner, 0
        self._held: tuple[CompiledKernel, Launch, int] | None = None

    def launch(self, kernel: CompiledKernel, call: Launch, stream: int) -> None:
        self.count += 1
        if kernel.dependent and kernel.name.startswith("linear") and self.count % 100 == 3:
            self._held = (kernel, call, stream)
            return
        self._inner.launch(kernel, call, stream)
        if self._held:
            self._inner.launch(*self._held)
            self._held = None


def test_replays_agree_unless_a_kernel_comes_too_early() -> None:
    executor = executor_of(small_model(3), graphs=True, max_sequences=1, max_batch_tokens=8)
    assert overlapping(executor) > 5
    piece = SequenceSlice(0, [7, 9, 11], 0, {"global": [3, 1], "local": [2, 5]}, sample=True, params=GREEDY)
    executor.execute(StepBatch([piece]))
    decode = replace(piece, token_ids=[1], start=3)
    assert replay_problems(executor, [decode], 3) == []
    executor.model = replace(executor.model, launcher=Hasty(executor.model.launcher))
    (problem,) = replay_problems(executor, [decode], 2)
    assert "replays differ" in problem
