"""Tiny sources and engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_source import write_tiny_source

from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import EngineDir

MakeSource = Callable[..., Path]


@pytest.fixture
def make_source(tmp_path: Path) -> MakeSource:
    """make_source(seed=0, tied=True, name="source") -> a Hugging Face directory with float32 weights."""
    return lambda seed=0, *, tied=True, name="source": write_tiny_source(tmp_path / name, seed, tied=tied)


@pytest.fixture
def engine(make_source: MakeSource, tmp_path: Path) -> EngineDir:
    """A fresh engine that the test may damage."""
    return build_engine(make_source(), tmp_path / "engine")
