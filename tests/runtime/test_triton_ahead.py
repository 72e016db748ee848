"""TritonExecutor under EngineCore: steps that start before the last one's tokens are read choose the same tokens."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton")

from triton_cpu import executor_of, small_model

from wicore_trt.backends.triton.executor import TritonExecutor
from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.runtime.executor import AheadExecutor
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import GenerateRequest, SamplingParams


def core_of(executor: TritonExecutor, eos: int) -> EngineCore:
    manager = KVCacheManager(
        executor.layout.num_pages, executor.spec.sliding_window, KeyChain("engine", executor.layout.page_tokens)
    )
    scheduler = Scheduler(manager, max_batch_tokens=executor.max_batch_tokens, max_sequences=4)
    return EngineCore(executor, scheduler, eos_ids=(eos,), max_context=64)


def answers(core: EngineCore, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    """Tokens by request; a request arrives every other step."""
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    left = list(requests)
    while left or core.has_work:
        if left:
            core.add(left.pop(0))
        for _ in range(2):
            for output in core.step():
                assert output.error is None, output.error
                tokens[output.request_id] += output.token_ids
    assert all(pool.used == 0 for pool in core.scheduler.manager.pools.values())
    return tokens


@pytest.mark.parametrize("graphs", [False, True])
def test_unread_tokens_are_those_of_the_step_before(graphs):
    rng = random.Random()
    model = small_model(rng.randrange(1 << 30))
    executor = executor_of(model, graphs=graphs)
    assert isinstance(executor, AheadExecutor)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4),
        SamplingParams(temperature=0.8, max_tokens=3, seed=5),
        SamplingParams(temperature=0.7, top_k=8, max_tokens=2, seed=6),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    ]
    requests = [
        GenerateRequest(str(i), tuple(rng.randrange(48) for _ in range(rng.randint(1, 4))), p)
        for i, p in enumerate(params)
    ]
    eos = rng.randrange(48)
    unread = []
    submit, leads = executor.submit, executor.leads
    executor.submit = lambda batch: (unread.append(any(-1 in s.token_ids for s in batch.slices)), submit(batch))[1]
    ahead = answers(core_of(executor, eos), requests)
    assert sum(unread) > 1, "nothing ran ahead"
    unread.clear()
    executor.leads = lambda batch: False
    assert answers(core_of(executor, eos), requests) == ahead and not any(unread)
    executor.leads = leads
    executor.close()


def test_what_does_not_lead():
    executor = executor_of(small_model(1))
    executor.model.launcher.launch = lambda *_: None  # what leads is said of a step, not of what it computes
    core = core_of(executor, 1)
    cases = {
        "greedy": (SamplingParams(temperature=0.0, max_tokens=4), True),
        "drawn": (SamplingParams(temperature=1.0, max_tokens=4), True),
        "top-p": (SamplingParams(temperature=1.0, top_p=0.9, max_tokens=4), True),
        "logprobs": (SamplingParams(temperature=0.0, logprobs=1, max_tokens=4), False),
        "penalty": (SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=4), False),
        "no end yet": (SamplingParams(temperature=0.0, min_tokens=3, max_tokens=4), False),
    }
    for name, (params, expected) in cases.items():
        batches = []
        submit = executor.submit
        executor.submit = lambda batch, submit=submit, batches=batches: (batches.append(batch), submit(batch))[1]
        core.add(GenerateRequest(name, (5, 6, 7), params))
        core.step()
        core.abort(name)
        while core.has_work:
            core.step()
        executor.submit = submit
        assert executor.leads(batches[0]) is expected, name
    executor.close()
