"""Random tiny Gemma 3 models: transformers' on one side, the unified checkpoint's tensors on the other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lazy import LazyModule

from wicore_trt.checkpoint.names import Role, hf_shapes, unified_tensors
from wicore_trt.checkpoint.quantize import quantize_e4m3_per_channel
from wicore_trt.model.hf_config import read_hf_config
from wicore_trt.model.spec import Gemma3Spec

transformers = LazyModule("transformers")


@dataclass(frozen=True)
class TinyModel:
    """One set of weights seen by both sides. `tensors` are the unified checkpoint's, float32."""

    hf: Any
    spec: Gemma3Spec
    tensors: dict[str, torch.Tensor]

    @torch.inference_mode()
    def hf_logits(self, token_ids: list[int]) -> torch.Tensor:
        """transformers' logits [len(token_ids), vocab] of one sequence."""
        return self.hf(torch.tensor([token_ids])).logits[0]


def unified(spec: Gemma3Spec, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of an engine from a transformers state dict: stacked, norms as 1 + w, no tied head; float32."""
    tensors = {}
    for tensor in unified_tensors(spec):
        if tensor.role is Role.HEAD and spec.tie_word_embeddings:
            continue
        whole = torch.cat([state[name].float() for name in tensor.sources])
        tensors[tensor.name] = whole + 1 if tensor.role is Role.NORM else whole
    return tensors


def cast(spec: Gemma3Spec, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All but the norms rounded to `dtype`; float8_e4m3fn quantizes the linears per channel, the rest to bfloat16."""
    out = {}
    for tensor in unified_tensors(spec):
        if tensor.name not in tensors:
            continue
        w = tensors[tensor.name]
        if dtype == torch.float8_e4m3fn and tensor.role is Role.LINEAR:
            bits, scale = quantize_e4m3_per_channel(w.numpy())
            out[tensor.name] = torch.from_numpy(bits).view(dtype)
            out[tensor.scale_name] = torch.from_numpy(scale)
        else:
            base = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
            out[tensor.name] = w if tensor.role is Role.NORM else w.to(base)
    return out


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
    config = transformers.Gemma3TextConfig(**{**settings, **overrides}, attn_implementation="eager")
    torch.manual_seed(seed)
    hf = transformers.Gemma3ForCausalLM(config).eval().float()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(0, 0.4)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(0, 0.6)
            else:  # keep the variance of what flows through, so that attention is far from uniform
                parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    spec = read_hf_config(config.to_dict())
    return TinyModel(hf, spec, unified(spec, hf.state_dict()))


def overflowing_model(where: str) -> TinyModel:
    """A model whose residual stream, or whose gate * up, goes far beyond float16's 65,504."""
    model = tiny_model(11, num_hidden_layers=4, sliding_window_pattern=2)
    norms = {
        "residual": ("post_attention_layernorm", "post_feedforward_layernorm"),
        "mlp": ("pre_feedforward_layernorm",),
    }[where]
    factor = {"residual": 50_000.0, "mlp": 900.0}[where]
    with torch.no_grad():
        for name, parameter in model.hf.named_parameters():
            if name.endswith(tuple(f"{n}.weight" for n in norms)):
                parameter.add_(1).mul_(factor).sub_(1)
    tensors = dict(model.tensors)
    for name in tensors:
        unified = ("post_layernorm", "post_feedforward_layernorm") if where == "residual" else norms
        if name.endswith(tuple(f".{n}.weight" for n in unified)):
            tensors[name] = tensors[name] * factor
    return TinyModel(model.hf, model.spec, tensors)


def transformers_model(spec: Gemma3Spec, tensors: Mapping[str, torch.Tensor]) -> Any:
    """transformers' model around an engine's fused float32 tensors, sharing their memory (norms apart).

    The inverse of `unified` and `backends.torch.weights.fuse_weights`; for models without transformers weights at hand.
    """
    names = {"global": "full_attention", "local": "sliding_attention"}
    config = transformers.Gemma3TextConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        query_pre_attn_scalar=int(spec.query_pre_attn_scalar),
        rms_norm_eps=spec.rms_norm_eps,
        sliding_window=spec.sliding_window,
        layer_types=[names[g] for g in spec.layer_groups],
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=spec.tie_word_embeddings,
        final_logit_softcapping=spec.final_logit_softcapping,
        rope_parameters={
            "full_attention": {
                "rope_type": "linear",
                "factor": spec.rope_scaling_factor,
                "rope_theta": spec.rope_theta,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": spec.rope_local_theta},
        },
    )
    state: dict[str, torch.Tensor] = {}
    shapes = hf_shapes(spec)
    for tensor in unified_tensors(spec):
        if tensor.role is Role.HEAD and spec.tie_word_embeddings:
            continue
        name, part = tensor.name, None
        if name.endswith((".mlp.fc.weight", ".mlp.gate.weight")):
            part = 0 if ".fc." in name else 1
            name = name.replace(".mlp.fc.", ".mlp.gate_up.").replace(".mlp.gate.", ".mlp.gate_up.")
        w = tensors[name] if part is None else tensors[name].chunk(2)[part]
        for source, rows in zip(tensor.sources, w.split([shapes[s][0] for s in tensor.sources]), strict=True):
            state[source] = rows - 1 if tensor.role is Role.NORM else rows
    with torch.device("meta"):
        hf = transformers.Gemma3ForCausalLM(config)
    hf.load_state_dict(state, strict=False, assign=True)
    hf.tie_weights()
    hf.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    hf.model.rotary_emb = type(hf.model.rotary_emb)(config)
    assert not any(t.is_meta for t in (*hf.parameters(), *hf.buffers()))
    return hf.eval()
