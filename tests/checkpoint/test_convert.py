"""Conversion: values of every dtype and tp against torch, errors, interruption, the directory's life."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_gemma import TEXT_CONFIG, random_tensors, write_model
from tiny_source import open_intact, write_tiny_tokenizer

from wicore_trt.checkpoint import safetensors_io
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.format import open_checkpoint
from wicore_trt.checkpoint.names import Role, Split, UnifiedTensor, unified_tensors
from wicore_trt.checkpoint.quantize import quantize_e4m3_per_channel
from wicore_trt.errors import CheckpointError, ConfigError, EnvironmentUnfitError
from wicore_trt.model.hf_config import read_hf_config
from wicore_trt.model.spec import LOCAL, Gemma3Spec

SPEC = read_hf_config(TEXT_CONFIG)
UNTIED = TEXT_CONFIG | {"tie_word_embeddings": False}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every tensor takes several blocks, the last one short."""
    monkeypatch.setattr(safetensors_io, "BLOCK_ITEMS", 1000)


def _expected(tensor: UnifiedTensor, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    whole = torch.cat([tensors[s] for s in tensor.sources])
    return whole.float() + 1 if tensor.role is Role.NORM else whole.to(dtype)  # norms stay float32


def _reassemble(
    tensor: UnifiedTensor, name: str, ranks: list[dict[str, torch.Tensor]], spec: Gemma3Spec
) -> torch.Tensor:
    """The whole tensor (or its scales, by `name`) from the ranks' files."""
    parts = [rank[name] for rank in ranks]
    parts = [p.view(torch.uint8) if p.dtype == torch.float8_e4m3fn else p for p in parts]
    if tensor.split is Split.NONE or (tensor.split is Split.COLUMNS and parts[0].ndim == 1):
        assert all(torch.equal(p, parts[0]) for p in parts)
        return parts[0]
    if tensor.split is Split.COLUMNS:
        return torch.cat(parts, dim=1)
    if tensor.split is Split.ROWS:
        return torch.cat(parts)
    tp, group = len(ranks), spec.layer_group(LOCAL)
    q = group.q_size // tp
    repeat = max(1, tp // spec.num_kv_heads)
    kv = group.kv_size // min(tp, spec.num_kv_heads)
    split = [p.split([q, kv, kv]) for p in parts]
    return torch.cat([torch.cat([s[0] for s in split]), *(torch.cat([s[i] for s in split[::repeat]]) for i in (1, 2))])


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [*DTYPES, "fp8"])
def test_values_of_every_dtype_and_tp(dtype: str, tp: int, tmp_path: Path) -> None:
    config = UNTIED if tp == 2 else TEXT_CONFIG
    spec = read_hf_config(config)
    tensors = random_tensors(spec, seed=tp)
    source = write_model(tmp_path / "m", tensors, config, shards=2)
    checkpoint = convert(source, tmp_path / "c", dtype=dtype, tp_size=tp)
    assert checkpoint.tp_size == tp and len(checkpoint.rank_files) == tp
    assert (checkpoint.dtype, checkpoint.weights.quantized) == (
        ("bfloat16", True) if dtype == "fp8" else (dtype, False)
    )
    ranks = [load_file(f) for f in checkpoint.rank_files]
    names = {n for rank in ranks for n in rank}
    for tensor in unified_tensors(spec):
        got = _reassemble(tensor, tensor.name, ranks, spec)
        if dtype != "fp8" or tensor.role is not Role.LINEAR:
            expected = _expected(tensor, tensors, DTYPES[checkpoint.dtype])
        else:
            w = _expected(tensor, tensors, torch.float32)
            scale = torch.from_numpy(quantize_e4m3_per_channel(w.numpy())[1])
            assert torch.equal(_reassemble(tensor, tensor.scale_name, ranks, spec), scale)
            expected = (w / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            names.remove(tensor.scale_name)
        assert got.dtype == expected.dtype and torch.equal(got, expected), tensor.name
        names.remove(tensor.name)
    assert not names
    open_intact(tmp_path / "c")


def test_auto_keeps_what_the_source_has(tmp_path: Path) -> None:
    for dtype, expected in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "bfloat16")):
        source = write_model(tmp_path / str(dtype), random_tensors(SPEC, seed=1, dtype=dtype))
        assert convert(source, tmp_path / f"c{dtype}").dtype == expected


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", random_tensors(SPEC, seed=3))
    write_tiny_tokenizer(source)
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (source / "README.md").write_text("no")
    checkpoint = convert(source, tmp_path / "c")
    assert {f.name for f in checkpoint.tokenizer_files} == {
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    assert not (checkpoint.path / "README.md").exists()


def test_float16_refuses_overflow_and_counts_what_vanishes(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC, seed=4, dtype=torch.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name].view(-1)[:5] = torch.tensor([1e-9, -2e-9, 6e-8, 65504.0, 0.0])
    source = write_model(tmp_path / "m", tensors)
    checkpoint = convert(source, tmp_path / "c", dtype="float16")
    expected = sum(int(((t.half() == 0) & (t != 0)).sum()) for n, t in tensors.items() if "norm" not in n)
    assert checkpoint.config["wicore"]["flushed_to_zero"] == expected >= 2
    tensors[name][3, 3] = -70000.0
    source = write_model(tmp_path / "m", tensors)
    with pytest.raises(CheckpointError, match=rf"{name} reaches 70000, beyond float16's 65504.*bfloat16"):
        convert(source, tmp_path / "d", dtype="float16")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("d")] == []


def test_outputs_that_are_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "m", random_tensors(SPEC, seed=5))
    output = tmp_path / "c"
    output.mkdir()
    convert(source, output)  # an empty directory is nobody's
    with pytest.raises(ConfigError, match=r"exists\..*--force"):
        convert(source, output)
    before = (output / "config.json").read_text()
    assert convert(source, output, dtype="float32", force=True).dtype == "float32"
    assert (output / "config.json").read_text() != before
    for precious in (source, source / "config.json"):
        with pytest.raises(ConfigError, match="not a (readable checkpoint|directory)"):
            convert(source, precious, force=True)
    with pytest.raises(EnvironmentUnfitError, match="Check free space and permissions"):
        convert(source, source / "config.json" / "c")
    with pytest.raises(ConfigError, match="'int4' is unknown"):
        convert(source, output, dtype="int4", force=True)
    with pytest.raises(CheckpointError, match="do not divide by tp 3"):
        convert(source, output, tp_size=3, force=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(EnvironmentUnfitError, match=r"needs 67\.\d MB on disk, and 0\.0 MB are free"):
        convert(source, tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "m"]
    open_intact(output)


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", random_tensors(SPEC, seed=6))
    a, b = (convert(source, tmp_path / n, dtype="fp8", tp_size=2) for n in "ab")
    assert a.files == b.files and (a.path / "config.json").read_bytes() == (b.path / "config.json").read_bytes()


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    source = write_model(tmp_path / "m", random_tensors(SPEC, seed=7))
    checkpoint = convert(source, tmp_path / "c", progress=lambda *call: seen.append(call))
    seen = [call for call in seen if call[0] == "convert"]
    assert seen[-1][1] == seen[-1][2] <= checkpoint.files["rank0.safetensors"].bytes
    assert [s[1] for s in seen] == sorted(s[1] for s in seen) and len({s[2] for s in seen}) == 1


SLOW = """
import sys, time
from wicore_trt.checkpoint import convert as module, safetensors_io
safetensors_io.BLOCK_ITEMS = 1000
def slow(*call):
    print(*call, flush=True)
    time.sleep(0.02)
module.convert(sys.argv[1], sys.argv[2], progress=slow, force=True)
"""


@pytest.mark.parametrize("lines", [1, 20, 60])
def test_a_killed_run_leaves_nothing_that_opens(lines: int, tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", random_tensors(SPEC, seed=8))
    output = tmp_path / "c"
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source), str(output)], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for _ in range(lines):
            assert run.stdout.readline()
        os.kill(run.pid, signal.SIGKILL)
    left = [p for p in tmp_path.iterdir() if p != source]
    assert [p.name.startswith(".c.wicore-") for p in left] == [True]
    for path in (output, left[0], left[0] / "new"):
        with pytest.raises(CheckpointError, match="wicore convert"):
            open_checkpoint(path)
    convert(source, output)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "m"]


def test_a_running_conversion_is_left_alone(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", random_tensors(SPEC, seed=9))
    output = tmp_path / "c"
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source), str(output)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        [theirs] = tmp_path.glob(".c.wicore-*")
        convert(source, output)
        assert theirs.exists()
        other.kill()
    convert(source, output, force=True)
    assert not theirs.exists()


def test_an_interrupted_overwrite_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", random_tensors(SPEC, seed=10))
    old = convert(source, tmp_path / "c", dtype="float32")

    def interrupt(*call: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "c", force=True, progress=interrupt)
    assert open_intact(tmp_path / "c").files == old.files
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "m"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from wicore_trt.cli.convert import command

    source = write_model(tmp_path / "m", random_tensors(SPEC, seed=11))
    start = time.monotonic()
    command(str(source), tmp_path / "c", dtype="fp8", tp=2, revision=None, force=False, json=True)
    result = json.loads(capsys.readouterr().out)
    assert (result["dtype"], result["tp_size"], result["vision"]) == ("fp8", 2, False)
    assert result["bytes"] == sum(f.stat().st_size for f in (tmp_path / "c").glob("rank*"))
    assert 0 <= result["seconds"] <= time.monotonic() - start + 0.001  # printed in milliseconds
    command(str(source), tmp_path / "d", dtype="auto", tp=1, revision=None, force=False, json=False)
    captured = capsys.readouterr()
    assert captured.out.startswith(f"converted {tmp_path / 'd'}: bfloat16, tp 1")
    assert "no tokenizer.json" in captured.err
