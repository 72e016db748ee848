"""`wicore serve` as a process of its own, one for each module, over a tiny model or Gemma 3 270M."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from real_server import Served, serving
from text.synthetic_tokenizer import write as write_tokenizer
from tiny_source import write_tiny_source

from wicore_trt.checkpoint.format import Checkpoint
from wicore_trt.engine.build import build_engine


@pytest.fixture(scope="module", params=["tiny", pytest.param("270m", marks=(pytest.mark.model, pytest.mark.long))])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Not beyond the module: it takes CPU time while it waits, too. Random weights beside a vocabulary of Gemma's
    construction do, where a client is tried; the long profile has the real ones."""
    home = tmp_path_factory.mktemp("served")
    if request.param == "270m":
        engine = request.getfixturevalue("engine_270m")
    else:
        source = write_tiny_source(home / "source", tied=False, vocab_size=400, max_position_embeddings=65536)
        engine = build_engine(write_tokenizer(source), home / "engine").path
    with serving(engine, home / "log") as started:
        yield started


@pytest.fixture(scope="module")
def served_in_float32(checkpoint_270m: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("float32")
    build = [sys.executable, "-m", "wicore_trt.cli.main", "build", str(checkpoint_270m.path), str(home / "engine")]
    subprocess.run(build, check=True)
    with serving(home / "engine", home / "log") as started:
        yield started
