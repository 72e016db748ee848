"""Read what a Hugging Face source says of its quantization: one table of methods, each with its keys.

Keys are those of compressed-tensors, ModelOpt, MLX, bitsandbytes, AutoAWQ, AutoGPTQ and GPTQModel. It must not know
tensors. Invariant: a key that changes the meaning of the files has a value that `unpack` decodes, or the source is
refused by that key's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from wicore_trt.checkpoint.names import canonical_name
from wicore_trt.errors import CheckpointError, named, shown
from wicore_trt.files import UntrustedFiles, is_present

READ = "compressed-tensors FP8 and W4A16, ModelOpt FP8, MLX, bitsandbytes NF4, AWQ and GPTQ"
FIX = f"Of quantized models WiCore reads {READ}; else give the model in BF16, or as a GGUF file."
KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json that describe a quantization; the last is MLX's."""
FORM_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which a quantizer describes its work, and its method."""
_GROUPS = (16, 32, 64, 128, 256, 512, 1024, -1)
_ARGS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # of QuantizationArgs, of no use to a reader
_FP8 = {"num_bits": (8,), "type": ("float",), "symmetric": (True,)}
_PATTERN = re.compile(r"re:\^?(?:[\w-]|\\\.|\.\*|\.)*\$?")  # names, dots and stars: what wildcards can say
_WILDCARDS = {"\\.": ".", ".*": "*", ".": "?", "^": ""}
_MAX_NAMES = 4096


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Form of a source's quantized modules: `kind` is a key of `unpack.KINDS`, `title` its name for users.
    `bits` of an integer, `group` values of a row with one scale (0: the row). `excluded` and `targets` are module
    names and patterns; `own` has (group, bits) of modules that differ. `static`: modules have scales of their inputs;
    `alone`: inputs are not quantized; `kv`: layers may have scales of keys and values. `ordered`: GPTQ's groups are
    those of g_idx. `stored_zero` is the zero point as GPTQ's files have it."""

    kind: str
    title: str
    bits: int = 8
    group: int = 0
    static: bool = False
    alone: bool = False
    kv: bool = False
    targets: tuple[str, ...] = ()
    excluded: tuple[str, ...] = field(default=(), compare=False)
    own: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    ordered: bool = False
    stored_zero: int = 0

    def is_covered(self, module: str) -> bool:
        """Return True for a module that the configuration quantizes, by its name in the files."""
        names = _list_spellings(module)
        return not any(_is_match(n, p) for p in self.excluded for n in names) and (
            not self.targets or any(_is_match(n, p) for p in self.targets for n in names)
        )

    def sizes_of(self, module: str) -> tuple[int, int]:
        """Return (group, bits) of a module."""
        return next((own for n in _list_spellings(module) if (own := self.own.get(n))), (self.group, self.bits))


def find_form(path: Path, config: Mapping[str, Any], door: UntrustedFiles) -> PackedForm | None:
    """Read the form of the source in `path`, whose config.json is `config`; None for an unquantized one. Raises
    CheckpointError for a quantization that is not read, naming the key, and for two that differ."""
    forms = [_read_form(place, said) for place, said in _list_descriptions(path, config, door)]
    if any(form != forms[0] for form in forms):
        raise CheckpointError(f"{path}: its files describe two different quantizations.", fix=FIX)
    return forms[0] if forms else None


def describe_form(form: PackedForm, dtype: str, count: int, scales: Collection[str] | None, kept: int) -> str:
    """Say how `count` tensors of a form were read into a checkpoint of `dtype`, which has these of the source's static
    `scales`, by name, or calibrated ones (None); of a q4_0 checkpoint, `kept` fit it exactly."""
    static, kv = (any(part in name for name in scales or ()) for part in ("activation_", "kv_cache_"))
    if dtype == "q4_0":
        said = "kept bit for bit" if kept == count else "dequantized, and quantized a second time to Q4_0"
        said += f", but for {kept} that are kept bit for bit" if 0 < kept < count else ""
    elif dtype != "fp8":
        said = f"dequantized to {dtype}, each value rounded once"
    elif form.kind != "e4m3":
        said = "dequantized, and quantized a second time to FP8"
    else:
        said = "kept as published, bits and scales"
        if scales is not None:
            by = "the source's scales" if static else "the token" + (", its scales left aside" if form.static else "")
            said += f"; activations are quantized by {by}"
    if form.kv and scales is not None:
        said += f"; KV scales: {'the larger of keys and values' if kv else 'none'}"
    return f"{form.title} weights of {count} tensors {said}."


def _list_descriptions(
    path: Path, config: Mapping[str, Any], door: UntrustedFiles
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, description) from config.json, its text_config and the files of quantizers."""
    text, place = config.get("text_config"), str(path / "config.json")
    for data in (config, text if isinstance(text, Mapping) else {}):
        for key in KEYS:
            said = data.get(key)
            if said is None or (key != "quantization" and said == data.get("quantization")):  # MLX writes both
                continue
            if not isinstance(said, Mapping):
                raise CheckpointError(f"{place}: {key} is {shown(said)}, no description of a quantization.", fix=FIX)
            yield f"{place}: {key}", {"quant_method": "mlx"} | dict(said) if key == "quantization" else said
    for file, method in FORM_FILES.items():
        if is_present(path / file):
            said = door.read_json(path / file)
            inner = said.get("quantization") if method == "modelopt" else said
            if not isinstance(inner, Mapping):
                raise CheckpointError(f"{path / file} describes no quantization.", fix=FIX)
            yield str(path / file), {"quant_method": method} | dict(inner)


def _read_form(place: str, said: Mapping[str, Any]) -> PackedForm:
    method = said.get("quant_method")
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise CheckpointError(f"{place}: quantized by {shown(method)}, which WiCore does not read.", fix=FIX)
    return read(place, {key: value for key, value in said.items() if key != "quant_method"})


def check_keys(
    place: str, said: Any, allowed: Mapping[str, tuple[Any, ...]], needed: Collection[str], idle: Collection[str] = ()
) -> None:
    """Refuse what is no JSON object, a key with a value that is not `allowed`, an unknown key, and a lack of those
    `needed`. Null is no value; `idle` keys mean nothing to a reader."""
    if not isinstance(said, Mapping):
        raise CheckpointError(f"{place} is {shown(said)}, which describes nothing.", fix=FIX)
    for key, value in said.items():
        if value is None or key in idle or (key not in allowed and value in ([], {})):
            continue
        if not any(type(value) is type(one) and value == one for one in allowed.get(key, ())):
            fits = f"WiCore reads {' or '.join(map(str, allowed[key]))}" if key in allowed else "it is not known"
            raise CheckpointError(f"{place}: {named(key)} is {shown(value)}; {fits}.", fix=FIX)
    if lacking := [key for key in needed if said.get(key) is None]:
        raise CheckpointError(f"{place} lacks {lacking[0]}.", fix=FIX)


def _pop_names(place: str, said: dict[str, Any], key: str) -> tuple[str, ...]:
    """Take a list of module names or patterns out of a description."""
    names = said.pop(key, None) or []
    if not isinstance(names, list) or len(names) > _MAX_NAMES or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{place}: {key} is {shown(names)}, no list of names.", fix=FIX)
    if odd := [name for name in names if name.startswith("re:") and not _PATTERN.fullmatch(name)]:
        raise CheckpointError(f"{place}: {named(odd[0])} is a pattern that WiCore does not match.", fix=FIX)
    return tuple(names)


def _pop_kv(place: str, said: dict[str, Any], key: str) -> bool:
    """Take the description of a quantized KV cache out; returns True for FP8 with one scale a tensor."""
    kv = said.pop(key, None)
    if kv is not None and kv != "FP8":
        allowed = _FP8 | {"dynamic": (False,), "strategy": ("tensor",)}
        check_keys(f"{place}: {key}", kv, allowed, ("num_bits", "type"), _ARGS)
    return kv is not None


def _list_spellings(module: str) -> list[str]:
    """List the names that versions of transformers and converters give to a module."""
    plain = canonical_name(f"{module}.weight").removesuffix(".weight")
    inner = plain.removeprefix("model.")
    return [module, plain, inner, *(f"{outer}{inner}" for outer in ("model.language_model.", "language_model.model."))]


def _is_match(name: str, pattern: str) -> bool:
    """Match a module's name: `re:` and an expression, a name with wildcards, `Linear`, or dotted parts of a name."""
    if pattern.startswith("re:"):  # fnmatch needs no long times; re.match asks for a beginning
        wild = re.sub(r"\\\.|\.\*|\.|\^", lambda found: _WILDCARDS[found[0]], pattern[3:])
        return fnmatchcase(name, wild[:-1] if wild.endswith("$") else f"{wild}*")
    if pattern == "Linear":
        return name.endswith(("_proj", "lm_head", ".fc1", ".fc2"))
    return f".{pattern}." in f".{name}." or ("*" in pattern and fnmatchcase(name, pattern))


def _read_compressed(place: str, said: dict[str, Any]) -> PackedForm:
    excluded, kv = _pop_names(place, said, "ignore"), _pop_kv(place, said, "kv_cache_scheme")
    groups = said.pop("config_groups", None)
    if not isinstance(groups, Mapping) or len(groups) != 1 or not isinstance(group := [*groups.values()][0], Mapping):
        raise CheckpointError(f"{place}: config_groups is {shown(groups)}; WiCore reads one group of modules.", fix=FIX)
    allowed: dict[str, tuple[Any, ...]] = {
        "format": ("float-quantized", "pack-quantized", "naive-quantized"),
        "quantization_status": ("compressed", "frozen"),
    }
    check_keys(place, said, allowed, ("format",), ("version", "global_compression_ratio"))
    place, group = f"{place}: config_groups", dict(group)
    targets = _pop_names(place, group, "targets")
    weights, inputs = group.pop("weights", None), group.pop("input_activations", None)
    check_keys(
        place, group | {"targets": targets or None}, {"format": (said["format"],), "targets": (targets,)}, ("targets",)
    )
    allowed, needed = {"dynamic": (False,), "actorder": (False, "weight", "static")}, ("num_bits", "type", "strategy")
    if said["format"] == "pack-quantized":
        allowed |= {"num_bits": (4, 8), "type": ("int",), "symmetric": (True,), "strategy": ("group", "channel")}
        check_keys(f"{place}: weights", weights, allowed | {"group_size": _GROUPS}, needed, _ARGS)
        check_keys(place, {"input_activations": inputs}, {}, ())
        bits, size = weights["num_bits"], weights.get("group_size") or -1
        if (weights["strategy"] == "group") != (size > 0):
            raise CheckpointError(f"{place}: strategy {weights['strategy']} has a group_size of {size}.", fix=FIX)
        title = f"compressed-tensors W{bits}A16"
        return PackedForm("pack", title, bits, max(size, 0), kv=kv, targets=targets, excluded=excluded)
    check_keys(f"{place}: weights", weights, allowed | _FP8 | {"strategy": ("channel", "tensor")}, needed, _ARGS)
    static = isinstance(inputs, Mapping) and inputs.get("dynamic") is not True
    allowed = {"dynamic": (not static,), "strategy": ("tensor",) if static else ("token",)}
    check_keys(f"{place}: input_activations", {} if inputs is None else inputs, _FP8 | allowed, (), _ARGS)
    return PackedForm("e4m3", "compressed-tensors FP8", 8, 0, static, inputs is None, kv, targets, excluded)


def _read_modelopt(place: str, said: dict[str, Any]) -> PackedForm:
    excluded = (*_pop_names(place, said, "ignore"), *_pop_names(place, said, "exclude_modules"))
    kv = [_pop_kv(place, said, key) for key in ("kv_cache_quant_algo", "kv_cache_scheme")]
    algos = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
    check_keys(place, said, {"quant_algo": algos}, ("quant_algo",), ("producer", "config_groups"))
    return PackedForm("e4m3", "ModelOpt FP8", static=said["quant_algo"] == "FP8", kv=any(kv), excluded=excluded)


def _read_mlx(place: str, said: dict[str, Any]) -> PackedForm:
    sizes, needed = {"group_size": (32, 64, 128), "bits": (4, 8), "mode": ("affine",)}, ("group_size", "bits")
    own = {key: said.pop(key) for key, value in [*said.items()] if isinstance(value, (Mapping, bool))}  # by module
    for module, inner in [("", said), *((name, inner) for name, inner in own.items() if not isinstance(inner, bool))]:
        check_keys(f"{place}: {named(module)}" if module else place, inner, sizes, needed)
    excluded = tuple(module for module, inner in own.items() if inner is False)
    sizes_of = {name: (inner["group_size"], inner["bits"]) for name, inner in own.items() if isinstance(inner, Mapping)}
    return PackedForm(
        "mlx", f"MLX {said['bits']}-bit", said["bits"], said["group_size"], excluded=excluded, own=sizes_of
    )


def _read_bitsandbytes(place: str, said: dict[str, Any]) -> PackedForm:
    excluded = _pop_names(place, said, "llm_int8_skip_modules")
    allowed = {
        "load_in_4bit": (True,), "_load_in_4bit": (True,), "load_in_8bit": (False,), "_load_in_8bit": (False,),
        "bnb_4bit_quant_type": ("nf4",), "bnb_4bit_quant_storage": ("uint8",),
    }  # fmt: skip
    idle = (
        "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload",
        "llm_int8_has_fp16_weight", "llm_int8_threshold",
    )  # fmt: skip
    check_keys(place, said, allowed, ("load_in_4bit", "bnb_4bit_quant_type"), idle)
    return PackedForm("nf4", "bitsandbytes NF4", 4, excluded=excluded)


_IDLE = (  # of AWQ and GPTQ: how a quantizer was run, or by what kernel a model shall run
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path", "meta", "dataset",
    "model_file_base_name", "model_file_basename", "tokenizer", "use_exllama", "disable_exllama", "exllama_config",
    "use_cuda_fp16", "max_input_length", "model_seqlen", "cache_block_outputs", "batch_size", "pad_token_id", "mse",
    "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "act_group_aware",
    "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
)  # fmt: skip


def _read_gptq(place: str, said: dict[str, Any]) -> PackedForm:
    allowed = {
        "bits": (4, 8), "group_size": _GROUPS, "sym": (True,), "desc_act": (True, False), "v2": (False,),
        "checkpoint_format": ("gptq", "gptq_v2"), "pack_dtype": ("int32",), "is_marlin_format": (False,),
        "lm_head": (True, False), "backend": ("auto",),
    }  # fmt: skip
    given = [said.pop(key, None) for key in ("checkpoint_format", "format")]  # GPTQModel's name, and transformers'
    layout = given[0] or given[1] or "gptq"
    said["checkpoint_format"] = layout if given[1] in (None, layout) else given
    check_keys(place, said, allowed, ("bits", "group_size", "sym"), _IDLE)
    bits, ordered = said["bits"], said.get("desc_act") is True
    zero = (1 << (bits - 1)) - (layout == "gptq")  # the first layout stores it less 1
    return PackedForm("gptq", f"GPTQ {bits}-bit", bits, max(said["group_size"], 0), ordered=ordered, stored_zero=zero)


def _read_awq(place: str, said: dict[str, Any]) -> PackedForm:
    excluded = _pop_names(place, said, "modules_to_not_convert")
    for old, key in (("w_bit", "bits"), ("q_group_size", "group_size"), ("format", "version")):
        if old in said and key not in said:
            said[key] = said.pop(old)
    allowed = {
        "bits": (4,), "group_size": _GROUPS, "zero_point": (True,), "version": ("gemm", "GEMM"), "desc_act": (False,),
        "backend": ("autoawq", "auto"),
    }  # fmt: skip
    check_keys(place, said, allowed, ("bits", "group_size", "zero_point", "version"), (*_IDLE, "sym"))
    return PackedForm("awq", "AWQ 4-bit", 4, max(said["group_size"], 0), excluded=excluded)


_METHODS: dict[str, Callable[[str, dict[str, Any]], PackedForm]] = {
    "compressed-tensors": _read_compressed, "modelopt": _read_modelopt, "mlx": _read_mlx,
    "bitsandbytes": _read_bitsandbytes, "gptq": _read_gptq, "awq": _read_awq,
}  # fmt: skip
