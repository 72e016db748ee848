"""The engine core over TensorRTExecutor on the fake TensorRT: a real scheduler's page tables, preemption, prefix hits
from the device and from host memory. Every answer must be transformers' greedy one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from backend_tensorrt.tensorrt_engines import executor_of, fake_engine
from parity.tiny import TinyModel, tiny_model

from wicore_trt.backends.tensorrt.plan_io import PlanLimits
from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.core.engine import EngineCore
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import GenerateRequest, SamplingParams

ANSWER = 12


def core_of(path: Path, model: TinyModel, pages: dict[str, int], **kv: Any) -> EngineCore:
    engine = fake_engine(path, model.spec, model.tensors, limits=PlanLimits(3, 13, 160), page_tokens=4)
    executor = executor_of(engine, kv_pages=pages, max_batch_tokens=24)
    settings = KVSettings(**kv)
    names = {"engine": "tiny", "kernels": executor.kernels}
    manager, loader = make_cache(settings, executor.layout, model.spec.sliding_window, copier=executor.copier, **names)
    scheduler = Scheduler(manager, max_batch_tokens=24, max_sequences=6, loader=loader, slice_tokens=8)
    return EngineCore(executor, scheduler, eos_ids=(1,), max_context=160)


def greedy(model: TinyModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(ANSWER):
        tokens.append(int(model.hf_logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def run(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        core.add(GenerateRequest(str(i), tuple(prompt), params))
    left = set(answers)
    while left:
        for output in core.step():
            assert output.error is None
            answers[output.request_key] += output.token_ids
            if output.finish_reason is not None:
                left.discard(output.request_key)
        core.scheduler.check_integrity()
    return [*answers.values()]


@pytest.mark.parametrize(
    ("window", "host_bytes"),
    [(6, 1 << 22), *(pytest.param(*case, marks=pytest.mark.long) for case in ((6, 0), (17, 0), (17, 1 << 22)))],
)
def test_conversations_through_the_scheduler_are_right(window: int, host_bytes: int, tmp_path: Path) -> None:
    rng = random.Random(f"{window}/{host_bytes}")
    model = tiny_model(window, sliding_window=window, num_hidden_layers=3, sliding_window_pattern=3, vocab_size=97)
    core = core_of(tmp_path / "engine", model, {GLOBAL: 34, LOCAL: 32}, host_bytes=host_bytes)
    core.scheduler.prefill.observe_step([(0, 64)], 64.0)  # the planner believes that computing is slow, and loads
    shared = [rng.randrange(2, 97) for _ in range(14)]
    prompts = [shared + [rng.randrange(2, 97) for _ in range(rng.randint(3, 20))] for _ in range(5)]
    for _ in range(3):
        answers = run(core, prompts)
        assert answers == [greedy(model, prompt) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            prompt += answer + [rng.randrange(2, 97) for _ in range(rng.randint(1, 6))]
        rng.shuffle(prompts)
    statistics = core.stats()
    assert statistics.preemptions > 0 and statistics.cached_prompt_tokens > 0, statistics
