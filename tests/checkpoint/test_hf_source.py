"""Hugging Face sources: every way a directory can be spelled, and every way it can be broken."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_gemma import TEXT_CONFIG, random_tensors, write_model
from tiny_images import VISION, make_vision_tensors

from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.checkpoint.quantize import from_float32, to_float32
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile
from wicore_trt.errors import CheckpointError
from wicore_trt.model.hf_config import read_hf_config
from wicore_trt.model.vision import vision_tensors

SPEC = read_hf_config(TEXT_CONFIG)
IDS = {"boi_token_index": 90, "eoi_token_index": 91, "image_token_index": 92}
WRAPPER = {"model_type": "gemma3", "text_config": TEXT_CONFIG, "vision_config": VISION, "mm_tokens_per_image": 4, **IDS}
_SPELLINGS = {
    "plain": str,
    "old": str,  # Google's files, and what transformers saves
    "new": lambda name: f"model.{name}",
    "bare": lambda name: name.replace("vision_tower.vision_model.", "vision_tower."),  # transformers 5 in memory
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local path must never touch the network."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["plain", "old", "new"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_spellings_give_the_same_tensors(tmp_path: Path, shards: int, prefix: str, dtype: torch.dtype) -> None:
    tensors = random_tensors(SPEC, seed=shards, dtype=dtype)
    vision = {n: torch.from_numpy(t).to(dtype) for n, t in make_vision_tensors(VISION, 64).items()}
    respelt = {_SPELLINGS[prefix](name): tensor for name, tensor in vision.items()}
    config = TEXT_CONFIG if prefix == "plain" else WRAPPER
    source = open_source(write_model(tmp_path / "m", tensors, config, shards=shards, prefix=prefix, extra=respelt))
    assert source.spec == SPEC and set(source.tensors) == set(tensors)
    if prefix == "plain":
        assert source.vision is None and "39 tensors of an image encoder that config.json lacks" in str(source.notes)
    else:
        assert source.vision and set(vision_tensors(source.vision)) == set(vision)
        for name, tensor in vision.items():
            np.testing.assert_array_equal(to_float32(*source.read_rows(name, 0, len(tensor))), tensor.float().numpy())
    for name, tensor in tensors.items():
        assert source.tensors[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(source.read_tensor(name), tensor.float().numpy())
    name = "model.layers.1.mlp.down_proj.weight"
    rows, tag = source.read_rows(name, 3, 9)
    expected = tensors[name][3:9].float().numpy()
    np.testing.assert_array_equal(rows, from_float32(expected, tag))


@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_transformers_saves(wrapped: bool, shard_size: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = transformers.Gemma3TextConfig(
        **{k: v for k, v in TEXT_CONFIG.items() if k not in ("model_type", "rope_scaling")}
    )
    if wrapped:
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.Gemma3Config(
            text_config=text.to_dict(),
            vision_config=vision | {"image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
            **IDS,
        )
        model = transformers.Gemma3ForConditionalGeneration(config)
    else:
        model = transformers.Gemma3ForCausalLM(text)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "1GB")
    source = open_source(tmp_path)
    assert source.spec.layer_groups == SPEC.layer_groups and source.spec.query_pre_attn_scalar == 24
    theirs = {n.replace("model.language_model.", "model."): t for n, t in model.state_dict().items()}
    for name in source.tensors:
        np.testing.assert_array_equal(source.read_tensor(name), theirs[name].float().numpy(), err_msg=name)
    others = {n.removeprefix("model.") for n in theirs if n not in source.tensors} - {"lm_head.weight"}
    assert bool(source.vision) == bool(others) == wrapped
    for name in vision_tensors(source.vision) if source.vision else ():
        mine = to_float32(*source.read_rows(name, 0, len(theirs[f"model.{_SPELLINGS['bare'](name)}"])))
        np.testing.assert_array_equal(mine, theirs[f"model.{_SPELLINGS['bare'](name)}"].numpy(), err_msg=name)


def test_a_tensor_in_two_spellings_is_refused(tmp_path: Path) -> None:
    twice = {"language_model.model.norm.weight": torch.zeros(64)}
    with pytest.raises(CheckpointError, match=r"holds model\.norm\.weight twice"):
        open_source(write_model(tmp_path / "m", random_tensors(SPEC, seed=1), extra=twice))


def test_untied_head_is_read_and_a_missing_one_refused(tmp_path: Path) -> None:
    config = TEXT_CONFIG | {"tie_word_embeddings": False}
    tensors = random_tensors(read_hf_config(config), seed=1)
    source = open_source(write_model(tmp_path / "a", tensors, config))
    np.testing.assert_array_equal(source.read_tensor("lm_head.weight"), tensors["lm_head.weight"].float().numpy())
    with pytest.raises(CheckpointError, match="lm_head"):
        open_source(write_model(tmp_path / "b", random_tensors(SPEC, seed=1), config))


def _sharded(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m", random_tensors(SPEC, seed=2), shards=3)


SHARD = "model-00002-of-00003.safetensors"


def test_broken_weight_files(tmp_path: Path) -> None:
    path = _sharded(tmp_path)
    shard = path / SHARD
    whole = shard.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
    cases = {
        pointer: "Git LFS pointer.*git lfs pull",
        whole[:-1]: f"truncated: {len(whole) - 1} bytes of {len(whole)}",
        whole + b"x": f"goes on behind its last tensor: {len(whole) + 1} bytes of {len(whole)}",
        whole[:100]: "truncated",
        b"": "truncated",
        b"\xff" * 64: "truncated or not a safetensors",
        whole[:8] + b"{" * (len(whole) - 8): r"the header of .*safetensors is not valid JSON",
        (2).to_bytes(8, "little") + b"[]": "not a readable safetensors",
    }
    for content, message in cases.items():
        shard.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            open_source(path)
        assert SHARD in str(caught.value)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of 3 shards: {SHARD}"):
        open_source(path)


def test_header_offsets_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    for bad in ([0, 4], [4, 12], [0, 12], [8, 0]):
        header["a"]["data_offsets"] = bad
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
        with pytest.raises(CheckpointError):
            SafetensorsFile(file)


def test_broken_index(tmp_path: Path) -> None:
    path = _sharded(tmp_path)
    index = path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    for change, message in (
        ({"model.extra.weight": SHARD}, "not in the shard that the index names"),
        ({"model.norm.weight": "../elsewhere.safetensors"}, "outside its directory"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map | change}))
        with pytest.raises(CheckpointError, match=message):
            open_source(path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        open_source(path)


def test_wrong_paths_say_what_to_give(tmp_path: Path) -> None:
    write_model(tmp_path / "m", random_tensors(SPEC, seed=3))
    (tmp_path / "empty").mkdir()
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(TEXT_CONFIG))
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "engine.json").write_text("{}")
    for ref, message in (
        (tmp_path / "engine", "is an engine; a build needs a model"),
        (tmp_path / "nothing", "does not exist.*hub id"),
        ("./a/b", "does not exist"),
        ("no/such/file.gguf", "does not exist"),
        ("a\0b", "does not exist"),
        ("folder/file.gguf", "does not exist"),
        (tmp_path / "m" / "model.safetensors", "Give its directory"),
        (tmp_path / "empty", "config.json is missing"),
        (tmp_path / "llama", "'llama' is not supported"),
        (tmp_path / "bare", "neither model.safetensors nor"),
        (tmp_path / "m" / "config.json", "not a GGUF file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_source(ref)


def _hub_errors() -> list[tuple[str, str]]:
    return [
        (
            "GatedRepoError",
            "is gated. Accept its licence at .*/google/gemma-3-27b-it, then set HF_TOKEN or run `hf auth",
        ),
        ("RepositoryNotFoundError", "The hub has no model google/gemma-3-27b-it"),
        ("RevisionNotFoundError", "has no revision 'v9'"),
        ("HfHubHTTPError", "Downloading .* failed"),
    ]


@pytest.mark.parametrize("kind,message", _hub_errors())
def test_hub_answers_say_what_to_do(kind: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    error = getattr(errors, kind)
    instance = error.__new__(error)
    Exception.__init__(instance, "403")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise instance

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=message):
        open_source("google/gemma-3-27b-it", revision="v9")


@pytest.mark.parametrize("offline", [True, False])
def test_hub_that_cannot_be_reached(offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set" if offline else "cannot be reached"):
        open_source("google/gemma-3-27b-it")


def test_hub_snapshot_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshot = write_model(tmp_path / "0123abcd", random_tensors(SPEC, seed=4))
    asked: dict[str, Any] = {}

    def download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo_id=repo_id)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = open_source("google/gemma-3-27b-it", revision="v2")
    assert (source.name, source.revision) == ("google/gemma-3-27b-it", "0123abcd")
    assert asked["repo_id"] == source.name and asked["revision"] == "v2"
    assert not any(p.endswith((".bin", ".gguf", "*")) for p in asked["allow_patterns"])
