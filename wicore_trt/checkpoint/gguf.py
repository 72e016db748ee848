"""Gemma 3 from a GGUF file: names, spec and dequantized rows.

Follows what llama.cpp's converter wrote and its Gemma 3 graph assumes (convert_hf_to_gguf.py, src/llama-model.cpp),
because GGUF carries no config.json. It knows nothing of the unified checkpoint. Invariant: tensors come out under
Hugging Face's names with the file's values, and `norm` gives a norm's factor as the file has it, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np

from wicore_trt.checkpoint.gguf_file import GgufFile, MetadataKeys, import_gguf, open_gguf
from wicore_trt.checkpoint.gguf_tokenizer import read_vocabulary, write_tokenizer
from wicore_trt.checkpoint.names import HF_EMBEDDING, HF_FINAL_NORM, HF_LM_HEAD, check_tensors
from wicore_trt.checkpoint.quantize import STORAGE, to_float32
from wicore_trt.checkpoint.safetensors_io import TensorInfo
from wicore_trt.checkpoint.source import Source
from wicore_trt.errors import CheckpointError, named, shown
from wicore_trt.model.spec import GLOBAL, LOCAL, MAX_LAYERS, Gemma3Spec, SpecError

STORED = ("F32", "F16", "BF16")
TYPES = (*STORED, "Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q5_K", "Q6_K")

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
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d*)\.(.+)\.weight")
_LAYERS_OF_27B = 62
_DEFAULT_PATTERN = 6
_DEFAULT_THETA = 10_000.0  # of both kinds of layers; the converter always writes that of the global ones
_PREFIX = "gemma3."
_KEYS = {
    "num_heads": "gemma3.attention.head_count",
    "num_kv_heads": "gemma3.attention.head_count_kv",
    "head_dim": "gemma3.attention.key_length",
    "query_pre_attn_scalar": "gemma3.attention.key_length",
    "rms_norm_eps": "gemma3.attention.layer_norm_rms_epsilon",
    "rope_theta": "gemma3.rope.freq_base",
    "rope_local_theta": "gemma3.rope.freq_base_swa",
    "rope_scaling_factor": "gemma3.rope.scaling.factor",
    "hidden_size": "gemma3.embedding_length",
    "intermediate_size": "gemma3.feed_forward_length",
    "final_logit_softcapping": "gemma3.final_logit_softcapping",
    "vocab_size": "the first dimension of token_embd.weight",
}
_ONLY = {  # what llama.cpp can be asked for in other models, at the one value that Gemma 3 has
    "attn_logit_softcapping": 0.0,
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "use_parallel_residual": False,
}
_HARMLESS = ("rope.scaling.original_context_length", "rope.scaling.finetuned", "attention.layer_norm_epsilon")
_CARRIED = ("vision.", "mm.")  # of the vision tower, which lies in another file


class GgufSource(Source):
    """An opened GGUF file of architecture gemma3."""

    makes_tokenizer = True

    def __init__(self, path: Path) -> None:
        self._file = open_gguf(path)
        self.door, self.name, self.revision = self._file.door, str(path), None
        self.spec = gguf_spec(self._file)
        self.config, self.vision = {}, {}
        self._names = {_hf_name(name): name for name in self._file.tensors}
        self.tensors = {
            hf: TensorInfo(self._file.tensors[n].shape, self._file.tensors[n].type_name)
            for hf, n in self._names.items()
        }
        check_tensors(self.spec, {n: info.shape for n, info in self.tensors.items()}, str(path))
        odd = sorted({f"{info.dtype}" for info in self.tensors.values() if info.dtype not in TYPES})
        if odd:
            raise CheckpointError(
                f"{path} uses {', '.join(odd)}, which WiCore does not read.", fix=f"It reads {', '.join(TYPES)}."
            )
        self._vocabulary = read_vocabulary(self._file.metadata, self.spec.vocab_size, str(path))
        self.chat_template = self._vocabulary.chat_template
        self.generation_config = {
            "bos_token_id": self._vocabulary.bos,
            "eos_token_id": self._vocabulary.ends,
        }

    def rows(self, name: str, start: int, stop: int) -> tuple[np.ndarray, str]:
        gguf = import_gguf()
        tensor = self._file.tensors[self._names[name]]
        blocks = np.frombuffer(self._file.read_rows(self._names[name], start, stop), np.uint8)
        shape = (stop - start, *tensor.shape[1:])
        if tensor.type_name in STORED:
            block, tag = blocks.view(STORAGE[tensor.type_name]).reshape(shape), tensor.type_name
        else:
            kind = gguf.GGMLQuantizationType[tensor.type_name]
            with np.errstate(invalid="ignore", over="ignore"):  # a scale that is not finite; the converter refuses it
                block, tag = gguf.quants.dequantize(blocks.reshape(stop - start, -1), kind).reshape(shape), "F32"
        return block, tag

    def norm(self, name: str, start: int, stop: int) -> np.ndarray:
        return to_float32(*self.rows(name, start, stop))  # llama.cpp's converter has added 1, whatever the type

    def vision_blocks(self, name: str) -> Iterator[bytes]:
        raise KeyError(name)

    def write_tokenizer(self, directory: Path) -> list[Path]:
        return write_tokenizer(self._vocabulary, self.generation_config, directory)

    def place_of(self, name: str) -> str:
        return f"{self._file.path}: {self._names[name]}"


def gguf_spec(file: GgufFile) -> Gemma3Spec:
    """The model's spec from GGUF metadata, with what llama.cpp's loader takes for a key that is absent.

    Raises CheckpointError for another architecture, a missing key, a value of the wrong type or range, and a key of
    gemma3 that is not known.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture != "gemma3":
        raise CheckpointError(f"{file.path} holds a {shown(architecture)} model, not gemma3.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no token_embd.weight.")
    keys = _ModelKeys(file)
    layers, heads = keys.whole("block_count", MAX_LAYERS), keys.whole("attention.head_count", 4096)
    hidden = keys.whole("embedding_length")
    head_dim = keys.whole("attention.key_length", default=hidden // heads)
    # llama.cpp's rule: the 27B alone scales by hidden / heads (168), the others by head_dim.
    scalar = hidden // heads if layers == _LAYERS_OF_27B else head_dim
    try:
        spec = Gemma3Spec(
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=keys.whole("attention.head_count_kv", default=heads),
            head_dim=head_dim,
            intermediate_size=keys.whole("feed_forward_length"),
            query_pre_attn_scalar=float(scalar),
            rms_norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
            rope_theta=keys.real("rope.freq_base", _DEFAULT_THETA),
            rope_local_theta=keys.real("rope.freq_base_swa", _DEFAULT_THETA),
            rope_scaling_factor=_rope_factor(keys),
            sliding_window=keys.whole("attention.sliding_window"),
            layer_groups=_layer_groups(keys, layers),
            max_position_embeddings=keys.whole("context_length"),
            tie_word_embeddings="output.weight" not in file.tensors,
            final_logit_softcapping=keys.real("final_logit_softcapping", None),
        )
    except SpecError as error:
        raise error.at(str(file.path), _KEYS) from error
    keys.expect("vocab_size", spec.vocab_size)
    for key in ("attention.value_length", "rope.dimension_count"):
        keys.expect(key, spec.head_dim)
    for key, only in _ONLY.items():
        keys.expect(key, only)
    keys.refuse_others()
    return spec


class _ModelKeys(MetadataKeys):
    """Typed access to the keys `gemma3.*` of a file; remembers which were asked for."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file.metadata, str(file.path), _PREFIX)
        self._asked = set(_HARMLESS)

    def get(self, key: str) -> Any:
        self._asked.add(key)
        return self.value(key)

    def whole(self, key: str, most: int = 1 << 24, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.missing(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.wrong(key, value, f"a whole number from 1 to {most:,}")
        return value

    def real(self, key: str, default: float | None | EllipsisType = ...) -> Any:
        """A float; `default` for an absent key, which is an error without one."""
        value = self.get(key)
        if value is None:
            if default is ...:
                raise self.missing(key)
            return default
        if not isinstance(value, float):
            raise self.wrong(key, value, "a floating-point number")
        return _shortest(value)

    def expect(self, key: str, only: object) -> None:
        """Refuse a key that is there with another value than `only`."""
        value = self.get(key)
        if value is not None and (value != only or isinstance(value, bool) != isinstance(only, bool)):
            raise self.wrong(key, value, f"{only!r} for Gemma 3")

    def refuse_others(self) -> None:
        names = [key.removeprefix(_PREFIX) for key in self._metadata if key.startswith(_PREFIX)]
        others = [key for key in names if key not in self._asked and not key.startswith(_CARRIED)]
        if others:
            raise CheckpointError(
                f"{self._place}: WiCore does not know what {named(_PREFIX + others[0])} asks for.",
                fix="Convert the original model with llama.cpp's convert_hf_to_gguf.py, or give that model.",
            )


def _rope_factor(keys: _ModelKeys) -> float:
    """The linear factor, which old files call scale_linear. llama.cpp takes a factor without a type for linear; its
    converter always writes both, so such a file is not its work and refused."""
    kind = keys.get("rope.scaling.type")
    factor, old = keys.real("rope.scaling.factor", None), keys.real("rope.scale_linear", None)
    if kind not in (None, "none", "linear"):
        raise keys.wrong("rope.scaling.type", kind, "'linear' or 'none' for Gemma 3")
    if kind is None and factor is not None:
        raise keys.wrong("rope.scaling.type", None, f"'linear' where rope.scaling.factor is {factor}")
    if kind == "none":
        return 1.0
    if None not in (factor, old) and factor != old:
        raise keys.wrong("rope.scale_linear", old, f"{factor}, as rope.scaling.factor is")
    if factor is None and old is None:
        if kind == "linear":
            raise keys.wrong("rope.scaling.factor", None, "there when rope.scaling.type is 'linear'")
        return 1.0
    return float(old if factor is None else factor)


def _layer_groups(keys: _ModelKeys, layers: int) -> tuple[str, ...]:
    """Kinds from a period (every pattern-th layer is global) or from one flag per layer (true: sliding)."""
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if any(not isinstance(sliding, bool) for sliding in pattern) or len(pattern) != layers:
            raise keys.wrong("attention.sliding_window_pattern", pattern, f"{layers} booleans, or a period")
        return tuple(LOCAL if sliding else GLOBAL for sliding in pattern)
    period = keys.whole("attention.sliding_window_pattern", default=_DEFAULT_PATTERN)
    return tuple(LOCAL if (i + 1) % period else GLOBAL for i in range(layers))


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return f"{name} (a GGUF name)"  # check_tensors lists it
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"


def _shortest(value: float) -> float:
    """The decimal that was meant: 1e-06 for the float32 that GGUF stores as 9.99999997e-07."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))
