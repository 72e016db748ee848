"""A damaged checkpoint makes no engine, and `inspect --verify` says what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.format import write_config
from wicore_trt.cli.main import run_command
from wicore_trt.engine.build import build_engine
from wicore_trt.errors import CheckpointError

MakeSource = Callable[..., Path]


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_checkpoint_makes_no_engine(
    make_source: MakeSource, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any byte of any file but vision.safetensors, which no engine is made of."""
    random = np.random.default_rng(seed)
    dtype, tp = [("bfloat16", 1), ("fp8", 1), ("float32", 2), ("float16", 1)][seed]
    checkpoint = convert(make_source(seed, tied=seed != 3), tmp_path / "c", dtype=dtype, tp_size=tp)
    build_engine(checkpoint.path, tmp_path / "good")
    for number in range(12):
        file = checkpoint.path / str(random.choice(sorted(checkpoint.files)))
        content = file.read_bytes()
        at = int(random.integers(len(content))) if number % 3 else int(random.integers(min(len(content), 64)))
        flipped = bytearray(content)
        flipped[at] ^= 1 << int(random.integers(8))
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=file.name):
            build_engine(checkpoint.path, tmp_path / "bad")
        assert not (tmp_path / "bad").exists()
        assert run_command(["inspect", str(checkpoint.path), "--verify"]) in (1, 4), (file.name, at)
        file.write_bytes(content)
    assert run_command(["inspect", str(checkpoint.path), "--verify"]) == 0
    assert "ok" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["transformer.layers.1.mlp.fc.weight", "lm_head.weight", "the header"])
def test_the_damaged_tensor_is_named(
    make_source: MakeSource, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the tied head, which no engine keeps, and the header's padding, which changes nothing."""
    checkpoint = convert(make_source(), tmp_path / "c")
    file = checkpoint.rank_files[0]
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    at = {"the header": bytes(content).index(b'"pt"') + 1}
    at |= {tensor: 8 + length + header[tensor]["data_offsets"][0] + 3 for tensor in header if tensor[0] != "_"}
    content[at[name]] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"rank0.safetensors is damaged: {name} has changed.*wicore convert"):
        build_engine(checkpoint.path, tmp_path / "e")
    assert run_command(["inspect", str(checkpoint.path), "--verify"]) == 4
    assert f"corrupted ({name})" in capsys.readouterr().err


def test_config_of_a_checkpoint_is_under_its_seal(make_source: MakeSource, tmp_path: Path) -> None:
    checkpoint = convert(make_source(), tmp_path / "c")
    path = checkpoint.path / "config.json"
    whole = json.loads(path.read_text())
    edits: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda c: c["wicore"]["spec"].update(rope_theta=1000009.0), "wicore.spec"),
        (lambda c: c["wicore"].update(source="elsewhere"), "wicore.source"),
        (lambda c: c["wicore"]["files"].pop("tokenizer.json"), "wicore.files"),
        (lambda c: c.update(num_hidden_layers=9), "num_hidden_layers"),
        (lambda c: c.update(surprise=1), "surprise"),
        (lambda c: c["wicore"].pop("seal"), "seal"),
    ]
    for change, key in edits:
        config = json.loads(json.dumps(whole))
        change(config)
        path.write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=f"edited or damaged: .*{key}"):
            build_engine(checkpoint.path, tmp_path / "e")
        assert run_command(["inspect", str(checkpoint.path)]) == 1
    write_config(checkpoint.path, whole | {"num_hidden_layers": 9})
    with pytest.raises(CheckpointError, match="num_hidden_layers does not agree with wicore.spec"):
        build_engine(checkpoint.path, tmp_path / "e")
    path.write_text(json.dumps(dict(reversed(whole.items())), indent=7))
    build_engine(checkpoint.path, tmp_path / "e")
