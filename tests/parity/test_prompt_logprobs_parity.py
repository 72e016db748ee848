"""Log-probabilities of prompts against transformers in float32, through the engine core in small steps."""

from __future__ import annotations

import random

import pytest
import torch
from parity.tiny import tiny_model

from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.core.engine import EngineCore
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams

TOLERANCE = 2e-4


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4, 5))])
def test_prompts_are_scored_as_transformers_does(seed: int, kernels: str) -> None:
    """Several prompts at a time, with a common beginning that is cached, longer than the window and than a step."""
    model, rng = tiny_model(seed), random.Random(seed)
    settings = ExecutorOptions(
        device="cpu", kernels=kernels, page_tokens=8, kv_pages={"global": 80, "local": 80}, max_batch_tokens=48
    )
    executor = TorchExecutor.from_tensors(model.spec, "float32", model.tensors, settings)
    window = model.spec.sliding_window
    cache, _ = make_cache(KVSettings(), executor.layout, window, engine="e", kernels="k", copier=executor.copier)
    scheduler = Scheduler(cache, max_batch_tokens=48, max_sequences=4, score_rows=rng.randint(1, 60))
    core = EngineCore(executor, scheduler, eos_ids=(1,), max_context=300)
    vocab, top = model.spec.vocab_size, 3
    head = [rng.randrange(vocab) for _ in range(50)]
    prompts = {str(i): head + [rng.randrange(vocab) for _ in range(rng.randint(1, 60))] for i in range(4)}
    found = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=rng.choice((0, 4)), temperature=0.0, prompt_logprobs=top)
        core.add(GenerateRequest(name, tuple(prompt), params))
    while core.has_work:
        for output in core.step():
            assert output.finish_reason in (None, FinishReason.LENGTH, FinishReason.STOP), output.error
            found[output.request_key] += output.prompt_logprobs
    core.close()
    for name, prompt in prompts.items():
        expected = torch.log_softmax(model.hf_logits(prompt), dim=-1)
        first, *rest = found[name]
        assert (first.token_id, first.logprob, first.top) == (prompt[0], 0.0, ())
        assert [entry.token_id for entry in rest] == prompt[1:]
        for at, entry in enumerate(rest):
            assert entry.logprob == pytest.approx(float(expected[at, entry.token_id]), abs=TOLERANCE)
            best = expected[at].topk(top).values.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best, abs=TOLERANCE)
            assert [float(expected[at, token]) for token, _ in entry.top] == pytest.approx(best, abs=TOLERANCE)
