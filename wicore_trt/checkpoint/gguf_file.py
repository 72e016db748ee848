"""The GGUF container: metadata and the table of tensors, read in one pass without mapping the file.

gguf.GGUFReader makes several Python objects per token (716 MB and seconds for Gemma's 262,144); this parser keeps
plain lists. Layout: github.com/ggml-org/ggml, docs/gguf.md. It knows nothing of Gemma. Invariant: an opened file is
as long as its tensor table says.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from wicore_trt.errors import CheckpointError, EnvironmentUnfitError
from wicore_trt.files import Door, size_of

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_COUNT = 1 << 28
_AGAIN = "Download it again."


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: shape [out, in] (row-major, so the reverse of the file's), type name, place in the file."""

    shape: tuple[int, ...]
    type_name: str
    offset: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by key (arrays are lists, floats are exact float32 widened) and tensors by GGUF name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def read_rows(self, name: str, start: int, stop: int) -> bytes:
        """Raw blocks of rows [start, stop)."""
        tensor = self.tensors[name]
        size = (stop - start) * tensor.row_bytes
        with Door(fix=_AGAIN).open(self.path, buffering=0) as file:
            file.seek(tensor.offset + start * tensor.row_bytes)
            data = file.read(size)
        if len(data) != size:
            raise CheckpointError(f"{self.path} ended early; it changed while being read.")
        return data


def import_gguf() -> Any:
    """The gguf package. Raises EnvironmentUnfitError when the extra is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise EnvironmentUnfitError(
            "Reading GGUF files needs the gguf package.", fix="pip install 'wicore-trt[gguf]'"
        ) from error
    return gguf


def open_gguf(path: Path) -> GgufFile:
    """Parse and check a little-endian GGUF file of version 2 or 3. Raises CheckpointError for any other file."""
    gguf = import_gguf()
    try:
        with Door(fix=_AGAIN).open(path, buffering=1 << 20) as file:
            size = size_of(file)
            reader = _Reader(file)
            if reader.take(4) != _MAGIC:
                raise CheckpointError(
                    f"{path} is not a GGUF file.", fix="Git LFS pointers are fetched by `git lfs pull`."
                )
            version = reader.scalar("I")
            if version not in _VERSIONS:
                raise CheckpointError(f"{path} is GGUF version {version}; versions 2 and 3 are read.")
            tensor_count, key_count = reader.scalar("Q"), reader.scalar("Q")
            metadata = dict(reader.pair() for _ in range(reader.checked(key_count)))
            table = [reader.tensor() for _ in range(reader.checked(tensor_count))]
            align = int(metadata.get("general.alignment", 32))
            data = -(-file.tell() // align) * align
    except (EOFError, struct.error, KeyError, UnicodeDecodeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} is truncated or damaged: {error!r}.", fix=_AGAIN) from error
    if metadata.get("split.count", 0) > 1:
        raise CheckpointError(f"{path} is one part of a split GGUF.", fix="Merge it with `llama-gguf-split --merge`.")
    tensors = {}
    for name, dims, type_id, offset in table:
        try:
            kind = gguf.GGMLQuantizationType(type_id)
        except ValueError as error:
            raise CheckpointError(
                f"{path}: {name} has unknown type {type_id}.", fix="Update the gguf package."
            ) from error
        block_items, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if dims[0] % block_items:
            raise CheckpointError(f"{path}: rows of {name} are not whole {kind.name} blocks.", fix=_AGAIN)
        size_bytes = prod(dims) // block_items * block_bytes
        tensor = GgufTensor(tuple(reversed(dims)), kind.name, data + offset, size_bytes // dims[-1])
        end = tensor.offset + size_bytes
        if end > size:
            raise CheckpointError(f"{path} is truncated: {name} ends at byte {end}, the file at {size}.", fix=_AGAIN)
        tensors[name] = tensor
    return GgufFile(path, metadata, tensors)


class _Reader:
    """Little-endian values from a stream."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise EOFError("the file ends in its header")
        return data

    def checked(self, count: int) -> int:
        if count > _MAX_COUNT:
            raise EOFError(f"a count of {count}")
        return count

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.checked(self.scalar("Q"))).decode("utf-8")

    def pair(self) -> tuple[str, Any]:
        key = self.string()
        return key, self.value(self.scalar("I"))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("I"), self.checked(self.scalar("Q"))
        if item in _SCALARS:
            layout = f"<{count}{_SCALARS[item]}"
            return list(struct.unpack(layout, self.take(struct.calcsize(layout))))
        return [self.value(item) for _ in range(count)]

    def tensor(self) -> tuple[str, list[int], int, int]:
        name, rank = self.string(), self.scalar("I")
        dims = [self.scalar("Q") for _ in range(rank)]
        return name, dims, self.scalar("I"), self.scalar("Q")
