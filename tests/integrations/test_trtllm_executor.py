"""The executor's configuration, and the life of requests against scripted responses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integrations import trtllm_stand_in
from integrations.trtllm_stand_in import Executor
from integrations.trtllm_stand_in import FinishReason as Theirs

from wicore_trt.backends.trtllm.executor import CacheSettings, TrtllmExecutor
from wicore_trt.errors import (
    ConfigError,
    EngineDeadError,
    EngineFormatError,
    EnvironmentUnfitError,
    InvalidRequestError,
    UnavailableError,
)
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams, TokenOutput

EOS = (1, 50)
RUN = Theirs.NOT_FINISHED


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trtllm_stand_in.install(monkeypatch)
    trtllm_stand_in.install_metadata(monkeypatch, tmp_path / "site")
    monkeypatch.setattr(Executor, "made", [])
    monkeypatch.setattr(Executor, "script", {})


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return write_engine(tmp_path / "trtllm")


@pytest.fixture
def executor(engine: Path) -> Iterator[TrtllmExecutor]:
    made = TrtllmExecutor(engine, eos_ids=EOS)
    yield made
    made.close()


def write_engine(path: Path, world: int = 1, **changes: Any) -> Path:
    path.mkdir()
    model = {"vocab_size": 64, "num_hidden_layers": 3, "mapping": {"world_size": world}}
    model |= {"runtime_defaults": {"max_attention_window": [16, 16, 4096]}}
    build = {"max_seq_len": 128, "max_batch_size": 4, "max_num_tokens": 256}
    (path / "config.json").write_text(json.dumps({"pretrained_config": model | changes, "build_config": build}))
    return path


def ask(first: int = 5, *, request_id: str = "r", deadline: float | None = None, salt: str = "", **params: Any):
    return GenerateRequest(request_id, (first, 6, 7), SamplingParams(**params), deadline=deadline, cache_salt=salt)


def theirs(executor: TrtllmExecutor) -> Any:
    """The stand-in behind an executor."""
    return executor._executor


def only(executor: TrtllmExecutor) -> Any:
    """The one request that TensorRT-LLM got."""
    (request,) = theirs(executor).requests.values()
    return request


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


# --- configuration ---


def test_configuration(engine: Path) -> None:
    executor = TrtllmExecutor(engine, eos_ids=EOS, cache=CacheSettings(gpu_share=0.5, max_tokens=1000))
    config = theirs(executor).config
    assert config.max_batch_size == 4 and config.max_num_tokens == 256 and config.enable_chunked_context
    kv = config.kv_cache_config
    assert kv.enable_block_reuse is False  # crashes Gemma 3 engines
    assert kv.max_attention_window == [16, 16, 128]  # of the engine's layers, not beyond its max_seq_len
    assert (kv.free_gpu_memory_fraction, kv.max_tokens, kv.host_cache_size) == (0.5, 1000, None)
    executor.close()


def test_block_reuse_is_an_explicit_choice(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="13123"):
        TrtllmExecutor(engine, eos_ids=EOS, cache=CacheSettings(host_bytes=1 << 30))
    executor = TrtllmExecutor(engine, eos_ids=EOS, cache=CacheSettings(block_reuse=True, host_bytes=1 << 30))
    kv = theirs(executor).config.kv_cache_config
    assert kv.enable_block_reuse and kv.host_cache_size == 1 << 30 and kv.secondary_offload_min_priority == 35
    assert kv.event_buffer_max_size == 1024 and "13123" in caplog.text
    assert executor.tiers.device_blocks == {16: 20, 128: 21} and executor.tiers.host_blocks == {16: 8, 128: 8}
    executor.close()


def test_a_host_cache_that_was_not_made_is_an_error(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executor, "host_blocks", 0)
    with pytest.raises(EnvironmentUnfitError, match="made no host cache"):
        TrtllmExecutor(engine, eos_ids=EOS, cache=CacheSettings(block_reuse=True, host_bytes=1 << 30))
    assert Executor.made[0].stopped


def test_engines_that_cannot_run(tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineFormatError):
        TrtllmExecutor(tmp_path, eos_ids=EOS)
    with pytest.raises(EngineFormatError, match="each layer"):
        TrtllmExecutor(write_engine(tmp_path / "short", num_hidden_layers=4), eos_ids=EOS)
    two = write_engine(tmp_path / "two", world=2)
    with pytest.raises(EnvironmentUnfitError, match="mpirun -n 2"):
        TrtllmExecutor(two, eos_ids=EOS)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    TrtllmExecutor(two, eos_ids=EOS).close()
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    monkeypatch.setattr(Executor, "load_error", "no such GPU")
    with pytest.raises(EnvironmentUnfitError, match="no such GPU"):
        TrtllmExecutor(engine, eos_ids=EOS)


# --- requests ---


def test_a_stream_of_tokens(executor: TrtllmExecutor) -> None:
    Executor.script[5] = [[10], [11, 12], [], [13], Theirs.LENGTH]
    outputs = list(executor.generate(ask(max_tokens=4)))
    assert [o.token_ids for o in outputs] == [(10,), (11, 12), (13,)]
    assert [o.finish_reason for o in outputs] == [None, None, FinishReason.LENGTH]
    assert outputs[-1].usage is not None and outputs[-1].usage.completion_tokens == 4
    request = only(executor)
    assert request.input_token_ids == [5, 6, 7] and request.streaming and request.max_tokens == 4
    assert request.output_config.exclude_input_from_output  # the default would send the prompt as output
    assert (request.end_id, request.stop_words) == (1, [[50]])
    assert executor.stats() == {"running": 0, "generated_tokens": 4, "kv_blocks": 10, "kv_blocks_free": 4}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.0, "seed": 1, "top_p": 0.5}, {"top_k": 1, "top_p": None, "temperature": None}),
        ({}, {"top_k": None, "top_p": 1.0, "temperature": 1.0, "min_p": None}),  # without top_p it would be greedy
        ({"temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1},
         {"top_k": 9, "top_p": 0.9, "temperature": 0.5, "min_p": 0.1}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"min_tokens": 3, "ignore_eos": True}, {"min_tokens": 3}),
    ],
)  # fmt: skip
def test_sampling(executor: TrtllmExecutor, params: dict, expected: dict) -> None:
    Executor.script[5] = [[9], Theirs.LENGTH]
    list(executor.generate(ask(**params)))
    config = only(executor).sampling_config
    assert {key: getattr(config, key) for key in expected} == expected
    assert only(executor).max_tokens == 125  # to the engine's limit


def test_sequences_have_seeds_of_their_own(executor: TrtllmExecutor) -> None:
    Executor.script[5] = [[9], [8], Theirs.LENGTH]
    outputs = list(executor.generate(ask(n=3, seed=-4)))
    assert sorted(o.index for o in outputs if o.finish_reason) == [0, 1, 2] and len(tokens(outputs)) == 6
    list(executor.generate(ask(n=3, seed=-4)))
    seeds = [request.sampling_config.seed for request in theirs(executor).requests.values()]
    assert len(set(seeds)) == 3 and seeds[:3] == seeds[3:]


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "swallowed"])
def test_end_of_text_is_the_last_token(executor: TrtllmExecutor, reported: bool) -> None:
    Executor.script[5] = [[10], [1] if reported else [], Theirs.END_ID]
    outputs = list(executor.generate(ask()))
    assert tokens(outputs) == [10, 1] and outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason is None and outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == 2


def test_a_stop_token_ends_the_sequence_here(executor: TrtllmExecutor) -> None:
    """Also when the engine went on: what follows is dropped, and the engine is told."""
    Executor.script[5] = [[10, 33, 34], "run"]
    outputs = list(executor.generate(ask(stop_token_ids=(33,), ignore_eos=True)))
    assert tokens(outputs) == [10, 33] and outputs[-1].stop_reason == 33
    assert outputs[-1].finish_reason is FinishReason.STOP and theirs(executor).cancelled == [1]
    assert only(executor).end_id == 33 and only(executor).stop_words is None


def test_tenants_have_numbers(executor: TrtllmExecutor) -> None:
    Executor.script[5] = [[9], Theirs.LENGTH]
    for salt in ("", "a", "b", "a"):
        list(executor.generate(ask(salt=salt)))
    ids = [request.cache_salt_id for request in theirs(executor).requests.values()]
    assert ids[0] is None and ids[1] == ids[3] != ids[2] and 0 <= ids[1] < 1 << 63


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"logprobs": 0}, "logprobs"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"stop_token_ids": (64,)}, "stop_token_ids"),
    ],
)
def test_what_would_mean_something_else_is_refused(executor: TrtllmExecutor, params: dict, field: str) -> None:
    with pytest.raises(InvalidRequestError) as found:
        executor.generate(ask(**params))
    assert found.value.field == field


def test_bad_prompts_are_refused(executor: TrtllmExecutor) -> None:
    for prompt in ((), (64,), (2,) * 128):
        with pytest.raises(InvalidRequestError):
            executor.generate(GenerateRequest("r", prompt, SamplingParams()))
    with pytest.raises(InvalidRequestError, match="63 is not liked"):
        list(executor.generate(ask(63)))
    assert executor.stats()["running"] == 0


# --- ends ---


def test_cancel_from_another_thread(executor: TrtllmExecutor) -> None:
    stream = executor.generate(ask(request_id="mine", n=2))
    next(stream)
    other = executor.generate(ask(request_id="other"))
    next(other)
    executor.cancel("mine")
    executor.cancel("unknown")
    rest = list(stream)
    assert [o.finish_reason for o in rest if o.finish_reason] == [FinishReason.CANCELLED] * 2
    assert sorted(theirs(executor).cancelled) == [1, 2] and next(other).token_ids == (7,)
    other.close()
    assert sorted(theirs(executor).cancelled) == [1, 2, 3] and executor.stats()["running"] == 0


def test_a_deadline_ends_open_sequences(executor: TrtllmExecutor) -> None:
    outputs = list(executor.generate(ask(deadline=time.monotonic() + 0.05, n=2)))
    assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.DEADLINE] * 2
    assert sorted(theirs(executor).cancelled) == [1, 2]


def test_an_error_of_one_request(executor: TrtllmExecutor) -> None:
    Executor.script |= {5: [[9], "bad sequence"], 6: [[9], Theirs.LENGTH]}
    outputs = list(executor.generate(ask(5)))
    assert outputs[-1].finish_reason is FinishReason.ERROR and outputs[-1].error == "bad sequence"
    assert tokens(list(executor.generate(ask(6)))) == [9]


def test_a_dead_engine_ends_all_streams(executor: TrtllmExecutor) -> None:
    stream, found = executor.generate(ask()), []
    next(stream)
    theirs(executor).broken = RuntimeError("CUDA error")
    with pytest.raises(EngineDeadError, match="CUDA error"):
        found.extend(stream)
    with pytest.raises(EngineDeadError):
        list(executor.generate(ask()))


def test_close_ends_waiting_streams(engine: Path) -> None:
    executor = TrtllmExecutor(engine, eos_ids=EOS)
    ended: list[Exception] = []

    def read() -> None:
        try:
            list(executor.generate(ask()))
        except UnavailableError as error:
            ended.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    while executor.stats()["running"] < 3:
        time.sleep(0.001)
    executor.close()
    executor.close()
    for reader in readers:
        reader.join(60)
    assert len(ended) == 3 and theirs(executor).stopped
    with pytest.raises(UnavailableError):
        list(executor.generate(ask()))
