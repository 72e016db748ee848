"""kill -9 at random moments of build, convert and fetch: the output is old or new, and the next run clears up."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable
from os import _exit
from pathlib import Path

import pytest
from tiny_source import open_intact, write_tiny_source

from wicore_trt.checkpoint import demo
from wicore_trt.checkpoint.convert import convert
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.scratch import MARKER, exchange_names

MODEL = random.Random(0).randbytes(3 << 20)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package that carries the demo model."""
    part = tmp_path / "part"
    part.write_bytes(MODEL)
    module = types.ModuleType(demo.MODELS["gemma3-270m"])
    module.__dict__.update(
        MODEL_NAME="m.gguf", EXPECTED_SHA256=hashlib.sha256(MODEL).hexdigest(), chunk_paths=lambda: [str(part)]
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(demo, "_READ", 1 << 16)


def killed_after(seconds: float, work: Callable[[], object]) -> bool:
    """Run `work` in a process of its own and kill it; False when it had ended."""
    child = os.fork()
    if not child:
        try:
            work()
            _exit(0)
        finally:
            _exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def engine_of(output: Path) -> str:
    return open_engine(output).manifest.weights_hash


def checkpoint_of(output: Path) -> str:
    return str(sorted((n, r.blake2b) for n, r in open_intact(output).files.items() if n[0] == "r"))


def model_of(output: Path) -> str:
    return hashlib.sha256(output.read_bytes()).hexdigest()


def run(command: str, source: Path, output: Path, force: bool) -> None:
    if command == "build":
        build_engine(source, output, force=force)
    elif command == "convert":
        convert(source, output, force=force)
    else:
        demo.fetch_model("gemma3-270m", output)


def campaign(tmp_path: Path, seed: int, kills: int) -> dict[str, int]:
    """`kills` kills of each command, with and without --force by turns; returns how many hit a living process."""
    chance, hits = random.Random(seed), {}
    old, new = write_tiny_source(tmp_path / "old", 1), write_tiny_source(tmp_path / "new", 2)
    exchanges = exchange_names(tmp_path / "old", tmp_path / "new")
    for command, content in (("build", engine_of), ("convert", checkpoint_of), ("fetch", model_of)):
        where = tmp_path / command
        where.mkdir()
        states: dict[str, str] = {}
        for name, source in (("old", old), ("new", new)):
            run(command, source, where / name, False)
            states[name] = content(where / name)
        times, hits[command] = [], 0
        for number in range(3):  # the shortest counts: on a busy machine one alone says little
            start = time.monotonic()
            run(command, new, where / f"timed{number}", False)
            times.append(time.monotonic() - start)
        for number in range(kills):
            force = bool(number % 2) and command != "fetch"
            folder, said = where / f"k{number}", f"{command}, seed {seed}, kill {number}"
            output = folder / "out"
            folder.mkdir()
            (folder / "thesis").write_text("mine")
            if force:
                shutil.copytree(where / "old", output)
            moment = chance.uniform(0, 1.2 * min(times))
            hits[command] += killed_after(moment, lambda: run(command, new, output, force))  # noqa: B023
            if output.exists():
                assert content(output) in states.values(), said
            else:
                assert not (force and exchanges), f"{said}: what is exchanged is never missing"
                kept = [p for p in folder.glob(".out.wicore-*/*") if p.name in ("taken", "old")]
                assert not force or [content(p) for p in kept] == [states["old"]], said
            for left in folder.glob(".out.wicore-*"):
                assert {p.name for p in left.iterdir()} <= {MARKER, "new", "work", "taken", "old"}, said
            run(command, new, output, force or output.exists())
            assert content(output) == states["new"], said
            assert sorted(p.name for p in folder.iterdir()) == ["out", "thesis"], said
            shutil.rmtree(folder)
    return hits


@pytest.mark.forks
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("package")
def test_kills(tmp_path: Path) -> None:
    campaign(tmp_path, seed=0, kills=6)


@pytest.mark.forks
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_length(seed: int, tmp_path: Path) -> None:
    hits = campaign(tmp_path, seed=seed, kills=100)
    assert min(hits.values()) > 25, f"most of the kills must hit: {hits}"
