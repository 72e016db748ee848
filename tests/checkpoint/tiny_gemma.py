"""Tiny random Gemma 3 models on disk, in the spellings that sources use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from wicore_trt.checkpoint.names import hf_shapes
from wicore_trt.model.spec import Gemma3Spec

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "query_pre_attn_scalar": 24,
    "sliding_window": 32,
    "sliding_window_pattern": 3,
    "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
PREFIXES = {"plain": ("model.", "lm_head."), "old": ("language_model.model.", "language_model.lm_head.")}
PREFIXES["new"] = ("model.language_model.", "lm_head.")


def random_tensors(spec: Gemma3Spec, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Random text tensors of `spec` under canonical names."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in hf_shapes(spec).items()}


def write_model(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any] | None = None,
    *,
    shards: int = 1,
    prefix: str = "plain",
    extra: dict[str, torch.Tensor] | None = None,
) -> Path:
    """A Hugging Face directory; `extra` tensors (vision) are written under their own names."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or TEXT_CONFIG))
    body, head = PREFIXES[prefix]
    named = {
        (head + n.removeprefix("lm_head.") if n.startswith("lm_head.") else body + n.removeprefix("model.")): t
        for n, t in tensors.items()
    } | (extra or {})
    if shards == 1:
        save_file(named, directory / "model.safetensors")
        return directory
    names, weight_map = list(named), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: named[n] for n in names[i::shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory
