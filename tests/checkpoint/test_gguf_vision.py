"""Image encoders of GGUF models, written by the rules of llama.cpp's and Ollama's converters, against the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_images import BOI, EOI, SOFT, TEMPLATE, TEXT, VISION, make_vision_tensors, write_image_source

from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.engine.build import build_engine
from wicore_trt.errors import CheckpointError
from wicore_trt.model.vision import PROJECTION, SOFT_NORM

PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"]
_NAMES = {  # gguf's tensor_mapping.py of SigLIP, by which llama.cpp's converter works
    "vision_tower.vision_model.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.vision_model.embeddings.position_embedding": "v.position_embd",
    "vision_tower.vision_model.encoder.layers.": "v.blk.",
    "vision_tower.vision_model.post_layernorm": "v.post_ln",
    "self_attn.out_proj": "attn_out",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "layer_norm": "ln",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "multi_modal_projector.mm_": "mm.",
    "projection_weight": "projection.weight",
}
_OLLAMA = [  # the replacements of convert_gemma3.go, in order
    ("vision_tower.vision_model.embeddings", "v"), ("vision_tower.vision_model", "v"), ("encoder.layers", "blk"),
    ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
    ("self_attn.out_proj", "attn_output"), ("input_projection_weight", "input_projection.weight"),
    ("multi_modal_projector", "mm"),
]  # fmt: skip


def respell(name: str, table: Any) -> str:
    for ours, theirs in table:
        name = name.replace(ours, theirs)
    return name


def write_text(path: Path, *, soft: str = "<image_soft_token>", ollama: bool = False) -> dict[str, np.ndarray]:
    """The text model of a tiny source, as llama.cpp's converter writes it; returns its vision tensors for Ollama."""
    spec = open_source(write_image_source(path.parent / f"hf-{path.stem}"))
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.add_context_length(TEXT["max_position_embeddings"])
    writer.add_block_count(TEXT["num_hidden_layers"])
    writer.add_embedding_length(TEXT["hidden_size"])
    writer.add_feed_forward_length(TEXT["intermediate_size"])
    writer.add_head_count(TEXT["num_attention_heads"])
    writer.add_head_count_kv(TEXT["num_key_value_heads"])
    writer.add_key_length(TEXT["head_dim"])
    writer.add_value_length(TEXT["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(TEXT["sliding_window"])
    writer.add_array("gemma3.attention.sliding_window_pattern", [True, False, True, False])
    writer.add_tokenizer_model("llama")
    letters = [*(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz\n\u2581"]
    pieces = [*PIECES, *letters]
    pieces += [*(f"<unused{i}>" for i in range(TEXT["vocab_size"] - len(pieces) - 1)), soft]
    writer.add_token_list(pieces)
    writer.add_token_types([6 if p.startswith("<0x") else 3 if p.startswith("<") else 1 for p in pieces])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_chat_template(TEMPLATE)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
             "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
             "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.o_proj": "attn_output",
             "self_attn.": "attn_", "_proj": "", "mlp.": "ffn_", "model.layers.": "blk.",
             "model.embed_tokens": "token_embd", "model.norm": "output_norm"}  # fmt: skip
    for name in spec.tensors:
        values = spec.read_tensor(name)
        writer.add_tensor(respell(name, names.items()), values + np.float32("norm" in name))
    if ollama:
        for key, value in {"block_count": 2, "embedding_length": 32, "feed_forward_length": 48, "image_size": 56,
                           "patch_size": 14, "num_channels": 3, "attention.head_count": 2}.items():  # fmt: skip
            writer.add_uint32(f"gemma3.vision.{key}", value)
        writer.add_float32("gemma3.vision.attention.layer_norm_epsilon", 1e-6)
        writer.add_uint32("gemma3.mm.tokens_per_image", 4)
        for name, values in make_vision_tensors(VISION, 16).items():
            norm = not respell(name, _OLLAMA).startswith("v.") and name.endswith("_norm.weight")
            writer.add_tensor(respell(name, _OLLAMA), values + np.float32(norm))
    finish(writer)
    return make_vision_tensors(VISION, 16)


def write_mmproj(path: Path, *, swapped: bool = False, half: bool = False, **keys: Any) -> dict[str, np.ndarray]:
    """Gemma3VisionModel of llama.cpp's converter; `swapped`: the names of its first script. Returns the original."""
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_string("general.type", "mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(keys.pop("projector", "gemma3"))
    writer.add_vision_projection_dim(16)
    writer.add_vision_image_size(keys.pop("image_size", 56))
    writer.add_vision_patch_size(14)
    writer.add_vision_embedding_length(32)
    writer.add_vision_feed_forward_length(48)
    writer.add_vision_block_count(2)
    writer.add_vision_head_count(2)
    writer.add_vision_image_mean(keys.pop("mean", [0.5] * 3))
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(2)
    original = make_vision_tensors(VISION, 16)
    table = _NAMES | ({"mlp.fc1": "ffn_down", "mlp.fc2": "ffn_up"} if swapped else {})
    for name, values in original.items():
        stored = values + np.float32(name == SOFT_NORM)
        if half and values.ndim == 2 and "position" not in name:
            stored = original[name] = values.astype(np.float16)
            original[name] = original[name].astype(np.float32)
        if name != keys.get("drop"):
            writer.add_tensor(respell(name, table.items()), stored)
    finish(writer)
    return original


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["now", "swapped", "half", "ollama"])
def test_the_encoder_is_the_original(kind: str, tmp_path: Path) -> None:
    path, mmproj = tmp_path / "m.gguf", None if kind == "ollama" else tmp_path / "mmproj.gguf"
    original = write_text(path, ollama=kind == "ollama")
    if mmproj:
        original = write_mmproj(mmproj, swapped=kind == "swapped", half=kind == "half")
    checkpoint = convert(path, tmp_path / "c", dtype="float32", mmproj=mmproj)
    spec = convert(tmp_path / "hf-m", tmp_path / "hf", dtype="float32").vision
    assert checkpoint.vision_file and checkpoint.vision and spec
    assert checkpoint.vision.to_dict() == spec.to_dict() | {"soft_id": 383} and checkpoint.vision.marks == (
        BOI,
        383,
        EOI,
    )
    stored = load_file(checkpoint.vision_file)
    assert set(stored) == set(original)
    for name, values in original.items():
        if name == SOFT_NORM:  # 1 was added, and is taken off again
            np.testing.assert_allclose(stored[name], values, atol=1.3e-7)
        else:
            np.testing.assert_array_equal(stored[name], values, err_msg=name)
    assert stored[PROJECTION].shape == (32, 16)


def test_an_early_file_without_the_soft_token_gets_one(tmp_path: Path) -> None:
    write_text(tmp_path / "m.gguf", soft="<unused999>")
    write_mmproj(tmp_path / "mmproj-m.gguf")
    notes = list[str]()
    engine = build_engine(tmp_path / "m.gguf", tmp_path / "e", mmproj=tmp_path / "mmproj-m.gguf", note=notes.append)
    assert "<unused999> becomes <image_soft_token>, which the file lacks." in notes
    assert engine.manifest.vision and engine.manifest.vision.soft_id == 383
    assert f"--mmproj {tmp_path / 'mmproj-m.gguf'} --force" in engine.rebuild_advice
    assert "<unused999>" not in engine.read("tokenizer.json").decode()


def test_a_folder_with_one_mmproj_takes_it_and_of_several_none(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_text(folder / "m.gguf")
    write_mmproj(folder / "mmproj-F16.gguf")
    assert (folder / "hf-m").rename(tmp_path / "hf-m")
    source = open_source(folder)
    assert source.vision and "the image encoder is that of mmproj-F16.gguf" in source.notes[-1]
    assert open_source(folder, text_only=True).vision is None
    write_mmproj(folder / "mmproj-F32.gguf")
    source = open_source(folder)
    assert source.vision is None and "2 image encoders; --mmproj" in source.notes[-1]
    assert open_source(folder, mmproj=folder / "mmproj-F32.gguf").vision
    (folder / "mmproj-F32.gguf").touch()  # of the door's files too
    with pytest.raises(CheckpointError, match="changed"):
        source = open_source(folder, mmproj=folder / "mmproj-F32.gguf")
        write_mmproj(folder / "mmproj-F32.gguf")
        source.check_unchanged()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"projector": "gemma3nv"}, "its projector is 'gemma3nv'"),
        ({"mean": [0.48, 0.45, 0.4]}, "clip.vision.image_mean must be 0.5"),
        ({"image_size": 57}, "patch_size is 14; it must divide 57"),
        ({"drop": PROJECTION}, "lacks 1 tensors of its image encoder"),
    ],
)
def test_another_encoder_is_refused(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_text(tmp_path / "m.gguf")
    write_mmproj(tmp_path / "p.gguf", **keys)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_source(tmp_path / "m.gguf", mmproj=tmp_path / "p.gguf")
    assert "--text-only" in str(caught.value)


def test_what_takes_no_mmproj_says_so(tmp_path: Path) -> None:
    write_text(tmp_path / "m.gguf", ollama=True)
    write_mmproj(tmp_path / "p.gguf")
    for source, words in (("m.gguf", "has an image encoder of its own"), ("hf-m", "belongs to a GGUF model")):
        with pytest.raises(CheckpointError, match=words):
            open_source(tmp_path / source, mmproj=tmp_path / "p.gguf")
    with pytest.raises(CheckpointError, match=r"and this file as --mmproj"):
        open_source(tmp_path / "p.gguf")
    assert SOFT  # the original's id, which the GGUF's need not be
