"""Reads Gemma 3's config.json, as transformers does, into a spec: `gemma3_text` and the multimodal wrapper `gemma3`.

Takes both spellings of rope and window keys. Missing keys have the defaults of transformers' Gemma3TextConfig (27B-IT
omits most). Must not know files, nor keys of a quantization. Invariant: another key that changes what transformers'
Gemma 3 computes is in the spec, has Gemma 3's only value, or is refused by name. The rest mean nothing to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from wicore_trt.errors import CheckpointError, named, shown
from wicore_trt.model.spec import GLOBAL, LOCAL, MAX_LAYERS, Gemma3Spec, SpecError, check_whole
from wicore_trt.model.vision import VisionSpec

_KINDS = {"full_attention": GLOBAL, "sliding_attention": LOCAL}
_KEYS = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "rope_local_theta": "rope_local_base_freq", "rope_scaling_factor": "rope_scaling.factor",
    "layer_groups": "layer_types", "tokens": "mm_tokens_per_image", "begin_id": "boi_token_index",
    "soft_id": "image_token_index", "end_id": "eoi_token_index",
}  # fmt: skip
_STRICT = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
_Model = TypeVar("_Model", bound=BaseModel)
_ONLY = {  # what else config.json may ask for, and why it is refused
    "attn_logit_softcapping": "attention softcapping is not part of Gemma 3",
    "use_bidirectional_attention": "bidirectional attention (EmbeddingGemma) is not a text generator",
    "attention_bias": "only attention without bias is Gemma 3",
    "mlp_bias": "only an MLP without bias is Gemma 3",
    "is_encoder_decoder": "Gemma 3 is a decoder",
    "add_cross_attention": "Gemma 3 is a decoder",
    "num_experts": "experts are not part of Gemma 3",
    "num_local_experts": "experts are not part of Gemma 3",
}
_OTHER_MODELS = {
    "gemma": "Gemma 1", "gemma2": "Gemma 2", "gemma3n": "Gemma 3n", "gemma4": "Gemma 4", "t5gemma": "T5Gemma",
    "paligemma": "PaliGemma", "recurrent_gemma": "RecurrentGemma",
}  # fmt: skip
"""Names of models of Gemma's family by the beginning of model_type; the longest that fits decides."""
_SHIELD = "shieldgemma2"  # Gemma 3 whose answer is read from the logits of two tokens
_WRAPPED = ("gemma3", _SHIELD)
_OTHER_HEADS = {
    "ForSequenceClassification": "a classifier or reward model",
    "ForTokenClassification": "a tagger",
    "ForImageClassification": "an image classifier",
    "ForQuestionAnswering": "a span finder",
}
"""Endings of names in `architectures` whose model does not write text."""


class _Rope(BaseModel):
    """Rotary embedding of one kind of layer. Keys of other schemes are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    rope_theta: float | None = None
    original_max_position_embeddings: int | None = None  # of no use to linear scaling
    partial_rotary_factor: Literal[1] | None = None


class _Ropes(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    full_attention: _Rope = _Rope()
    sliding_attention: _Rope = _Rope()


class _TextConfig(BaseModel):
    """Keys that Gemma 3 computes with; the spec checks their ranges."""

    model_config = _STRICT
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    vocab_size: int = 262_208
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    query_pre_attn_scalar: float = 256
    rms_norm_eps: float = 1e-6
    sliding_window: int = 4096
    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool | None = None
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    rope_theta: float | None = None
    rope_local_base_freq: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Ropes | None = None
    partial_rotary_factor: Literal[1] | None = None
    layer_types: list[str] | None = Field(default=None, max_length=MAX_LAYERS)
    sliding_window_pattern: int | None = None
    old_window_pattern: int | None = Field(default=None, alias="_sliding_window_pattern")
    final_logit_softcapping: float | None = None
    is_causal: Literal[True] = True


class _Wrapper(BaseModel):
    model_config = _STRICT
    text_config: dict[str, Any]
    tie_word_embeddings: bool | None = None


class _VisionConfig(BaseModel):
    """Keys that SigLIP computes with, and defaults of transformers' SiglipVisionConfig."""

    model_config = _STRICT
    model_type: Literal["siglip_vision_model"] = "siglip_vision_model"
    image_size: int = 224
    patch_size: int = 16
    num_channels: Literal[3] = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    layer_norm_eps: float = 1e-6
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"


class _ImageConfig(BaseModel):
    """Keys of the wrapper, and defaults of transformers' Gemma3Config, which knows each id by two names."""

    model_config = _STRICT
    vision_config: dict[str, Any]
    mm_tokens_per_image: int = 256
    boi_token_index: int = Field(default=255_999, validation_alias=AliasChoices("boi_token_index", "boi_token_id"))
    image_token_index: int = Field(
        default=262_144, validation_alias=AliasChoices("image_token_index", "image_token_id")
    )
    eoi_token_index: int = Field(default=256_000, validation_alias=AliasChoices("eoi_token_index", "eoi_token_id"))


def read_vision_config(config: Mapping[str, Any], text: Gemma3Spec, place: str = "config.json") -> VisionSpec | None:
    """Read the image encoder of a config.json, which errors call `place`; None if it has no vision_config. `text` is
    the text model's spec. Raises CheckpointError for an encoder that is not SigLIP and for bad values."""
    if config.get("vision_config") is None:
        return None
    outer = _parse_fields(_ImageConfig, config, place)
    place = f"{place}: vision_config"
    vision = _parse_fields(_VisionConfig, outer.vision_config, place)
    try:
        return VisionSpec(
            image_size=vision.image_size, patch_size=vision.patch_size, hidden_size=vision.hidden_size,
            num_layers=vision.num_hidden_layers, num_heads=vision.num_attention_heads,
            intermediate_size=vision.intermediate_size, layer_norm_eps=float(vision.layer_norm_eps),
            tokens=outer.mm_tokens_per_image, text_hidden_size=text.hidden_size, begin_id=outer.boi_token_index,
            soft_id=outer.image_token_index, end_id=outer.eoi_token_index,
        )  # fmt: skip
    except SpecError as error:
        raise error.name_place(place, _KEYS) from error


def read_hf_config(config: Mapping[str, Any], place: str = "config.json") -> Gemma3Spec:
    """Read the contents of a config.json, which errors call `place`. Raises CheckpointError for another architecture, a
    missing key, a value of the wrong type or range, and a meaningful key that Gemma 3 does not have."""
    kind = config.get("model_type")
    if kind not in (*_WRAPPED, "gemma3_text"):
        family = max((m for m in _OTHER_MODELS if str(kind).startswith(m)), key=len, default=None)
        what = f"it is {_OTHER_MODELS[family]}" if family else f"model_type {shown(kind)} is not supported"
        fix = "WiCore builds Gemma 3: model_type 'gemma3_text' or 'gemma3'."
        raise CheckpointError(f"{place} has no model_type." if kind is None else f"{place}: {what}.", fix=fix)
    _refuse_others(config, place)
    _refuse_heads(config, place)
    outer_tie: bool | None = None
    data: Mapping[str, Any] = config
    if kind in _WRAPPED:
        wrapper = _parse_fields(_Wrapper, config, place)
        data, outer_tie = wrapper.text_config, wrapper.tie_word_embeddings
        place = f"{place}: text_config"
        if data.get("model_type", "gemma3_text") != "gemma3_text":
            raise CheckpointError(f"{place}: model_type is {shown(data['model_type'])}, not 'gemma3_text'.")
        _refuse_others(data, place)
    text = _parse_fields(_TextConfig, data, place)
    tie = outer_tie if kind == "gemma3" else text.tie_word_embeddings  # transformers asks the outermost alone
    tie = True if kind == _SHIELD and outer_tie else tie  # but here either
    theta, local_theta, factor = _read_rope(text, place)
    try:
        check_whole("num_layers", text.num_hidden_layers, 1, MAX_LAYERS)
        return Gemma3Spec(
            vocab_size=text.vocab_size, hidden_size=text.hidden_size, num_layers=text.num_hidden_layers,
            num_heads=text.num_attention_heads, num_kv_heads=text.num_key_value_heads, head_dim=text.head_dim,
            intermediate_size=text.intermediate_size, query_pre_attn_scalar=float(text.query_pre_attn_scalar),
            rms_norm_eps=float(text.rms_norm_eps), rope_theta=theta, rope_local_theta=local_theta,
            rope_scaling_factor=factor, sliding_window=text.sliding_window,
            layer_groups=_layer_groups(text, place), max_position_embeddings=text.max_position_embeddings,
            tie_word_embeddings=tie is None or tie, final_logit_softcapping=text.final_logit_softcapping,
        )  # fmt: skip
    except SpecError as error:
        raise error.name_place(place, _KEYS) from error


def compare_config(config: Mapping[str, Any]) -> list[str]:
    """Describe keys that a config.json gives twice with different values where transformers prefers one by rule.
    `config` has passed read_hf_config."""
    text, notes = config.get("text_config"), list[str]()
    if config.get("model_type") == _SHIELD:
        yes, no = (config.get(f"{word}_token_index", default) for word, default in (("yes", 10_784), ("no", 3_771)))
        notes.append(f"ShieldGemma 2 answers by the first token's logits: {yes} for Yes, a violation, {no} for No.")
    if isinstance(text, dict):
        for key in ("tie_word_embeddings", *_TextConfig.model_fields):
            outer, inner = config.get(key), text.get(key)
            if None not in (outer, inner) and outer != inner and not any(note.startswith(key) for note in notes):
                used = "the first" if key == "tie_word_embeddings" else "the second"
                notes.append(
                    f"{key} is {shown(outer)} in config.json, {shown(inner)} in its text_config: {used} counts."
                )
    data = text if isinstance(text, dict) else config
    pattern, kinds = data.get("sliding_window_pattern"), data.get("layer_types")
    if pattern and kinds and kinds != [list(_KINDS)[bool((i + 1) % pattern)] for i in range(len(kinds))]:
        notes.append(f"sliding_window_pattern {pattern} and layer_types differ: layer_types counts.")
    return notes


def _refuse_heads(config: Mapping[str, Any], place: str) -> None:
    """Raises CheckpointError for a model that writes no text, or that brings its own code."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else []:
        for ending, what in _OTHER_HEADS.items():
            if str(name).endswith(ending) and config.get("model_type") != _SHIELD:
                raise CheckpointError(f"{place}: {shown(name)} is {what}; WiCore builds models that write text.")
    code = config.get("auto_map")
    if isinstance(code, dict) and any(str(key).startswith("AutoModel") for key in code):
        problem = f"{place}: auto_map names the model's own code, {shown(next(iter(code.values())))}, which is not run."
        raise CheckpointError(problem, fix="Remove auto_map if the model is plain Gemma 3.")


def _refuse_others(config: Mapping[str, Any], place: str) -> None:
    ropes = [k for k, value in config.items() if k.startswith("rope") and k not in _TextConfig.model_fields and value]
    if ropes:
        raise CheckpointError(f"{place}: WiCore does not know what {named(ropes[0])} asks for.")
    for key, why in _ONLY.items():
        value = config.get(key)
        if value is not None and value is not False:
            raise CheckpointError(f"{place}: {key} is {shown(value)}, but {why}.")


def _parse_fields(model: type[_Model], data: Mapping[str, Any], place: str) -> _Model:
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            lost = [str(e["loc"][0]) for e in error.errors(include_url=False) if e["type"] == "missing"]
            raise CheckpointError(f"{place} lacks {', '.join(lost)}.") from error
        raise CheckpointError(f"{place}: {key} is {shown(first['input'])}: {first['msg']}.") from error


def _read_rope(text: _TextConfig, place: str) -> tuple[float, float, float]:
    """Read global base, local base and linear factor from the old keys or from rope_parameters (transformers 5)."""
    parameters = text.rope_parameters or _Ropes()
    full, sliding = parameters.full_attention, parameters.sliding_attention
    if (sliding.rope_type or sliding.type or "default") != "default" or sliding.factor is not None:
        raise CheckpointError(f"{place}: rope_parameters.sliding_attention is scaled; Gemma 3's local layers are not.")
    scaling = text.rope_scaling or _Rope()
    theta = _check_one("rope_theta", (text.rope_theta, scaling.rope_theta, full.rope_theta), 1_000_000.0, place)
    local = _check_one("rope_local_base_freq", (text.rope_local_base_freq, sliding.rope_theta), 10_000.0, place)
    given = [rope for rope in (text.rope_scaling, full if text.rope_parameters else None) if rope]
    return theta, local, _check_one("the rope factor", tuple(_read_factor(rope, place) for rope in given), 1.0, place)


def _check_one(key: str, said: tuple[float | None, ...], default: float, place: str) -> float:
    """Read a number from a key or its other spellings, which must agree: versions of transformers prefer different
    ones."""
    numbers = {float(number) for number in said if number is not None}
    if len(numbers) > 1:
        both = " and ".join(map(str, sorted(numbers)))
        raise CheckpointError(f"{place}: {key} is both {both}; rope_scaling and rope_parameters must say the same.")
    return numbers.pop() if numbers else default


def _read_factor(rope: _Rope, place: str) -> float:
    kinds = {kind for kind in (rope.rope_type, rope.type) if kind is not None}
    if len(kinds) > 1 or not kinds <= {"default", "linear"}:
        raise CheckpointError(f"{place}: rope type {shown(sorted(kinds))} is not Gemma 3's, which is 'linear'.")
    if kinds == {"linear"} and rope.rope_type is None:  # transformers 4 scales by it, 5 does not
        raise CheckpointError(f"{place}: rope scaling has type 'linear' but no rope_type.")
    if kinds != {"linear"}:
        if rope.factor not in (None, 1.0):
            raise CheckpointError(f"{place}: rope scaling has the factor {rope.factor} but no type 'linear'.")
        return 1.0
    if rope.factor is None:
        raise CheckpointError(f"{place}: rope scaling is 'linear' but lacks its factor.")
    return float(rope.factor)


def _layer_groups(text: _TextConfig, place: str) -> tuple[str, ...]:
    """Read layer kinds from `layer_types`, or from the window pattern: every pattern-th layer is global."""
    if text.layer_types is not None:
        unknown = sorted(set(text.layer_types) - set(_KINDS))
        if unknown:
            raise CheckpointError(f"{place}: layer_types names {shown(unknown)}; Gemma 3 has {', '.join(_KINDS)}.")
        return tuple(_KINDS[kind] for kind in text.layer_types)
    pattern = 6 if text.sliding_window_pattern is None else text.sliding_window_pattern
    old = text.old_window_pattern  # transformers writes it and never reads it
    if old not in (None, pattern):
        problem = f"{place}: sliding_window_pattern is both {' and '.join(map(str, sorted([pattern, old])))}."
        raise CheckpointError(problem)
    check_whole("sliding_window_pattern", pattern, 1, 1 << 20)
    return tuple(LOCAL if (i + 1) % pattern else GLOBAL for i in range(text.num_hidden_layers))
