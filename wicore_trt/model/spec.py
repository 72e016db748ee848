"""What a Gemma 3 text model is: its sizes and constants, read from the model's own files.

Everything comes from `config.json` (both `gemma3_text` and the multimodal wrapper `gemma3`, both spellings of the
rope and window keys) or from GGUF metadata; nothing is remembered from a model card. This module knows neither
tensors nor torch. Invariant: a constructed spec is consistent (heads divide, one kind per layer).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wicore_trt.errors import CheckpointError

GLOBAL = "global"
LOCAL = "local"
GROUPS = (GLOBAL, LOCAL)


@dataclass(frozen=True, slots=True)
class Gemma3Spec:
    """Sizes of one Gemma 3 decoder.

    `layer_groups[i]` is "global" (full attention, `rope_theta`, positions divided by `rope_scaling_factor`) or
    "local" (the last `sliding_window` tokens with self, `rope_local_theta`, no scaling). Attention scores are
    scaled by `query_pre_attn_scalar ** -0.5`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    query_pre_attn_scalar: float
    rms_norm_eps: float
    rope_theta: float
    rope_local_theta: float
    rope_scaling_factor: float
    sliding_window: int
    layer_groups: tuple[str, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        if len(self.layer_groups) != self.num_layers or any(g not in GROUPS for g in self.layer_groups):
            raise CheckpointError(f"config: {self.num_layers} layers but layer kinds {self.layer_groups!r}.")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"config: {self.num_heads} heads do not divide by {self.num_kv_heads} KV heads.")
        if self.head_dim % 2 or self.sliding_window < 1:
            raise CheckpointError("config: head_dim must be even and sliding_window positive.")

    def layers_of(self, group: str) -> tuple[int, ...]:
        """Indices of the layers whose KV belongs to `group`, ascending."""
        return tuple(i for i, g in enumerate(self.layer_groups) if g == group)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_scale(self) -> float:
        """Factor on embeddings before the first layer; executors round it to the embedding's dtype as HF does."""
        return math.sqrt(self.hidden_size)

    def page_bytes(self, group: str, page_tokens: int, kv_bytes: int) -> int:
        """Bytes of one KV page: K and V of every layer in the group for `page_tokens` tokens."""
        return len(self.layers_of(group)) * 2 * page_tokens * self.kv_size * kv_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layer_groups": list(self.layer_groups)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Gemma3Spec:
        """Inverse of to_dict. Raises CheckpointError on unknown or missing keys."""
        try:
            return cls(**{**data, "layer_groups": tuple(data["layer_groups"])})
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"model spec: {error}.") from error

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Gemma3Spec:
        """Read a Hugging Face config.json of model_type gemma3_text or gemma3.

        Raises CheckpointError for another architecture or a missing key, naming it.
        """
        kind = config.get("model_type")
        if kind == "gemma3":
            text = dict(config.get("text_config") or {})
            text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", True))
        elif kind == "gemma3_text":
            text = dict(config)
        else:
            raise CheckpointError(
                f"model_type {kind!r} is not supported.", fix="WiCore builds Gemma 3: 'gemma3_text' or 'gemma3'."
            )
        text = _WITH_DEFAULTS | {k: v for k, v in text.items() if v is not None}
        if text.get("attn_logit_softcapping"):
            raise CheckpointError("attn_logit_softcapping is not part of Gemma 3.")
        if text.get("use_bidirectional_attention"):
            raise CheckpointError("config: bidirectional attention (EmbeddingGemma) is not a text generator.")
        if text["hidden_activation"] != "gelu_pytorch_tanh" or text["attention_bias"]:
            raise CheckpointError("config: only gelu_pytorch_tanh without attention bias is Gemma 3.")
        missing = [k for k in _REQUIRED if k not in text]
        if missing:
            raise CheckpointError(f"config.json lacks {', '.join(missing)}.")
        theta, local_theta, factor = _rope(text)
        return cls(
            vocab_size=int(text["vocab_size"]),
            hidden_size=int(text["hidden_size"]),
            num_layers=int(text["num_hidden_layers"]),
            num_heads=int(text["num_attention_heads"]),
            num_kv_heads=int(text["num_key_value_heads"]),
            head_dim=int(text["head_dim"]),
            intermediate_size=int(text["intermediate_size"]),
            query_pre_attn_scalar=float(text["query_pre_attn_scalar"]),
            rms_norm_eps=float(text["rms_norm_eps"]),
            rope_theta=theta,
            rope_local_theta=local_theta,
            rope_scaling_factor=factor,
            sliding_window=int(text["sliding_window"]),
            layer_groups=_layer_groups(text),
            max_position_embeddings=int(text["max_position_embeddings"]),
            tie_word_embeddings=bool(text["tie_word_embeddings"]),
            final_logit_softcapping=text.get("final_logit_softcapping"),
        )


_REQUIRED = ("hidden_size", "num_hidden_layers", "intermediate_size")

# What transformers' Gemma3TextConfig assumes for a key that config.json leaves out (27B-IT leaves out most).
_WITH_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


def _rope(text: Mapping[str, Any]) -> tuple[float, float, float]:
    """Global base, local base and linear factor, from the old keys or from rope_parameters (transformers 5)."""
    theta, local_theta = float(text["rope_theta"]), float(text["rope_local_base_freq"])
    scaling = text.get("rope_scaling")
    parameters = text.get("rope_parameters")
    if parameters:
        full = parameters.get("full_attention", {})
        theta = float(full.get("rope_theta", theta))
        sliding = parameters.get("sliding_attention", {})
        local_theta = float(sliding.get("rope_theta", local_theta))
        if sliding.get("rope_type", "default") != "default":
            raise CheckpointError("rope scaling on local layers is not part of Gemma 3.")
        scaling = full
    if not scaling:
        return theta, local_theta, 1.0
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, local_theta, 1.0
    if kind != "linear":
        raise CheckpointError(f"rope type {kind!r} is not supported; Gemma 3 uses 'linear' on global layers.")
    return theta, local_theta, float(scaling["factor"])


def _layer_groups(text: Mapping[str, Any]) -> tuple[str, ...]:
    """Layer kinds from `layer_types`, or from the window pattern: every pattern-th layer is global."""
    count = int(text["num_hidden_layers"])
    types = text.get("layer_types")
    if types:
        names = {"full_attention": GLOBAL, "sliding_attention": LOCAL}
        unknown = sorted(set(types) - set(names))
        if unknown:
            raise CheckpointError(f"config: layer types {unknown} are not Gemma 3.")
        return tuple(names[t] for t in types)
    pattern = int(text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or 6)
    return tuple(LOCAL if (i + 1) % pattern else GLOBAL for i in range(count))
