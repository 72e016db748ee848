"""What `RequestExecutor` promises, of TensorRT-LLM: the stand-in, and the library itself where it and a GPU are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_trtllm import trtllm_machine

from wicore_trt.backends.trtllm.executor import TrtllmExecutor
from wicore_trt.engine.directory import open_engine
from wicore_trt.errors import InvalidRequestError, WicoreError
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.types import Constraint, ConstraintKind, FinishReason, GenerateRequest, SamplingParams, TokenOutput

PROMPT = (5, 6, 7)
WAIT_S = 0.01


@pytest.fixture(scope="module")
def real_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tensorrt_llm", reason="TensorRT-LLM is not installed")
    if not torch.cuda.is_available():
        pytest.skip("TensorRT-LLM needs a GPU")
    return trtllm_machine.build(tmp_path_factory.mktemp("real"), head_dim=64)  # its kernels have no smaller heads


@pytest.fixture(params=["stand-in", "library"])
def executor(request: pytest.FixtureRequest) -> Iterator[TrtllmExecutor]:
    path = request.getfixturevalue("trtllm_engine" if request.param == "stand-in" else "real_engine")
    made = TrtllmExecutor(open_engine(path), ExecutorOptions(max_sequences=3))
    yield made
    made.close()


def ask(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: Any) -> GenerateRequest:
    values = {"temperature": 0.0, "ignore_eos": True, **params}
    return GenerateRequest(name, prompt, SamplingParams(**values))


def start(executor: TrtllmExecutor, request: GenerateRequest, index: int = 0, seed: int = 0) -> None:
    stops = request.params.stop_token_ids
    executor.check(request, stops)
    executor.submit(request, index, seed, stops)


def gather(executor: TrtllmExecutor, ends: int, timeout_s: float = 60.0) -> dict[tuple[str, int], list[TokenOutput]]:
    """Outputs by sequence until so many have ended; nothing may follow an end."""
    found: dict[tuple[str, int], list[TokenOutput]] = {}
    end = time.monotonic() + timeout_s
    while sum(outputs[-1].finish_reason is not None for outputs in found.values()) < ends:
        assert time.monotonic() < end, found
        for output in executor.poll(WAIT_S):
            outputs = found.setdefault((output.request_key, output.index), [])
            assert not outputs or outputs[-1].finish_reason is None
            outputs.append(output)
    return found


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def alone(executor: TrtllmExecutor, request: GenerateRequest, seed: int = 0) -> list[TokenOutput]:
    start(executor, request, seed=seed)
    [outputs] = gather(executor, 1).values()
    return outputs


def test_a_sequence_has_as_many_tokens_as_were_asked_for(executor: TrtllmExecutor) -> None:
    outputs = alone(executor, ask(max_tokens=9))
    assert len(tokens(outputs)) == 9 and outputs[-1].finish_reason is FinishReason.LENGTH
    assert all(0 <= token < executor.spec.vocab_size for token in tokens(outputs))
    usage = outputs[-1].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (3, 9)
    assert [o.usage.completion_tokens for o in outputs if o.usage] == [
        len(tokens(outputs[: i + 1])) for i in range(len(outputs))
    ]


def test_greedy_and_seeded_tokens_come_again(executor: TrtllmExecutor) -> None:
    for params in ({}, {"temperature": 1.0}):
        first, second = (tokens(alone(executor, ask(max_tokens=12, **params), seed=11)) for _ in range(2))
        assert first == second
    assert tokens(alone(executor, ask(max_tokens=12, temperature=1.0), seed=12)) != first


def test_sequences_run_side_by_side(executor: TrtllmExecutor) -> None:
    request, other = ask("a", n=2, max_tokens=20, temperature=1.0), ask("b", (9, 9), max_tokens=5)
    start(executor, request, 0, seed=1)
    start(executor, request, 1, seed=2)
    start(executor, other)
    found = gather(executor, 3)
    assert {name: len(tokens(outputs)) for name, outputs in found.items()} == {("a", 0): 20, ("a", 1): 20, ("b", 0): 5}
    assert tokens(found["a", 0]) != tokens(found["a", 1])
    assert tokens(found["b", 0]) == tokens(alone(executor, other))


@pytest.mark.parametrize("more", [(), (3,)], ids=["one stop token", "several"])
def test_a_stop_token_is_the_last(executor: TrtllmExecutor, more: tuple[int, ...]) -> None:
    free = tokens(alone(executor, ask(max_tokens=12)))
    stop = next(token for token in free[3:] if token not in more)
    outputs = alone(executor, ask(max_tokens=12, stop_token_ids=(*more, stop)))
    until = min(free.index(token) for token in (*more, stop) if token in free)
    assert tokens(outputs) == free[: until + 1] and outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == free[until]


def test_a_stop_token_waits_for_min_tokens(executor: TrtllmExecutor) -> None:
    free = tokens(alone(executor, ask(max_tokens=12)))
    outputs = alone(executor, ask(max_tokens=12, stop_token_ids=(free[0],), min_tokens=4))
    assert len(tokens(outputs)) >= 4


def test_the_context_is_the_end(executor: TrtllmExecutor) -> None:
    long = tuple([4] * (trtllm_machine.CONTEXT - 5))
    outputs = alone(executor, ask(prompt=long))
    assert len(tokens(outputs)) == 5 and outputs[-1].finish_reason is FinishReason.LENGTH


def test_cancelled_is_silent_and_leaves_the_others(executor: TrtllmExecutor) -> None:
    start(executor, ask("gone", max_tokens=100))
    start(executor, ask("stays", max_tokens=30))
    while not executor.poll(WAIT_S):
        pass
    executor.cancel("gone", 0)
    executor.cancel("gone", 0)
    executor.cancel("unknown", 0)
    found = gather(executor, 1)
    assert {*found} == {("stays", 0)}
    start(executor, ask("gone", max_tokens=4))  # the name is free again, and what comes is of the new one
    assert len(tokens(gather(executor, 1)["gone", 0])) == 4


def test_poll_waits_no_longer_than_told(executor: TrtllmExecutor) -> None:
    assert executor.poll(0.05) == []  # or this would not end


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"logprobs": 0}, "logprobs"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"constraint": Constraint(ConstraintKind.JSON_OBJECT)}, "constraint"),
        ({"min_tokens": 1, "stop_token_ids": (3, 4)}, "min_tokens"),
    ],
)
def test_what_would_mean_something_else_is_refused_by_name(
    executor: TrtllmExecutor, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as found:
        start(executor, ask(**params))
    assert found.value.field == field and field in found.value.message


@pytest.mark.parametrize("executor", ["stand-in"], indirect=True)
def test_a_request_that_the_library_refuses_fails_alone(executor: TrtllmExecutor) -> None:
    with pytest.raises(WicoreError, match="63 is not liked"):
        start(executor, ask(prompt=(63, 1)))
    assert len(tokens(alone(executor, ask(max_tokens=3)))) == 3
