"""`wicore serve` as a process of its own, one for each module, over a model with the vocabulary of Gemma 3."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import Served, serving
from scripted import write_source

from wicore_trt.checkpoint.format import Checkpoint


@pytest.fixture(scope="module", params=["two layers", pytest.param("270m", marks=pytest.mark.long)])
def served(
    request: pytest.FixtureRequest, engine_270m: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Not beyond the module: it takes CPU time while it waits, too. The random weights of two layers do, beside the
    real vocabulary, where a client is tried; the long profile has the real ones."""
    home, engine = tmp_path_factory.mktemp("served"), engine_270m
    if request.param != "270m":
        source, engine = write_source(home / "source", engine_270m), home / "engine"
        subprocess.run([sys.executable, "-m", "wicore_trt.cli.main", "build", str(source), str(engine)], check=True)
    with serving(engine, home / "log") as started:
        yield started


@pytest.fixture(scope="module")
def served_in_float32(checkpoint_270m: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("float32")
    build = [sys.executable, "-m", "wicore_trt.cli.main", "build", str(checkpoint_270m.path), str(home / "engine")]
    subprocess.run(build, check=True)
    with serving(home / "engine", home / "log") as started:
        yield started
