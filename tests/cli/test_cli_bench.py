"""`wicore bench` on a tiny engine with random weights: tables, JSON, a server as target, user errors."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import tokenizers
from serve.serving import serving
from tiny_source import write_tiny_source

from wicore_trt.bench import bound
from wicore_trt.cli.main import run_command
from wicore_trt.engine.build import build_engine

Captured = pytest.CaptureFixture[str]
SMALL = ["--input-tokens", "12", "--output-tokens", "4", "--threads", "1"]


@pytest.fixture(autouse=True)
def quick_and_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from outside, and a machine that is measured in milliseconds."""
    for name in [n for n in os.environ if n.startswith("WICORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WICORE_KV__DEVICE_BYTES", "16MiB")  # not the gigabyte that an engine takes by default
    monkeypatch.setitem(bound.READ_BYTES, "cpu", 1 << 22)
    monkeypatch.setitem(bound.GEMM_SIZE, "cpu", 64)


def source(path: Path) -> Path:
    """A tiny source whose tokenizer works: one token per character."""
    write_tiny_source(path)
    characters = ["<pad>", "<eos>", "<bos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "]
    model = tokenizers.models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(characters[:4])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (path / "generation_config.json").write_text('{"eos_token_id": 1, "bos_token_id": 2}')
    return path


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("bench")
    return build_engine(source(scratch / "source"), scratch / "engine").path


def test_latency_table(engine: Path, capsys: Captured) -> None:
    arguments = ["--batch", "1,2", *SMALL, "--repeats", "1"]
    assert run_command(["bench", "latency", "--engine", str(engine), *arguments]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert "kernels, in process" in lines[0] and lines[2].startswith("bounds: ")
    rows = [line.split() for line in lines[-2:]]
    assert [row[:3] for row in rows] == [["1", "12", "4"], ["2", "12", "4"]]
    numbers = [[float(number.replace(",", "")) for number in row] for row in rows]
    assert all(row[3] > 0 and row[-3] > 0 for row in numbers)  # a step is a difference of two runs: noise here
    assert "batch 1, 12 + 4 tokens ..." in captured.err.splitlines()


def test_latency_json(engine: Path, capsys: Captured) -> None:
    arguments = ["--batch", "1", *SMALL, "--repeats", "2", "--seed", "7", "--json"]
    assert run_command(["bench", "latency", "--engine", str(engine), *arguments]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == "" and report["command"] == "latency" and report["target"] == "in process"
    assert report["parameters"]["seed"] == 7 and report["rates"]["read_bytes_per_s"] > 0
    assert report["results"][0]["itl"]["count"] == 2 * 3
    assert report["results"][0]["decode_step"]["bound"] > 0


def test_load_on_an_engine(engine: Path, capsys: Captured) -> None:
    arguments = ["--rate", "50", "--requests", "6", "--turns", "2", "--turn-tokens", "3", *SMALL, "--json"]
    assert run_command(["bench", "serve", "--engine", str(engine), *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    (result,) = report["results"]
    assert report["target"] == result["target"] == "in process"
    assert (result["completed"], result["output_tokens"]) == (6, 24) and result["planned"] == 6
    assert result["prompt_tokens"] == 3 * (12 + 12 + 4 + 3) and "device" in result["tier_hit_tokens"]


async def test_a_running_server(engine: Path, capsys: Captured) -> None:
    async with serving() as running:
        where = ["--target", running.address]
        arguments = ["bench", "latency", *where, "--batch", "1", *SMALL, "--repeats", "1"]
        assert await asyncio.to_thread(run_command, arguments) == 0
        text = capsys.readouterr().out
        assert f"fake kernels, {running.address}" in text and "bounds" not in text
        assert await asyncio.to_thread(run_command, ["bench", "latency", *where, "--batch", "2", *SMALL, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["rates"] is None and report["results"][0]["decode_step"]["bound"] is None
        other = ["bench", "latency", *where, "--engine", str(engine), *SMALL]
        assert await asyncio.to_thread(run_command, other) == 3
        assert "runs fake, another engine than" in capsys.readouterr().err


def test_perplexity_of_two_engines(engine: Path, tmp_path: Path, capsys: Captured) -> None:
    float32 = build_engine(source(tmp_path / "source"), tmp_path / "float32", dtype="float32").path
    text = tmp_path / "text"
    text.write_text("abc abd " * 40)
    where = ["--engine", str(float32), "--engine", str(engine), "--text", str(text), "--threads", "1"]
    assert run_command(["bench", "perplexity", *where, "--tokens", "100", "--context", "32", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["results"]
    assert (first["dtype"], second["dtype"]) == ("float32", "bfloat16")
    assert first["tokens"] == second["tokens"] >= 99
    assert first["text_blake2b"] == second["text_blake2b"]
    assert first["difference_percent"] == 0 and 0 < abs(second["difference_percent"]) < 5
    ratio = second["perplexity"] / first["perplexity"]
    assert second["difference_percent"] == pytest.approx(100 * (ratio - 1))
    assert run_command(["bench", "perplexity", *where, "--tokens", "50", "--context", "32"]) == 0
    assert "+0.000 %" in capsys.readouterr().out
    assert run_command(["bench", "perplexity", *where, "--tokens", "5000", "--context", "32"]) == 3
    assert "tokens, not 5000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["latency"], 3, "Give --engine DIR or --target HOST:PORT"),
        (["latency", "--engine", "/nowhere"], 4, "does not exist"),
        (["latency", "--engine", "x", "--batch", "1,-2"], 2, "not a list of positive numbers"),
        (["latency", "--engine", "x", "--batch", "1,,2"], 2, "not a list of positive numbers"),
        (["perplexity", "--engine", "/nowhere"], 4, "does not exist"),
    ],
)
def test_user_errors(arguments: list[str], code: int, words: str, capsys: Captured) -> None:
    assert run_command(["bench", *arguments]) == code
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_lengths_beyond_the_context(engine: Path, capsys: Captured) -> None:
    assert run_command(["bench", "latency", "--engine", str(engine), "--input-tokens", "100000"]) == 3
    assert "exceed the model's context" in capsys.readouterr().err
