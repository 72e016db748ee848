"""The executor's configuration, what it refuses to run, and what it makes of the library's answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_trtllm import trtllm_stand_in
from backend_trtllm.trtllm_stand_in import Executor
from backend_trtllm.trtllm_stand_in import FinishReason as Theirs

from wicore_trt.backends.trtllm.executor import TrtllmExecutor
from wicore_trt.engine.directory import EngineDir, open_engine
from wicore_trt.errors import EngineFormatError, EnvironmentUnfitError
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams, TokenOutput

STOPS = (1, 50)


@pytest.fixture
def engine(trtllm_engine: Path) -> EngineDir:
    return open_engine(trtllm_engine)


@pytest.fixture
def executor(engine: EngineDir) -> Iterator[TrtllmExecutor]:
    made = TrtllmExecutor(engine, ExecutorOptions())
    yield made
    made.close()


def ask(*, salt: str = "", **params: Any) -> GenerateRequest:
    return GenerateRequest("r", (5, 6, 7), SamplingParams(**params), cache_salt=salt)


def only(executor: TrtllmExecutor) -> Any:
    """The one request that TensorRT-LLM got."""
    (request,) = executor._executor.requests.values()
    return request


def answers(executor: TrtllmExecutor, request: GenerateRequest, script: list[Any]) -> list[TokenOutput]:
    """The outputs of one request that the library answers so."""
    Executor.script[5] = script
    executor.submit(request, 0, 1, (*(() if request.params.ignore_eos else STOPS), *request.params.stop_token_ids))
    found: list[TokenOutput] = []
    while not found or found[-1].finish_reason is None:
        found += executor.poll(0.01)
    return found


# --- configuration ---


def test_configuration(engine: EngineDir) -> None:
    executor = TrtllmExecutor(engine, ExecutorOptions(kv_fraction=0.5, max_sequences=3, max_batch_tokens=99))
    made = executor._executor
    assert made.model_path == engine.path / "trtllm" and executor.max_sequences == 3
    assert made.config.max_batch_size == 3 and made.config.max_num_tokens == 99 and made.config.enable_chunked_context
    kv = made.config.kv_cache_config
    assert kv.enable_block_reuse is False  # crashes Gemma 3 engines
    spec = engine.manifest.spec
    assert kv.max_attention_window == [spec.sliding_window if g == "local" else 128 for g in spec.layer_groups]
    assert (kv.free_gpu_memory_fraction, kv.host_cache_size) == (0.5, None)
    assert executor.kernels == "tensorrt-llm-1.2.1-sm90"
    executor.close()


def test_without_the_library_the_error_says_what_to_install(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if not path.endswith("site")])
    with pytest.raises(EnvironmentUnfitError, match=r"not installed.*pip install .tensorrt-llm>=1\.2,<1\.3"):
        TrtllmExecutor(engine, ExecutorOptions())


def test_another_version_than_the_engine_s_is_refused(
    engine: EngineDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trtllm_stand_in.install_metadata(monkeypatch, tmp_path, "1.2.0")
    with pytest.raises(
        EnvironmentUnfitError, match=r"built by TensorRT-LLM 1\.2\.1, and 1\.2\.0 is installed"
    ) as found:
        TrtllmExecutor(engine, ExecutorOptions())
    assert "wicore build" in str(found.value) and "\n" not in str(found.value)


def test_another_gpu_than_the_engine_s_is_refused(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    with pytest.raises(EnvironmentUnfitError, match="is for sm90, and this GPU is sm89"):
        TrtllmExecutor(engine, ExecutorOptions())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentUnfitError, match="is for sm90, and PyTorch finds no GPU"):
        TrtllmExecutor(engine, ExecutorOptions())


def test_what_the_library_does_not_load_says_why_on_one_line(
    engine: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Executor, "load_error", "assertion failed:\n  no such GPU.\n")
    with pytest.raises(EnvironmentUnfitError, match="does not load .* assertion failed: no such GPU") as found:
        TrtllmExecutor(engine, ExecutorOptions())
    assert "\n" not in str(found.value)


def edit(config: dict[str, Any], section: str, **changes: Any) -> None:
    config[section] |= changes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: edit(c, "pretrained_config", num_hidden_layers=9), "each layer"),
        (lambda c: edit(c, "pretrained_config", mapping={"world_size": 2}), "split over 2 ranks"),
        (lambda c: edit(c, "build_config", max_seq_len=None), "no TensorRT-LLM engine"),
        (lambda c: c.pop("build_config"), "no TensorRT-LLM engine"),
        (lambda c: c.update(build_config=[]), "no TensorRT-LLM engine"),
    ],
)
def test_files_that_are_no_engine(
    engine: EngineDir, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    config = json.loads((engine.path / "trtllm" / "config.json").read_text())
    change(config)
    (tmp_path / "trtllm").mkdir()
    (tmp_path / "trtllm" / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFormatError, match=words):
        TrtllmExecutor(replace(engine, path=tmp_path), ExecutorOptions())
    assert not Executor.made


# --- what the library is asked ---


def test_a_request(executor: TrtllmExecutor) -> None:
    outputs = answers(executor, ask(max_tokens=4), [[10], [11, 12], [], [13], Theirs.LENGTH])
    assert [o.token_ids for o in outputs] == [(10,), (11, 12), (13,)]
    assert [o.finish_reason for o in outputs] == [None, None, FinishReason.LENGTH]
    request = only(executor)
    assert request.input_token_ids == [5, 6, 7] and request.streaming and request.max_tokens == 4
    assert request.output_config.exclude_input_from_output  # the default would send the prompt as output
    assert (request.end_id, request.stop_words) == (1, [[50]])


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.0, "seed": 1, "top_p": 0.5}, {"top_k": 1, "top_p": None, "temperature": None}),
        ({}, {"top_k": None, "top_p": 1.0, "temperature": 1.0, "min_p": None}),  # without top_p it would be greedy
        ({"temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1},
         {"top_k": 9, "top_p": 0.9, "temperature": 0.5, "min_p": 0.1, "seed": 1}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"min_tokens": 3, "ignore_eos": True}, {"min_tokens": 3}),
    ],
)  # fmt: skip
def test_sampling(executor: TrtllmExecutor, params: dict[str, Any], expected: dict[str, Any]) -> None:
    answers(executor, ask(**params), [[9], Theirs.LENGTH])
    config = only(executor).sampling_config
    assert {key: getattr(config, key) for key in expected} == expected
    assert only(executor).max_tokens == 125  # to the engine's limit


def test_tenants_have_numbers(executor: TrtllmExecutor) -> None:
    for salt in ("", "a", "b", "a"):
        answers(executor, ask(salt=salt), [[9], Theirs.LENGTH])
    ids = [request.cache_salt_id for request in executor._executor.requests.values()]
    assert ids[0] is None and ids[1] == ids[3] != ids[2] and 0 <= ids[1] < 1 << 63


# --- what the library answers ---


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "swallowed"])
def test_end_of_text_is_the_last_token(executor: TrtllmExecutor, reported: bool) -> None:
    outputs = answers(executor, ask(), [[10], [1] if reported else [], Theirs.END_ID])
    assert [t for o in outputs for t in o.token_ids] == [10, 1] and outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason is None and outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == 2


def test_a_swallowed_stop_word_takes_no_token_along(executor: TrtllmExecutor) -> None:
    """The text layer shows no text for the last token of an output that says STOP."""
    outputs = answers(executor, ask(), [[10], [11], Theirs.STOP_WORDS])
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [
        ((10,), None), ((11,), None), ((), FinishReason.STOP)
    ]  # fmt: skip


def test_a_stop_token_ends_the_sequence_here(executor: TrtllmExecutor) -> None:
    """Also when the library went on: what follows is dropped, and the library is told."""
    outputs = answers(executor, ask(stop_token_ids=(33,), ignore_eos=True), [[10, 33, 34], "run"])
    assert outputs[-1].token_ids == (10, 33) and outputs[-1].stop_reason == 33
    assert outputs[-1].finish_reason is FinishReason.STOP and executor._executor.cancelled == [1]
    assert only(executor).end_id == 33 and only(executor).stop_words is None
    assert executor.poll(0.01) == [] == executor.poll(0.01)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (Theirs.TIMED_OUT, FinishReason.DEADLINE),
        (Theirs.CANCELLED, FinishReason.CANCELLED),
        ("bad\nsequence", FinishReason.ERROR),
    ],
)
def test_other_ends(executor: TrtllmExecutor, theirs: Any, ours: FinishReason) -> None:
    output = answers(executor, ask(), [[9], theirs])[-1]
    assert output.finish_reason is ours and output.error == ("bad sequence" if ours is FinishReason.ERROR else None)


def test_a_broken_library_is_not_silence(executor: TrtllmExecutor) -> None:
    Executor.script[5] = [[9], "break"]
    executor.submit(ask(), 0, 1, STOPS)
    with pytest.raises(RuntimeError, match="CUDA error"):
        for _ in range(3):
            executor.poll(0.01)
