"""Image encoders of Hugging Face sources: casts, what is refused by name, and what is left aside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_images import BOI, EOI, SOFT, VISION, write_image_source
from tiny_source import open_intact

from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.format import write_config
from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.checkpoint.records import record_file
from wicore_trt.engine.build import build_engine
from wicore_trt.errors import CheckpointError
from wicore_trt.model.vision import PROJECTION, SOFT_NORM, vision_layer

FC1 = vision_layer(1, "mlp.fc1")
Edit = Callable[[Path], None]


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        ("float32", "float32"),
        ("auto", "bfloat16"),
        ("float16", "float16"),
        ("fp8", "bfloat16"),
        ("q4_0", "bfloat16"),
    ],
)
def test_products_have_the_engines_dtype_and_the_rest_is_float32(dtype: str, kept: str, tmp_path: Path) -> None:
    source = write_image_source(tmp_path / "m", hidden_size=32, intermediate_size=64)
    checkpoint = convert(source, tmp_path / "c", dtype=dtype)
    assert checkpoint.vision_file is not None and checkpoint.vision is not None
    given, stored = load_file(source / "model.safetensors"), load_file(checkpoint.vision_file)
    assert len(stored) == 39 and set(stored) < set(given)
    for name, tensor in stored.items():
        product = given[name].dim() > 1 and "position" not in name
        assert tensor.dtype == (getattr(torch, kept) if product else torch.float32), name
        assert torch.equal(tensor, given[name].to(tensor.dtype)), name
    assert (checkpoint.vision.begin_id, checkpoint.vision.soft_id, checkpoint.vision.end_id) == (BOI, SOFT, EOI)
    assert checkpoint.vision.to_dict() == checkpoint.config["wicore"]["vision"]
    assert open_intact(checkpoint.path).vision == checkpoint.vision


def change(**changes: torch.Tensor | None) -> Edit:
    """Replace tensors, or drop those that are None; "/" stands for a dot."""

    def edit(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        for name, tensor in changes.items():
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor
        save_file(tensors, path / "model.safetensors")

    return edit


def configure(file: str = "config.json", **keys: Any) -> Edit:
    def edit(path: Path) -> None:
        data = json.loads((path / file).read_text()) if (path / file).exists() else {}
        (path / file).write_text(json.dumps(data | keys))

    return edit


def drop_marks(path: Path) -> None:
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(
        text.replace("image_soft_token", "image_hard_token").replace("<start_of_image>", "<begin>")
    )
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": config["eos_token"]}))
    data = json.loads((path / "tokenizer.json").read_text())
    data["added_tokens"] = [token for token in data["added_tokens"] if "image" not in token["content"]]
    (path / "tokenizer.json").write_text(json.dumps(data))


REFUSED: dict[str, tuple[Edit, str]] = {
    "missing": (change(**{f"{FC1}.bias": None}), f"lacks 1 tensors of its image encoder: {FC1}.bias"),
    "unknown": (change(**{"vision_tower.extra": torch.ones(2)}), "does not have: vision_tower.vision_model.extra"),
    "shape": (change(**{PROJECTION: torch.ones(16, 32)}), rf"{PROJECTION} is \[16, 32\], not \[32, 16\]"),
    "type": (change(**{f"{FC1}.weight": torch.ones(48, 32, dtype=torch.int8)}), "is stored as I8, quantized"),
    "layers": (configure(vision_config=VISION | {"num_hidden_layers": 3}), "lacks 16 tensors of its image encoder"),
    "activation": (configure(vision_config=VISION | {"hidden_act": "gelu"}), "hidden_act is 'gelu'"),
    "tower": (configure(vision_config=VISION | {"model_type": "clip_vision_model"}), "model_type is 'clip"),
    "tokens": (configure(mm_tokens_per_image=5), "mm_tokens_per_image is 5; it must be a square"),
    "ids": (configure(image_token_index=384), "soft_id is 384; the text model has 384 tokens"),
    "marks": (drop_marks, rf"its tokenizer has no marks \[{BOI}, {SOFT}, {EOI}\] around images"),
    "mean": (configure("preprocessor_config.json", image_mean=[0.48, 0.45, 0.4]), "image_mean is .0.48, 0.45, 0.4"),
    "size": (configure("preprocessor_config.json", size={"height": 224, "width": 224}), "size is .'height': 224"),
    "inner": (configure("processor_config.json", image_processor={"resample": 3}), "resample is 3; .* need 2"),
}  # fmt: skip


def test_pan_and_scan_of_the_source_is_told(tmp_path: Path) -> None:
    source = write_image_source(tmp_path / "m")
    assert not any("pan and scan" in note for note in open_source(source).notes)
    configure("preprocessor_config.json", do_pan_and_scan=True)(source)
    assert any("preprocessor_config.json asks for pan and scan" in note for note in open_source(source).notes)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    edit, words = REFUSED[case]
    source = write_image_source(tmp_path / "m")
    edit(source)
    with pytest.raises(CheckpointError, match=words) as caught:
        convert(source, tmp_path / "c")
    assert ("--text-only" in str(caught.value)) != (case == "type") and not (tmp_path / "c").exists()
    checkpoint = convert(source, tmp_path / "c", text_only=True)
    assert checkpoint.vision is checkpoint.vision_file is None and checkpoint.rebuild_command.endswith(
        "--text-only --force"
    )


@pytest.mark.parametrize(
    ("dtype", "name", "value", "words"),
    [
        ("float16", f"{FC1}.weight", 7e4, "mlp.fc1.weight reaches 70000, beyond float16's 65504, in row 3"),
        ("float16", f"{FC1}.bias", 7e4, "mlp.fc1.bias reaches 70000, beyond float16's 65504, in row 3"),
        ("float16", vision_layer(1, "layer_norm1.bias"), 7e4, ""),
        ("bfloat16", f"{FC1}.weight", np.nan, "mlp.fc1.weight holds NaN in row 3"),
        ("bfloat16", SOFT_NORM, np.inf, "soft_emb_norm.weight holds an infinity in row 3"),
    ],
)  # fmt: skip
def test_values_are_checked_as_text_weights_are(
    dtype: str, name: str, value: float, words: str, tmp_path: Path
) -> None:
    source = write_image_source(tmp_path / "m")
    tensor = load_file(source / "model.safetensors")[name]
    tensor[3] = value
    change(**{name: tensor})(source)
    if not words:
        assert convert(source, tmp_path / "c", dtype=dtype).vision
        return
    with pytest.raises(CheckpointError, match=words):
        convert(source, tmp_path / "c", dtype=dtype)
    assert not (tmp_path / "c").exists()


def test_the_pooling_head_that_gemma_lacks_is_left_aside(tmp_path: Path) -> None:
    source = write_image_source(tmp_path / "m")
    change(**{
        "vision_tower.vision_model.head.probe": torch.ones(1, 1, 32),
        "vision_tower.vision_model.embeddings.position_ids": torch.arange(16)[None],
    })(source)  # fmt: skip
    checkpoint = convert(source, tmp_path / "c")
    assert checkpoint.vision_file and len(load_file(checkpoint.vision_file)) == 39


def test_the_encoder_of_an_older_checkpoint_is_left_aside(tmp_path: Path) -> None:
    """Its tensors are as they were in the source, and its configuration too."""
    checkpoint = convert(write_image_source(tmp_path / "m"), tmp_path / "c")
    assert checkpoint.vision_file
    save_file({"model.vision_tower.x": torch.ones(3, dtype=torch.int64)}, checkpoint.vision_file)
    block = checkpoint.config["wicore"]
    block["files"]["vision.safetensors"] = record_file(checkpoint.vision_file).to_dict()
    write_config(checkpoint.path, {**checkpoint.config, "wicore": {**block, "vision": {"vision_config": VISION}}})
    old = open_intact(checkpoint.path)
    assert old.vision is None and old.vision_file is not None
    notes = list[str]()
    engine = build_engine(old.path, tmp_path / "e", note=notes.append)
    assert notes == ["left aside: vision.safetensors of an older checkpoint; convert again for images."]
    assert engine.manifest.vision is None and "vision.safetensors" not in engine.manifest.files


@pytest.mark.parametrize("text_only", [False, True])
def test_an_adapter_of_the_encoder_is_merged(text_only: bool, tmp_path: Path) -> None:
    source, adapter = write_image_source(tmp_path / "m"), tmp_path / "adapter"
    adapter.mkdir()
    random = torch.Generator().manual_seed(3)
    places = {
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj": (32, 32),
        f"{FC1}": (48, 32),
        "language_model.layers.1.self_attn.q_proj": (64, 16),
    }
    parts = {name: (torch.randn(rows, 2, generator=random), torch.randn(2, columns, generator=random))
             for name, (rows, columns) in places.items()}  # fmt: skip
    tensors = {}
    for name, (left, right) in parts.items():
        tensors |= {f"base_model.model.model.{name}.lora_{kind}.weight": t for kind, t in (("A", right), ("B", left))}
    save_file(tensors, adapter / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 3}
    config["target_modules"] = ["fc1", "language_model.layers.1.self_attn.q_proj", "encoder.layers.0.self_attn.q_proj"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    notes = list[str]()
    made = convert(source, tmp_path / "c", dtype="float32", lora=adapter, text_only=text_only, note=notes.append)
    assert any("left aside: 4 tensors of the adapter" in note for note in notes) == text_only
    if text_only:
        return
    given, stored = load_file(source / "model.safetensors"), load_file(made.vision_file or "")
    for name, tensor in stored.items():
        want = given[name]
        if (name.removesuffix(".weight") in parts) and name.endswith(".weight"):
            left, right = parts[name.removesuffix(".weight")]
            want = want + 1.5 * left @ right
        torch.testing.assert_close(tensor, want, atol=1e-5, rtol=0)
