"""The backend runs `trtllm-build` with flags that it has, and keeps only an engine that is what was asked for."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_trtllm import trtllm_stand_in
from backend_trtllm.trtllm_checkpoints import checkpoint, source

from wicore_trt.backends.trtllm import installed as trtllm_installed
from wicore_trt.backends.trtllm.build import TensorRTLLMBackend, build_arguments
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.engine.options import BACKENDS, BuildOptions
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.progress import ignore_progress

BACKEND = TensorRTLLMBackend()


def options(**changes: Any) -> BuildOptions:
    values = {"backend": "tensorrt-llm", "dtype": "auto", "kv_dtype": "auto", "tp_size": 1, "page_tokens": 32}
    values |= {"targets": (), "max_context": None, "max_batch": 8, "max_chunk": 512, "calibration": None}
    return BuildOptions(**(values | changes))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TensorRT-LLM 1.2.1 is here; the value is an empty engine directory."""
    trtllm_stand_in.install_metadata(monkeypatch, tmp_path / "site")
    trtllm_stand_in.install_command(monkeypatch, tmp_path / "bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "engine").mkdir()
    return tmp_path / "engine"


def frequencies(base: float, factor: float) -> np.ndarray:
    return (1 / (factor * base ** (np.arange(0, 16, 2) / 16))).astype(np.float32)


@pytest.mark.parametrize(("dtype", "tp"), [("bfloat16", 1), ("float16", 2), ("fp8", 2)])
def test_it_builds_an_engine(installed: Path, dtype: str, tp: int, caplog: pytest.LogCaptureFixture) -> None:
    made = checkpoint(installed.parent, dtype=dtype, tp=tp, static=dtype == "fp8")
    phases: list[tuple[str, int, int]] = []
    with caplog.at_level(logging.INFO):
        found = BACKEND.compile(made, installed, options(), lambda *phase: phases.append(phase))
    assert [p.name for p in installed.iterdir()] == ["trtllm"]  # the intermediate checkpoint is gone
    assert sorted(p.name for p in (installed / "trtllm").iterdir()) == [
        "config.json", *(f"rank{rank}.engine" for rank in range(tp))
    ]  # fmt: skip
    assert found["flavour"] == "tensorrt-llm" and found["tensorrt_llm"] == "1.2.1"
    assert json.loads(json.dumps(found)) == found and str(installed.parent) not in json.dumps(found)
    assert ("--gemm_plugin" in found["arguments"]) == (dtype != "fp8")
    assert phases[-1] == ("compile", 1, 1) and "[TRT-LLM] [I] loading" in caplog.text
    for rank in range(tp):
        seen = json.loads((installed / "trtllm" / f"rank{rank}.engine").read_text())
        # the reason for our model class: 8 on global layers, nothing on local ones, and the model's epsilon
        assert np.array_equal(np.float32(seen["global"]), frequencies(1e6, 8.0))
        assert np.array_equal(np.float32(seen["local"]), frequencies(1e4, 1.0))
        assert seen["is_local"] == [True, True, False, True, True, False, True]
        assert seen["scale"] == [1.0 if local else 8.0 for local in seen["is_local"]]
        assert seen["scale_type"] == ["none" if local else "linear" for local in seen["is_local"]]
        assert seen["eps"] == [1e-6]
        angle = np.outer(np.arange(4), np.float32(seen["local"]))  # interleaved cosines and sines, position by position
        table = np.float32(seen["local_table"]).reshape(4, 8, 2)
        assert np.allclose(table, np.stack([np.cos(angle), np.sin(angle)], -1), atol=1e-6)


def test_it_is_a_backend_of_wicore_build(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{TensorRTLLMBackend.__module__}:{TensorRTLLMBackend.__name__}"
    monkeypatch.setitem(BACKENDS, "tensorrt-llm", name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    output = installed.parent / "built"
    built = build_engine(source(installed.parent / "hf", 0), output, backend="tensorrt-llm", max_context=96)
    assert built.manifest.targets == ["sm90"] and built.manifest.max_context == 96
    assert {"trtllm/config.json", "trtllm/rank0.engine"} < set(built.manifest.files)
    assert not any("checkpoint" in name for name in built.manifest.files)
    open_engine(output, verify=True)
    config = json.loads((output / "trtllm" / "config.json").read_text())
    assert config["build_config"]["max_seq_len"] == 96 and config["pretrained_config"]["dtype"] == "bfloat16"


def test_arguments_say_all_limits(tmp_path: Path) -> None:
    made = checkpoint(tmp_path)
    arguments = build_arguments(made, options(page_tokens=64, max_context=96, max_batch=3, max_chunk=197))
    expected = {"max_batch_size": 3, "max_num_tokens": 200, "max_seq_len": 96, "max_input_len": 96, "workers": 1}
    assert expected.items() <= {k.removeprefix("--"): v for k, v in arguments.items()}.items()
    assert arguments["--tokens_per_block"] == 64 and arguments["--kv_cache_type"] == "paged"
    assert arguments["--use_paged_context_fmha"] == "enable" and arguments["--gemm_plugin"] == "auto"
    assert build_arguments(made, options())["--max_seq_len"] == 128  # not times the rope factor


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("STAND_IN_FAIL", "CUDA out of memory", r"exit code 3(.|\n)*CUDA out of memory"),
        ("STAND_IN_OWN_CLASS", "1", "wrong rope on local layers"),
        ("STAND_IN_CLAMP", "1", "max_num_tokens 7, not 520"),
        ("STAND_IN_DROP", "rotary_scaling", "rotary_scaling None, not .*8.0"),
        ("STAND_IN_DROP", "runtime_defaults", "runtime_defaults"),
    ],
)
def test_a_bad_build_is_an_error(
    installed: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(EnvironmentUnfitError, match=words):
        BACKEND.compile(checkpoint(installed.parent), installed, options(), ignore_progress)
    assert not any(installed.iterdir())


def test_options_that_it_does_not_have(installed: Path) -> None:
    made = checkpoint(installed.parent)
    for changes, words in (({"page_tokens": 4}, "blocks of 8"), ({"kv_dtype": "float32"}, "float32")):
        with pytest.raises(ConfigError, match=words):
            BACKEND.compile(made, installed, options(**changes), ignore_progress)
    assert not any(installed.iterdir())


@pytest.mark.parametrize("version", ["1.1.0", "1.3.0", "1.2.0rc3", "0.21.0", "12.2"])
def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    trtllm_stand_in.install_metadata(monkeypatch, tmp_path / "site", version)
    with pytest.raises(EnvironmentUnfitError, match=rf"{version} is installed.*>=1.2,<1.3"):
        trtllm_installed.require_tensorrt_llm()


def test_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentUnfitError, match="not installed.*>=1.2,<1.3"):
        BACKEND.targets(options())
    trtllm_stand_in.install_metadata(monkeypatch, tmp_path / "site")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentUnfitError, match="trtllm-build"):
        trtllm_installed.find_trtllm_build()


def test_targets_are_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trtllm_stand_in.install_metadata(monkeypatch, tmp_path / "site")
    trtllm_stand_in.install_command(monkeypatch, tmp_path / "bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentUnfitError, match="there is none here"):
        BACKEND.targets(options())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert BACKEND.targets(options()) == BACKEND.targets(options(targets=("sm90",))) == ["sm90"]
    with pytest.raises(ConfigError, match="sm89"):
        BACKEND.targets(options(targets=("sm89",)))
