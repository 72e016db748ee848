"""Read Gemma 3 from a GGUF file: names, spec and dequantized rows.

GGUF has no config.json, so this follows llama.cpp's converter and its Gemma 3 graph (convert_hf_to_gguf.py,
src/llama-model.cpp). It knows nothing of the unified checkpoint. Invariant: tensors have Hugging Face's names and
the file's values; `read_norm` gives a norm's factor as the file has it, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np

from wicore_trt.checkpoint.gguf_file import GgufFile, GgufTensor, MetadataKeys, import_gguf, open_gguf
from wicore_trt.checkpoint.gguf_tokenizer import read_vocabulary, write_tokenizer
from wicore_trt.checkpoint.gguf_vision import IMAGE_TENSORS, read_gguf_vision
from wicore_trt.checkpoint.names import HF_EMBEDDING, HF_FINAL_NORM, HF_LM_HEAD, TEXT_ONLY, check_tensors
from wicore_trt.checkpoint.quantize import FLOATS, STORAGE, to_float32
from wicore_trt.checkpoint.safetensors_io import TensorInfo
from wicore_trt.checkpoint.source import Source
from wicore_trt.errors import CheckpointError, named, shown
from wicore_trt.model.spec import GLOBAL, LOCAL, MAX_LAYERS, Gemma3Spec, SpecError
from wicore_trt.model.vision import SOFT_NORM, VisionSpec

TYPES = (
    *FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip
"""Types of tensors that are read; the gguf package dequantizes them bit for bit as ggml-quants.c does."""

_TOP = {"token_embd.weight": HF_EMBEDDING, "output_norm.weight": HF_FINAL_NORM, "output.weight": HF_LM_HEAD}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_FUSED = re.compile(r"blk\.(0|[1-9]\d*)\.attn_qkv\.weight")
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d*)\.(.+)\.weight")
_LAYERS_OF_1B, _LAYERS_OF_27B = 26, 62
_SCALED = (34, 48, 62)  # layers of 4B, 12B and 27B, whose global layers have the rope factor 8
_QUANTIZATION = 2  # the version of all block layouts since 2023
_DEFAULT_PATTERN = 6
_DEFAULT_THETA = 10_000.0  # of both kinds of layers; the converter always writes that of the global ones
_ITS_MODEL = "Give the GGUF of the language model that it belongs to, and this file as --mmproj."
_OTHERS = {  # what else a GGUF may hold, by general.architecture and then by general.type, and what to do
    "clip": ("an image encoder (mmproj)", _ITS_MODEL),
    "gemma-embedding": ("EmbeddingGemma, which writes no text", "Give a Gemma 3 model."),
    "controlvector": ("a control vector", "Give the GGUF of the model that it steers."),
    "imatrix": ("an importance matrix", "Give the GGUF of the model that it was measured on."),
    "mmproj": ("an image encoder (mmproj)", _ITS_MODEL),
    "adapter": (
        "a LoRA adapter",
        "Build from the base with --lora and the adapter as peft saved it, or merge with llama-export-lora.",
    ),
}
_PREFIX = "gemma3."
_KEYS = {
    "num_heads": "gemma3.attention.head_count", "num_kv_heads": "gemma3.attention.head_count_kv",
    "head_dim": "gemma3.attention.key_length", "query_pre_attn_scalar": "gemma3.attention.key_length",
    "rms_norm_eps": "gemma3.attention.layer_norm_rms_epsilon", "rope_theta": "gemma3.rope.freq_base",
    "rope_local_theta": "gemma3.rope.freq_base_swa", "rope_scaling_factor": "gemma3.rope.scaling.factor",
    "hidden_size": "gemma3.embedding_length", "intermediate_size": "gemma3.feed_forward_length",
    "final_logit_softcapping": "gemma3.final_logit_softcapping",
    "vocab_size": "the first dimension of token_embd.weight",
}  # fmt: skip
_OLLAMA = {"rope.freq_base": "rope.global.freq_base", "rope.freq_base_swa": "rope.local.freq_base"}
"""Keys of llama.cpp's converter and what Ollama's calls them."""
_ONLY = {  # what llama.cpp can be asked for in other models, at the one value that Gemma 3 has
    "attn_logit_softcapping": 0.0, "attention.causal": True, "expert_count": 0, "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0, "use_parallel_residual": False,
}  # fmt: skip
_HARMLESS = ("rope.scaling.original_context_length", "rope.scaling.finetuned", "attention.layer_norm_epsilon")
_VISION_KEYS = ("vision.", "mm.")  # Ollama keeps the image encoder in the same file


class GgufSource(Source):
    tensors: dict[str, TensorInfo]
    notes: list[str]

    def __init__(self, path: Path, mmproj: Path | None, *, text_only: bool) -> None:
        self._file = open_gguf(path)
        self.door, self.name, self.revision = self._file.door, str(path), None
        self.notes = []
        self.spec = read_gguf_spec(self._file, self.notes.append)
        # a tensor's file, its name there and the first of its rows
        self._places = dict[str, tuple[GgufFile, str, int]]()
        self.tensors = {}
        for name, tensor in self._file.tensors.items():
            if not name.startswith(IMAGE_TENSORS):
                self._enter_tensor(name, tensor)
        check_tensors(self.spec, {n: info.shape for n, info in self.tensors.items()}, str(path))
        self._vocabulary = read_vocabulary(self._file.metadata, self.spec.vocab_size, str(path))
        self.notes += self._vocabulary.notes
        self.vision = None if text_only else self._read_vision(mmproj)
        for file, stored, _ in self._places.values():
            if (kind := file.tensors[stored].type_name) not in TYPES:
                fix = f"Convert it: llama-quantize --allow-requantize FILE NEW.gguf Q8_0. Read are {', '.join(TYPES)}."
                what = f"{named(stored)} is stored as {kind}, which WiCore does not read."
                raise CheckpointError(f"{file.path}: {what}", fix=fix)
        self.generation_config = {"bos_token_id": self._vocabulary.bos, "eos_token_id": self._vocabulary.ends}

    def _enter_tensor(self, name: str, tensor: GgufTensor) -> None:
        """Enter a tensor of the file; tensors that converters fuse (--fuse-qkv) are entered as three parts."""
        layer, parts = _FUSED.fullmatch(name), {_hf_name(name): tensor.shape[0]}
        group = self.spec.layer_group(GLOBAL)
        heads = (group.q_size, group.kv_size, group.kv_size)
        if layer and tensor.shape[0] == sum(heads):
            parts = {_hf_name(f"blk.{layer[1]}.attn_{n}.weight"): rows for n, rows in zip("qkv", heads, strict=True)}
        first = 0
        for hf, rows in parts.items():
            if hf in self.tensors:
                raise CheckpointError(f"{self._file.path} holds {named(hf)} twice.")
            self.tensors[hf] = TensorInfo((rows, *tensor.shape[1:]), tensor.type_name)
            self._places[hf] = self._file, name, first
            first += rows

    def _read_vision(self, mmproj: Path | None) -> VisionSpec | None:
        """Read the image encoder in the file `mmproj`, or Ollama's in the model's own file."""
        within = sum(name.startswith(IMAGE_TENSORS) for name in self._file.tensors)
        if mmproj is None and not within:
            return None
        if mmproj is not None and within:
            raise CheckpointError(f"{self._file.path} has an image encoder of its own.", fix="Leave --mmproj out.")
        file = self._file
        if mmproj is not None:
            file = open_gguf(mmproj, self.door)
            if file.metadata.get("general.architecture") != "clip":
                raise CheckpointError(f"{mmproj} holds no image encoder (mmproj).", fix=TEXT_ONLY)
        try:
            vision, names = read_gguf_vision(file, self.spec, self._vocabulary, self.notes.append)
        except CheckpointError as error:
            if mmproj is not None:
                raise
            self.notes.append(f"left aside: {within} tensors of the image encoder. {error.message}")
            return None
        self._places |= {name: (file, stored, 0) for name, stored in names.items()}
        return vision

    def find_blocks(self, name: str) -> str:
        kind = self.tensors[name].dtype
        return "" if kind in FLOATS else kind

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        file, stored, first = self._places[name]
        blocks = np.frombuffer(file.read_rows(stored, first + start, first + stop), np.uint8)
        return blocks.reshape(stop - start, -1)

    def read_rows(self, name: str, start: int, stop: int) -> tuple[np.ndarray, str]:
        gguf = import_gguf()
        file, stored, _ = self._places[name]
        tensor, blocks = file.tensors[stored], self.read_blocks(name, start, stop)
        shape = (stop - start, *tensor.shape[1:])
        if tensor.type_name in FLOATS:
            block, tag = blocks.view(STORAGE[tensor.type_name]).reshape(shape), tensor.type_name
        else:
            kind = gguf.GGMLQuantizationType[tensor.type_name]
            with np.errstate(invalid="ignore", over="ignore"):  # a scale that is not finite; the converter refuses it
                block, tag = gguf.quants.dequantize(blocks, kind).reshape(shape), "F32"
        if name == SOFT_NORM:  # converters have added 1
            return to_float32(block, tag) - np.float32(1.0), "F32"
        return block, tag

    def read_norm(self, name: str, start: int, stop: int) -> np.ndarray:
        return to_float32(*self.read_rows(name, start, stop))  # llama.cpp's converter has added 1, whatever the type

    def write_tokenizer(self, directory: Path) -> list[Path]:
        return write_tokenizer(self._vocabulary, self.generation_config, directory)

    def place_of(self, name: str) -> str:
        file, stored, _ = self._places[name]
        return f"{file.tensors[stored].path}: {stored}"


def read_gguf_spec(file: GgufFile, note: Callable[[str], None] = lambda text: None) -> Gemma3Spec:
    """Make the model's spec from GGUF metadata, with the defaults of llama.cpp's loader for absent keys.
    Ollama's converter leaves out more keys: these take the values of the Gemma 3 with that many layers, and `note`
    gets a sentence on it. Raises CheckpointError for another kind of file, a missing key, a value of the wrong type
    or range, and an unknown key of gemma3."""
    _refuse_other_kinds(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no token_embd.weight.")
    keys = _ModelKeys(file, note)
    layers, heads = keys.read_int("block_count", MAX_LAYERS), keys.read_int("attention.head_count", 4096)
    hidden = keys.read_int("embedding_length")
    head_dim = keys.read_int("attention.key_length", default=hidden // heads)
    # llama.cpp's rule: the 27B alone scales by hidden / heads (168), the others by head_dim.
    scalar = hidden // heads if layers == _LAYERS_OF_27B else head_dim
    cap = keys.read_float("final_logit_softcapping", None)
    if keys.ollamas and layers == _LAYERS_OF_1B and cap is not None:
        keys.note(f"final_logit_softcapping {cap:g} is left aside: Gemma 3 1B has none, Ollama's converter wrote it.")
        cap = None
    try:
        spec = Gemma3Spec(
            vocab_size=embedding.shape[0], hidden_size=hidden, num_layers=layers, num_heads=heads,
            num_kv_heads=keys.read_int("attention.head_count_kv", default=heads), head_dim=head_dim,
            intermediate_size=keys.read_int("feed_forward_length"), query_pre_attn_scalar=float(scalar),
            rms_norm_eps=keys.read_float("attention.layer_norm_rms_epsilon", 1e-6 if keys.ollamas else ...),
            rope_theta=keys.read_theta("rope.freq_base", 1e6 if keys.ollamas else _DEFAULT_THETA),
            rope_local_theta=keys.read_theta("rope.freq_base_swa", _DEFAULT_THETA),
            rope_scaling_factor=_rope_factor(keys, layers),
            sliding_window=keys.read_int("attention.sliding_window"), layer_groups=_layer_groups(keys, layers),
            max_position_embeddings=keys.read_int("context_length"),
            tie_word_embeddings="output.weight" not in file.tensors,
            final_logit_softcapping=float(cap) if cap else None,  # 0 means none
        )  # fmt: skip
    except SpecError as error:
        raise error.name_place(str(file.path), _KEYS) from error
    keys.expect_value("vocab_size", spec.vocab_size)
    for key in ("attention.value_length", "rope.dimension_count"):
        keys.expect_value(key, spec.head_dim)
        keys.expect_value(f"{key}_swa", spec.head_dim)
    keys.expect_value("attention.key_length_swa", spec.head_dim)
    scale = keys.read_float("attention.scale", None)
    if scale is not None and not abs(scale * scale * spec.query_pre_attn_scalar - 1) < 1e-4:
        raise keys.make_value_error("attention.scale", scale, f"{spec.query_pre_attn_scalar**-0.5:g} for this model")
    for key, only in _ONLY.items():
        keys.expect_value(key, only)
    keys.refuse_others()
    return spec


def _refuse_other_kinds(file: GgufFile) -> None:
    architecture, kind = (file.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    for said in (kind, architecture):
        if isinstance(said, str) and said in _OTHERS:
            what, fix = _OTHERS[said]
            raise CheckpointError(f"{file.path} holds {what}, not a model.", fix=fix)
    if architecture != "gemma3":
        raise CheckpointError(f"{file.path} holds a {shown(architecture)} model, not gemma3.")
    version = file.metadata.get("general.quantization_version", _QUANTIZATION)
    if version != _QUANTIZATION:
        problem = f"{file.path}: general.quantization_version is {shown(version)}; version {_QUANTIZATION} is read."
        raise CheckpointError(problem)


class _ModelKeys(MetadataKeys):
    """Reads the keys `gemma3.*` of a file and remembers which were read.
    `ollamas`: Ollama's converter wrote the file; `note` gets a sentence on keys that it leaves out."""

    def __init__(self, file: GgufFile, note: Callable[[str], None]) -> None:
        super().__init__(file.metadata, str(file.path), _PREFIX)
        self._asked, self.note = set(_HARMLESS), note
        vision = any(key.startswith(f"{_PREFIX}vision.") for key in file.metadata)
        plain = self.find_metadata("attention.layer_norm_rms_epsilon") is None and vision
        self.ollamas = plain or any(self.find_metadata(key) is not None for key in _OLLAMA.values())

    def find_value(self, key: str) -> Any:
        self._asked.add(key)
        return self.find_metadata(key)

    def read_int(self, key: str, most: int = 1 << 24, default: int | None = None) -> int:
        value = self.find_value(key)
        value = default if value is None else value
        if value is None:
            raise self.make_missing_error(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.make_value_error(key, value, f"a whole number from 1 to {most:,}")
        return value

    def read_float(self, key: str, default: float | None | EllipsisType = ...) -> Any:
        """Read a float; `default` for an absent key, which is an error without one."""
        value = self.find_value(key)
        if value is None:
            if default is ...:
                raise self.make_missing_error(key)
            return default
        if not isinstance(value, float):
            raise self.make_value_error(key, value, "a floating-point number")
        with np.errstate(over="ignore"):  # the decimal that was meant: 1e-06 for 9.99999997e-07, the file's float32
            return float(str(np.float32(value)))

    def read_theta(self, key: str, default: float) -> float:
        """Read a rope base, under llama.cpp's or Ollama's name."""
        ours, theirs = self.read_float(key, None), self.read_float(_OLLAMA[key], None)
        if None not in (ours, theirs) and ours != theirs:
            raise self.make_value_error(_OLLAMA[key], theirs, f"{ours}, as {key} is")
        return float(next((value for value in (ours, theirs) if value is not None), default))

    def expect_value(self, key: str, only: object) -> None:
        """Refuse a key that has another value than `only`."""
        value = self.find_value(key)
        if value is not None and (value != only or isinstance(value, bool) != isinstance(only, bool)):
            raise self.make_value_error(key, value, f"{only!r} for Gemma 3")

    def refuse_others(self) -> None:
        names = [key.removeprefix(_PREFIX) for key in self._metadata if key.startswith(_PREFIX)]
        others = [key for key in names if key not in self._asked and not key.startswith(_VISION_KEYS)]
        if others:
            problem = f"{self._place}: WiCore does not know what {named(_PREFIX + others[0])} asks for."
            fix = "Convert the original model with llama.cpp's convert_hf_to_gguf.py, or give that model."
            raise CheckpointError(problem, fix=fix)


def _rope_factor(keys: _ModelKeys, layers: int) -> float:
    """Read the linear rope factor, which old files call scale_linear.
    llama.cpp takes a factor without a type for linear. Its converter always writes both and Ollama's neither, so a
    file with only one of them is refused."""
    kind = keys.find_value("rope.scaling.type")
    factor, old = keys.read_float("rope.scaling.factor", None), keys.read_float("rope.scale_linear", None)
    if kind not in (None, "none", "linear"):
        raise keys.make_value_error("rope.scaling.type", kind, "'linear' or 'none' for Gemma 3")
    if kind is None and factor is not None:
        raise keys.make_value_error("rope.scaling.type", None, f"'linear' where rope.scaling.factor is {factor}")
    if kind == "none":
        return 1.0
    if None not in (factor, old) and factor != old:
        raise keys.make_value_error("rope.scale_linear", old, f"{factor}, as rope.scaling.factor is")
    if factor is None and old is None:
        if kind == "linear":
            raise keys.make_value_error("rope.scaling.factor", None, "there when rope.scaling.type is 'linear'")
        if keys.ollamas and layers in _SCALED:
            keys.note(f"rope's linear factor 8 of Gemma 3 with {layers} layers is taken, which the file leaves out.")
            return 8.0
        return 1.0
    return float(old if factor is None else factor)


def _layer_groups(keys: _ModelKeys, layers: int) -> tuple[str, ...]:
    """Return the kinds of layers, from a period (every pattern-th is global) or one flag a layer (true: sliding)."""
    pattern = keys.find_value("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if any(not isinstance(sliding, bool) for sliding in pattern) or len(pattern) != layers:
            raise keys.make_value_error("attention.sliding_window_pattern", pattern, f"{layers} booleans, or a period")
        return tuple(LOCAL if sliding else GLOBAL for sliding in pattern)
    period = keys.read_int("attention.sliding_window_pattern", default=_DEFAULT_PATTERN)
    return tuple(LOCAL if (i + 1) % period else GLOBAL for i in range(layers))


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return f"{name} (a GGUF name)"  # check_tensors lists it
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
