"""Folders as hubs and trainers leave them: which file counts, what is left aside, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_gemma import TEXT_CONFIG, random_tensors, write_model
from tiny_images import VISION as TINY_VISION
from tiny_images import make_vision_tensors

from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.errors import CheckpointError
from wicore_trt.model.hf_config import read_hf_config

SPEC = read_hf_config(TEXT_CONFIG)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
WRAPPER = {
    "model_type": "gemma3",
    "text_config": TEXT_CONFIG,
    "vision_config": VISION | {"image_size": 28, "patch_size": 14},
    "mm_tokens_per_image": 4,
}
NO_IMAGES = "config.json describes an image encoder, which the files lack: images are not read."


def folder(path: Path, config: dict[str, Any] | None = None, **files: str) -> Path:
    """A whole tiny model, and `files` with their contents (a name that ends with "/" is a directory)."""
    write_model(path, random_tensors(SPEC, seed=1), config)
    for name, content in files.items():
        (path / name).mkdir() if name.endswith("/") else (path / name).write_text(content)
    return path


def trained(head: bool, embedding: bool = True, *, equal: bool = False) -> dict[str, torch.Tensor]:
    tensors = random_tensors(SPEC, seed=4, dtype=torch.float32)
    if head:
        tensors[HEAD] = tensors[EMBEDDING].clone() if equal else torch.randn(96, 64)
    if not embedding:
        del tensors[EMBEDDING]
    return tensors


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("tensors", "tied", "note"),
    [
        (trained(True), False, "the head of the files is used"),
        (trained(True, equal=True), True, None),
        (trained(True, embedding=False), True, "is the embedding too"),
        (trained(False), True, None),
    ],
    ids=["trained head", "copy", "head alone", "no head"],
)
def test_the_head_is_the_one_of_transformers(
    tensors: dict[str, torch.Tensor], tied: bool, note: str | None, wrapped: bool, tmp_path: Path
) -> None:
    import transformers

    # Of a wrapper the outer flag counts, which is true by default.
    config = WRAPPER | {"text_config": TEXT_CONFIG | {"tie_word_embeddings": False}} if wrapped else TEXT_CONFIG
    path = write_model(tmp_path / "m", tensors, config, prefix="old" if wrapped else "plain")
    kind = transformers.Gemma3ForConditionalGeneration if wrapped else transformers.Gemma3ForCausalLM
    theirs = kind.from_pretrained(path, dtype=torch.float32)
    source = open_source(path)
    assert source.spec.tie_word_embeddings is tied
    head = source.read_tensor(EMBEDDING if tied else HEAD)
    np.testing.assert_array_equal(head, theirs.get_output_embeddings().weight.detach().numpy())
    np.testing.assert_array_equal(source.read_tensor(EMBEDDING), theirs.get_input_embeddings().weight.detach().numpy())
    assert (HEAD in source.tensors) is not tied
    said = [n for n in source.notes if not n.startswith("tie_word") and n != NO_IMAGES]
    assert len(said) == bool(note) and (note or "") in "".join(said)


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = trained(True) | {HEAD: torch.zeros(100, 64)}
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight is \[100, 64\] and model.embed_tokens.weight \[96, 64\]"
    ):
        open_source(write_model(tmp_path / "m", tensors))


WRAPPINGS = ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod.", "_fsdp_wrapped_module.", ""]


@pytest.mark.parametrize("outer", WRAPPINGS)
@pytest.mark.parametrize("inner", ["", "_orig_mod.", "_checkpoint_wrapped_module."])
@pytest.mark.parametrize("bare", [False, True])
def test_wrappers_in_names_are_taken_off(outer: str, inner: str, bare: bool, tmp_path: Path) -> None:
    tensors = random_tensors(SPEC, seed=2)
    spelled = {
        outer + (n.removeprefix("model.") if bare else n).replace("self_attn.q_proj.", f"self_attn.{inner}q_proj."): t
        for n, t in tensors.items()
    }
    path = folder(tmp_path / "m")
    save_file(spelled, path / "model.safetensors")
    source = open_source(path)
    assert set(source.tensors) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(source.read_tensor(name), tensor.float().numpy())


LEFT = [
    "README.md", "LICENSE", ".gitattributes", "USE_POLICY.md", "logo.png", "notes.txt", "training_args.bin",
    "trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "scaler.pt",
    "train_results.json", "all_results.json", "zero_to_fp32.py", "latest", "trainer_log.jsonl",
    "mergekit_config.yml", "axolotl.yaml", "tokenizer.model.v3", "vocab.json", "merges.txt",
    "random_states_0.pkl", "events.out.tfevents.17", "video_preprocessor_config.json", "value_head.bin",
    "train.ipynb", "chat.jinja",
]  # fmt: skip
FORMS = [
    "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json",
    "model.fp16.safetensors", "flax_model.msgpack", "tf_model.h5", "consolidated.00.pth", "m.Q4_K_M.gguf",
    "model.onnx", "gemma3.task", "model-00001-of-00009.safetensors",
]  # fmt: skip


def test_what_trainers_leave_builds_and_other_forms_are_told(tmp_path: Path) -> None:
    directories = {
        f"{d}/": "" for d in ("original", "onnx", "runs", "checkpoint-500", ".cache", "global_step500", "blobs")
    }
    path = folder(tmp_path / "m", **dict.fromkeys(LEFT, "x"), **directories)
    (path / "checkpoint-500" / "adapter_config.json").write_text("{}")
    assert open_source(path).notes == []
    folder(path, **dict.fromkeys((*FORMS, "odd.json"), "x"))
    notes = open_source(path).notes
    assert (
        len(notes) == 2 and all(name in notes[0] for name in sorted(FORMS)[:4]) and f"{len(FORMS) - 4} more" in notes[0]
    )
    assert notes[1] == "left aside, read by nobody: odd.json."
    (path / "fine").mkdir()
    (path / "fine" / "adapter_config.json").write_text("{}")
    assert "fine holds an adapter that is not merged; --lora" in " ".join(open_source(path).notes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter_config.json", "whole weights and an adapter.*--lora.*merged already"),
        ("adapter_model.safetensors", "adapter_model.safetensors holds weights that no part"),
        ("soft_prompt.pt", "soft_prompt.pt holds weights that no part"), ("extra.npz", "extra.npz"),
        ("control.safetensors", "control.safetensors"), ("adapters.safetensors", "an adapter of MLX.*mlx_lm.fuse"),
        ("hf_quant_config.json", "describes no quantization"), ("quantize_config.json", "lacks bits"),
        ("quant_config.json", "lacks bits"),
        ("modules.json", "sentence-transformers"), ("non_lora_trainables.bin", "trained beside a LoRA"),
    ],
)  # fmt: skip
def test_what_changes_the_model_is_refused_by_name(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        open_source(folder(tmp_path / "m", **{name: "{}"}))
    assert "\n" not in str(caught.value) and "Download" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter_config.json", "is an adapter of 'google/gemma'.*wicore build BASE OUTPUT --lora"),
        ("model_index.json", "diffusers"), ("blobs", "Ollama"), ("snapshots", "cache of Hugging Face"),
        ("mlc-chat-config.json", "MLC"), ("x.txt", "config.json is missing"),
    ],
)  # fmt: skip
def test_folders_that_are_no_model_are_named(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"base_model_name_or_path": "google/gemma"}')
    with pytest.raises(CheckpointError, match=words):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma2"}, "it is Gemma 2"), ({"model_type": "gemma3n_text"}, "Gemma 3n"),
        ({"model_type": "gemma4"}, "Gemma 4"), ({"model_type": "t5gemma2"}, "T5Gemma"),
        ({"model_type": "paligemma"}, "PaliGemma"),
        ({"architectures": ["ShieldGemma2ForImageClassification"]}, "an image classifier"),
        ({"architectures": ["Gemma3TextForSequenceClassification"]}, "classifier or reward"),
        ({"use_bidirectional_attention": True, "architectures": ["Gemma3TextModel"]}, "EmbeddingGemma"),
        ({"is_causal": False}, "is_causal is False"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "lacks load_in_4bit.*BF16"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "lacks group_size"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups is None"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "hold no tensor of MLX 4-bit"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.Mine"}}, "own code, 'modeling_x.Mine'"),
    ],
)  # fmt: skip
def test_other_models_are_refused_by_their_names(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_source(folder(tmp_path / "m", TEXT_CONFIG | change))


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        ("qweight", "AWQ or GPTQ"), ("weight_packed", "compressed-tensors"), ("weight.absmax", "bitsandbytes"),
        ("scales", "MLX"), ("weight_scale", "FP8"), ("lora_A.weight", "not merged.*--lora"),
    ],
)  # fmt: skip
def test_tensors_of_other_work_are_named(suffix: str, words: str, tmp_path: Path) -> None:
    tensors = random_tensors(SPEC, seed=1)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors[f"model.layers.0.mlp.up_proj.{suffix}"] = torch.zeros(2, 2)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_source(write_model(tmp_path / "m", tensors))
    assert "Download" not in str(caught.value)


def test_shards_without_an_index_and_pickled_weights(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", random_tensors(SPEC, seed=2), shards=3)
    (path / "model.safetensors.index.json").unlink()
    source = open_source(path)
    assert source.notes == ["model.safetensors.index.json is missing: all 3 shards are read."]
    assert set(source.tensors) == set(random_tensors(SPEC, seed=2))
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither model.safetensors nor.*Download all files"):
        open_source(path)
    for shard in path.glob("model-*"):
        shard.unlink()
    (path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="weights as pytorch_model.bin, which can run code.*save_pretrained"):
        open_source(path)


def test_what_two_places_say_is_compared(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", random_tensors(SPEC, seed=2), shards=3)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": {"total_size": 7}}))
    assert "says 7 bytes of weights; its shards hold" in open_source(path).notes[0]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    source = open_source(folder(tmp_path / "a", TEXT_CONFIG | {"layer_types": kinds}))
    assert source.spec.layer_groups == ("local", "global", "local")
    assert source.notes == ["sliding_window_pattern 3 and layer_types differ: layer_types counts."]
    text = TEXT_CONFIG | {"tie_word_embeddings": False}
    outer = WRAPPER | {"text_config": text, "tie_word_embeddings": True, "sliding_window": 7}
    source = open_source(folder(tmp_path / "b", outer))
    assert source.spec == SPEC
    assert source.notes == [
        "tie_word_embeddings is True in config.json, False in its text_config: the first counts.",
        "sliding_window is 7 in config.json, 32 in its text_config: the second counts.",
        NO_IMAGES,
    ]


def test_what_shapes_greedy_answers_is_told(tmp_path: Path) -> None:
    plain = json.dumps({"do_sample": True, "top_k": 64, "repetition_penalty": 1.0, "num_beams": 1, "min_length": 0})
    assert open_source(folder(tmp_path / "m", **{"generation_config.json": plain})).notes == []
    asked = json.dumps({"repetition_penalty": 1.3, "suppress_tokens": [3]})
    said = open_source(folder(tmp_path / "n", **{"generation_config.json": asked})).notes
    assert said[0].startswith("left aside: repetition_penalty 1.3, suppress_tokens [3].") and len(said) == 1
    assert (
        "no_repeat_ngram_size 2"
        in open_source(folder(tmp_path / "o", TEXT_CONFIG | {"no_repeat_ngram_size": 2})).notes[0]
    )


def test_compiled_vision_towers_and_double_precision(tmp_path: Path) -> None:
    tensors = {f"_orig_mod.{name}": tensor for name, tensor in random_tensors(SPEC, seed=1).items()}
    vision = {f"_orig_mod.{n}": torch.from_numpy(t) for n, t in make_vision_tensors(TINY_VISION, 64).items()}
    wrapper = WRAPPER | {
        "vision_config": TINY_VISION, "boi_token_index": 90, "eoi_token_index": 91, "image_token_index": 92
    }  # fmt: skip
    assert open_source(write_model(tmp_path / "m", tensors, wrapper, extra=vision)).vision is not None
    double = {name: tensor.double() for name, tensor in random_tensors(SPEC, seed=1).items()}
    with pytest.raises(CheckpointError, match="stored as F64, which WiCore does not read"):
        open_source(write_model(tmp_path / "n", double))
