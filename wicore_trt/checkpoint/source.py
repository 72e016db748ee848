"""Where weights come from: a Hugging Face directory, a hub id or a GGUF file, behind one face.

A source gives the model's spec, its tensors under canonical Hugging Face names (`checkpoint.names`), rows of any
tensor on demand, and the files of its tokenizer. It does not know the unified checkpoint. Invariant: a source that
was opened holds exactly the tensors its configuration asks for, and a local path never touches the network.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wicore_trt.checkpoint import hub
from wicore_trt.checkpoint.names import canonical_name, check_tensors, is_vision
from wicore_trt.checkpoint.quantize import to_float32
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, TensorInfo
from wicore_trt.errors import CheckpointError, first_fault, named, shown
from wicore_trt.files import TOKENIZER_BYTES, Door, present, quoted
from wicore_trt.model.spec import Gemma3Spec

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXT_TAGS = ("F32", "F16", "BF16")
_FILE_NAME = re.compile(r"[^/\\\0]{1,255}")
_AGAIN = "Download it again."


class Source(ABC):
    """An opened source.

    `tensors`: canonical text tensors; `vision`: tensors of the vision tower under their own names; `name` is
    the reference it was opened by and `revision` the hub commit; `generation_config` is {} when there is none.
    All files are read through `door`, which remembers them.
    """

    spec: Gemma3Spec
    door: Door
    name: str
    revision: str | None
    tensors: Mapping[str, TensorInfo]
    vision: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    makes_tokenizer = False
    """Whether write_tokenizer makes the tokenizer of checked parts; `chat_template` is then what it takes over."""
    chat_template: str | None = None

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> tuple[np.ndarray, str]:
        """Rows [start, stop) of a text tensor and the format they are in: F32, F16 or BF16 bits (uint16)."""

    @abstractmethod
    def vision_blocks(self, name: str) -> Iterator[bytes]:
        """The bytes of a vision tensor as stored, some MiB at a time."""

    @abstractmethod
    def write_tokenizer(self, directory: Path) -> list[Path]:
        """Put the tokenizer's files into `directory` and return them."""

    @abstractmethod
    def place_of(self, name: str) -> str:
        """The file that holds a text or vision tensor, for errors."""

    def read(self, name: str) -> np.ndarray:
        """A whole text tensor as float32."""
        return to_float32(*self.rows(name, 0, self.tensors[name].shape[0]))

    def norm(self, name: str, start: int, stop: int) -> np.ndarray:
        """What rows [start, stop) of a norm multiply by, 1 + w, float32 [stop - start]."""
        with np.errstate(invalid="ignore"):  # a NaN may be a signalling one; whether values are finite is asked later
            return to_float32(*self.rows(name, start, stop)) + np.float32(1.0)


def open_source(ref: str | Path, *, revision: str | None = None) -> Source:
    """Open a directory, a GGUF file or a hub id (`owner/name`, at `revision`).

    Raises CheckpointError for anything missing, truncated, gated, unreachable or not Gemma 3, and
    EnvironmentUnfitError when a GGUF file is given and the extra `gguf` is not installed.
    """
    from wicore_trt.checkpoint.gguf import GgufSource

    path = Path(os.path.expanduser(ref))  # an unknown ~name stays as it is
    if present(path) and not os.path.isdir(path):
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path} is one file of a model.", fix=f"Give its directory: {quoted(path.parent)}")
        return GgufSource(path)
    if os.path.isdir(path):
        ggufs = sorted(path.glob("*.gguf"))
        if present(path / "config.json") or not ggufs:
            return HfSource(path, name=str(ref))
        if len(ggufs) > 1:
            raise CheckpointError(f"{path} holds {len(ggufs)} GGUF files.", fix="Give the path of one of them.")
        Door(path, fix="Give the path of the GGUF file itself.").check(ggufs[0])
        return GgufSource(ggufs[0])
    if not isinstance(ref, str) or not hub.is_hub_id(ref):
        raise CheckpointError(
            f"{ref} does not exist.",
            fix="Give a model directory, a .gguf file or a hub id such as google/gemma-3-27b-it, or run: wicore fetch "
            "gemma3-270m",
        )
    snapshot = hub.download(ref, revision)
    return HfSource(snapshot, name=ref, revision=snapshot.name)


class HfSource(Source):
    """A directory with config.json and model.safetensors, or shards listed in model.safetensors.index.json."""

    def __init__(self, path: Path, *, name: str, revision: str | None = None) -> None:
        self.path, self.name, self.revision = path, name, revision
        self.door = Door(path, fix=_AGAIN, seen={})
        if not present(path / "config.json"):
            raise CheckpointError(
                f"{path / 'config.json'} is missing.", fix="Give the directory of a Hugging Face model."
            )
        self.config = self.door.json(path / "config.json")
        self.spec = Gemma3Spec.from_hf_config(self.config, str(path / "config.json"))
        generation = path / GENERATION
        self.generation_config = self.door.json(generation) if present(generation) else {}
        check_generation(self.generation_config, self.spec.vocab_size, str(generation))
        self._files: dict[str, tuple[SafetensorsFile, str]] = {}  # name -> file, name in the file
        self.tensors, self.vision = {}, {}
        for file in _weight_files(path, self.door):
            for raw, info in file.tensors.items():
                kind = self.vision if is_vision(raw) else self.tensors
                key = raw if is_vision(raw) else canonical_name(raw)
                if key in kind:
                    raise CheckpointError(
                        f"{path} holds {named(key)} twice: in {self._files[key][0].path.name} and {file.path.name}."
                    )
                kind[key] = info
                self._files[key] = (file, raw)
        place = str(path / SINGLE) if len({f.path for f, _ in self._files.values()}) == 1 else str(path)
        check_tensors(self.spec, {n: info.shape for n, info in self.tensors.items()}, place)
        for key, info in self.tensors.items():
            if info.dtype not in TEXT_TAGS:
                file = self._files[key][0]
                raise CheckpointError(
                    f"{file.path}: {key} is stored as {info.dtype}.", fix="Use a BF16, F16 or F32 source."
                )

    def rows(self, name: str, start: int, stop: int) -> tuple[np.ndarray, str]:
        file, raw = self._files[name]
        return file.rows(raw, start, stop), self.tensors[name].dtype

    def vision_blocks(self, name: str) -> Iterator[bytes]:
        file, raw = self._files[name]
        return file.blocks(raw)

    def write_tokenizer(self, directory: Path) -> list[Path]:
        names = [name for name in TOKENIZER_FILES if present(self.path / name)]
        return [self.door.copy(self.path / n, directory / n, limit=TOKENIZER_BYTES) for n in names]

    def place_of(self, name: str) -> str:
        return str(self._files[name][0].path)


def check_generation(config: Mapping[str, Any], vocab_size: int, place: str) -> None:
    """Raise CheckpointError when the contents of a generation_config.json, which errors call `place`, name token ids
    that are no numbers below `vocab_size`."""
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        for token in value if isinstance(value, list) and key == "eos_token_id" else [value]:
            whole = isinstance(token, int) and not isinstance(token, bool)
            if token is not None and not (whole and 0 <= token < vocab_size):
                raise CheckpointError(
                    f"{place}: {key} is {shown(value)}; it must be an id below {vocab_size}, the vocabulary's size."
                )


class _Index(BaseModel):
    """model.safetensors.index.json: which file holds which tensor."""

    model_config = ConfigDict(strict=True)
    weight_map: Annotated[dict[str, str], Field(min_length=1)]


def _weight_files(path: Path, door: Door) -> list[SafetensorsFile]:
    index = path / INDEX
    if not present(index):
        if not present(path / SINGLE):
            raise CheckpointError(
                f"{path} holds neither {SINGLE} nor {INDEX}.",
                fix="WiCore reads safetensors and GGUF; convert other formats first.",
            )
        return [SafetensorsFile(path / SINGLE, door)]
    try:
        weight_map = _Index.model_validate(door.json(index)).weight_map
    except ValidationError as error:
        raise door.refusal(index, f"has no weight_map to use: {first_fault(error)}") from error
    shards = sorted(set(weight_map.values()))
    odd = [s for s in shards if s in (".", "..") or not _FILE_NAME.fullmatch(s)]
    if odd:
        raise door.refusal(index, f"names files outside its directory: {shown(odd)}")
    if present(path / SINGLE) and SINGLE not in shards:
        raise CheckpointError(
            f"{path} holds both {SINGLE} and {INDEX}, which does not name it.", fix="Remove the one that is not meant."
        )
    missing = [s for s in shards if not present(path / s)]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(shards)} shards: {', '.join(map(named, missing[:8]))}.",
            fix="Download them.",
        )
    files = {s: SafetensorsFile(path / s, door) for s in shards}
    lost = [n for n, s in weight_map.items() if n not in files[s].tensors]
    if lost:
        raise CheckpointError(
            f"{index}: {len(lost)} tensors are not in the shard that the index names, e.g. {named(lost[0])}.",
            fix="Download it again.",
        )
    return list(files.values())
