"""Specs: types and ranges are checked whatever the values come from, and errors name the key of the file."""

from __future__ import annotations

from typing import Any

import pytest

from wicore_trt.errors import CheckpointError
from wicore_trt.model.hf_config import read_hf_config
from wicore_trt.model.spec import Gemma3Spec

CONFIG: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "sliding_window": 8,
    "max_position_embeddings": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
NAN, INF = float("nan"), float("inf")
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9), ("num_hidden_layers", 0), ("num_hidden_layers", 3.0), ("num_hidden_layers", True),
        ("hidden_size", "32"), ("hidden_size", 10**9), ("head_dim", 15), ("head_dim", 1e308), ("vocab_size", 10**18),
        ("num_attention_heads", 0), ("num_key_value_heads", 3), ("rms_norm_eps", -1), ("rms_norm_eps", INF),
        ("rms_norm_eps", NAN), ("rms_norm_eps", "1e-6"), ("query_pre_attn_scalar", 0), ("query_pre_attn_scalar", NAN),
        ("sliding_window", 0), ("sliding_window", 10**18), ("sliding_window", None), ("max_position_embeddings", -5),
        ("rope_theta", 0), ("rope_theta", [1]), ("rope_local_base_freq", -1.0), ("tie_word_embeddings", "false"),
        ("tie_word_embeddings", 1), ("final_logit_softcapping", 0.0), ("final_logit_softcapping", True),
        ("final_logit_softcapping", NAN), ("layer_types", ["full_attention"]), ("layer_types", "full_attention"),
        ("layer_types", [["full_attention"]] * 3), ("layer_types", ["chunked_attention"] * 3),
        ("hidden_activation", "relu"), ("hidden_act", "silu"), ("attention_bias", "no"), ("mlp_bias", True),
        ("attn_logit_softcapping", 50.0), ("use_bidirectional_attention", True), ("num_experts", 8),
        ("rope_scaling", "linear"), ("rope_scaling", {"factor": 8.0}),
        ("rope_scaling", {"rope_type": "linear"}), ("rope_scaling", {"rope_type": "yarn", "factor": 8.0}),
        ("rope_scaling", LINEAR | {"factor": 0}), ("rope_scaling", LINEAR | {"beta_fast": 32}),
        ("rope_parameters", [1]), ("rope_parameters", {"rope_theta": 1e6}),
        ("rope_parameters", {"full_attention": None}),
        ("rope_parameters", {"sliding_attention": LINEAR}),
        ("rope_parameters", {"full_attention": {"rope_theta": 5e5}}),
    ],
)  # fmt: skip
def test_values_that_cannot_be_right(key: str, value: Any) -> None:
    for config in (
        CONFIG | {key: value},
        {
            "model_type": "gemma3",
            "text_config": {k: v for k, v in (CONFIG | {key: value}).items() if k != "model_type"},
        },
    ):
        with pytest.raises(CheckpointError) as caught:
            read_hf_config(config, "m/config.json")
        message = str(caught.value)
        asked = {"rope_scaling": "rope", "num_key_value_heads": "num_key_value_heads"}.get(key, key)
        if key == "rope_parameters" and "full_attention" in value and value["full_attention"]:
            asked = "rope_theta"
        assert message.startswith("m/config.json") and asked in message and message.isprintable(), message


def test_patterns_and_wrappers() -> None:
    plain = {k: v for k, v in CONFIG.items() if k != "layer_types"}
    for wrong in (0, -2, "x", 1.0):
        with pytest.raises(CheckpointError, match="sliding_window_pattern"):
            read_hf_config(plain | {"sliding_window_pattern": wrong})
    with pytest.raises(CheckpointError, match="sliding_window_pattern is both 2 and 3"):
        read_hf_config(plain | {"sliding_window_pattern": 2, "_sliding_window_pattern": 3})
    with pytest.raises(CheckpointError, match="sliding_window_pattern is both 3 and 6"):  # transformers reads 6
        read_hf_config(plain | {"_sliding_window_pattern": 3})
    for text in ([1], "x", None):
        with pytest.raises(CheckpointError, match="text_config"):
            read_hf_config({"model_type": "gemma3", "text_config": text})
    with pytest.raises(CheckpointError, match="text_config: model_type is 'gemma2'"):
        read_hf_config({"model_type": "gemma3", "text_config": CONFIG | {"model_type": "gemma2"}})
    with pytest.raises(CheckpointError, match=r"model_type \['gemma3'\] is not supported"):
        read_hf_config({"model_type": ["gemma3"]})


def test_keys_that_mean_nothing_to_gemma_are_left_alone() -> None:
    harmless = {"torch_dtype": "bfloat16", "use_cache": True, "unsloth_fixed": True, "attention_bias": False,
                "attn_logit_softcapping": None, "_name_or_path": "x", "cache_implementation": "hybrid"}  # fmt: skip
    assert read_hf_config(CONFIG | harmless) == read_hf_config(CONFIG)


@pytest.mark.parametrize(
    "change",
    [{"rms_norm_eps": NAN}, {"num_layers": 10**9}, {"tie_word_embeddings": "false"}, {"layer_groups": "local"},
     {"layer_groups": ["local", "x", "global"]}, {"head_dim": 0}, {"extra": 1}, {"vocab_size": True}],
)  # fmt: skip
def test_our_own_files_are_checked_alike(change: dict[str, Any]) -> None:
    good = read_hf_config(CONFIG).to_dict()
    assert Gemma3Spec.from_dict(good).to_dict() == good
    with pytest.raises(CheckpointError, match=next(iter(change))):
        Gemma3Spec.from_dict(good | change)
    with pytest.raises(CheckpointError, match="missing or unknown: head_dim"):
        Gemma3Spec.from_dict({k: v for k, v in good.items() if k != "head_dim"})
