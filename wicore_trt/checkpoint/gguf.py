"""Gemma 3 from a GGUF file: names, spec and dequantized rows.

Follows what llama.cpp's converter wrote and its Gemma 3 graph assumes (convert_hf_to_gguf.py, src/llama-model.cpp),
because GGUF carries no config.json. It knows nothing of the unified checkpoint. Invariant: tensors come out with
Hugging Face's names and meaning, so norm weights are the file's minus 1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from wicore_trt.checkpoint.gguf_file import GgufFile, import_gguf, open_gguf
from wicore_trt.checkpoint.gguf_tokenizer import end_tokens, write_tokenizer
from wicore_trt.checkpoint.names import HF_EMBEDDING, HF_FINAL_NORM, HF_LM_HEAD, check_tensors
from wicore_trt.checkpoint.safetensors_io import TensorInfo
from wicore_trt.checkpoint.source import Source
from wicore_trt.errors import CheckpointError
from wicore_trt.model.spec import GLOBAL, LOCAL, Gemma3Spec

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q5_K", "Q6_K")

_TOP = {"token_embd.weight": HF_EMBEDDING, "output_norm.weight": HF_FINAL_NORM, "output.weight": HF_LM_HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)\.weight")
_LAYERS_OF_27B = 62
_DEFAULT_PATTERN = 6
_DEFAULT_LOCAL_THETA = 10_000.0


class GgufSource(Source):
    """An opened GGUF file of architecture gemma3."""

    def __init__(self, path: Path) -> None:
        self._file = open_gguf(path)
        self.name, self.revision = str(path), None
        self.spec = spec_of(self._file)
        self.config, self.vision = {}, {}
        self._names = {_hf_name(name): name for name in self._file.tensors}
        self.tensors = {
            hf: TensorInfo(self._file.tensors[n].shape, self._file.tensors[n].type_name)
            for hf, n in self._names.items()
        }
        check_tensors(self.spec, {n: info.shape for n, info in self.tensors.items()})
        odd = sorted({f"{info.dtype}" for info in self.tensors.values() if info.dtype not in TYPES})
        if odd:
            raise CheckpointError(
                f"{path} uses {', '.join(odd)}, which WiCore does not read.", fix=f"It reads {', '.join(TYPES)}."
            )
        self.generation_config = {
            "bos_token_id": self._file.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": end_tokens(self._file.metadata),
        }

    def rows(self, name: str, start: int, stop: int) -> tuple[np.ndarray, str]:
        gguf = import_gguf()
        tensor = self._file.tensors[self._names[name]]
        blocks = np.frombuffer(self._file.read_rows(self._names[name], start, stop), np.uint8)
        if tensor.type_name == "BF16":
            return blocks.view(np.uint16).reshape(stop - start, *tensor.shape[1:]), "BF16"
        if tensor.type_name == "F16":
            return blocks.view(np.float16).reshape(stop - start, *tensor.shape[1:]), "F16"
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        values = gguf.quants.dequantize(blocks.reshape(stop - start, -1), kind).reshape(stop - start, *tensor.shape[1:])
        return (values - np.float32(1.0) if name.endswith("norm.weight") else values), "F32"

    def vision_bytes(self, name: str, start: int, stop: int) -> bytes:
        raise KeyError(name)

    def write_tokenizer(self, directory: Path) -> list[Path]:
        return write_tokenizer(self._file.metadata, self.generation_config, directory)


def spec_of(file: GgufFile) -> Gemma3Spec:
    """The model's spec from GGUF metadata. Raises CheckpointError for another architecture or a missing key."""
    meta = file.metadata
    if meta.get("general.architecture") != "gemma3":
        raise CheckpointError(f"{file.path} holds a {meta.get('general.architecture')!r} model, not gemma3.")

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"gemma3.{key}", default)
        if value is None:
            raise CheckpointError(f"{file.path} lacks the key gemma3.{key}.")
        return _shortest(value) if isinstance(value, float) else value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no token_embd.weight.")
    layers, heads, hidden = get("block_count"), get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden // heads)
    # llama.cpp's rule: the 27B alone scales by hidden / heads (168), the others by head_dim.
    scalar = hidden / heads if layers == _LAYERS_OF_27B else head_dim
    softcap = meta.get("gemma3.final_logit_softcapping")
    return Gemma3Spec(
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=get("feed_forward_length"),
        query_pre_attn_scalar=float(scalar),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 1_000_000.0),
        rope_local_theta=get("rope.freq_base_swa", _DEFAULT_LOCAL_THETA),
        rope_scaling_factor=_rope_factor(file, get),
        sliding_window=get("attention.sliding_window"),
        layer_groups=_layer_groups(get("attention.sliding_window_pattern", _DEFAULT_PATTERN), layers),
        max_position_embeddings=get("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        final_logit_softcapping=None if not softcap else _shortest(softcap),
    )


def _rope_factor(file: GgufFile, get: Any) -> float:
    kind = file.metadata.get("gemma3.rope.scaling.type", "none")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise CheckpointError(f"{file.path}: rope scaling {kind!r} is not Gemma 3's, which is linear.")
    return float(get("rope.scaling.factor"))


def _layer_groups(pattern: int | list[bool], layers: int) -> tuple[str, ...]:
    """Kinds from a period (every pattern-th layer is global) or from one flag per layer (true: sliding)."""
    if isinstance(pattern, list):
        return tuple(LOCAL if sliding else GLOBAL for sliding in pattern)
    return tuple(LOCAL if (i + 1) % pattern else GLOBAL for i in range(layers))


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return name  # check_tensors lists it
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"


def _shortest(value: float) -> float:
    """The decimal that was meant: 1e-06 for the float32 that GGUF stores as 9.99999997e-07."""
    return float(str(np.float32(value)))
