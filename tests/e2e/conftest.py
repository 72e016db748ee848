"""The real model, built once per test session the way a user builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WICORE = [sys.executable, "-m", "wicore_trt.cli.main"]


@pytest.fixture(scope="session")
def engine_270m(gemma_270m_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine directory of Gemma 3 270M in the default dtype, straight from the GGUF."""
    engine = tmp_path_factory.mktemp("engines") / "gemma3-270m"
    subprocess.run([*WICORE, "build", str(gemma_270m_gguf), str(engine)], check=True)
    return engine
