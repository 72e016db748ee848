"""Replays with overlapping launches against ordered ones, in Triton's interpreter: who comes too early is seen."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from msgspec import structs  # noqa: E402

pytest.importorskip("triton", reason="pip install -e .[triton]")

from runtime.triton_cpu import executor_of, small_model  # noqa: E402

from benchmarks.gpu.step_overlap import captured, overlapping, replay_problems  # noqa: E402
from wicore_trt.backends.triton.executor import TritonExecutor  # noqa: E402
from wicore_trt.backends.triton.rows import decode_plan, make_plan  # noqa: E402
from wicore_trt.plugins.aot import CompiledKernel  # noqa: E402
from wicore_trt.plugins.launch import Launcher  # noqa: E402
from wicore_trt.plugins.layout import Launch  # noqa: E402
from wicore_trt.runtime.batch import SequenceSlice  # noqa: E402
from wicore_trt.types import SamplingParams  # noqa: E402

GREEDY = SamplingParams(temperature=0.0)


class Hasty:
    """`Launcher` that puts each `every`th dependent linear behind its reader, as a missing wait might."""

    def __init__(self, inner: Launcher, every: int) -> None:
        self._inner, self._every, self._count = inner, every, 0
        self._held: tuple[CompiledKernel, Launch, int] | None = None

    def launch(self, kernel: CompiledKernel, call: Launch, stream: int) -> None:
        if kernel.dependent and kernel.name.startswith("linear"):
            self._count += 1
            if self._count % self._every == 0:
                self._held = (kernel, call, stream)
                return
        self._inner.launch(kernel, call, stream)
        if self._held:
            self._inner.launch(*self._held)
            self._held = None


@pytest.mark.long
def test_replays_agree_unless_a_kernel_comes_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TritonExecutor, "_prepare_steps", lambda self, sizing=False: None
    )  # warms up what only a GPU has
    model = small_model(3, num_hidden_layers=1, sliding_window_pattern=1)
    executor = executor_of(model, graphs=True, max_sequences=1, max_batch_tokens=8)
    executor.graphs[1] = captured(executor, decode_plan(1), executor.model.launcher)
    assert overlapping(executor) > 5
    decode = SequenceSlice(0, [1], 0, {"global": [3, 1], "local": [2, 5]}, sample=True, params=GREEDY)
    assert replay_problems(executor, [decode], 2) == []
    executor.graphs[1] = captured(executor, decode_plan(1), Hasty(executor.model.launcher, 4))
    (problem,) = replay_problems(executor, [decode], 1)
    assert "1 of 1 replays differ" in problem
    size, prompt = make_plan(8, 1, 2, 3), structs.replace(decode, token_ids=[4, 5, 6], seq_id=1)
    executor.prompt_graphs[size] = captured(executor, size, executor.model.launcher)
    assert replay_problems(executor, [decode, prompt], 2) == []
    executor.prompt_graphs[size] = captured(executor, size, Hasty(executor.model.launcher, 2))
    assert replay_problems(executor, [decode, prompt], 1)
