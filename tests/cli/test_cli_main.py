"""The command line as a whole: start-up time, exit codes, one line per failure."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

import wicore_trt
from wicore_trt import errors
from wicore_trt.cli import app as commands
from wicore_trt.cli import main as cli

HEAVY = ("torch", "grpc", "numpy", "transformers", "huggingface_hub", "safetensors", "tokenizers", "yaml")
INNER = [
    *(["bench", name] for name in ("latency", "serve", "perplexity")),
    *(["kv", name] for name in ("plan", "inspect", "verify", "purge", "simulate")),
    *(["recipes", name] for name in ("list", "show")),
]
COMMANDS = [name for names in commands.PANELS.values() for name in names]


def wicore(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WICORE_")}
    command = [sys.executable, "-m", "wicore_trt.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, env=clean | environ, timeout=60)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Replace every command's body."""

    def install(body: Callable[[], Any]) -> None:
        stub = typer.Typer()
        stub.command("doctor")(body)
        monkeypatch.setattr(commands, "_load_command", lambda name, panel: typer.main.get_command(stub))

    monkeypatch.delenv("WICORE_DEBUG", raising=False)
    return install


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from wicore_trt.cli.main import run_command\n"
        f"for args in [['--help'], *([name, '--help'] for name in {COMMANDS})]:\n"
        "    assert run_command(args) == 0, args\n"
        f"    heavy = [m for m in {HEAVY} if m in sys.modules]\n"
        "    assert not heavy, (args, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for args in [*([name] for name in COMMANDS), *INNER]:
        assert cli.run_command([*args, "--help"]) == 0
        assert "…" not in capsys.readouterr().out, f"{args}: something is cut"


def test_the_shell_completes_names_of_backends_and_recipes() -> None:
    def completed(words: str) -> list[str]:
        environ = {"_WICORE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return wicore(**environ).stdout.split()

    assert completed("wicore build --backend t") == ["torch", "triton", "tensorrt", "tensorrt-llm"]
    assert "gemma3-27b-fp8-h100" in completed("wicore build --recipe gemma3-27b")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_its_own_file_and_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(f"wicore_trt.cli.{name}")
    assert hasattr(module, "command") or hasattr(module, "app")
    assert cli.run_command([name, "--help"]) == 0
    assert f"wicore {name}" in capsys.readouterr().out


def test_public_names_are_there_and_cost_nothing() -> None:
    code = (
        "import sys, wicore_trt\n"
        "assert not [m for m in sys.modules if m.startswith('wicore_trt.')]\n"
        "for name in wicore_trt.__all__: assert getattr(wicore_trt, name)\n"
        "assert issubclass(wicore_trt.ConfigError, wicore_trt.WicoreError)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    from wicore_trt import __version__

    assert wicore("--version").stdout == f"wicore {__version__}\n"


@pytest.mark.parametrize("args", [["no-such"], ["doctor", "--no-such"], ["recipes", "no-such"], ["recipes", "show"]])
def test_usage_errors_exit_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(args) == 2
    captured = capsys.readouterr()
    assert not captured.out and "Usage" in captured.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.WicoreError("broke"), 1),
        (errors.InvalidRequestError("wrong", field="prompt"), 1),
        (errors.ConfigError("bad recipe", fix="Mend it."), 3),
        (errors.EnvironmentUnfitError("no GPU"), 4),
        (errors.EngineFormatError("two\nlines"), 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_known_errors_are_one_line_and_their_code(
    command: Any, capsys: pytest.CaptureFixture[str], error: errors.WicoreError, code: int
) -> None:
    command(raising(error))
    assert cli.run_command(["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.err == f"error: {' '.join(str(error).split())}\n" and captured.out == ""


@pytest.mark.parametrize(("module", "extra"), [("torch", "torch"), ("grpc.aio", "serve"), ("triton", "triton")])
def test_a_missing_extra_is_named(command: Any, capsys: pytest.CaptureFixture[str], module: str, extra: str) -> None:
    command(raising(ModuleNotFoundError(f"No module named {module!r}", name=module)))
    assert cli.run_command(["doctor"]) == 4
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"pip install -e '.[{extra}]'" in err and "bug" not in err
    command(raising(ModuleNotFoundError("No module named 'wicore_trt.x'", name="wicore_trt.x")))
    assert cli.run_command(["doctor"]) == 1 and "bug in wicore" in capsys.readouterr().err


def test_interrupt_exits_130(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (KeyboardInterrupt(), typer.Abort()):
        command(raising(error))
        assert cli.run_command(["doctor"]) == 130
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("becomes", ["raise", "raise ImportError('numpy')"], ids=["interrupt", "import error"])
def test_an_interrupt_while_importing_is_one_line(becomes: str, tmp_path: Path) -> None:
    lines = "import os, signal, time", "try:", " os.kill(os.getpid(), signal.SIGINT)", " time.sleep(20)"
    (tmp_path / "typer.py").write_text("\n".join((*lines, "except KeyboardInterrupt:", f" {becomes}")))
    done = wicore("doctor", PYTHONPATH=os.pathsep.join((str(tmp_path), *sys.path)))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_unexpected_errors_are_short_and_say_how_to_see_more(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(raising(ZeroDivisionError("division by zero")))
    assert cli.run_command(["doctor"]) == 1
    err = capsys.readouterr().err
    assert "unexpected ZeroDivisionError" in err and "WICORE_DEBUG=1" in err and "Traceback" not in err
    monkeypatch.setenv("WICORE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.run_command(["doctor"])
    monkeypatch.setenv("WICORE_DEBUG", "0")
    with pytest.raises(ZeroDivisionError):
        cli.run_command(["--debug", "doctor"])
    with pytest.raises(ZeroDivisionError):
        cli.run_command(["doctor", "--debug"])


def test_returned_and_exited_codes(command: Any) -> None:
    def leave() -> None:
        raise typer.Exit(4)

    command(leave)
    assert cli.run_command(["doctor"]) == 4
    command(lambda: 7)
    assert cli.run_command(["doctor"]) == 7
    command(lambda: None)
    assert cli.run_command(["doctor"]) == 0


def test_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "wicore_trt.cli.main", "recipes", "list"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1


def test_bad_recipe_exits_3() -> None:
    done = wicore("recipes", "show", "gemma3-270m-gpu")
    assert done.returncode == 3 and "Did you mean" in done.stderr and done.stderr.count("\n") == 1
    done = wicore("build", "a", "b", WICORE_KV__PAGE_SIZE="1")
    assert done.returncode == 3 and "WICORE_KV__PAGE_SIZE" in done.stderr


@pytest.mark.parametrize("command", [[], ["serve"], ["build"], ["bench", "serve"], ["kv", "plan"], ["kv", "purge"]])
def test_help_shows_no_type_beside_a_flag(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command([*command, "--help"]) == 0
    told = capsys.readouterr().out
    assert "--help" in told and "<bool>" not in told and "BOOL" not in told


def test_public_names_are_listed() -> None:
    assert dir(wicore_trt) == sorted(wicore_trt.__all__) and all(hasattr(wicore_trt, n) for n in dir(wicore_trt))


def test_a_server_that_is_not_there_is_told_without_grpcs_words(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cli.run_command(["chat", address]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: No server answers at {address}: Connection refused. Start one (wicore serve)")
