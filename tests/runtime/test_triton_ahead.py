"""TritonExecutor under EngineCore: steps that start before the last one's tokens are read choose the same tokens."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton")

from triton_cpu import executor_of, small_model

from wicore_trt.backends.triton.executor import TritonExecutor
from wicore_trt.core.engine import EngineCore
from wicore_trt.grammar.matcher import Grammars
from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.runtime.executor import AheadExecutor
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import Constraint, ConstraintKind, GenerateRequest, SamplingParams


class Letters:
    """Token t is the letter chr(65 + t), but the end."""

    bos_id = None

    def __init__(self, eos: int) -> None:
        self.eos_ids = (eos,)

    def list_vocabulary(self) -> list[bytes | None]:
        return [None if t in self.eos_ids else chr(65 + t).encode() for t in range(48)]

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        return [ord(c) - 65 for c in text]


def core_of(executor: TritonExecutor, eos: int) -> EngineCore:
    manager = KVCacheManager(
        executor.layout.num_pages, executor.spec.sliding_window, KeyChain("engine", executor.layout.page_tokens)
    )
    scheduler = Scheduler(manager, max_batch_tokens=executor.max_batch_tokens, max_sequences=4)
    return EngineCore(executor, scheduler, eos_ids=(eos,), max_context=64, grammars=Grammars(Letters(eos), 48))


def answers(core: EngineCore, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    """Tokens by request; a request arrives every other step."""
    tokens: dict[str, list[int]] = {r.request_key: [] for r in requests}
    left = list(requests)
    while left or core.has_work:
        if left:
            core.add(left.pop(0))
        for _ in range(2):
            for output in core.step():
                assert output.error is None, output.error
                tokens[output.request_key] += output.token_ids
    assert all(pool.used_slots == 0 for pool in core.scheduler.manager.pools.values())
    return tokens


@pytest.mark.parametrize("graphs", [pytest.param(False, marks=pytest.mark.long), True])
def test_unread_tokens_are_those_of_the_step_before(graphs):
    rng = random.Random()
    model = small_model(rng.randrange(1 << 30))
    executor = executor_of(model, graphs=graphs, max_batch_tokens=12)
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


ANYTHING = Constraint(ConstraintKind.REGEX, "[A-z]*")


def test_constrained_sequences_are_masked_and_others_are_not():
    """Alone and in company: only batch-invariant kernels promise the same tokens."""
    model = small_model(11)
    executor = executor_of(model, graphs=True, max_batch_tokens=12, batch_invariant=True)
    plain = [
        GenerateRequest("greedy", (3, 4), SamplingParams(temperature=0.0, max_tokens=4)),
        GenerateRequest("drawn", (5, 6), SamplingParams(temperature=0.9, max_tokens=4, seed=3)),
    ]
    choice = Constraint(ConstraintKind.CHOICE, '["CAB", "FED"]')
    constrained = [
        GenerateRequest("c", (3, 4), SamplingParams(temperature=0.0, constraint=choice)),
        GenerateRequest("d", (9,), SamplingParams(temperature=0.9, seed=1, constraint=choice)),
    ]
    alone = answers(core_of(executor, 47), plain)
    together = answers(core_of(executor, 47), [constrained[0], *plain, constrained[1]])
    assert {name: together[name] for name in alone} == alone
    for name in ("c", "d"):
        assert "".join(chr(65 + t) for t in together[name][:-1]) in ("CAB", "FED") and together[name][-1] == 47
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
        "constraint": (SamplingParams(temperature=0.0, max_tokens=4, constraint=ANYTHING), False),
        "no end yet": (SamplingParams(temperature=0.0, min_tokens=3, max_tokens=4), False),
    }
    for name, (params, expected) in cases.items():
        said, leads = [], executor.leads
        executor.leads = lambda batch, leads=leads, said=said: said.append(leads(batch)) or said[-1]
        core.add(GenerateRequest(name, (5, 6, 7), params))
        core.step()
        core.abort(name)
        while core.has_work:
            core.step()
        executor.leads = leads
        assert said[0] is expected, name
    executor.close()


def test_a_step_that_raises_when_half_of_it_is_on_the_stream_is_over():
    """Else it would read what later steps write for theirs."""
    executor = executor_of(small_model(1))
    core, waited = core_of(executor, 1), []
    executor.device.synchronize = lambda: waited.append(len(executor._steps))
    enqueue, executor.sampler.drawing.draw_rows = executor.sampler.drawing.draw_rows, lambda *_: 1 // 0
    core.add(GenerateRequest("a", (5, 6, 7), SamplingParams(max_tokens=2)))
    with pytest.raises(ZeroDivisionError):
        core.step()
    assert waited == [0, 0], "in the batch and alone"
    executor.sampler.drawing.draw_rows = enqueue
    executor.close()
