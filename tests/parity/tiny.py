"""Random tiny Gemma 3 models: transformers' on one side, the unified checkpoint's tensors on the other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from wicore_trt.checkpoint.names import Role, unified_tensors
from wicore_trt.model.spec import Gemma3Spec


@dataclass(frozen=True)
class TinyModel:
    """One set of weights seen by both sides. `tensors` are the unified checkpoint's, float32."""

    hf: Gemma3ForCausalLM
    spec: Gemma3Spec
    tensors: dict[str, torch.Tensor]

    @torch.inference_mode()
    def hf_logits(self, token_ids: list[int]) -> torch.Tensor:
        """transformers' logits [len(token_ids), vocab] of one sequence."""
        return self.hf(torch.tensor([token_ids])).logits[0]


def unified(spec: Gemma3Spec, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Unified tensors of a transformers state dict: stacked, norms as 1 + w, in float32."""
    tensors = {}
    for tensor in unified_tensors(spec):
        whole = torch.cat([state[name].float() for name in tensor.sources])
        tensors[tensor.name] = whole + 1 if tensor.role is Role.NORM else whole
    return tensors


def tiny_model(seed: int, **overrides: Any) -> TinyModel:
    """A model of random shape and lively weights; `overrides` are Gemma3TextConfig fields."""
    rng = random.Random(seed)
    kv_heads, repeat = rng.choice((1, 2, 3)), rng.choice((1, 2, 4))
    heads = kv_heads * repeat
    settings: dict[str, Any] = {
        "vocab_size": rng.choice((97, 256, 301)),
        "hidden_size": heads * rng.choice((8, 12, 16)),
        "intermediate_size": rng.choice((40, 96, 130)),
        "num_hidden_layers": rng.randint(2, 7),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice((16, 32, 48)),
        "query_pre_attn_scalar": rng.choice((16, 24, 40)),
        "sliding_window": rng.choice((5, 16, 33)),
        "sliding_window_pattern": rng.choice((2, 3, 6)),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": {
            "full_attention": {
                "rope_theta": 1e6,
                **({"rope_type": "linear", "factor": 8.0} if rng.random() < 0.5 else {"rope_type": "default"}),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "final_logit_softcapping": rng.choice((None, None, 30.0)),
    }
    config = Gemma3TextConfig(**{**settings, **overrides}, attn_implementation="eager")
    torch.manual_seed(seed)
    hf = Gemma3ForCausalLM(config).eval().float()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(0, 0.4)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(0, 0.6)
            else:  # keep the variance of what flows through, so that attention is far from uniform
                parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    spec = Gemma3Spec.from_hf_config(config.to_dict())
    return TinyModel(hf, spec, unified(spec, hf.state_dict()))
