"""Every command where an extra is lacking: it works, or ends with one line that names the extra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_source import write_tiny_source

from wicore_trt import errors
from wicore_trt.cli.app import PANELS
from wicore_trt.cli.main import run_command
from wicore_trt.engine.build import build_engine

EXTRAS = {
    "torch": ("torch", "triton"),
    "gguf": ("gguf",),
    "serve": (
        *("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google", "smg_grpc_proto", "prometheus_client"),
        *("starlette", "uvicorn", "uvloop", "httptools", "websockets", "llguidance"),
    ),
    "bench": ("aiohttp",),
}
EXTRAS["bench"] += EXTRAS["serve"]
"""Extra to the modules that it brings and the base does not."""
HIDE = """
import sys
from importlib.machinery import PathFinder
class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Hidden
"""
"""A sitecustomize of every process: to whoever imports or looks, the modules are not installed."""
COMMANDS = {
    "fetch": ["nothing-of-this-name"],
    "convert": ["{source}", "{out}"],
    "build": ["{source}", "{out}"],
    "inspect": ["{engine}"],
    "serve": ["{engine}", "--grpc-port", "0", "--http-port", "0", "--admin-port", "0"],
    "chat": ["{engine}"],
    "generate": ["{engine}", "a", "--max-tokens", "1"],
    "bench": ["latency", "--engine", "{engine}", "--batch", "1", "--input-tokens", "4", "--output-tokens", "2"],
    "kv": ["plan", "--model", "gemma3-1b"],
    "doctor": [],
    "recipes": ["list"],
}
MORE = {
    "chat of a server": ["chat", "127.0.0.1:1"],
    "build of a GGUF file": ["build", "{gguf}", "{out}"],
    "bench serve": ["bench", "serve", "--target", "127.0.0.1:1", "--rate", "1", "--duration", "1"],
}
WAIT = ("serve", "bench serve")
"""Commands that go on or wait for a server where nothing is lacking."""
NEEDED = {
    **dict.fromkeys([("torch", name) for name in ("serve", "chat", "generate", "bench")], "torch"),
    **dict.fromkeys([("serve", name) for name in ("serve", "chat of a server", "bench serve")], "serve"),
    ("bench", "serve"): "serve",
    ("bench", "chat of a server"): "serve",
    ("bench", "bench serve"): "(serve|bench)",
    ("gguf", "build of a GGUF file"): "gguf",
}
"""Hidden extra and command, to the extra that the error names."""
SHORT = {*NEEDED} - {("bench", "serve"), ("bench", "chat of a server")}  # as where `serve` lacks, which it brings


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("extras")
    source = write_tiny_source(place / "source")
    (place / "x.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    return {"source": source, "engine": build_engine(source, place / "engine").path, "gguf": place / "x.gguf"}


def test_every_command_is_here() -> None:
    assert {*COMMANDS} == {name for names in PANELS.values() for name in names}


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        pytest.param(extra, command, marks=() if (extra, command) in SHORT else pytest.mark.long)
        for extra in EXTRAS
        for command in [*COMMANDS, *MORE]
        if command not in WAIT or (extra, command) in NEEDED
    ],
)
def test_a_lacking_extra_is_named_in_one_line(
    extra: str, command: str, places: dict[str, Path], tmp_path: Path
) -> None:
    args = MORE.get(command) or [command, *COMMANDS[command]]
    args = [arg.format(**places, out=tmp_path / "out") for arg in args]
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=EXTRAS[extra]))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "wicore_trt.cli.main", *args],
        env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "This is a bug" not in done.stderr, done.stderr
    if (extra, command) in NEEDED:
        assert done.returncode == 4, (done.returncode, done.stderr)
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: ") and re.search(rf"\[{NEEDED[extra, command]}\]", last), done.stderr
    else:
        assert "This needs" not in done.stderr, done.stderr


@pytest.mark.parametrize("module", [name for name in (*EXTRAS["serve"], "torch") if name != "uvloop"])
def test_a_server_names_the_extra_of_each_module(
    module: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An extra that only another process of the server would miss. It runs without uvloop."""
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == module else find_spec(name))
    assert run_command(["serve", str(places["engine"]), "--grpc-port", "0"]) == 4
    told = capsys.readouterr()
    assert told.err.startswith(f"error: This needs {module}, ") and told.err.count("\n") == 1 and told.out == ""
