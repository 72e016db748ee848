"""Where weights come from: a Hugging Face directory, a hub id or a GGUF file, behind one face.

A source gives the model's spec, its tensors under canonical Hugging Face names (`checkpoint.names`), rows of any
tensor on demand, and the files of its tokenizer. It does not know the unified checkpoint. Invariant: a source that
was opened holds exactly the tensors its configuration asks for, and a local path never touches the network.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wicore_trt.checkpoint import hub
from wicore_trt.checkpoint.names import canonical, check_tensors, is_vision
from wicore_trt.checkpoint.quantize import to_float32
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, TensorInfo
from wicore_trt.errors import CheckpointError
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
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_AGAIN = "Download it again."


class Source(ABC):
    """An opened source.

    `tensors`: canonical text tensors; `vision`: tensors of the vision tower under their own names; `name` is
    the reference it was opened by and `revision` the hub commit; `generation_config` is {} when there is none.
    """

    spec: Gemma3Spec
    name: str
    revision: str | None
    tensors: Mapping[str, TensorInfo]
    vision: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> tuple[np.ndarray, str]:
        """Rows [start, stop) of a text tensor and the format they are in: F32, F16 or BF16 bits (uint16)."""

    @abstractmethod
    def vision_bytes(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a vision tensor as stored."""

    @abstractmethod
    def write_tokenizer(self, directory: Path) -> list[Path]:
        """Put the tokenizer's files into `directory` and return them."""

    def read(self, name: str) -> np.ndarray:
        """A whole text tensor as float32."""
        return to_float32(*self.rows(name, 0, self.tensors[name].shape[0]))


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
            fix="Give a model directory, a .gguf file or a hub id such as google/gemma-3-27b-it.",
        )
    snapshot = hub.download(ref, revision)
    return HfSource(snapshot, name=ref, revision=snapshot.name)


class HfSource(Source):
    """A directory with config.json and model.safetensors, or shards listed in model.safetensors.index.json."""

    def __init__(self, path: Path, *, name: str, revision: str | None = None) -> None:
        self.path, self.name, self.revision = path, name, revision
        door = Door(path, fix=_AGAIN)
        if not present(path / "config.json"):
            raise CheckpointError(
                f"{path / 'config.json'} is missing.", fix="Give the directory of a Hugging Face model."
            )
        self.config = door.json(path / "config.json")
        self.spec = Gemma3Spec.from_hf_config(self.config)
        generation = path / "generation_config.json"
        self.generation_config = door.json(generation) if present(generation) else {}
        self._files: dict[str, tuple[SafetensorsFile, str]] = {}  # name -> file, name in the file
        self.tensors, self.vision = {}, {}
        for file in _weight_files(path):
            for raw, info in file.tensors.items():
                kind = self.vision if is_vision(raw) else self.tensors
                key = raw if is_vision(raw) else canonical(raw)
                if key in kind:
                    raise CheckpointError(f"{path} holds {key} twice.")
                kind[key] = info
                self._files[key] = (file, raw)
        check_tensors(self.spec, {n: info.shape for n, info in self.tensors.items()})

    def rows(self, name: str, start: int, stop: int) -> tuple[np.ndarray, str]:
        file, raw = self._files[name]
        return file.rows(raw, start, stop), self.tensors[name].dtype

    def vision_bytes(self, name: str, start: int, stop: int) -> bytes:
        file, raw = self._files[name]
        return file.raw(raw, start, stop)

    def write_tokenizer(self, directory: Path) -> list[Path]:
        door, names = Door(self.path, fix=_AGAIN), [name for name in TOKENIZER_FILES if present(self.path / name)]
        return [door.copy(self.path / name, directory / name, limit=TOKENIZER_BYTES) for name in names]


def _weight_files(path: Path) -> list[SafetensorsFile]:
    if not present(path / _INDEX):
        if not present(path / _SINGLE):
            raise CheckpointError(
                f"{path} holds neither {_SINGLE} nor {_INDEX}.",
                fix="WiCore reads safetensors and GGUF; convert other formats first.",
            )
        return [SafetensorsFile(path / _SINGLE, within=path)]
    weight_map = Door(path, fix=_AGAIN).json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / _INDEX} has no weight_map.", fix=_AGAIN)
    odd = [s for s in weight_map.values() if not isinstance(s, str) or Path(s).name != s or "\0" in s]
    if odd:
        raise CheckpointError(f"{path / _INDEX} names {odd[0]!r}, which lies outside its directory.", fix=_AGAIN)
    shards = sorted(set(weight_map.values()))
    missing = [s for s in shards if not present(path / s)]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing)}.", fix="Download them."
        )
    files = {s: SafetensorsFile(path / s, within=path) for s in shards}
    lost = [n for n, s in weight_map.items() if n not in files[s].tensors]
    if lost:
        raise CheckpointError(
            f"{path}: {len(lost)} tensors are not in the shard that the index names, e.g. {lost[0]}.",
            fix="Download it again.",
        )
    return list(files.values())
