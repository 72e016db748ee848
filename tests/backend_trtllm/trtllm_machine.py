"""A machine with what stands in for TensorRT-LLM, and an engine that was built there.

    python tests/backend_trtllm/trtllm_machine.py DIRECTORY ARGUMENT...

runs `wicore ARGUMENT...` on such a machine, whose files are in DIRECTORY. `script` and `pace_s` of the stand-in come
from the environment variable STAND_IN, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from backend_trtllm import trtllm_stand_in
from backend_trtllm.trtllm_checkpoints import source

from wicore_trt.config import Settings
from wicore_trt.core.loop import Core
from wicore_trt.engine.build import build_engine
from wicore_trt.process import engine, supervisor
from wicore_trt.types import ModelInfo

CONTEXT = 128


def stand_in_machine(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """The stand-in as library and command, and a GPU of sm90 as far as PyTorch says so."""
    trtllm_stand_in.install(monkeypatch)
    trtllm_stand_in.install_metadata(monkeypatch, directory / "site")
    trtllm_stand_in.install_command(monkeypatch, directory / "bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def build(directory: Path, **changes: int) -> Path:
    """An engine of a tiny random model, built by this machine's `trtllm-build`; `changes` are of its config.json."""
    hf = source(directory / "hf", 0, **changes)
    build_engine(hf, directory / "engine", backend="tensorrt-llm", max_context=CONTEXT, max_batch=4)
    return directory / "engine"


def become(directory: Path) -> None:
    """Make this process one of such a machine."""
    stand_in_machine(pytest.MonkeyPatch(), directory)
    given = json.loads(os.environ.get("STAND_IN", "{}"))
    trtllm_stand_in.Executor.script = {int(first): todo for first, todo in given.get("script", {}).items()}
    trtllm_stand_in.Executor.pace_s = given.get("pace_s", 0.002)


def load(settings: Settings) -> tuple[Core, ModelInfo]:
    """The engine, in a process of a server on such a machine."""
    assert settings.engine is not None
    become(Path(settings.engine).parent)
    return engine.load_engine(settings)


if __name__ == "__main__":
    from wicore_trt.cli.main import run_command

    become(Path(sys.argv[1]))
    supervisor.Supervisor = partial(supervisor.Supervisor, load_engine="backend_trtllm.trtllm_machine:load")
    raise SystemExit(run_command(sys.argv[2:]))
