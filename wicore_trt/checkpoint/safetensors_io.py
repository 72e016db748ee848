"""Read and write safetensors files a few rows at a time.

The library's writer takes all tensors at once and its reader maps the file, which counts as resident memory; a 54 GB
checkpoint must pass through a small machine. Layout: u64 little-endian header size, JSON header {name: {dtype,
shape, data_offsets}}, buffers without gaps (github.com/huggingface/safetensors, "Format"). Must not know tensor
names. Invariant: a file for which `SafetensorsWriter.close` returned is complete, on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from wicore_trt.checkpoint.digest import HEADER, READ_BYTES, Digest, combine_digests, hash_bytes
from wicore_trt.checkpoint.quantize import STORAGE
from wicore_trt.errors import CheckpointError, first_fault, named, shown
from wicore_trt.files import SMALL_BYTES, UntrustedFiles, size_of, write_all

TAG_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
BLOCK_ITEMS = 1 << 22  # 16 MiB as float32; about ten such arrays live at once
_ARRAYS = {**STORAGE, "U8": np.uint8, "I32": np.int32, "U32": np.uint32, "I64": np.int64}
TensorEntry = tuple[str, str, tuple[int, ...]]
"""Name, tag and shape of a tensor in a file."""
_AGAIN = "Download or convert it again."
_LFS_POINTER = b"version https://git-lfs"
_ALIGN = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and storage format of a tensor: a safetensors tag, or a GGUF type name such as Q4_K."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of a tensor with a safetensors tag."""
        return prod(self.shape) * TAG_BYTES[self.dtype]


def split_rows(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Split the rows of a tensor of this `shape` into ranges of a block each."""
    step = max(1, BLOCK_ITEMS // max(1, prod(shape[1:])))
    return [(start, min(shape[0], start + step)) for start in range(0, shape[0], step)]


class SafetensorsFile:
    """Opens a file and reads its tensors with plain file I/O, through `door` (by default from anywhere).
    The header must describe every byte once: types, shapes and offsets, no gap, no overlap, no tensor twice. Raises
    CheckpointError for a missing, truncated or foreign file, naming the tensor."""

    def __init__(self, path: Path, door: UntrustedFiles | None = None) -> None:
        self.path, self._door = path, door or UntrustedFiles(fix=_AGAIN)
        self.tensors, self._offsets = _read_header(path, self._door)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows [start, stop) of a tensor as stored; BF16 and 8-bit floats as their bits (uint16, uint8)."""
        info = self.tensors[name]
        if info.dtype not in _ARRAYS:
            raise CheckpointError(f"{self.path}: {name} is stored as {info.dtype}, which holds no weights.")
        row_bytes = prod(info.shape[1:]) * TAG_BYTES[info.dtype]
        raw = self._read_bytes(self._offsets[name] + start * row_bytes, (stop - start) * row_bytes)
        return np.frombuffer(raw, _ARRAYS[info.dtype]).reshape(stop - start, *info.shape[1:])

    def read_blocks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor's buffer, READ_BYTES or less at a time."""
        size = self.tensors[name].bytes
        for start in range(0, size, READ_BYTES):
            yield self._read_bytes(self._offsets[name] + start, min(READ_BYTES, size - start))

    def locate_parts(self) -> dict[str, tuple[int, int]]:
        """Return the byte range [first, end) of each part: the header as `digest.HEADER`, and the tensors by name."""
        header = min(self._offsets.values(), default=self.path.stat().st_size)
        parts = {name: (at, at + self.tensors[name].bytes) for name, at in self._offsets.items()}
        return {HEADER: (0, header), **parts}

    def _read_bytes(self, offset: int, size: int) -> bytes:
        with self._door.open_file(self.path, buffering=0) as file:
            return read_at(file, offset, size, self.path)


def read_at(file: BinaryIO, offset: int, size: int, path: Path) -> bytes:
    """Read `size` bytes of an unbuffered file from `offset`. Raises CheckpointError when it ends before them."""
    file.seek(offset)
    parts, left = [], size
    while left:  # one read gives at most 2 GiB
        data = file.read(left)
        if not data:
            raise CheckpointError(f"{path} ended early; it changed while being read.")
        parts.append(data)
        left -= len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class _Item(BaseModel):
    model_config = ConfigDict(strict=True)
    dtype: str
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 48)]], Field(max_length=8)]
    data_offsets: Annotated[list[Annotated[int, Field(ge=0, le=1 << 62)]], Field(min_length=2, max_length=2)]


_HEADER = TypeAdapter(dict[str, _Item])
_METADATA = TypeAdapter(dict[str, str], config=ConfigDict(strict=True))


def _read_header(path: Path, door: UntrustedFiles) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Read the tensors, and the offset of each from the start of the file."""
    with door.open_file(path) as file:
        size = size_of(file)
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise CheckpointError(f"{path} is a Git LFS pointer, not the weights.", fix="Run `git lfs pull` there.")
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > size - 8:
            raise door.make_error(path, f"is truncated or not a safetensors file ({size} bytes)")
        if length > SMALL_BYTES:
            raise door.make_error(path, f"has a header of {length} bytes, more than the {SMALL_BYTES} that it may have")
        file.seek(8)
        header = door.parse_json(file.read(length), f"the header of {path}")
    try:
        if isinstance(header, dict):
            _METADATA.validate_python(header.pop("__metadata__", {}))
        items = _HEADER.validate_python(header)
    except ValidationError as error:
        fault = first_fault(error, "its header")
        raise door.make_error(path, f"is not a readable safetensors file: {fault}") from error
    tensors, offsets, end = dict[str, TensorInfo](), dict[str, int](), 0
    for name, item in sorted(items.items(), key=lambda pair: pair[1].data_offsets):
        first_byte, last = item.data_offsets
        if item.dtype not in TAG_BYTES:
            raise door.make_error(path, f"stores {named(name)} as {shown(item.dtype)}, which is unknown")
        info = TensorInfo(tuple(item.shape), item.dtype)
        if last - first_byte != info.bytes:
            needs = f"{info.dtype} {item.shape} needs {info.bytes}"
            raise door.make_error(path, f"gives {named(name)} the bytes {item.data_offsets}, but {needs}")
        if first_byte != end:
            before = named(next(reversed(tensors))) if tensors else "the start"
            kind = f"overlaps {before}" if first_byte < end else f"leaves a gap behind {before}"
            raise door.make_error(path, f"places {named(name)} at byte {first_byte} of the data, not {end}: it {kind}")
        tensors[name], offsets[name], end = info, 8 + length + first_byte, last
    if size != 8 + length + end:
        kind = "is truncated" if size < 8 + length + end else "goes on behind its last tensor"
        raise door.make_error(path, f"{kind}: {size} bytes of {8 + length + end}")
    return tensors, offsets


class SafetensorsWriter:
    """Writes tensors in the order of `entries` (name, dtype tag, shape), each in any number of pieces.
    As a context manager it closes the file when no exception leaves it. `digests` has the digests of the header and
    of every complete tensor (see `digest`); `digest` is the file's, known after `close`."""

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        self.path = path
        self.digest, self.digests = "", dict[str, str]()
        self._pending = [(name, prod(shape) * TAG_BYTES[tag]) for name, tag, shape in reversed(entries)]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for (name, tag, shape), (_, size) in zip(entries, reversed(self._pending), strict=True):
            header[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGN)
        self.size = 8 + len(text) + offset
        self._left = 0
        self._hash = Digest()
        self._file = path.open("wb", buffering=0)
        head = len(text).to_bytes(8, "little") + text
        write_all(self._file, head)
        self.digests[HEADER] = hash_bytes(head)

    def write(self, name: str, block: np.ndarray | bytes) -> int:
        """Append a piece of tensor `name`, which must be the current or, once that is full, the next one."""
        if not self._left:
            self._current, self._left = self._pending.pop()
            self._hash = Digest()
        assert name == self._current, f"{name} written where {self._current} is due"
        raw = np.ascontiguousarray(block).view(np.uint8).data if isinstance(block, np.ndarray) else block
        data = memoryview(raw).cast("B")
        assert data.nbytes <= self._left, f"{name}: too many bytes"
        self._hash.update(data)
        write_all(self._file, data)
        self._left -= data.nbytes
        if not self._left:
            self.digests[name] = self._hash.hexdigest()
        return data.nbytes

    def close(self) -> None:
        """Flush to disk and compute `digest`."""
        assert not self._pending and not self._left, "tensors are missing"
        os.fsync(self._file.fileno())
        self._file.close()
        self.digest = combine_digests(self.digests)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
