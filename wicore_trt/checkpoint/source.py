"""Open sources of weights: a Hugging Face directory, a hub id or a GGUF file.

A source gives the specs, tensors under canonical Hugging Face names (`checkpoint.names`), their rows, and tokenizer
files. It does not know the unified checkpoint. Invariant: an opened source holds exactly the tensors that its
configuration asks for, and a local path never touches the network.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wicore_trt.checkpoint import unpack
from wicore_trt.checkpoint.folder import ADAPTER, check_folder, list_entries, name_kind
from wicore_trt.checkpoint.names import (
    HF_EMBEDDING,
    HF_LM_HEAD,
    TEXT_ONLY,
    canonical_name,
    check_tensors,
    check_vision,
    is_vision,
)
from wicore_trt.checkpoint.quantize import FLOATS, to_float32
from wicore_trt.checkpoint.quantized import FIX, FORM_FILES, describe_form, find_form
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, TensorInfo, split_rows
from wicore_trt.errors import CheckpointError, first_fault, named, shown
from wicore_trt.files import CONFIG_ENDS, TOKENIZER_BYTES, UntrustedFiles, is_present, quote_arg
from wicore_trt.model.hf_config import compare_config, read_hf_config, read_vision_config
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.model.vision import VisionSpec

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHAPING = (  # what changes greedy answers of transformers' generate
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "exponential_decay_length_penalty",
    "sequence_bias", "num_beams", "stop_strings", "guidance_scale", "penalty_alpha",
)  # fmt: skip
_PIXELS: dict[str, Any] = {  # what the encoder takes for granted of an image's way to it
    "do_convert_rgb": True, "do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 2,
    "rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
_SHAPES_NOTHING: tuple[Any, ...] = (None, 0, 1, [], {})
_FILE_NAME = re.compile(r"[^/\\\0]{1,255}")
_AGAIN = "Download it again."
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


class Source(ABC):
    """Opened source.
    `tensors` are canonical text tensors; `vision` is the image encoder, all of whose tensors are there. `name` is the
    reference that was opened and `revision` the hub commit; `generation_config` is {} when there is none. `notes`
    are sentences on decisions between contradictions and on ignored files. Quantized tensors are read dequantized, as
    F32; `fp8`: `read_e4m3` gives the linears as published. `auto_dtype` is "fp8" if their inputs are quantized, too.
    `static_scales` are the source's own, of inputs and KV, by the checkpoint's names, float32 [1]. All files are read
    through `door`, which remembers them."""

    spec: Gemma3Spec
    door: UntrustedFiles
    name: str
    revision: str | None
    tensors: Mapping[str, TensorInfo]
    vision: VisionSpec | None
    generation_config: Mapping[str, Any]
    notes: Sequence[str] = ()
    auto_dtype: str | None = None
    fp8: bool = False
    static_scales: dict[str, np.ndarray] = {}

    @abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> tuple[np.ndarray, str]:
        """Read rows [start, stop) of a tensor, with their format: F32, F16 or BF16 bits (uint16)."""

    def find_blocks(self, name: str) -> str:
        """Name the kind of GGUF blocks in which a tensor can be read, "" for none."""
        return ""

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows [start, stop) of a tensor for which `find_blocks` names a kind: uint8 [rows, bytes], a row's GGUF
        blocks in order."""
        raise AssertionError(f"{name} is not stored in blocks")

    @abstractmethod
    def write_tokenizer(self, directory: Path) -> list[Path]:
        """Put the tokenizer's files into `directory` and return them."""

    @abstractmethod
    def place_of(self, name: str) -> str:
        """Return the file that holds a tensor, for errors."""

    def check_unchanged(self) -> None:
        """Refuse when a file that was read has changed since it was opened."""
        self.door.check_unchanged()

    def read_e4m3(self, name: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Read rows of a tensor that is E4M3 in the source: bits uint8 and scales float32 [stop - start]; else None."""
        return None

    def describe_reading(self, dtype: str, scales: Collection[str] | None) -> str | None:
        """Say how quantized tensors are read into a checkpoint of `dtype`, which has these `static_scales`, or
        calibrated ones (None); None for a source without quantized tensors."""
        return None

    def read_tensor(self, name: str) -> np.ndarray:
        """Read a whole text tensor as float32."""
        return to_float32(*self.read_rows(name, 0, self.tensors[name].shape[0]))

    def read_norm(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read the factors 1 + w of rows [start, stop) of a norm, float32 [stop - start]."""
        with np.errstate(invalid="ignore"):  # a NaN may be a signalling one; whether values are finite is asked later
            return to_float32(*self.read_rows(name, start, stop)) + np.float32(1.0)


class HfSource(Source):
    """Directory with config.json and model.safetensors, or shards listed in model.safetensors.index.json."""

    tensors: dict[str, TensorInfo]
    notes: list[str]

    def __init__(
        self, path: Path, *, name: str, revision: str | None = None, lora: Path | None = None, text_only: bool
    ) -> None:
        self.path, self.name, self.revision = path, name, revision
        self.door = UntrustedFiles(path, fix=_AGAIN, seen={})
        if not is_present(path / "config.json"):
            raise _no_config(path)
        self.config = self.door.read_json(path / "config.json")
        self.spec = read_hf_config(self.config, str(path / "config.json"))
        self._form = find_form(path, self.config, self.door)
        self.fp8 = self._form is not None and self._form.kind == "e4m3"
        self.auto_dtype = "fp8" if self._form is not None and self.fp8 and not self._form.alone else None
        self.generation_config = self._read_generation(path / GENERATION)
        files, self.notes = _weight_files(path, self.door)
        asked = self.generation_config or self.config
        shaping = [f"{key} {shown(asked[key])}" for key in _SHAPING if asked.get(key) not in _SHAPES_NOTHING]
        if shaping:
            self.notes.append(f"left aside: {', '.join(shaping)}. How tokens are chosen is what requests say.")
        read = {"config.json", SINGLE, INDEX, *TOKENIZER_FILES, *FORM_FILES, *(file.path.name for file in files)}
        merges = lora is not None and os.path.realpath(lora) == os.path.realpath(path)
        self.notes += [*compare_config(self.config), *check_folder(path, read, merges_adapter=merges)]
        self._files: dict[str, tuple[SafetensorsFile, str]] = {}  # name -> file, name in the file
        self._packed: dict[str, unpack.PackedModule] = {}
        self._fitting: dict[str, bool] = {}  # tensors that Q4_0 holds exactly
        self.tensors, images = {}, dict[str, TensorInfo]()
        modules, taken = unpack.gather_modules(self._form, files) if self._form else ({}, set[str]())
        if self._form and not modules:
            problem = f"{path}: its files hold no tensor of {self._form.title}, which it describes."
            raise CheckpointError(problem, fix=FIX)
        for name, module in modules.items():
            info = TensorInfo((module.rows, module.columns), "F32")
            key = self._note_tensor(f"{name}.weight", info, module.path, images)
            self._packed[key] = module
        kv = set[str]()
        if self._form:
            kv, self.static_scales = unpack.find_kv_scales(self._form, files, self.spec.num_layers)
        for file in files:
            for raw, info in file.tensors.items():
                if self._form and self._form.kind == "mlx" and len(info.shape) == 4:  # MLX has channels last
                    info = TensorInfo((info.shape[0], info.shape[3], *info.shape[1:3]), info.dtype)
                if raw not in taken and raw not in kv:
                    self._files[self._note_tensor(raw, info, file.path, images)] = file, raw
        self._settle_head()
        place = str(files[0].path) if len(files) == 1 else str(path)
        check_tensors(self.spec, {n: info.shape for n, info in self.tensors.items()}, place)
        self._check_types(self.tensors)
        if self._form and self._form.static:
            self.static_scales |= unpack.find_input_scales(self.spec, self._packed)
        self.vision = None if text_only else self._settle_vision(images)

    def _read_generation(self, path: Path) -> dict[str, Any]:
        found = self.door.read_json(path) if is_present(path) else {}
        limit = self.spec.vocab_size
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = found.get(key)
            for token in value if isinstance(value, list) and key == "eos_token_id" else [value]:
                if token is not None and not (type(token) is int and 0 <= token < limit):
                    wanted = f"it must be an id below {limit}, the vocabulary's size."
                    raise CheckpointError(f"{path}: {key} is {shown(value)}; {wanted}")
        return found

    def _check_types(self, names: Iterable[str]) -> None:
        for key in (name for name in names if name not in self._packed):
            file, raw = self._files[key]
            if (tag := file.tensors[raw].dtype) not in FLOATS:
                why = "which WiCore does not read" if tag == "F64" else "quantized"
                fix = "Use a BF16, F16 or F32 source, or a GGUF file."
                raise CheckpointError(f"{self.place_of(key)}: {key} is stored as {tag}, {why}.", fix=fix)

    def _settle_vision(self, images: Mapping[str, TensorInfo]) -> VisionSpec | None:
        """Read and check the image encoder, whose tensors are `images`; None where files or configuration have none."""
        place, described = str(self.path / "config.json"), self.config.get("vision_config") is not None
        if not images or not described:
            if described:
                self.notes.append("config.json describes an image encoder, which the files lack: images are not read.")
            if images:
                self.notes.append(f"left aside: {len(images)} tensors of an image encoder that config.json lacks.")
            return None
        try:
            vision = read_vision_config(self.config, self.spec, place)
        except CheckpointError as error:
            raise CheckpointError(error.message, fix=TEXT_ONLY) from error
        assert vision is not None
        self._check_types(check_vision(vision, self.spec, {n: i.shape for n, i in images.items()}, str(self.path)))
        self._check_processor(vision)
        return vision

    def _check_processor(self, vision: VisionSpec) -> None:
        """Refuse files that ask for another way from an image to the encoder than Gemma 3's."""
        square = {"height": vision.image_size, "width": vision.image_size}
        wanted = _PIXELS | {"size": square, "image_seq_length": vision.tokens}
        for file, key in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
            data = self.door.read_json(self.path / file) if is_present(self.path / file) else {}
            found = data if key is None else data.get(key)
            given = found if isinstance(found, Mapping) else {}
            if given.get("do_pan_and_scan"):
                self.notes.append(f"{file} asks for pan and scan: here a request does, by detail: high or crops.")
            for name, want in wanted.items():
                if given.get(name) not in (None, want):
                    problem = f"{self.path / file}: {name} is {shown(given[name])}; Gemma 3's images need {want}."
                    raise CheckpointError(problem, fix=TEXT_ONLY)

    def _note_tensor(self, raw: str, info: TensorInfo, path: Path, images: dict[str, TensorInfo]) -> str:
        """Enter a tensor of the file `path` under its canonical name, which is returned."""
        key = canonical_name(raw)
        kind = images if is_vision(key) else self.tensors
        if key in kind:
            problem = f"{self.path} holds {named(key)} twice: in {Path(self.place_of(key)).name} and {path.name}."
            raise CheckpointError(problem)
        kind[key] = info
        return key

    def _settle_head(self) -> None:
        """Decide between configuration and files on tied embeddings as transformers 5 (PreTrainedModel.tie_weights).
        Of two tensors, a head that differs is used; a single tensor is both."""
        head, embedding = self.tensors.get(HF_LM_HEAD), self.tensors.get(HF_EMBEDDING)
        if head is None or not self.spec.tie_word_embeddings:
            return
        if embedding is None:
            self.tensors = {HF_EMBEDDING: head, **{n: i for n, i in self.tensors.items() if n != HF_LM_HEAD}}
            holder: dict[str, Any] = self._files if HF_LM_HEAD in self._files else self._packed
            holder[HF_EMBEDDING] = holder.pop(HF_LM_HEAD)
            self.notes.append(f"{HF_LM_HEAD} is the embedding too: the files hold no {HF_EMBEDDING}.")
        elif head.shape != embedding.shape:
            shapes = f"{HF_LM_HEAD} is {list(head.shape)} and {HF_EMBEDDING} {list(embedding.shape)}"
            fix = "Set tie_word_embeddings to false if both are meant."
            raise CheckpointError(f"{self.path}: {shapes}, and its configuration ties them.", fix=fix)
        elif self._have_equal_values(HF_LM_HEAD, HF_EMBEDDING):
            del self.tensors[HF_LM_HEAD]
        else:
            self.spec = replace(self.spec, tie_word_embeddings=False)
            self.notes.append(
                f"{HF_LM_HEAD} differs from the embedding though config.json ties them: the head of the files is used."
            )

    def _have_equal_values(self, one: str, other: str) -> bool:
        """Compare two tensors of one shape, some MiB at a time."""
        return all(
            np.array_equal(to_float32(*self.read_rows(one, *span)), to_float32(*self.read_rows(other, *span)))
            for span in split_rows(self.tensors[one].shape)
        )

    def read_rows(self, name: str, start: int, stop: int) -> tuple[np.ndarray, str]:
        if name in self._packed:
            return self._packed[name].decode_rows(start, stop), "F32"
        file, raw = self._files[name]
        block = file.read_rows(raw, start, stop)
        moved = self._form and self._form.kind == "mlx" and block.ndim == 4
        return np.moveaxis(block, 3, 1) if moved else block, file.tensors[raw].dtype

    def write_tokenizer(self, directory: Path) -> list[Path]:
        names = [name for name in TOKENIZER_FILES if is_present(self.path / name)]
        paths = [self.door.copy_file(self.path / n, directory / n, limit=TOKENIZER_BYTES) for n in names]
        texts = [self.config, self.config.get("text_config")]  # where config.json names ends
        given = [text.get("eos_token_id") for text in texts if isinstance(text, Mapping)]
        ids = [i for value in given for i in (value if isinstance(value, list) else [value])]
        ends = [i for i in dict.fromkeys(ids) if type(i) is int and 0 <= i < self.spec.vocab_size]
        if ends:
            path = directory / GENERATION
            text = json.dumps({**self.generation_config, CONFIG_ENDS: ends}, indent=2)
            path.write_text(text + "\n", encoding="utf-8")
            paths = [*(p for p in paths if p != path), path]
        return paths

    def read_e4m3(self, name: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray] | None:
        return unpack.read_e4m3(self._packed[name], start, stop) if self.fp8 and name in self._packed else None

    def find_blocks(self, name: str) -> str:
        if name not in self._fitting:
            self._fitting[name] = name in self._packed and unpack.fits_q4_0(self._packed[name])
        return "Q4_0" if self._fitting[name] else ""

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        return unpack.read_q4_0(self._packed[name], start, stop)

    def describe_reading(self, dtype: str, scales: Collection[str] | None) -> str | None:
        if self._form is None:
            return None
        kept = sum(self.find_blocks(name) == "Q4_0" for name in self._packed) if dtype == "q4_0" else 0
        return describe_form(self._form, dtype, len(self._packed), scales, kept)

    def place_of(self, name: str) -> str:
        return str(self._packed[name].path if name in self._packed else self._files[name][0].path)


class _Index(BaseModel):
    model_config = ConfigDict(strict=True)
    weight_map: Annotated[dict[str, str], Field(min_length=1)]
    metadata: dict[str, Any] | None = None


def _no_config(path: Path) -> CheckpointError:
    """Make the error for a directory without config.json, naming what it is as far as its files tell."""
    if is_present(path / ADAPTER):
        base = UntrustedFiles(path, fix=_AGAIN).read_json(path / ADAPTER).get("base_model_name_or_path")
        return CheckpointError(
            f"{path} is an adapter of {shown(base)}, no whole model.",
            fix=f"Build its base with it: wicore build BASE OUTPUT --lora {quote_arg(path)}",
        )
    return name_kind(path) or CheckpointError(
        f"{path / 'config.json'} is missing.", fix="Give the directory of a Hugging Face model."
    )


def _weight_files(path: Path, door: UntrustedFiles) -> tuple[list[SafetensorsFile], list[str]]:
    """Find the weight files; returns sentences on how they were found, too."""
    index = path / INDEX
    if not is_present(index):
        shards = [name for name in list_entries(path) if _SHARD.fullmatch(name)]
        if is_present(path / SINGLE):
            return [SafetensorsFile(path / SINGLE, door)], []
        if shards and len(shards) == int(shards[0][15:20]) and len({name[15:20] for name in shards}) == 1:
            note = f"{INDEX} is missing: all {len(shards)} shards are read."
            return [SafetensorsFile(path / name, door) for name in shards], [note]
        pickled = [name for name in list_entries(path) if name.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack"))]
        problem = f"{path} holds neither {SINGLE} nor {INDEX}."
        fix = "Download all files of it." if shards else "WiCore reads safetensors and GGUF."
        if pickled and not shards:
            problem = f"{path} holds its weights as {named(pickled[0])}, which can run code when it is read."
            fix = "Load it with transformers and save_pretrained it to a new directory: that writes safetensors."
        raise name_kind(path) or CheckpointError(problem, fix=fix)
    try:
        listed = _Index.model_validate(door.read_json(index))
    except ValidationError as error:
        raise door.make_error(index, f"has no weight_map to use: {first_fault(error)}") from error
    weight_map, notes = listed.weight_map, list[str]()
    shards = sorted(set(weight_map.values()))
    odd = [s for s in shards if s in (".", "..") or not _FILE_NAME.fullmatch(s)]
    if odd:
        raise door.make_error(index, f"names files outside its directory: {shown(odd)}")
    if is_present(path / SINGLE) and SINGLE not in shards:
        fix = "Remove the one that is not meant."
        raise CheckpointError(f"{path} holds both {SINGLE} and {INDEX}, which does not name it.", fix=fix)
    missing = [s for s in shards if not is_present(path / s)]
    if missing:
        problem = f"{path} lacks {len(missing)} of {len(shards)} shards: {', '.join(map(named, missing[:8]))}."
        raise CheckpointError(problem, fix="Download them.")
    files = {s: SafetensorsFile(path / s, door) for s in shards}
    lost = [n for n, s in weight_map.items() if n not in files[s].tensors]
    if lost:
        problem = f"{index}: {len(lost)} tensors are not in the shard that the index names, e.g. {named(lost[0])}."
        raise CheckpointError(problem, fix="Download it again.")
    said = (listed.metadata or {}).get("total_size")
    held = sum(info.bytes for file in files.values() for info in file.tensors.values())
    if isinstance(said, int) and said != held:
        notes.append(f"{INDEX} says {said} bytes of weights; its shards hold {held}, all of which are read.")
    return list(files.values()), notes
