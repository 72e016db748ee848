"""Merge a LoRA adapter of PEFT into a source, a few rows at a time.

Reads adapter_config.json and adapter_model.safetensors as peft 0.21 does (tuners/lora/layer.py: W + s * B A; DoRA
brings the rows to the trained lengths). It knows a base only as a Source. Invariant: every tensor of the adapter is
in the result, or the adapter is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wicore_trt.checkpoint.folder import ADAPTER, ADAPTER_WEIGHTS, check_folder
from wicore_trt.checkpoint.names import HF_EMBEDDING, HF_LM_HEAD, canonical_name, check_tensors, hf_shapes, is_vision
from wicore_trt.checkpoint.quantize import FLOATS, to_float32
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, TensorInfo
from wicore_trt.checkpoint.source import GENERATION, TOKENIZER_FILES, Source
from wicore_trt.errors import CheckpointError, first_fault, named, shown
from wicore_trt.files import TOKENIZER_BYTES, UntrustedFiles, is_present
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.model.vision import vision_tensors

_PARTS = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
_ORIGINAL = ".original_module."  # beside what modules_to_save put in its place
_SAVED = re.compile(r"\.(?:modules_to_save(?:\.default)?|base_layer)\.weight$")
_INITS = (True, False, None, "gaussian", "orthogonal", "eva")  # the others change the base, which the adapter lacks
_UNUSED = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "monteclora_config",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
_IDLE = (  # change training, or nothing where those above are absent
    "auto_mapping", "bias", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode", "layers_pattern",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
)  # fmt: skip
_TOKENIZER = [name for name in TOKENIZER_FILES if name != GENERATION and "processor" not in name]
_Pattern = Annotated[dict[str, float], Field(max_length=4096)]


class _Config(BaseModel):
    """Fields of adapter_config.json that change what is computed."""

    model_config = ConfigDict(strict=True, extra="allow")
    peft_type: str
    r: Annotated[int, Field(ge=1)] = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: _Pattern | None = None
    alpha_pattern: _Pattern | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    init_lora_weights: bool | str | None = True
    ensure_weight_tying: bool = False
    base_model_name_or_path: str | None = None


# Weights are merged in float32, and the converter rounds them once. The result is the model that was trained,
# unmerged: an adapter of tied embeddings changes the side that it names and unties them.
class LoraSource(Source):
    """Source `base` with the adapter in the directory `path` merged into it."""

    def __init__(self, base: Source, path: Path) -> None:
        self._base, self._path = base, path
        self.name, self.revision = base.name, base.revision
        self.door, self.vision, self.generation_config = base.door, base.vision, base.generation_config
        self._door = UntrustedFiles(path, fix="Save the adapter again.", seen={})
        self._config = self._read_config()
        if not is_present(path / ADAPTER_WEIGHTS):
            raise CheckpointError(f"{path} lacks {ADAPTER_WEIGHTS}.", fix="Save the adapter with peft as safetensors.")
        self._file = SafetensorsFile(path / ADAPTER_WEIGHTS, self._door)
        self._images = vision_tensors(self.vision) if self.vision else {}
        self._full, parts, aside = self._sort_tensors()
        self._shared: str | None = None  # what stands in the place of embedding and head of a tied base
        self.spec = self._settle_head(set(parts))
        self._low = parts  # names in the file by kind, of each weight that gets an addition
        self._scales = {name: self._check_low_rank(name, kinds) for name, kinds in parts.items()}
        needed = hf_shapes(self.spec)
        self.tensors = {name: self._find_info(name) for name in needed}
        check_tensors(self.spec, {name: info.shape for name, info in self.tensors.items()}, f"{path} with {base.name}")
        self._check_targets(parts)
        self._held: tuple[str, dict[str, np.ndarray]] = "", {}
        self._own = os.path.realpath(path) != os.path.realpath(base.name) and is_present(path / "tokenizer.json")
        self.notes = [*base.notes, *self._describe_adapter(aside)]

    def read_rows(self, name: str, start: int, stop: int) -> tuple[np.ndarray, str]:
        source, stored = self._find_origin(name)
        if source is None:
            block, tag = self._base.read_rows(stored, start, stop)
        else:
            block, tag = source.read_rows(stored, start, stop), source.tensors[stored].dtype
        if name not in self._low:
            return block, tag
        if self._held[0] != name:
            self._held = name, {kind: self._read_array(raw) for kind, raw in self._low[name].items()}
        kinds = self._held[1]
        if "lora_embedding_A" in kinds:  # left [rows, rank], right [rank, columns]
            left, right = kinds["lora_embedding_A"].T, kinds["lora_embedding_B"].T
        else:
            left, right = kinds["lora_B"], kinds["lora_A"]
        with np.errstate(over="ignore", invalid="ignore"):  # the converter refuses what is not finite
            merged = to_float32(block, tag) + (left[start:stop] @ right) * np.float32(self._scales[name])
            if "lora_magnitude_vector" in kinds:  # DoRA: the lengths of the merged rows, [rows]
                lengths = kinds["lora_magnitude_vector"][start:stop]
                merged *= (lengths / np.linalg.norm(merged, axis=1))[:, None]
        return merged, "F32"

    def find_blocks(self, name: str) -> str:
        source, stored = self._find_origin(name)
        return "" if source is not None or name in self._low else self._base.find_blocks(stored)

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._base.read_blocks(self._find_origin(name)[1], start, stop)

    def read_e4m3(self, name: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray] | None:
        kept = self._find_origin(name) == (None, name) and name not in self._low
        return self._base.read_e4m3(name, start, stop) if kept else None

    def describe_reading(self, dtype: str, scales: Collection[str] | None) -> str | None:
        said = self._base.describe_reading(dtype, scales)
        return said and f"before the adapter was merged, {said}"

    def read_norm(self, name: str, start: int, stop: int) -> np.ndarray:
        return super().read_norm(name, start, stop) if name in self._full else self._base.read_norm(name, start, stop)

    def write_tokenizer(self, directory: Path) -> list[Path]:
        files = self._base.write_tokenizer(directory)
        if not self._own:
            return files
        for file in files:
            if file.name in _TOKENIZER:
                file.unlink()
        names = [name for name in _TOKENIZER if is_present(self._path / name)]
        copied = [self._door.copy_file(self._path / n, directory / n, limit=TOKENIZER_BYTES) for n in names]
        return [*(file for file in files if file.name not in _TOKENIZER), *copied]

    def place_of(self, name: str) -> str:
        source, stored = self._find_origin(name)
        place = self._base.place_of(stored) if source is None else str(source.path)
        return f"{place} with {self._path}" if name in self._low else place

    def check_unchanged(self) -> None:
        self._base.check_unchanged()
        self._door.check_unchanged()

    def _read_config(self) -> _Config:
        place = self._path / ADAPTER
        if not is_present(place):
            raise CheckpointError(f"{self._path} is no adapter: it has no {ADAPTER}.", fix="Give a directory of PEFT.")
        said = self._door.read_json(place)
        if "fine_tune_type" in said or "lora_parameters" in said:
            raise CheckpointError(f"{self._path} is an adapter of MLX.", fix="Fuse it with mlx_lm.fuse.")
        try:
            config = _Config.model_validate(said)
        except ValidationError as error:
            raise CheckpointError(f"{place}: {first_fault(error)}.") from error
        if config.peft_type != "LORA":
            raise CheckpointError(f"{place}: {shown(config.peft_type)} is no LoRA, and cannot be merged.")
        patterns = [config.target_modules, config.exclude_modules, *(config.rank_pattern or ())]
        for pattern in (*patterns, *(config.alpha_pattern or ())):
            try:
                re.compile(pattern if isinstance(pattern, str) else "")
            except re.error as error:
                raise CheckpointError(f"{place}: {shown(pattern)} is no regular expression: {error}.") from error
        odd = [key for key in _UNUSED if said.get(key)]
        if config.init_lora_weights not in _INITS:
            odd.append("init_lora_weights")
        if odd:
            fix = "Merge it with peft's merge_and_unload and build the result."
            raise CheckpointError(f"{place}: {odd[0]} is {shown(said[odd[0]])}, which WiCore does not merge.", fix=fix)
        return config

    def _sort_tensors(self) -> tuple[dict[str, str], dict[str, dict[str, str]], int]:
        """Return tensors that replace the base's, tensors that are added to them, and the number of those that belong
        to an image encoder that the base lacks. Both are by canonical name."""
        full, low, aside = dict[str, str](), dict[str, dict[str, str]](), 0
        known = hf_shapes(replace(self._base.spec, tie_word_embeddings=False)) | self._images
        for raw, info in self._file.tensors.items():
            match = _PARTS.fullmatch(raw)
            name = canonical_name(f"{match[1]}.weight" if match else _SAVED.sub(".weight", raw))
            if is_vision(name) and not self._images:
                aside += 1
            elif _ORIGINAL in raw and raw.replace(_ORIGINAL, ".modules_to_save.") in self._file.tensors:
                continue  # the base's own, of which no use is made
            elif (
                name not in known
                or info.dtype not in FLOATS
                or (len(known[name]) != 2 and match)
                or (name in self._images and not match and info.shape != known[name])
            ):
                raise CheckpointError(f"{self._file.path}: {named(raw)} is nothing that can be merged into Gemma 3.")
            elif match:
                low.setdefault(name, {})[match[2]] = raw
            elif name in full and self._have_equal_values(raw, full[name]):
                full[name] = max(full[name], raw, key=len)  # the one that says whose it is
            elif name in full:
                raise CheckpointError(f"{self._file.path} holds {name} twice: {named(full[name])}, {named(raw)}.")
            else:
                full[name] = raw
        if not full and not low:
            raise CheckpointError(f"{self._file.path} holds nothing that changes the text model.")
        return full, low, aside

    def _have_equal_values(self, one: str, other: str) -> bool:
        infos = self._file.tensors[one], self._file.tensors[other]
        return infos[0] == infos[1] and np.array_equal(self._read_array(one), self._read_array(other))

    def _settle_head(self, lowered: set[str]) -> Gemma3Spec:
        """Return the spec with the adapter: tied embeddings of which it changes one side are tied no more.
        A saved copy of the base's own (peft's save_embedding_layers) changes both sides. Rows beyond the base's are
        added tokens."""
        spec, both = self._base.spec, (HF_EMBEDDING, HF_LM_HEAD)
        if spec.tie_word_embeddings:
            copies = [name for name in both if name in self._full and not self._is_saved(self._full[name])]
            self._shared = self._full[copies[0]] if copies else None
            for name in copies:
                del self._full[name]
            spec = replace(spec, tie_word_embeddings=not lowered.union(self._full).intersection(both))
        embedding = self._full.get(HF_EMBEDDING, self._shared)
        return replace(spec, vocab_size=self._file.tensors[embedding].shape[0]) if embedding else spec

    def _is_saved(self, raw: str) -> bool:
        """Return True for a whole tensor that belongs to one module alone (modules_to_save)."""
        if ".base_layer." in raw or ".modules_to_save." in raw:
            return ".modules_to_save." in raw
        return _is_among(raw.removesuffix(".weight"), self._config.modules_to_save or ())

    def _check_low_rank(self, name: str, parts: dict[str, str]) -> float:
        """Check the tensors of an addition to one weight, by kind; returns its scale: scale * left @ right."""
        kinds, place = set(parts), self._file.path
        if kinds - {"lora_magnitude_vector"} not in ({"lora_A", "lora_B"}, {"lora_embedding_A", "lora_embedding_B"}):
            raise CheckpointError(f"{place}: of {name} it holds {' and '.join(sorted(kinds))} alone.")
        embedding, dora = "lora_embedding_A" in kinds, "lora_magnitude_vector" in kinds
        if dora != self._config.use_dora or (dora and embedding):
            has = "an embedding's" if embedding else "a" if dora else "no"
            problem = f"{place}: use_dora is {self._config.use_dora}, and {name} has {has} lora_magnitude_vector."
            raise CheckpointError(problem)
        module = _name_module(parts)
        rank = _find_pattern_value(self._config.rank_pattern, module, self._config.r)
        alpha = _find_pattern_value(self._config.alpha_pattern, module, self._config.lora_alpha)
        shapes = {kind: self._file.tensors[raw].shape for kind, raw in parts.items()}
        down = shapes["lora_embedding_A" if embedding else "lora_A"]
        up = shapes["lora_embedding_B" if embedding else "lora_B"]
        rows, columns = (down[-1], up[0]) if embedding else (up[0], down[-1])
        want = self._images.get(name) or self._find_info(name).shape
        if len(down) != 2 or len(up) != 2 or down[0] != up[1] or (rows, columns) != want:
            raise CheckpointError(f"{place}: {list(up)} x {list(down)} does not fit {name}, which is {list(want)}.")
        if down[0] != rank:
            raise CheckpointError(f"{place}: {name} has rank {down[0]}, and {ADAPTER} says {rank:g}.")
        if dora and shapes["lora_magnitude_vector"] != (rows,):
            raise CheckpointError(f"{place}: lora_magnitude_vector of {name} is {shapes['lora_magnitude_vector']}.")
        return alpha / (sqrt(rank) if self._config.use_rslora else rank)

    def _check_targets(self, low: dict[str, dict[str, str]]) -> None:
        """Compare target_modules and their layers with the modules that have tensors."""
        both = (HF_EMBEDDING, HF_LM_HEAD) if self._config.ensure_weight_tying else ()  # either stands for both
        strangers = [n for n, parts in low.items() if n not in both and not self._is_targeted(_name_module(parts))]
        if strangers:
            problem = f"{self._file.path} holds {named(strangers[0])}, which target_modules of {ADAPTER} does not name."
            raise CheckpointError(problem)
        inside = [parts for name, parts in low.items() if ".layers." in name and name not in self._images]
        inner = [_name_module(parts).partition("layers.")[0] for parts in inside]
        lost = [
            name
            for name, info in self.tensors.items()
            if inner and ".layers." in name and len(info.shape) == 2 and name not in low and name not in self._full
            if self._is_targeted(inner[0] + name.removeprefix("model.").removesuffix(".weight"))
        ]
        held = {*self._full, *(both if self._full.keys() & {*both} else ())}
        saved = tuple(f".{name}.weight" for name in self._config.modules_to_save or ())
        whole = hf_shapes(replace(self.spec, tie_word_embeddings=False))
        lost += [name for name in whole if f".{name}".endswith(saved) and name not in held]
        if lost:
            such = f"such as {named(lost[0])}"
            raise CheckpointError(f"{self._file.path} lacks {len(lost)} of the weights that {ADAPTER} names, {such}.")

    def _is_targeted(self, module: str) -> bool:
        """Return True when peft's check_target_module_exists would match this module."""
        config, targets = self._config, self._config.target_modules
        if config.exclude_modules and _is_among(module, config.exclude_modules):
            return False
        if targets is None or targets == "all-linear":
            return True
        layers = config.layers_to_transform
        if not isinstance(targets, str) and module in targets:
            return True
        if layers in (None, []) or isinstance(targets, str):
            return _is_among(module, targets)
        layer = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        chosen = [layers] if isinstance(layers, int) else layers
        return _is_among(module, targets) and layer is not None and int(layer[1]) in chosen

    def _find_origin(self, name: str) -> tuple[SafetensorsFile | None, str]:
        """Find a tensor's rows before additions: the adapter's file, or None for the base, and the name there."""
        if name in self._full:
            return self._file, self._full[name]
        if name in (HF_EMBEDDING, HF_LM_HEAD) and self._shared:
            return self._file, self._shared
        tied = name == HF_LM_HEAD and self._base.spec.tie_word_embeddings
        return None, HF_EMBEDDING if tied else name

    def _find_info(self, name: str) -> TensorInfo:
        source, stored = self._find_origin(name)
        return (self._base if source is None else source).tensors[stored]

    def _read_array(self, raw: str) -> np.ndarray:
        info = self._file.tensors[raw]
        return to_float32(self._file.read_rows(raw, 0, info.shape[0]), info.dtype)

    def _describe_adapter(self, aside: int) -> list[str]:
        config, trained = self._config, self._config.base_model_name_or_path
        many = f"{len(self._low)} weights" + (f", {len(self._full)} replaced" if self._full else "")
        notes = [f"merged {self._path}: rank {config.r}, alpha {config.lora_alpha:g}, {many}."]
        if trained and _plain_name(trained) != _plain_name(self._base.name):
            merged = f"it is merged into {self._base.name}."
            notes.append(f"the adapter says that it was trained on {named(trained)}; {merged}")
        if self.spec.tie_word_embeddings != self._base.spec.tie_word_embeddings:
            notes.append("the adapter changes embedding and head apart: the engine holds both.")
        if aside:
            notes.append(f"left aside: {aside} tensors of the adapter, for an image encoder that the base lacks.")
        unknown = [k for k, v in (config.model_extra or {}).items() if v and k not in _IDLE]
        if unknown:
            notes.append(f"{ADAPTER} says {named(unknown[0])}, which is not known and changes nothing here.")
        if self._own:
            notes.append("tokenizer and chat template are those beside the adapter.")
        if os.path.realpath(self._path) != os.path.realpath(self._base.name):
            beside = [name for name in _TOKENIZER if is_present(self._path / name)]
            if beside and not self._own:
                notes.append(f"{', '.join(beside)} of the adapter left aside: it has no tokenizer.json.")
            notes += check_folder(self._path, (ADAPTER, ADAPTER_WEIGHTS, *_TOKENIZER), merges_adapter=True)
        return notes


def _is_among(module: str, names: Sequence[str]) -> bool:
    """Return True when a module has one of these names, or matches the one regular expression."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _name_module(parts: dict[str, str]) -> str:
    """Return the module of low-rank tensors, as peft called it when they were saved."""
    return next(iter(parts.values())).split(".lora_")[0].removeprefix("base_model.model.")


def _find_pattern_value(pattern: dict[str, float] | None, module: str, default: float) -> float:
    """Return the value of the first key of a pattern that matches a module (peft's get_pattern_key)."""
    return next((v for key, v in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _plain_name(name: str) -> str:
    """Return a model's name without its owner and without suffixes of trainers."""
    return re.sub(r"(-unsloth)?(-bnb-4bit)?(\.gguf)?$", "", os.path.basename(os.path.normpath(name)).lower())
