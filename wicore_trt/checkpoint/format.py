"""Read and write the unified checkpoint directory: config.json, rank{N}.safetensors, tokenizer, vision.safetensors.

It touches no weight values. Invariant: a directory that `open_checkpoint` accepts is complete, and its config.json
is as it was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from wicore_trt.checkpoint.digest import SEAL, describe_broken_seal, hash_bytes, make_seal
from wicore_trt.checkpoint.names import (
    Role,
    Split,
    UnifiedTensor,
    activation_scale_name,
    kv_scale_name,
    linear_kind,
    unified_tensors,
    weight_minimum_name,
)
from wicore_trt.checkpoint.records import FileRecord, file_entries
from wicore_trt.checkpoint.safetensors_io import TAG_BYTES, SafetensorsFile, TensorEntry
from wicore_trt.checkpoint.sharding import shard_of
from wicore_trt.checkpoint.source import TOKENIZER_FILES
from wicore_trt.errors import CheckpointError, shown
from wicore_trt.files import LIST_BYTES, TOKENIZER_BYTES, UntrustedFiles, is_present, quote_arg
from wicore_trt.model.gemma3 import LM_HEAD
from wicore_trt.model.spec import GLOBAL, LOCAL, Gemma3Spec
from wicore_trt.model.vision import POSITIONS, VisionSpec, vision_tensors
from wicore_trt.scratch import Product
from wicore_trt.weight_format import FORMATS, LAYOUTS, PLAIN, VISION, WeightFormat, find_format

# The layout and field names are TensorRT-LLM's (docs/source/legacy/architecture/checkpoint.md and
# models/gemma/config.py of 1.2); fields that it lacks are in the block `wicore`. Norm weights are 1 + w in float32
# whatever the dtype (TensorRT-LLM's own converter rounds them), the embedding is unscaled, the head always written. FP8
# (quant_algo FP8_PER_CHANNEL_PER_TOKEN): the five linears of a layer are E4M3 with `<weight>s_scaling_factor`, float32
# [out], so that w = e4m3 * scale; embedding and head are BF16. Calibrated: quant_algo FP8, linears have
# `<linear>.activation_scaling_factor`; kv_cache_quant_algo is FP8 when each layer has
# `attention.kv_cache_scaling_factor`. Both are float32 [1] = amax / 448, equal on all ranks. `wicore.files` has a
# digest of every other file, of weight files one per tensor, and `wicore.seal` that of config.json
# (`checkpoint.digest`); readers compare what they have read. vision.safetensors has the image encoder that
# `wicore.vision` describes (`VisionSpec`): weights of products in `dtype`, norms, biases and positions in float32.
# Checkpoints before it have another `wicore.vision`, and the encoder as it was in the source: it is left aside. Q4_0
# (quant_algo W4A16_Q4_0, which TensorRT-LLM lacks): layouts of `weight_format.LAYOUTS`, scales as for FP8, minimums in
# `<weight>s_minimum`; `quantization` names the storage of embedding and head, and the kinds of linears that have
# minimums. Version 3 is for these checkpoints alone, so that older readers refuse them by their version.
FORMAT_VERSION, BLOCKS_VERSION = 2, 3
CONFIG = "config.json"
KV_FP8 = "FP8"
READ_AS = "read_as"
"""Key, in `wicore` and in an engine's `compiled`, of a sentence on how quantized tensors of the source were read."""
TAGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
FP8_TAG = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class CheckpointForm:
    """Facts that a checkpoint's tensors follow from. `dtype` is that of embedding and head, `weights` the format of the
    linears. `kv_scales`: every layer has a scale for an FP8 KV cache."""

    spec: Gemma3Spec
    dtype: str
    weights: WeightFormat
    tp_size: int
    kv_scales: bool = field(default=False, kw_only=True)

    def find_storage(self, role: Role) -> str:
        """Return the storage of a tensor: a base dtype or a name in LAYOUTS."""
        if role is Role.NORM:
            # 1 + w of norms in bfloat16 would move them by up to 0.4 %, so they are float32.
            return "float32"
        return self.weights.storage if role is Role.LINEAR else self.weights.head or self.dtype

    def list_parts(self, tensor: UnifiedTensor, shape: tuple[int, ...] | None = None) -> list[TensorEntry]:
        """List (name, safetensors tag, shape) of what stores a tensor, or its shard of `shape`: values, then scales,
        then minimums. Raises CheckpointError for rows that are not whole blocks."""
        shape, storage = tensor.shape if shape is None else shape, self.find_storage(tensor.role)
        layout = LAYOUTS.get(storage)
        if layout is None:
            return [(tensor.name, TAGS[storage], shape)]
        rows, k = shape
        if layout.group and k % layout.group:
            problem = f"{tensor.name} has rows of {k} values on a rank, which are not whole blocks of {layout.group}."
            raise CheckpointError(problem, fix="Use fewer ranks (--tp), or --dtype bfloat16 or fp8.")
        scales: tuple[int, ...] = (rows, k // layout.group) if layout.group else (rows,)
        values: tuple[int, ...] = (rows, k // layout.packed)
        parts = [(tensor.name, layout.tag, values), (tensor.scale_name, layout.scale_tag, scales)]
        if tensor.role is Role.LINEAR and linear_kind(tensor.name) in self.weights.minimums:
            parts.append((weight_minimum_name(tensor.name), layout.scale_tag, scales))
        return parts

    def list_static(self, tensor: UnifiedTensor) -> list[str]:
        """List the static scales, float32 [1] each, that follow a tensor in a rank file."""
        linear = self.weights.static_activations and tensor.role is Role.LINEAR
        names = [activation_scale_name(tensor.name)] if linear else []
        if self.kv_scales and tensor.split is Split.QKV:
            names.append(kv_scale_name(int(tensor.name.split(".")[2])))
        return names

    def list_entries(self, rank: int) -> list[TensorEntry]:
        """List (name, safetensors tag, shape) of every tensor in rank{rank}.safetensors, in file order."""
        entries: list[TensorEntry] = []
        for tensor in unified_tensors(self.spec):
            entries += self.list_parts(tensor, shard_of(tensor, self.spec, rank, self.tp_size).shape)
            entries += [(name, "F32", (1,)) for name in self.list_static(tensor)]
        return entries

    def make_fields(self) -> dict[str, Any]:
        """Make the fields of config.json that TensorRT-LLM reads."""
        spec, weights = self.spec, self.weights
        windows = {GLOBAL: spec.max_position_embeddings, LOCAL: spec.sliding_window}
        # Without the period of the windows, which its versions name differently.
        config: dict[str, Any] = {
            "architecture": "Gemma3ForCausalLM", "dtype": self.dtype, "logits_dtype": "float32",
            "vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size, "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads,
            "head_size": spec.head_dim, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": spec.rms_norm_eps,
            "position_embedding_type": "rope_gpt_neox", "max_position_embeddings": spec.max_position_embeddings,
            "rotary_embedding_dim": spec.head_dim, "rotary_base": spec.rope_theta,
            "rope_local_base_freq": spec.rope_local_theta, "query_pre_attn_scalar": spec.query_pre_attn_scalar,
            "final_logit_softcapping": spec.final_logit_softcapping, "sliding_window": spec.sliding_window,
            "attn_bias": False, "mlp_bias": False, "qk_layernorm": True, "inter_layernorms": True,
            "use_parallel_embedding": self.tp_size > 1, "embedding_sharding_dim": 0,
            "mapping": {"world_size": self.tp_size, "tp_size": self.tp_size, "pp_size": 1},
            "quantization": {"quant_algo": weights.algo, "kv_cache_quant_algo": KV_FP8 if self.kv_scales else None},
            "runtime_defaults": {"max_attention_window": [windows[group] for group in spec.layer_groups]},
        }  # fmt: skip
        if weights.quantized:
            config["quantization"]["exclude_modules"] = ["transformer.vocab_embedding", "lm_head"]
        if weights.group:
            form = {"group_size": weights.group, "head": weights.head, "minimums": list(weights.minimums)}
            config["quantization"] |= form
        if spec.rope_scaling_factor != 1.0:  # of global layers only
            config["rotary_scaling"] = {"type": "linear", "factor": spec.rope_scaling_factor}
        return config


@dataclass(frozen=True, slots=True)
class Checkpoint(CheckpointForm):
    """Opened unified checkpoint."""

    path: Path
    config: dict[str, Any]
    rank_files: list[Path]
    tokenizer_files: list[Path]
    vision_file: Path | None
    files: Mapping[str, FileRecord]
    vision: VisionSpec | None = None
    """The image encoder in `vision_file`; None for a text model, and for a file of an older layout."""

    def read(self, name: str) -> bytes:
        """Read the listed file `name`, a small one. Raises CheckpointError when its bytes are not as recorded."""
        data = UntrustedFiles(self.path, fix=self.rebuild_command).read_bytes(self.path / name, limit=TOKENIZER_BYTES)
        if hash_bytes(data) != self.files[name].blake2b:
            raise self.make_damage_error(name, name)
        return data

    def make_damage_error(self, name: str, part: str) -> CheckpointError:
        problem = f"is damaged: {'it' if part == name else part} has changed since it was written."
        return CheckpointError(f"{self.path / name} {problem}", fix=self.rebuild_command)

    @property
    def rebuild_command(self) -> str:
        return _find_rebuild_command(self.path, self.config)

    @property
    def revision(self) -> str | None:
        """Hub commit that the checkpoint was converted from, if any."""
        revision: str | None = self.config["wicore"].get("revision")
        return revision

    @property
    def source(self) -> str:
        return str(self.config["wicore"]["source"])


def count_weight_bytes(spec: Gemma3Spec, weights: WeightFormat) -> int:
    """Count the bytes of a text model's weights on a GPU: all of one rank's file but a tied head, heads in blocks as 16
    bits. The base dtype has 16 bits unless `weights` are plain."""
    dtype = "bfloat16" if weights.quantized else weights.storage
    weights = replace(weights, head="float16" if weights.head else "")
    tied = LM_HEAD if spec.tie_word_embeddings else None
    entries = CheckpointForm(spec, dtype, weights, 1).list_entries(0)
    return sum(prod(shape) * TAG_BYTES[tag] for name, tag, shape in entries if not (tied and name.startswith(tied)))


def vision_entries(vision: VisionSpec, dtype: str) -> list[TensorEntry]:
    """List (name, safetensors tag, shape) of every tensor in vision.safetensors, in file order."""
    return [
        (name, TAGS[dtype] if len(shape) > 1 and name != POSITIONS else "F32", shape)
        for name, shape in vision_tensors(vision).items()
    ]


def build_config(form: CheckpointForm, files: Mapping[str, FileRecord], origin: Mapping[str, Any]) -> dict[str, Any]:
    """Make config.json. `origin`: the `source`, the hub commit `revision`, `lora`, `mmproj`, the spec `vision`, the
    count `flushed_to_zero`, the sentence `read_as` and `calibration` (`text`, `tokens`, `token_ids_blake2b`); all but
    the first may lack."""
    spec, config = form.spec, form.make_fields()
    pattern = window_pattern(spec)
    if pattern:  # both spellings occur among TensorRT-LLM's versions
        config |= {"sliding_window_pattern": pattern, "_sliding_window_pattern": pattern}
    config["wicore"] = {
        "format_version": find_version(form.weights), "source": origin["source"], "revision": origin.get("revision"),
        "spec": spec.to_dict(), "tie_word_embeddings": spec.tie_word_embeddings,
        "vision": origin.get("vision") or None, "flushed_to_zero": origin.get("flushed_to_zero", 0),
        "calibration": origin.get("calibration"), "files": file_entries(files),
        **{key: origin[key] for key in ("lora", "mmproj", "text_only", READ_AS) if origin.get(key)},
    }  # fmt: skip
    return config


def find_version(weights: WeightFormat) -> int:
    """Return the version of a checkpoint's format."""
    return BLOCKS_VERSION if weights.group else FORMAT_VERSION


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Seal config.json, write it and wait until it is on disk."""
    block = {**config["wicore"], SEAL: make_seal(_check_seal(config))}
    config = {**config, "wicore": block}
    with (directory / CONFIG).open("w", encoding="utf-8") as stream:
        json.dump(config, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())


def _check_seal(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "wicore": {key: value for key, value in config["wicore"].items() if key != SEAL}}


def window_pattern(spec: Gemma3Spec) -> int | None:
    """Return n when exactly every n-th layer is global, None when the layers follow no such period."""
    globals_ = spec.layers_of(GLOBAL)
    pattern = globals_[0] + 1 if globals_ else spec.num_layers + 1
    return pattern if globals_ == tuple(range(pattern - 1, spec.num_layers, pattern)) else None


def _find_file_names(path: Path) -> set[str] | None:
    """Return the names of a checkpoint's files, damaged or not; None when the directory is no checkpoint."""
    try:
        config = UntrustedFiles(path).read_json(path / CONFIG, limit=LIST_BYTES)
    except CheckpointError:
        return None
    block = config.get("wicore")
    files = block.get("files") if isinstance(block, dict) else None
    return {CONFIG, *files} if isinstance(files, dict) and "architecture" in config else None


CHECKPOINT = Product("checkpoint", CONFIG, _find_file_names)
"""Directory that `wicore convert --force` may replace."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open and check a unified checkpoint.
    Every file must have its recorded size, every rank file every tensor of the spec with its shape and dtype, and
    config.json must be as written; readers compare what they read of the others (`Checkpoint.read`,
    `FileRecord.parts`). Raises CheckpointError that says what is wrong and how to make the directory again."""
    path = Path(path)
    config = _read_config(path)
    block, rebuild = config["wicore"], _find_rebuild_command(path, config)
    try:
        spec = Gemma3Spec.from_dict(block["spec"], f"{path / CONFIG}: wicore.spec")
        dtype, tp_size = str(config["dtype"]), int(config["mapping"]["tp_size"])
        quantization = config["quantization"]
        quant_algo, kv_algo = (quantization[key] for key in ("quant_algo", "kv_cache_quant_algo"))
        head, minimums = quantization.get("head", ""), quantization.get("minimums", ())
        files = {name: FileRecord.from_dict(record) for name, record in block["files"].items()}
        vision = block.get("vision") or {}
        if "text_hidden_size" in vision:
            vision = VisionSpec.from_dict(vision, f"{path / CONFIG}: wicore.vision")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / CONFIG} is damaged: {error!r}.", fix=rebuild) from error
    try:
        weights = find_format(quant_algo, dtype, head, minimums)
        known = dtype in PLAIN and kv_algo in (None, KV_FP8) and block["format_version"] == find_version(weights)
    except (KeyError, TypeError):
        known = False
    if not known:
        form = f"dtype {dtype!r}, quantization {quant_algo!r}, KV {kv_algo!r}"
        raise CheckpointError(f"{path}: format {block['format_version']} with {form} is unknown.", fix=rebuild)
    spec.shard(0, tp_size)
    opened = CheckpointForm(spec, dtype, weights, tp_size, kv_scales=kv_algo is not None)
    for key, value in opened.make_fields().items():
        if config.get(key) != value:
            raise CheckpointError(f"{path / CONFIG}: {key} does not agree with wicore.spec.", fix=rebuild)
    ranks = [path / f"rank{rank}.safetensors" for rank in range(tp_size)]
    tables = {file: opened.list_entries(rank) for rank, file in enumerate(ranks)}
    if isinstance(vision, VisionSpec):
        tables[path / VISION] = vision_entries(vision, dtype)
    unlisted = [file.name for file in tables if file.name not in files or not files[file.name].parts]
    if unlisted:
        raise CheckpointError(f"{path / CONFIG} does not list {', '.join(unlisted)}.", fix=rebuild)
    _check_files(path, files, tables, fix=rebuild)
    return Checkpoint(
        spec, dtype, weights, tp_size, kv_scales=opened.kv_scales, path=path, config=config, rank_files=ranks,
        tokenizer_files=[path / n for n in TOKENIZER_FILES if n in files],
        vision_file=path / VISION if VISION in files else None, files=files,
        vision=vision if isinstance(vision, VisionSpec) else None,
    )  # fmt: skip


def _read_config(path: Path) -> dict[str, Any]:
    """Read config.json, and check that it is a checkpoint's and as it was written."""
    if not path.is_dir():
        fix = f"Make it: wicore convert SOURCE {quote_arg(path)}"
        raise CheckpointError(f"{path} is not a checkpoint directory.", fix=fix)
    if not is_present(path / CONFIG):
        fix = "Run: wicore convert SOURCE OUTPUT, to a new directory"
        raise CheckpointError(f"{path} has no {CONFIG}: it is not a checkpoint.", fix=fix)
    files = UntrustedFiles(path, fix="Convert the original model again, to a new directory.")
    config = files.read_json(path / CONFIG, limit=LIST_BYTES)
    block = config.get("wicore")
    if not isinstance(block, dict) or config.get("architecture") != "Gemma3ForCausalLM":
        fix = "Convert the original model: wicore convert"
        raise CheckpointError(f"{path / CONFIG} was not written by wicore.", fix=fix)
    if block.get("format_version") not in (FORMAT_VERSION, BLOCKS_VERSION):
        reads = f"this version reads {FORMAT_VERSION} and {BLOCKS_VERSION}."
        problem = f"{path} has checkpoint format {shown(block.get('format_version'))}; {reads}"
        raise CheckpointError(problem, fix="Convert it again or update wicore-trt.")
    broken = describe_broken_seal(_check_seal(config), block.get(SEAL))
    if broken:
        raise CheckpointError(
            f"{path / CONFIG} was edited or damaged: {broken}.", fix=_find_rebuild_command(path, config)
        )
    return config


def _check_files(
    path: Path, records: Mapping[str, FileRecord], tables: Mapping[Path, list[TensorEntry]], *, fix: str
) -> None:
    """Check that every file has its recorded size, and every weight file the tensors of its table."""
    files = UntrustedFiles(path, fix=fix)
    for name, record in records.items():
        if Path(name).name != name or not is_present(path / name):
            raise CheckpointError(f"{path} lacks {name}.", fix=fix)
        size = files.check_file(path / name)
        if size != record.bytes:
            raise CheckpointError(f"{path / name} has {size} bytes, not {record.bytes}.", fix=fix)
    for file, entries in tables.items():
        held = SafetensorsFile(file, files).tensors
        for name, tag, shape in entries:
            info = held.get(name)
            if info is None or info.dtype != tag or info.shape != shape:
                found = "missing" if info is None else f"{info.dtype} {list(info.shape)}"
                raise CheckpointError(f"{file}: {name} should be {tag} {list(shape)}, it is {found}.", fix=fix)


def _find_rebuild_command(path: Path, config: Mapping[str, Any]) -> str:
    """Return the command that makes the checkpoint again, as far as a damaged config tells."""
    block, mapping, quant = config["wicore"], config.get("mapping"), config.get("quantization")
    algo = quant.get("quant_algo") if isinstance(quant, dict) else None
    known = FORMATS.get(algo) if isinstance(algo, str) else None
    dtype = known.storage if known else config.get("dtype", "auto")
    tp = mapping.get("tp_size", 1) if isinstance(mapping, dict) else 1
    words: list[object] = [block.get("source", "SOURCE"), path]
    flags: list[tuple[str, object]] = [("dtype", dtype), ("tp", tp)]
    flags += [(name, block[name]) for name in ("revision", "lora", "mmproj") if block.get(name)]
    calibration = block.get("calibration")
    if isinstance(calibration, dict):
        flags += [("calibrate", calibration.get("text")), ("calibrate-tokens", calibration.get("tokens"))]
    options = "".join(f" --{name} {quote_arg(value)}" for name, value in flags)
    if isinstance(calibration, dict) and not (isinstance(quant, dict) and quant.get("kv_cache_quant_algo")):
        options += " --no-kv-scales"
    options += " --text-only" if block.get("text_only") else ""
    return f"Run: wicore convert {' '.join(quote_arg(word) for word in words)}{options} --force"
