"""`wicore serve` as a process of its own, one for each module, over a model with the vocabulary of Gemma 3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from real_server import Served
from scripted import write_source

from wicore_trt.checkpoint.format import Checkpoint


@contextmanager
def serving(engine: Path, log: Path) -> Iterator[Served]:
    """A server of an engine, which has to end well. `log` is where its log goes."""
    command = [sys.executable, "-m", "wicore_trt.cli.main", "serve", str(engine), "--grpc-port", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--http-port", "0"], stdout=subprocess.PIPE, stderr=stderr, text=True, env=env
        )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("ready on ").strip()
        url = process.stdout.readline().removeprefix("HTTP on ").strip()
        assert url, log.read_text()
        yield Served(process, url, address, httpx.get(f"{url}/v1/models").json()["data"][0]["id"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0 and "Traceback" not in log.read_text(), log.read_text()[-10_000:]
    finally:
        process.kill()


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
