"""The unified config and open_checkpoint: what TensorRT-LLM reads, and every way a directory can be wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_gemma import TEXT_CONFIG, random_tensors, write_model
from tiny_source import open_intact, write_tiny_tokenizer

from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.format import CheckpointForm, build_config, open_checkpoint, window_pattern, write_config
from wicore_trt.checkpoint.records import FileRecord
from wicore_trt.errors import CheckpointError
from wicore_trt.model.hf_config import read_hf_config
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.weight_format import BF16, FP8

SPEC = read_hf_config(TEXT_CONFIG)


def test_config_has_tensorrt_llm_fields() -> None:
    origin = {"source": "x", "revision": "rev"}
    config = build_config(CheckpointForm(SPEC, "bfloat16", BF16, 2), {"rank0.safetensors": FileRecord(3, "ab")}, origin)
    assert config["architecture"] == "Gemma3ForCausalLM"
    assert (config["head_size"], config["norm_epsilon"], config["rotary_base"]) == (16, 1e-6, 1e6)
    assert config["rope_local_base_freq"] == 1e4 and config["query_pre_attn_scalar"] == 24
    assert config["rotary_scaling"] == {"type": "linear", "factor": 8.0}
    assert config["sliding_window_pattern"] == config["_sliding_window_pattern"] == 3
    assert config["qk_layernorm"] is config["inter_layernorms"] is config["use_parallel_embedding"] is True
    assert config["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}
    assert config["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": None}
    assert config["runtime_defaults"] == {"max_attention_window": [32, 32, 512]}
    assert Gemma3Spec.from_dict(config["wicore"]["spec"]) == SPEC
    assert config["wicore"]["revision"] == "rev"
    json.dumps(config)


def test_config_without_scaling_or_pattern() -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    spec = read_hf_config(TEXT_CONFIG | {"rope_scaling": None, "layer_types": types})
    config = build_config(CheckpointForm(spec, "float16", FP8, 1), {}, {"source": "x"})
    assert "rotary_scaling" not in config and "sliding_window_pattern" not in config
    assert config["runtime_defaults"]["max_attention_window"] == [512, 32, 32]
    assert config["quantization"]["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert config["use_parallel_embedding"] is False


@pytest.mark.parametrize("layers,pattern", [(3, 3), (7, 3), (2, 6), (6, 6), (4, 1)])
def test_window_pattern_is_found(layers: int, pattern: int) -> None:
    config = TEXT_CONFIG | {"num_hidden_layers": layers, "sliding_window_pattern": pattern}
    found = window_pattern(read_hf_config(config))
    groups = read_hf_config(config).layer_groups
    assert found is not None
    assert read_hf_config(config | {"sliding_window_pattern": found}).layer_groups == groups


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("made")
    source = write_model(base / "m", random_tensors(SPEC, seed=1))
    write_tiny_tokenizer(source)
    return convert(source, base / "c", tp_size=2).path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    target = tmp_path / "c"
    target.mkdir()
    for file in made.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_an_intact_copy_opens(copy: Path) -> None:
    checkpoint = open_intact(copy)
    assert checkpoint.spec == SPEC and checkpoint.tp_size == 2 and checkpoint.source.endswith("/m")
    assert [f.name for f in checkpoint.rank_files] == ["rank0.safetensors", "rank1.safetensors"]
    assert [f.name for f in checkpoint.tokenizer_files] == ["tokenizer.json", "generation_config.json"]


FILES = ["rank0.safetensors", "rank1.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "short", "long", "flipped"])
def test_damaged_files_are_named(name: str, damage: str, copy: Path) -> None:
    file = copy / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(content[:-1])
    elif damage == "long":
        file.write_bytes(content + b"x")
    else:
        content[-1] ^= 1
        file.write_bytes(content)
        open_checkpoint(copy)  # sizes and names are right: opening reads no contents
    with pytest.raises(CheckpointError, match=name) as caught:
        (open_intact if damage == "flipped" else open_checkpoint)(copy)
    assert f"{copy} --dtype bfloat16 --tp 2 --force" in str(caught.value)


def _edit(path: Path, change: Callable[[dict[str, Any]], Any], *, sealed: bool = True) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    if sealed and "wicore" in config:
        write_config(path, config)
    else:
        (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda c: c["wicore"].update(format_version=4), "checkpoint format 4"),
        (lambda c: c["wicore"].update(format_version=3), "format 3 with dtype 'bfloat16'"),
        (lambda c: c.pop("wicore"), "not written by wicore"),
        (lambda c: c.update(architecture="LlamaForCausalLM"), "not written by wicore"),
        (lambda c: c["wicore"].pop("spec"), "damaged"),
        (lambda c: c["wicore"]["spec"].pop("head_dim"), "head_dim"),
        (lambda c: c["wicore"]["spec"].update(head_dim=32), "head_size does not agree"),
        (
            lambda c: c["wicore"]["spec"].update(head_dim=32) or c.update(head_size=32, rotary_embedding_dim=32),
            r"should be BF16 \[",
        ),
        (lambda c: c["mapping"].update(tp_size="two"), "damaged"),
        (lambda c: c["mapping"].update(tp_size=1), "use_parallel_embedding does not agree"),
        (lambda c: c["mapping"].update(world_size=4, tp_size=4), "does not list rank2"),
        (lambda c: c.update(dtype="float16"), "should be F16"),
        (lambda c: c.update(dtype="int8"), "'int8'"),
        (lambda c: c["quantization"].update(quant_algo="FP8_PER_CHANNEL_PER_TOKEN"), "quantization does not agree"),
        (lambda c: c["quantization"].update(quant_algo="W4A16_AWQ"), "W4A16_AWQ"),
        (lambda c: c["wicore"]["files"].pop("rank1.safetensors"), "does not list rank1"),
        (lambda c: c["wicore"]["files"].update({"../x": {"bytes": 1, "blake2b": ""}}), "lacks ../x"),
        (lambda c: c["wicore"].update(files=[]), "damaged"),
    ],
)
def test_configs_that_do_not_fit(change: Callable[[dict[str, Any]], Any], message: str, copy: Path) -> None:
    _edit(copy, change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(copy)


def test_configs_that_cannot_be_read(copy: Path, tmp_path: Path) -> None:
    config = copy / "config.json"
    whole = config.read_text()
    for content in (whole[: len(whole) // 2], "", "[]", "\xff"):
        config.write_text(content, encoding="latin-1")
        with pytest.raises(CheckpointError, match=r"config\.json"):
            open_checkpoint(copy)
    os.unlink(config)
    with pytest.raises(CheckpointError, match="not a checkpoint.*wicore convert"):
        open_checkpoint(copy)
    with pytest.raises(CheckpointError, match="not a checkpoint directory.*wicore convert"):
        open_checkpoint(tmp_path / "nowhere")
