"""Where weights come from: a Hugging Face directory, a hub id or a GGUF file, behind one face.

A source gives the model's spec, its tensors under canonical Hugging Face names (`checkpoint.names`), rows of any
tensor on demand, and the files of its tokenizer. It does not know the unified checkpoint. Invariant: a source that
was opened holds exactly the tensors its configuration asks for, and a local path never touches the network.
"""

from __future__ import annotations

import json
import shutil
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

    path = Path(ref).expanduser()
    if path.is_file():
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path} is one file of a model.", fix=f"Give its directory: {path.parent}")
        return GgufSource(path)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or not ggufs:
            return HfSource(path, name=str(ref))
        if len(ggufs) > 1:
            raise CheckpointError(f"{path} holds {len(ggufs)} GGUF files.", fix="Give the path of one of them.")
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
        self.config = _json(path / "config.json")
        self.spec = Gemma3Spec.from_hf_config(self.config)
        generation = path / "generation_config.json"
        self.generation_config = _json(generation) if generation.exists() else {}
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
        present = [name for name in TOKENIZER_FILES if (self.path / name).exists()]
        return [Path(shutil.copyfile(self.path / name, directory / name)) for name in present]


def _weight_files(path: Path) -> list[SafetensorsFile]:
    if not (path / _INDEX).exists():
        if not (path / _SINGLE).exists():
            raise CheckpointError(
                f"{path} holds neither {_SINGLE} nor {_INDEX}.",
                fix="WiCore reads safetensors and GGUF; convert other formats first.",
            )
        return [SafetensorsFile(path / _SINGLE)]
    weight_map = _json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / _INDEX} has no weight_map.", fix="Download it again.")
    shards = sorted(set(weight_map.values()))
    odd = [s for s in shards if not isinstance(s, str) or Path(s).name != s]
    if odd:
        raise CheckpointError(f"{path / _INDEX} names files outside its directory: {odd}.")
    missing = [s for s in shards if not (path / s).exists()]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing)}.", fix="Download them."
        )
    files = {s: SafetensorsFile(path / s) for s in shards}
    lost = [n for n, s in weight_map.items() if n not in files[s].tensors]
    if lost:
        raise CheckpointError(
            f"{path}: {len(lost)} tensors are not in the shard that the index names, e.g. {lost[0]}.",
            fix="Download it again.",
        )
    return list(files.values())


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.", fix="Give the directory of a Hugging Face model.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}.", fix="Download it again.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return data
