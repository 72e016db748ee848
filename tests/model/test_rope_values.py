"""Rope values, wherever a config.json puts them, are those of transformers' rotary embedding, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fuzz.models import CONFIG

from wicore_trt.errors import CheckpointError
from wicore_trt.model.hf_config import read_hf_config

PLAIN = {k: v for k, v in CONFIG.items() if not k.startswith("rope")}
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "ropes",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e3, "rope_scaling": LINEAR},
        {"rope_scaling": {"rope_theta": 5e5}},
        {"rope_scaling": LINEAR | {"rope_theta": 5e5}, "rope_theta": 5e5},
        {"rope_scaling": LINEAR | {"type": "linear", "original_max_position_embeddings": 64}},
        {"rope_parameters": {"full_attention": LINEAR | {"rope_theta": 2e4}, "sliding_attention": {"rope_theta": 3e3}}},
        {"rope_parameters": {"sliding_attention": {"rope_theta": 3e3}}, "partial_rotary_factor": 1},
    ],
)
def test_values_are_transformers(ropes: dict[str, Any]) -> None:
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig(**copy.deepcopy(PLAIN | ropes)))
    spec = read_hf_config(PLAIN | ropes, "config.json")
    steps = torch.arange(0, spec.head_dim, 2).float() / spec.head_dim
    torch.testing.assert_close(theirs.full_attention_inv_freq, spec.rope_theta**-steps / spec.rope_scaling_factor)
    torch.testing.assert_close(theirs.sliding_attention_inv_freq, spec.rope_local_theta**-steps)


@pytest.mark.parametrize(
    ("ropes", "words"),
    [
        (
            {"rope_scaling": LINEAR | {"rope_theta": 5e5}, "rope_theta": 1e6},
            "rope_theta is both 500000.0 and 1000000.0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "no rope_type"),
        ({"rope_scaling": LINEAR, "rope_parameters": {"full_attention": {}}}, "the rope factor is both"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_percent": 0.5}, "rope_percent"),
        ({"rope_scaling": LINEAR | {"attention_factor": 2.0}}, "rope_scaling.attention_factor"),
    ],
)
def test_what_is_read_differently_is_refused(ropes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_hf_config(PLAIN | ropes, "config.json")
