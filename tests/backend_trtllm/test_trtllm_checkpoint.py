"""The exported checkpoint is what TensorRT-LLM documents, and its values are ours."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from backend_trtllm.trtllm_build_stand_in import BadCheckpointError, check_checkpoint
from backend_trtllm.trtllm_checkpoints import CONFIG, checkpoint
from safetensors.torch import load_file

from wicore_trt.backends.trtllm.checkpoint import export_checkpoint
from wicore_trt.checkpoint import safetensors_io
from wicore_trt.checkpoint.format import Checkpoint
from wicore_trt.errors import CheckpointError, ConfigError

SEED = int.from_bytes(os.urandom(4), "little")
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every matrix takes several blocks, the last one short."""
    monkeypatch.setattr(safetensors_io, "BLOCK_ITEMS", 7 * 32)


def export(made: Checkpoint, *, kv_fp8: bool = False) -> Path:
    output = made.path.parent / "trtllm"
    output.mkdir()
    export_checkpoint(made, output, kv_fp8=kv_fp8)
    return output


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("tp", "kv_heads"), [(1, 2), (2, 2), (2, 1)])
def test_values_are_ours(tmp_path: Path, dtype: str, tp: int, kv_heads: int) -> None:
    made = checkpoint(tmp_path, seed=SEED, dtype=dtype, tp=tp, num_key_value_heads=kv_heads)
    output = export(made)
    check_checkpoint(output)
    for path in made.rank_files:
        ours, theirs = load_file(path), load_file(output / path.name)
        assert set(ours) == set(theirs)
        norms = 0
        for name, tensor in ours.items():
            norms += "norm" in name or "ln_f" in name
            assert torch.equal(theirs[name], tensor.to(TORCH[dtype])), name
            assert theirs[name].dtype == TORCH[dtype]
        assert norms == 6 * 7 + 1
        assert torch.equal(theirs["lm_head.weight"], theirs["transformer.vocab_embedding.weight"])


def test_config_is_theirs_alone(tmp_path: Path) -> None:
    config = check_checkpoint(export(checkpoint(tmp_path, tp=2)))
    assert config["rotary_scaling"] == {"type": "linear", "factor": 8.0}  # of global layers
    assert (config["rotary_base"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["_sliding_window_pattern"] == 3 and "sliding_window_pattern" not in config
    assert config["runtime_defaults"] == {"max_attention_window": [32, 32, 128, 32, 32, 128, 32]}
    assert config["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}
    assert "wicore" not in config and config["query_pre_attn_scalar"] == 24


def test_no_scaling_without_a_factor(tmp_path: Path) -> None:
    config = check_checkpoint(export(checkpoint(tmp_path, rope_scaling=None)))
    assert config["rotary_scaling"] is None


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.long), 2])
def test_fp8_is_requantized_once(tmp_path: Path, tp: int) -> None:
    """Against torch's own cast: one scale per tensor over all ranks, shared where TensorRT-LLM stacks two linears."""
    made = checkpoint(tmp_path, seed=SEED, dtype="fp8", tp=tp, static=True)
    output = export(made)
    config = check_checkpoint(output)
    assert config["quantization"]["quant_algo"] == "FP8" and config["dtype"] == "bfloat16"
    ranks = [(load_file(path), load_file(output / path.name)) for path in made.rank_files]
    linears = [name for name, tensor in ranks[0][0].items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(linears) == 5 * 7
    whole = {
        name: [ours[name].float() * ours[f"{name}s_scaling_factor"][:, None] for ours, _ in ranks] for name in linears
    }
    amax = {name: max(float(part.abs().max()) for part in parts) for name, parts in whole.items()}
    for name in linears:
        twin = {"fc": name.replace("mlp.fc", "mlp.gate"), "gate": name.replace("mlp.gate", "mlp.fc")}
        largest = max(amax[name], amax[twin.get(name.split(".")[-2], name)])
        stem = name.removesuffix("weight")
        for part, (ours, theirs) in zip(whole[name], ranks, strict=True):
            scale = theirs[f"{stem}weights_scaling_factor"]
            assert scale.item() == torch.tensor(largest / 448, dtype=torch.float32).item()
            expected = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(theirs[name].view(torch.uint8), expected.view(torch.uint8)), name
            assert (theirs[name].float() * scale - part).abs().max() <= largest / 448 * 16.001  # half the widest step
            again = (theirs[name].float() * scale / scale).to(torch.float8_e4m3fn)  # as use_fused_mlp does
            assert torch.equal(again.view(torch.uint8), theirs[name].view(torch.uint8))
            key = f"{stem}activation_scaling_factor"
            assert torch.equal(theirs[key], ours[key]) and theirs[key].shape == (1,)


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.long), "fp8"])
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_kv_scales_travel_only_with_an_fp8_cache(tmp_path: Path, dtype: str, kv_fp8: bool) -> None:
    made = checkpoint(tmp_path, dtype=dtype, kv_scales=True)
    output = export(made, kv_fp8=kv_fp8)
    config = check_checkpoint(output)
    assert config["quantization"]["kv_cache_quant_algo"] == ("FP8" if kv_fp8 else None)
    ours, theirs = load_file(made.rank_files[0]), load_file(output / "rank0.safetensors")
    names = [name for name in ours if "kv_cache" in name]
    assert len(names) == 7
    assert all((name in theirs) == kv_fp8 and (not kv_fp8 or torch.equal(theirs[name], ours[name])) for name in names)


def test_what_it_cannot_express(tmp_path: Path) -> None:
    def refused(kind: type[Exception], words: str, *, kv_fp8: bool = False, **arguments: object) -> None:
        made = checkpoint(tmp_path / words, **arguments)  # type: ignore[arg-type]
        with pytest.raises(kind, match=words):
            export(made, kv_fp8=kv_fp8)

    refused(ConfigError, "--calibrate", dtype="fp8")
    refused(ConfigError, "bfloat16", dtype="float32")
    refused(ConfigError, "KV cache needs scales", kv_fp8=True)
    kinds = ["full_attention" if i in (1, 2) else "sliding_attention" for i in range(CONFIG["num_hidden_layers"])]
    refused(CheckpointError, "every n-th layer", layer_types=kinds)


def test_float16_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        export(checkpoint(tmp_path / "bf16"))
        assert not caplog.records
        export(checkpoint(tmp_path / "fp16", dtype="float16"))
    assert "65,504" in caplog.text


@pytest.mark.parametrize(
    "change", [{"wicore": {}}, {"sliding_window_pattern": 3}, {"rotary_scaling": {"type": "yarn"}}]
)
def test_the_stand_in_refuses(tmp_path: Path, change: dict) -> None:
    """What it checks must be able to fail."""
    output = export(checkpoint(tmp_path))
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(BadCheckpointError):
        check_checkpoint(output)
