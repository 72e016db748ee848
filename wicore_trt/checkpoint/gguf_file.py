"""Parse GGUF containers: metadata and the table of tensors, in one pass without mapping the file.

Files NAME-00001-of-0000N.gguf are read as one model, whichever is given. Must not know Gemma. Layout:
github.com/ggml-org/ggml, docs/gguf.md, and ggml's gguf.cpp. Invariants: nothing is allocated from a count before the
file is known to hold as many bytes; tensors lie one behind the other, aligned; names and keys are unique in the
model.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from wicore_trt.arithmetic import div_ceil
from wicore_trt.checkpoint.safetensors_io import read_at
from wicore_trt.errors import CheckpointError, EnvironmentUnfitError, install_command, named, shown
from wicore_trt.files import UntrustedFiles, is_present, quote_arg, size_of

ALIGNMENT = "general.alignment"
_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_RANK = 4  # ggml's own
_MAX_KEYS = 1 << 14
_MAX_TENSORS = 1 << 14
_MAX_VALUES = 1 << 21  # in all of the metadata; Gemma's has 800,000
_MAX_HEADER = 64 << 20  # bytes; Gemma's takes 7 MB
_MAX_NESTING = 4
_MAX_ALIGNMENT = 1 << 16
_AGAIN = "Download it again."
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MMPROJ = "mmproj"
_SIDE_FILE = re.compile(rf"{_MMPROJ}|imatrix")
_OLLAMA_MODEL = "application/vnd.ollama.image.model"  # media type of the weights in a manifest
_MAX_MANIFEST = 1 << 16  # bytes


# gguf.GGUFReader makes several Python objects per token (716 MB and seconds for Gemma's 262,144 tokens); this parser
# keeps plain lists.
@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Tensor of shape [out, in] (row-major, the reverse of the file's), its type name, and its place in `path`."""

    shape: tuple[int, ...]
    type_name: str
    offset: int
    row_bytes: int
    path: Path = Path()


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by key (arrays are lists, floats are float32 widened exactly) and tensors by GGUF name.
    Of a split model, `path` and `metadata` are those of the first part, `tensors` those of all parts."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    door: UntrustedFiles = UntrustedFiles(fix=_AGAIN)

    def read_rows(self, name: str, start: int, stop: int) -> bytes:
        """Read the raw blocks of rows [start, stop)."""
        tensor = self.tensors[name]
        with self.door.open_file(tensor.path, buffering=0) as file:
            offset = tensor.offset + start * tensor.row_bytes
            return read_at(file, offset, (stop - start) * tensor.row_bytes, tensor.path)


class MetadataKeys:
    """Keys of `metadata` that begin with `prefix`; errors name them, and the file as `place`."""

    def __init__(self, metadata: Mapping[str, Any], place: str, prefix: str) -> None:
        self._metadata, self._place, self._prefix = metadata, place, prefix

    def find_metadata(self, key: str) -> Any:
        return self._metadata.get(self._prefix + key)

    def make_value_error(self, key: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self._place}: {self._prefix}{key} is {shown(value)}; it must be {expected}.")

    def make_missing_error(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self._place} lacks the key {self._prefix}{key}.")


def import_gguf() -> Any:
    """Import the gguf package. Raises EnvironmentUnfitError when the extra is not installed."""
    try:
        import gguf
    except ImportError as error:
        fix = install_command("gguf")
        raise EnvironmentUnfitError("Reading GGUF files needs the gguf package.", fix=fix) from error
    return gguf


def open_gguf(path: Path, door: UntrustedFiles | None = None) -> GgufFile:
    """Parse and check a little-endian GGUF file of version 2 or 3, with the other parts of a split model. Raises
    CheckpointError for any other file."""
    import_gguf()
    door = door or UntrustedFiles(fix=_AGAIN, seen={})
    file = _open_one(path, door)
    count = _split_key(file, "split.count")
    return file if count < 2 else _join_parts(path, count, door)


def _open_one(path: Path, door: UntrustedFiles) -> GgufFile:
    with door.open_file(path, buffering=1 << 20) as file:
        size = size_of(file)
        reader = _Reader(file, path, min(size, _MAX_HEADER))
        start = reader.take_bytes(4, "the file's start") if size >= len(_MAGIC) else b""
        if start != _MAGIC:
            fix = _other_kind(path, start + file.read(_MAX_MANIFEST))
            raise CheckpointError(f"{path} is not a GGUF file.", fix=fix)
        version = reader.read_scalar("I", "the version")
        if version not in (2, 3):
            turned = "It is big-endian: convert the model anew for this machine." if version % 65536 == 0 else None
            raise CheckpointError(f"{path} is GGUF version {version}; versions 2 and 3 are read.", fix=turned)
        tensors = reader.read_count("the number of tensors", _MAX_TENSORS, 24)
        keys = reader.read_count("the number of keys", _MAX_KEYS, 13)
        metadata = reader.read_metadata(keys)
        table = [reader.read_tensor_entry() for _ in range(tensors)]
        align = metadata.get(ALIGNMENT, 32)
        if type(align) is not int or not 1 <= align <= _MAX_ALIGNMENT or align & align - 1:
            wanted = f"a power of two up to {_MAX_ALIGNMENT}"
            raise CheckpointError(f"{path}: {ALIGNMENT} is {shown(align)}; it must be {wanted}.", fix=_AGAIN)
        data = div_ceil(file.tell(), align) * align
    return GgufFile(path, metadata, _check_tensor_table(path, table, data, align, size), door)


def _other_kind(path: Path, start: bytes) -> str:
    """Describe what to do about a file that begins with `start` and is no GGUF; a manifest of Ollama names one."""
    try:
        layers = json.loads(start)["layers"]
        digest = next(layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL)
        blobs = next(up / "blobs" for up in path.absolute().parents if (up / "blobs").is_dir())
    except (ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return "Git LFS pointers are fetched by `git lfs pull`."
    return f"It is a manifest of Ollama; its weights are {quote_arg(blobs / str(digest).replace(':', '-'))}."


def choose_gguf(directory: Path) -> Path | None:
    """Find the GGUF file that is the model in a directory, of a split model the first part; None when there is none.
    Files named as image encoders (mmproj) or imatrix are ignored beside others. Raises CheckpointError for several
    models."""
    files = sorted(directory.glob("*.gguf"))
    models = [file for file in files if not _SIDE_FILE.search(file.name.lower())] or files
    parts = {match[1] for file in models if (match := _PART.fullmatch(file.name))}
    if len(models) > 1 and (len(parts) != 1 or not all(_PART.fullmatch(file.name) for file in models)):
        raise CheckpointError(f"{directory} holds {len(models)} GGUF files.", fix="Give the path of one of them.")
    return models[0] if models else None


def list_mmproj(directory: Path) -> list[Path]:
    """List the files in a directory that are named as image encoders."""
    return [file for file in sorted(directory.glob("*.gguf")) if _MMPROJ in file.name.lower()]


def _split_key(file: GgufFile, key: str) -> int:
    value = file.metadata.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"{file.path}: {key} is {shown(value)}; it must be a whole number.", fix=_AGAIN)
    return value


def _join_parts(path: Path, count: int, door: UntrustedFiles) -> GgufFile:
    """Join the `count` parts of a model, which lie beside its part `path`."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        fix = "Call the parts NAME-00001-of-0000N.gguf, or merge them with `llama-gguf-split --merge`."
        raise CheckpointError(f"{path} is one part of a split GGUF: split.count is {count}.", fix=fix)
    paths = [path.with_name(f"{match[1]}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
    lacking = [part.name for part in paths if not is_present(part)]
    if lacking:
        problem = f"{path} is one of {count} parts, of which {len(lacking)} are missing: {named(lacking[0])}."
        raise CheckpointError(problem, fix="Download all parts.")
    parts = [_open_one(part, door) for part in paths]
    tensors: dict[str, GgufTensor] = {}
    for index, part in enumerate(parts):
        if (_split_key(part, "split.count"), _split_key(part, "split.no")) != (count, index):
            raise CheckpointError(f"{part.path} is not part {index + 1} of {count}, as its name says.", fix=_AGAIN)
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise CheckpointError(f"{part.path} holds the tensor {named(min(twice))} once more.", fix=_AGAIN)
        tensors |= part.tensors
    said = _split_key(parts[0], "split.tensors.count")
    if said not in (0, len(tensors)):
        raise CheckpointError(f"{path}: its parts hold {len(tensors)} tensors, not {said} as split.tensors.count says.")
    return replace(parts[0], tensors=tensors)


def _check_tensor_table(
    path: Path, table: list[tuple[str, list[int], int, int]], data: int, align: int, size: int
) -> dict[str, GgufTensor]:
    """Check the table: known types, whole blocks, and each tensor where the one before it ends."""
    gguf = import_gguf()
    tensors: dict[str, GgufTensor] = {}
    end = 0
    for raw_name, dims, type_id, offset in table:
        name = named(raw_name)
        if raw_name in tensors:
            raise CheckpointError(f"{path} holds the tensor {name} twice.", fix=_AGAIN)
        try:
            kind = gguf.GGMLQuantizationType(type_id)
        except ValueError as error:
            problem = f"{path}: {name} has type {type_id}, which the gguf package does not know."
            raise CheckpointError(problem, fix="Update the gguf package, or convert the model anew.") from error
        block_items, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if dims[0] % block_items:
            raise CheckpointError(f"{path}: rows of {name} are not whole {kind.name} blocks.", fix=_AGAIN)
        if len(dims) == 1 and block_items > 1:
            raise CheckpointError(f"{path}: {name} has one dimension and is stored as {kind.name}; it cannot be.")
        size_bytes = prod(dims) // block_items * block_bytes
        start = div_ceil(end, align) * align
        end = start + size_bytes
        if data + end > size:
            problem = f"{path} is truncated: {name} ends at byte {data + end}, the file at {size}."
            raise CheckpointError(problem, fix=_AGAIN)
        if offset != start:
            problem = f"{path} is damaged: {name} is placed at byte {offset} of the data, where {start} is due."
            raise CheckpointError(problem, fix=_AGAIN)
        tensors[raw_name] = GgufTensor(tuple(reversed(dims)), kind.name, data + offset, size_bytes // dims[-1], path)
    return tensors


class _Reader:
    """Reads little-endian values from a stream, at most `limit` bytes."""

    def __init__(self, file: BinaryIO, path: Path, limit: int) -> None:
        self._file, self._path, self._left, self._values = file, path, limit, _MAX_VALUES

    def make_damage_error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is truncated or damaged: {reason}.", fix=_AGAIN)

    def take_bytes(self, size: int, what: str) -> bytes:
        if size > self._left:
            problem = f"{what} needs {size} bytes, {self._left} are left of the file or of a header's limit"
            raise self.make_damage_error(problem)
        self._left -= size
        data = self._file.read(size)
        if len(data) != size:
            raise self.make_damage_error(f"it ends in {what}")
        return data

    def read_scalar(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take_bytes(struct.calcsize("<" + code), what))[0]

    def read_count(self, what: str, most: int, item_bytes: int) -> int:
        """Read a count of things of at least `item_bytes` each."""
        count: int = self.read_scalar("Q", what)
        if count > most or count * item_bytes > self._left:
            raise self.make_damage_error(f"{what} is {count}")
        return count

    def read_string(self, what: str) -> str:
        data = self.take_bytes(self.read_count(f"the length of {what}", _MAX_HEADER, 1), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.make_damage_error(f"{what} is not UTF-8 (its byte {error.start})") from error

    def read_metadata(self, keys: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index in range(keys):
            key = self.read_string(f"the name of key {index}")
            if key in found:
                raise self.make_damage_error(f"the key {named(key)} stands twice")
            found[key] = self._read_value(self.read_scalar("I", named(key)), named(key), 0)
        return found

    def _read_value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self.read_string(key)
        if kind in _SCALARS:
            return self._read_scalars(_SCALARS[kind], 1, key)[0]
        if kind != _ARRAY:
            raise self.make_damage_error(f"{key} has the unknown type {kind}")
        if depth == _MAX_NESTING:
            raise self.make_damage_error(f"{key} nests more than {_MAX_NESTING} arrays")
        item = self.read_scalar("I", key)
        smallest = struct.calcsize("<" + _SCALARS[item]) if item in _SCALARS else 8 if item == _STRING else 12
        count = self.read_count(f"the length of {key}", self._values, smallest)
        self._values -= count
        if item in _SCALARS:
            return list(self._read_scalars(_SCALARS[item], count, key))
        if item == _STRING:
            return self._read_strings(count, key)
        return [self._read_value(item, key, depth + 1) for _ in range(count)]

    def _read_strings(self, count: int, key: str) -> list[str]:
        """Read `count` strings without a call for each: a vocabulary has 262,144."""
        read, length_of, found, left = self._file.read, struct.Struct("<Q").unpack, [], self._left
        try:
            for _ in range(count):
                (size,) = length_of(read(8))
                left -= 8 + size
                if left < 0:
                    raise self.make_damage_error(f"a string of {key} needs {size} bytes, more than are left")
                found.append(read(size).decode("utf-8"))
        except UnicodeDecodeError as error:
            problem = f"string {len(found)} of {key} is not UTF-8 (its byte {error.start})"
            raise self.make_damage_error(problem) from error
        except struct.error as error:
            raise self.make_damage_error(f"it ends in {key}") from error
        self._left = left
        return found

    def _read_scalars(self, code: str, count: int, key: str) -> tuple[Any, ...]:
        """Read scalars of one kind; a boolean is a byte of 0 or 1."""
        layout = f"<{count}{'B' if code == '?' else code}"
        values = struct.unpack(layout, self.take_bytes(struct.calcsize(layout), key))
        if code != "?":
            return values
        if any(value > 1 for value in values):
            raise self.make_damage_error(f"{key} holds a boolean that is neither 0 nor 1")
        return tuple(map(bool, values))

    def read_tensor_entry(self) -> tuple[str, list[int], int, int]:
        name = self.read_string("a tensor's name")
        what = f"the entry of {named(name)}"
        rank = self.read_scalar("I", what)
        if not 1 <= rank <= _MAX_RANK:
            raise self.make_damage_error(f"{named(name)} has {rank} dimensions")
        dims = [self.read_scalar("Q", what) for _ in range(rank)]
        if any(not 1 <= dim <= 1 << 48 for dim in dims):
            raise self.make_damage_error(f"{named(name)} has the dimensions {dims}")
        return name, dims, self.read_scalar("I", what), self.read_scalar("Q", what)
