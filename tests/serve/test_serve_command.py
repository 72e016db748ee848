"""`wicore serve` and the streaming example, as a user runs them."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Annotated, get_origin, get_type_hints

import pytest
from serving import expected, process
from tiny_source import write_tiny_source

from wicore_trt.cli import build, serve
from wicore_trt.cli.main import run_command
from wicore_trt.config import load_settings
from wicore_trt.engine.build import build_engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpc_stream.py"


def wicore(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "wicore_trt.cli.main", *args], capture_output=True, text=True, timeout=120
    )


def test_flags_beat_the_environment_and_secrets_are_not_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WICORE_SERVER__PORT", "7001")
    monkeypatch.setenv("WICORE_SERVER__GRACE_S", "9")
    monkeypatch.setenv("WICORE_SERVER__API_KEY", "hidden")
    assert run_command(["serve", str(tmp_path), "--grpc-port", "7002", "--no-reflection", "--print-config"]) == 0
    out = capsys.readouterr().out
    for line in (
        "port: 7002  # --grpc-port",
        "grace_s: 9.0  # env WICORE_SERVER__GRACE_S",
        "reflection: false  # --reflection",
    ):
        assert line in out
    assert f'engine: "{tmp_path}"  # argument' in out and "hidden" not in out


def test_settings_are_explained_without_an_engine_and_help_shows_their_defaults(capsys):
    assert run_command(["serve", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert (
        "  # Which pages leave a full tier first;" in out and "  # policies on a trace. One of cost, lru, a2cr." in out
    )
    for module in (serve, build):
        shown, keys = defaults_of(module), flags_of(module)
        assert keys.keys() <= shown.keys()
        for name, key in keys.items():
            default = value_of(load_settings(), key)
            if default is not None and default != ():
                assert value_of(load_settings(None, {key: shown[name]}), key) == default, f"{name} shows {shown[name]}"


def defaults_of(module):
    """{parameter: what help shows as its default} of a command."""
    hints = get_type_hints(module.command, include_extras=True)
    return {name: hint.__metadata__[0].show_default for name, hint in hints.items() if get_origin(hint) is Annotated}


def flags_of(module):
    """{parameter: setting} of the dict that a command makes of its flags."""
    tree = ast.parse(inspect.getsource(module.command))
    [found] = [n for n in ast.walk(tree) if isinstance(n, ast.Dict) and any(k and k.value == "engine" for k in n.keys)]
    pairs = [(key, value) for key, value in zip(found.keys, found.values, strict=True) if key is not None]
    names = ((key.value, value.values[0] if isinstance(value, ast.BoolOp) else value) for key, value in pairs)
    return {value.id: key for key, value in names if isinstance(value, ast.Name) and value.id != "source"}


def value_of(settings, key):
    return reduce(getattr, key.split("."), settings)


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["serve", "no-such-recipe"], 3, "no directory and no recipe 'no-such-recipe'"),
        (["serve", "gemma3-270m-cpu"], 4, "wicore build --recipe gemma3-270m-cpu"),
        (["serve", "engines/missing"], 4, "wicore build SOURCE engines/missing"),
        (["serve", ".", "--grpc-port", "8000"], 3, "server.port and server.http_port are both 8000"),
        (["serve", ".", "--grpc-port", "8000", "--http-host", "192.0.2.1", "--insecure"], 4, "8000"),
        (["serve", "missing.yaml"], 3, "recipe missing.yaml does not exist"),
        (
            ["serve", "model.gguf"],
            3,
            "is a model; an engine or a recipe is needed. Build one: wicore build ",
        ),
        (["serve", ".", "--port", "70000"], 3, "--port: "),
        (["serve", ".", "--tls-cert", "/nonexistent.pem"], 3, "error: --tls-cert: tls_cert and tls_key go together"),
        (["serve", ".", "--grpc-port", "5", "--tls-key", "/no.pem"], 3, "error: --tls-key: tls_cert and tls_key go"),
        (["serve", ".", "--host", "::1", "--tls-client-ca", "/no.pem"], 3, "error: --tls-client-ca: tls_client_ca nee"),
        (["serve", ".", "--tls-cert", "/no.pem", "--tls-key", "/no.pem", "--grpc-port", "0"], 3, "/no.pem is missing"),
        (["serve", ".", "--host", "192.0.2.1", "--insecure"], 4, "Cannot listen on 192.0.2.1"),
        (["serve"], 2, "ENGINE"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(args, code, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    assert run_command(args) == code
    err = capsys.readouterr().err
    assert text in err and "Traceback" not in err
    assert code == 2 or (err.startswith("error: ") and err.count("\n") == 1)


@pytest.mark.parametrize("more", [(), ("--replicas", "2")])
def test_too_few_open_files_are_an_error_with_figures(more, capsys, monkeypatch):
    """Before anything is read or started; a limit that no file has is none."""
    monkeypatch.setattr(serve.resource, "setrlimit", lambda *_: None)
    for most in (24, serve.FILES - 1, serve.FILES, serve.resource.RLIM_INFINITY):
        monkeypatch.setattr(serve.resource, "getrlimit", lambda _, most=most: (most, most))
        assert run_command(["serve", "/nonexistent/engine", *more]) == 4
        err = capsys.readouterr().err
        few = f"error: Each process of a server needs {serve.FILES} open files, and may have {most} here. Raise the"
        assert err.startswith(few if 0 < most < serve.FILES else "error: engine /nonexistent/engine")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    place = tmp_path_factory.mktemp("memory")
    return build_engine(write_tiny_source(place / "source"), place / "engine").path


def test_memory_that_is_not_there_is_an_error_with_figures(engine, capsys, monkeypatch):
    served = wicore("serve", str(engine), "--grpc-port", "0", "--http-port", "0", "--kv-host-bytes", "9TiB")
    monkeypatch.setenv("WICORE_KV__DEVICE_BYTES", "9TiB")
    code = run_command(["generate", str(engine), "a"])
    out, err = capsys.readouterr()
    assert (served.returncode, served.stdout, code, out) == (4, "", 4, "") and "Traceback" not in served.stderr + err
    for name, flag, log in (
        ("kv.host_bytes", "--kv-host-bytes", served.stderr),
        ("kv.device_bytes", "--kv-bytes", err),
    ):
        last = log.splitlines()[-1]
        assert last.startswith(f"error: {name}: 9216.0 GiB of memory are wanted, and ") and flag in last


def test_a_directory_that_is_no_engine_ends_with_code_4(tmp_path):
    done = wicore("serve", str(tmp_path), "--grpc-port", "0", "--http-port", "0")
    assert done.returncode == 4, done.stderr
    assert done.stdout == "", "it never served"
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr


async def test_the_streaming_example_prints_the_completion():
    async with process() as server:
        await server.until_serving()
        command = [sys.executable, str(EXAMPLE), "hello", "--address", server.address, "--max-tokens", "5"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(expected("hello", 5)[0]) and "5 tokens" in done.stderr
        bad = subprocess.run([*command, "--temperature", "-1"], capture_output=True, text=True, timeout=120)
        assert bad.returncode == 1 and "INVALID_ARGUMENT: temperature" in bad.stderr
        reader, writer = os.pipe()
        os.close(reader)
        cut = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
        os.close(writer)
        assert cut.returncode == 1 and cut.stderr == ""


async def test_the_streaming_example_waits_for_a_server_that_is_loading():
    async with process(load_s=1.5) as server:
        command = [sys.executable, str(EXAMPLE), "hello", "--address", server.address, "--max-tokens", "5"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.startswith(expected("hello", 5)[0]), done.stderr
    nobody = subprocess.run([*command, "--wait", "0.5"], capture_output=True, text=True, timeout=120)
    assert nobody.returncode == 1 and "DEADLINE_EXCEEDED" in nobody.stderr and "Traceback" not in nobody.stderr
