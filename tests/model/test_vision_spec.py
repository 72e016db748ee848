"""Vision specs: config.json is read as transformers reads it, names and shapes are those of its model, bad values are
refused by their key."""

from __future__ import annotations

from typing import Any

import pytest

from wicore_trt.errors import CheckpointError
from wicore_trt.model.hf_config import read_hf_config, read_vision_config
from wicore_trt.model.vision import VisionSpec, vision_tensors

TEXT: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
VISION: dict[str, Any] = {
    "image_size": 56, "patch_size": 14, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 20, "vision_use_head": False,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_type": "gemma3", "text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4,
    "boi_token_index": 290, "eoi_token_index": 291, "image_token_index": 292,
}  # fmt: skip


def _read(config: dict[str, Any]) -> VisionSpec | None:
    return read_vision_config(config, read_hf_config(config), "m/config.json")


def test_a_config_gives_the_names_and_shapes_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3Config(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    spec = _read(config.to_dict())
    assert spec is not None and spec == _read(CONFIG) == VisionSpec.from_dict(spec.to_dict())
    assert (spec.begin_id, spec.soft_id, spec.end_id) == (290, 292, 291)
    model = transformers.Gemma3ForConditionalGeneration(config)
    theirs = {
        name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model."): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not name.startswith(("model.language_model.", "lm_head"))
    }
    assert vision_tensors(spec) == theirs
    assert read_vision_config(TEXT, read_hf_config(TEXT)) is None


def test_sizes_of_the_published_encoder() -> None:
    vision = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16}
    config = {"model_type": "gemma3", "text_config": TEXT | {"hidden_size": 5376}, "vision_config": vision}
    spec = _read(config | {"vision_config": vision | {"num_hidden_layers": 27, "patch_size": 14}})
    assert spec is not None
    assert (spec.patches, spec.pooled_side, spec.head_dim, spec.tokens) == (4096, 4, 72, 256)
    assert (spec.begin_id, spec.soft_id, spec.end_id) == (255_999, 262_144, 256_000)
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) * (14**2 if len(shape) == 4 else 1)
             for name, shape in vision_tensors(spec).items() if name.startswith("vision_tower")]  # fmt: skip
    assert 415e6 < sum(sizes) < 418e6


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_size", 57), ("image_size", [56, 56]), ("image_size", 10**6), ("patch_size", 0), ("patch_size", 15),
        ("hidden_size", 10**9), ("num_attention_heads", 5), ("num_hidden_layers", 2.0), ("hidden_act", "gelu"),
        ("layer_norm_eps", float("nan")), ("num_channels", 1), ("model_type", "clip_vision_model"),
        ("mm_tokens_per_image", 5), ("mm_tokens_per_image", 9), ("image_token_index", 290), ("boi_token_index", -1),
    ],
)  # fmt: skip
def test_values_that_cannot_be_right(key: str, value: Any) -> None:
    config = CONFIG | (
        {key: value} if key in CONFIG and key != "model_type" else {"vision_config": VISION | {key: value}}
    )
    asked = {"image_size": "", "boi_token_index": "boi_token_index"}.get(key, key)
    with pytest.raises(CheckpointError) as caught:
        _read(config)
    assert str(caught.value).startswith("m/config.json") and asked in str(caught.value)


def test_a_manifest_with_other_keys_is_refused() -> None:
    spec = _read(CONFIG)
    assert spec is not None
    for data in ({**spec.to_dict(), "more": 1}, {"image_size": 56}, [1]):
        with pytest.raises(CheckpointError, match=r"^engine\.json: these keys are missing or unknown: "):
            VisionSpec.from_dict(data, "engine.json")  # type: ignore[arg-type]
