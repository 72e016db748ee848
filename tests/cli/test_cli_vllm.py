"""Options of vLLM on the command line of `wicore serve`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wicore_trt.cli import _vllm
from wicore_trt.cli.main import run_command

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


def print_config(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """(exit code, settings as printed, standard error) of `wicore serve . ARGS --print-config`."""
    code = run_command(["serve", ".", *args, "--print-config"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("args", "setting"),
    [
        (["--max-model-len", "4096"], "max_context: 4096  # --max-context"),
        (["--max-model-len=32k"], "max_context: 32000  # --max-context"),
        (["--max_model_len", "32K"], "max_context: 32768  # --max-context"),
        (["--max-model-len", "auto"], "max_context: null  # default"),
        (["--gpu-memory-utilization", "0.8"], "device_fraction: 0.8  # --gpu-memory-utilization"),
        (["--max-num-seqs", "7"], "max_sequences: 7  # --max-sequences"),
        (["--max-num-batched-tokens", "1k"], "max_batch_tokens: 1000  # --max-batch-tokens"),
        (["--kv-offloading-size", "4"], f"host_bytes: {4 << 30}  # --kv-host-bytes"),
        (["--kv-cache-memory-bytes", "1000"], "device_bytes: 1000  # --kv-bytes"),
        (["--allowed-origins", '["https://a.example", "*"]'], 'cors_origins: ["https://a.example", "*"]'),
        (["--uvicorn-log-level", "error"], 'level: "error"  # --log-level'),
        (["--api-key", "0123456789abcdef"], 'api_key: "***"  # --api-key'),
        (["--host", "localhost"], 'host: "localhost"  # --host'),
    ],
)
def test_options_of_vllm_set_the_setting_of_the_same_meaning(
    capsys: pytest.CaptureFixture[str], args: list[str], setting: str
) -> None:
    code, out, err = print_config(capsys, *args)
    assert (code, err) == (0, "")
    assert setting in out


@pytest.mark.parametrize(
    ("args", "http", "grpc"),
    [
        (["--port", "9000"], "9000  # --port", "50051  # default"),
        (["--http-port", "9000", "--port", "9001"], "9000  # --http-port", "9001  # --port"),
        (["--port", "9000", "--grpc-port", "9001"], "9000  # --port", "9001  # --grpc-port"),
        (["--http-port", "none", "--grpc-port", "0"], "null  # --http-port", "0  # --grpc-port"),
    ],
)
def test_port_is_the_port_of_http(capsys: pytest.CaptureFixture[str], args: list[str], http: str, grpc: str) -> None:
    code, out, _ = print_config(capsys, *args)
    assert code == 0
    assert f"  http_port: {http}" in out and f"  port: {grpc}" in out


def test_three_ports_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = print_config(capsys, "--port", "1", "--http-port", "2", "--grpc-port", "3")
    assert code == 2 and "--port" in err


@pytest.mark.parametrize("name", _vllm.UNNEEDED)
def test_a_flag_that_changes_nothing_is_told(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, err = print_config(capsys, name, "--max-context", "77")
    assert code == 0 and "max_context: 77" in out
    assert err == f"note: {name} changes nothing: {_vllm.UNNEEDED[name]}.\n"


@pytest.mark.parametrize("name", _vllm.UNNEEDED_VALUES)
def test_an_option_that_changes_nothing_is_told(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, err = print_config(capsys, name, "x", "--max-context", "77")
    assert code == 0 and "max_context: 77" in out and name in err


@pytest.mark.parametrize("name", _vllm.REFUSED)
def test_an_option_that_would_change_the_answer_is_refused(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, _, err = print_config(capsys, name, "2")
    assert code == 2 and name in err and " ".join(_vllm.REFUSED[name][1].split()[:3]) in " ".join(err.split())
    for neutral in _vllm.REFUSED[name][0]:
        assert print_config(capsys, f"{name}={neutral}")[0] == 0


def test_the_document_names_every_option() -> None:
    table = DOCUMENT.read_text(encoding="utf-8").split("## Options")[1].split("## What runs")[0]
    theirs = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(--[a-z-]+)", line.split("|")[1])
    }
    ours = {"--host", "--api-key", "--served-model-name", "--port", "--gpu-memory-utilization", "--model"}
    assert theirs == ours | set(_vllm.RENAMED) | set(_vllm.UNNEEDED) | set(_vllm.UNNEEDED_VALUES) | set(_vllm.REFUSED)
