"""Gemma 3 class that `trtllm-build` uses in place of its own: `--model_cls_file` this file, with the name below.

TensorRT-LLM 1.2's own class differs from Gemma 3 in two ways, which this one repairs:
- it applies `rotary_scaling` to local layers too, which Gemma 3 never scales (layers/attention.py,
  create_attention_const_params: both tables get the same factor);
- q_norm and k_norm run with its default epsilon, 1e-5, not the model's 1e-6 (models/gemma/model.py passes none on).

`trtllm-build` loads this file by its path, so it imports only what a bare interpreter has until the class is asked for.
Invariant: an engine without the repairs is not kept; `compile` looks for MARKER in the build's output.
"""

from __future__ import annotations

from typing import Any

MODEL_CLASS = "WicoreGemma3ForCausalLM"
MARKER = "wicore: Gemma 3 repaired"


def __getattr__(name: str) -> Any:
    """Make the model class on first use, because only `trtllm-build` has tensorrt_llm."""
    if name != MODEL_CLASS:
        raise AttributeError(name)
    from tensorrt_llm.functional import RopeEmbeddingUtils, RotaryScalingType
    from tensorrt_llm.models.gemma.model import GemmaForCausalLM

    def __init__(self: Any, config: Any) -> None:
        GemmaForCausalLM.__init__(self, config)
        tables = RopeEmbeddingUtils.create_sinusoidal_positions_for_attention_plugin(
            config.max_position_embeddings, config.head_size, config.rope_local_base_freq
        )
        repair(self, config, tables, RotaryScalingType.none)

    return type(MODEL_CLASS, (GemmaForCausalLM,), {"__init__": __init__, "__module__": __name__})


def repair(model: Any, config: Any, local_tables: Any, no_scaling: Any) -> None:
    """Give local layers the unscaled rope `local_tables` (inverse frequencies, cos and sin) and all q and k norms the
    model's epsilon. A missing attribute means another version than 1.2: AttributeError, and the build ends."""
    model.rotary_inv_freq_local.value, model.embed_positions_for_gpt_attention_local.value = local_tables
    local = 0
    for layer in model.transformer.layers:
        attention = layer.attention
        for norm in (attention.q_layernorm, attention.k_layernorm):
            assert hasattr(norm, "eps")
            norm.eps = config.norm_epsilon
        if attention.is_local:
            local += 1
            assert hasattr(attention, "rotary_embedding_scale_type") and hasattr(attention, "rotary_embedding_scale")
            attention.rotary_embedding_scale_type, attention.rotary_embedding_scale = no_scaling, 1.0
    print(f"{MARKER}: {local} local layers without rope scaling, norm epsilon {config.norm_epsilon}", flush=True)
