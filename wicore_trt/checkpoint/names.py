"""Map the names of Gemma 3's tensors between Hugging Face and the unified checkpoint.

One table says which Hugging Face tensors are stacked into a unified tensor, its whole shape and its tensor-parallel
split. It knows neither files nor torch. Invariant: every tensor of a source is in the table, a tensor of the image
encoder (`model.vision` has those), or an error by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from wicore_trt.errors import CheckpointError, list_some, named
from wicore_trt.model.gemma3 import EMBEDDING, FINAL_NORM, LM_HEAD, layer_weight
from wicore_trt.model.spec import Gemma3Spec, SpecError
from wicore_trt.model.vision import TOWER, VisionSpec, vision_tensors

HF_EMBEDDING = "model.embed_tokens.weight"
HF_FINAL_NORM = "model.norm.weight"
HF_LM_HEAD = "lm_head.weight"

_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")  # anywhere in a name
_OUTER = r"(?:(?:model|language_model|module|base_model)\.)*"
_TEXT = re.compile(_OUTER + r"(embed_tokens\.weight|norm\.weight|layers\..+|lm_head\..+)")
_VISION = re.compile(_OUTER + r"(vision_tower\.(?:vision_model\.)?|multi_modal_projector\.)(.+)")
_IDLE_VISION = (f"{TOWER}head.", f"{TOWER}embeddings.position_ids")  # SigLIP's pooling head, which Gemma 3 lacks
_QUANTIZED = "quantization that its configuration does not describe: give the model in BF16 or as GGUF"
_MERGE = "merge it with peft's merge_and_unload"
_FOREIGN = (  # part of an unknown tensor's name, and whose work it is
    (".lora_", f"a LoRA adapter that is not merged: {_MERGE}, or build the base with --lora"),
    *((part, f"a wrapped PEFT model: {_MERGE}") for part in (".original_module.", ".modules_to_save.")),
    (".qweight", f"AWQ or GPTQ {_QUANTIZED}"),
    (".weight_packed", f"compressed-tensors {_QUANTIZED}"),
    (".absmax", f"bitsandbytes {_QUANTIZED}"),
    *((part, f"zero points or an order of columns beside {_QUANTIZED}") for part in (".weight_zero_point", "g_idx")),
    *((f".{part}_scale", f"FP8 {_QUANTIZED}") for part in ("weight", "input", "output", "k", "v", "q")),
    (".scales", f"MLX {_QUANTIZED}"),
    ("score.", "a classifier or reward model, which writes no text"),
    ("v_head.", "the value head of a reward model: remove it from the weights"),
)
_MAX_LISTED = 8
_GATE_UP = re.compile(r"\.mlp\.(fc|gate)\.")
TEXT_ONLY = "For an engine that reads no images: --text-only."
"""Advice on a broken image encoder."""


def weight_scale_name(weight: str) -> str:
    """Return the name of a weight's scales: "x.weight" -> "x.weights_scaling_factor"."""
    return weight + "s_scaling_factor"


def weight_minimum_name(weight: str) -> str:
    """Return the name of a weight's minimums: "x.weight" -> "x.weights_minimum"."""
    return weight + "s_minimum"


def linear_kind(name: str) -> str:
    """Return the kind of a layer's linear, as in a step's weights: "transformer.layers.3.mlp.fc.weight" ->
    "mlp.gate_up"."""
    return _GATE_UP.sub(".mlp.gate_up.", name).split(".", 3)[-1].removesuffix(".weight")


def activation_scale_name(weight: str) -> str:
    """Return the name of a static activation scale: "x.weight" -> "x.activation_scaling_factor"."""
    return weight.removesuffix("weight") + "activation_scaling_factor"


# Sources put the text model below `model.`, below wrappers of other models, trainers and compilers, or below nothing;
# behind this module there is `model.*` only. The unified names, and the trap in them (HF gate_proj is `mlp.fc`,
# up_proj is `mlp.gate`, post_attention_layernorm is `post_layernorm`), are TensorRT-LLM's:
# examples/models/core/gemma/convert_checkpoint.py.
class Role(Enum):
    """Role of a tensor for the converter: norms get +1, linears are quantized for FP8."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    LINEAR = "linear"


class Split(Enum):
    """Tensor-parallel division of a tensor. QKV splits each of the three stacked parts by heads."""

    NONE = "none"
    ROWS = "rows"
    COLUMNS = "columns"
    QKV = "qkv"


@dataclass(frozen=True, slots=True)
class UnifiedTensor:
    """Tensor of the whole (unsharded) unified checkpoint: `sources` stacked on dim 0."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    role: Role
    split: Split

    @property
    def scale_name(self) -> str:
        return weight_scale_name(self.name)


# unified name, Hugging Face names with their sizes, split; all below a layer's prefix and above ".weight"
_LAYER: tuple[tuple[str, dict[str, str], Split], ...] = (
    ("input_layernorm", {"input_layernorm": "hidden"}, Split.NONE),
    (
        "attention.qkv",
        {"self_attn.q_proj": "q hidden", "self_attn.k_proj": "kv hidden", "self_attn.v_proj": "kv hidden"}, Split.QKV,
    ),
    ("attention.q_layernorm", {"self_attn.q_norm": "head"}, Split.NONE),
    ("attention.k_layernorm", {"self_attn.k_norm": "head"}, Split.NONE),
    ("attention.dense", {"self_attn.o_proj": "hidden q"}, Split.COLUMNS),
    ("post_layernorm", {"post_attention_layernorm": "hidden"}, Split.NONE),
    ("pre_feedforward_layernorm", {"pre_feedforward_layernorm": "hidden"}, Split.NONE),
    ("mlp.fc", {"mlp.gate_proj": "mlp hidden"}, Split.ROWS), ("mlp.gate", {"mlp.up_proj": "mlp hidden"}, Split.ROWS),
    ("mlp.proj", {"mlp.down_proj": "hidden mlp"}, Split.COLUMNS),
    ("post_feedforward_layernorm", {"post_feedforward_layernorm": "hidden"}, Split.NONE),
)  # fmt: skip


def is_vision(name: str) -> bool:
    """Return True for a canonical name of the image encoder's."""
    return _VISION.fullmatch(name) is not None


def canonical_name(name: str) -> str:
    """Strip the prefix of a tensor's Hugging Face name, so that text tensors begin with `model.` or are the head, and
    the image encoder's are called as in `model.vision`. Other names are returned unchanged."""
    plain = _WRAPPERS.sub("", name).replace(".base_layer.", ".")
    if vision := _VISION.fullmatch(plain):
        return (TOWER if vision[1].startswith("vision") else vision[1]) + vision[2]
    match = _TEXT.fullmatch(plain)
    if match is None:
        return name
    return match[1] if match[1].startswith("lm_head.") else f"model.{match[1]}"


def kv_scale_name(layer: int) -> str:
    """Return the name of a layer's one scale for keys and values."""
    return layer_weight(layer, "attention").removesuffix("weight") + "kv_cache_scaling_factor"


def hf_shapes(spec: Gemma3Spec) -> dict[str, tuple[int, ...]]:
    """Return the text tensors that a Hugging Face checkpoint of `spec` must hold, with shapes [out, in] or [size]."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {HF_EMBEDDING: (spec.vocab_size, hidden), HF_FINAL_NORM: (hidden,)}
    if not spec.tie_word_embeddings:
        shapes[HF_LM_HEAD] = (spec.vocab_size, hidden)
    for i, group in enumerate(spec.attention_by_layer):
        sizes = {"hidden": hidden, "mlp": mlp, "q": group.q_size, "kv": group.kv_size, "head": group.head_dim}
        parts = [part for _, parts, _ in _LAYER for part in parts.items()]
        shapes |= {f"model.layers.{i}.{n}.weight": tuple(sizes[size] for size in s.split()) for n, s in parts}
    return shapes


def unified_tensors(spec: Gemma3Spec) -> tuple[UnifiedTensor, ...]:
    """List the tensors of the unified checkpoint in file order. A tied head is read from the embedding."""
    shapes = hf_shapes(spec)
    head = HF_EMBEDDING if spec.tie_word_embeddings else HF_LM_HEAD

    def tensor(name: str, sources: tuple[str, ...], role: Role, split: Split) -> UnifiedTensor:
        rows = sum(shapes[s][0] for s in sources)
        return UnifiedTensor(name, sources, (rows, *shapes[sources[0]][1:]), role, split)

    tensors = [tensor(EMBEDDING, (HF_EMBEDDING,), Role.EMBEDDING, Split.ROWS)]
    for i in range(spec.num_layers):
        for name, parts, split in _LAYER:
            sources = tuple(f"model.layers.{i}.{part}.weight" for part in parts)
            role = Role.NORM if name.endswith("layernorm") else Role.LINEAR
            tensors.append(tensor(layer_weight(i, name), sources, role, split))
    tensors.append(tensor(FINAL_NORM, (HF_FINAL_NORM,), Role.NORM, Split.NONE))
    tensors.append(tensor(LM_HEAD, (head,), Role.HEAD, Split.ROWS))
    return tuple(tensors)


def check_tensors(spec: Gemma3Spec, present: Mapping[str, tuple[int, ...]], place: str = "The source") -> None:
    """Compare a source's canonical text tensors with those that `spec` needs; errors call the source `place`.
    A tied model may carry a copy of its head, which is not read. Raises CheckpointError that lists missing tensors,
    unknown tensors or wrong shapes."""
    needed = hf_shapes(spec)
    unknown = [name for name in present if name not in needed and name != HF_LM_HEAD]
    for part, work in _FOREIGN:
        names = [name for name in unknown if part in f".{name}"]
        if names:
            raise CheckpointError(f"{place} holds {named(names[0])}, which is of {work}.")
    missing = [name for name in needed if name not in present]
    if missing == [HF_LM_HEAD]:
        problem = f"{place} lacks {HF_LM_HEAD}, and its configuration says tie_word_embeddings: false."
        fix = "Set tie_word_embeddings to true if the model has no head of its own; else add the file that holds it."
        raise CheckpointError(problem, fix=fix)
    if missing:
        problem, fix = list_some(missing, _MAX_LISTED), "Download it again, all files of it."
        if unknown:
            problem += f", and holds {len(unknown)} that it does not have: {list_some(unknown, _MAX_LISTED)}"
            fix = "Its names must be those that transformers saves."
        raise CheckpointError(f"{place} lacks {len(missing)} tensors of Gemma 3: {problem}.", fix=fix)
    if unknown:
        problem = f"{place} holds {len(unknown)} tensors that Gemma 3 does not have: {list_some(unknown, _MAX_LISTED)}."
        raise CheckpointError(problem)
    wrong = [f"{n} is {list(present[n])}, not {list(s)}" for n, s in needed.items() if tuple(present[n]) != s]
    if wrong:
        raise CheckpointError(f"{place}: its tensors do not fit its configuration: {list_some(wrong, _MAX_LISTED)}.")


def check_vision(
    vision: VisionSpec, text: Gemma3Spec, present: Mapping[str, tuple[int, ...]], place: str
) -> dict[str, tuple[int, ...]]:
    """Compare a source's canonical tensors with those of its image encoder, whose shapes are returned. Raises
    CheckpointError that lists missing, unknown or wrong ones, and for an encoder of another text model."""
    needed = vision_tensors(vision)
    try:
        vision.check_text(text)
    except SpecError as error:
        raise CheckpointError(f"{place}: its image encoder's {error.field} {error.problem}", fix=TEXT_ONLY) from error
    unknown = [n for n in present if n not in needed and not n.startswith(_IDLE_VISION)]
    wrong = [n for n, shape in needed.items() if n in present and tuple(present[n]) != shape]
    for names, what in (
        ([n for n in needed if n not in present], "lacks {} tensors of its image encoder: {}"),
        (unknown, "holds {} tensors that Gemma 3's image encoder does not have: {}"),
        ([f"{n} is {list(present[n])}, not {list(needed[n])}" for n in wrong], "has {} others than it says: {}"),
    ):
        if names:
            raise CheckpointError(f"{place} {what.format(len(names), list_some(names, _MAX_LISTED))}.", fix=TEXT_ONLY)
    return needed


def run_weights(spec: Gemma3Spec) -> dict[str, list[UnifiedTensor]]:
    """Return the tensors stacked in each weight of a step: `mlp.fc` and `mlp.gate` in `mlp.gate_up`, else one."""
    made: dict[str, list[UnifiedTensor]] = {}
    for tensor in unified_tensors(spec):
        made.setdefault(_GATE_UP.sub(".mlp.gate_up.", tensor.name), []).append(tensor)
    return made
