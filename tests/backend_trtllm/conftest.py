"""Engines of backend tensorrt-llm for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_trtllm import trtllm_machine
from backend_trtllm.trtllm_stand_in import Executor


@pytest.fixture(scope="session")
def trtllm_built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a machine's files and its engine."""
    directory = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as monkeypatch:
        trtllm_machine.stand_in_machine(monkeypatch, directory)
        trtllm_machine.build(directory)
    return directory


@pytest.fixture
def trtllm_engine(trtllm_built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The engine, on a machine that has what it needs."""
    trtllm_machine.stand_in_machine(monkeypatch, trtllm_built)
    monkeypatch.setattr(Executor, "made", [])
    monkeypatch.setattr(Executor, "script", {})
    yield trtllm_built / "engine"
    assert all(made.stopped for made in Executor.made)
