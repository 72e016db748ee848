"""`engine.json`: what an engine directory is, as plain data.

Parses, validates and writes the manifest; it opens no weights and knows no backend. Invariant: a parsed `Manifest`
is of a format this version reads, its file names stay inside the directory, and its fingerprint matches its fields.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from wicore_trt.errors import CheckpointError, EngineFormatError
from wicore_trt.files import Door, present, quoted
from wicore_trt.model.spec import Gemma3Spec

MANIFEST_NAME = "engine.json"
KIND = "wicore-engine"
FORMAT_VERSION = 1
DTYPES = ("float32", "bfloat16", "float16", "fp8")
DIGEST_BYTES = 32
DUMMY_WEIGHTS = "dummy_weights"
"""Key of Manifest.compiled: the engine has no weight files, and whoever loads it makes weights up."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size in bytes and content hash (see `directory.hash_file`) of one file of the engine."""

    bytes: int
    blake2b: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything `engine.json` records.

    `dtype` is that of the linear weights; for "fp8", `quantization` has "algo" and "base_dtype" (the dtype of
    everything that is not FP8). `page_tokens` is the default KV page size. `max_context` is the longest sequence in
    tokens. `weights_hash` is over tensor contents, not over file bytes. `fingerprint` names what a KV page computed
    with this engine depends on. `created` is ISO 8601, UTC. `compiled` is what the backend says of its files.
    """

    model_id: str
    spec: Gemma3Spec
    backend: str
    targets: list[str]
    dtype: str
    kv_dtype: str
    page_tokens: int
    max_context: int
    quantization: dict[str, Any] | None
    tp_size: int
    files: dict[str, FileEntry]
    weights_hash: str
    fingerprint: str
    tools: dict[str, str]
    source: str
    created: str
    compiled: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def base_dtype(self) -> str:
        """Dtype of activations and of unquantized weights."""
        return str(self.quantization["base_dtype"]) if self.quantization else self.dtype

    @property
    def dummy_weights(self) -> bool:
        """Whether the engine has no weights and computes nothing sensible."""
        return bool(self.compiled.get(DUMMY_WEIGHTS))

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def to_dict(self) -> dict[str, Any]:
        return {"kind": KIND, **asdict(self), "spec": self.spec.to_dict()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"


def compute_fingerprint(
    *,
    spec: Gemma3Spec,
    weights_hash: str,
    dtype: str,
    kv_dtype: str,
    quantization: Mapping[str, Any] | None,
    tp_size: int,
) -> str:
    """Hex blake2b over the canonical JSON of all that the content of a KV page depends on, page size apart."""
    facts = {
        "spec": spec.to_dict(),
        "weights_hash": weights_hash,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "quantization": quantization,
        "tp_size": tp_size,
    }
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(canonical.encode(), digest_size=DIGEST_BYTES, person=b"wicore-engine-1").hexdigest()


def rebuild_command(path: Path, source: str = "SOURCE") -> str:
    """The command that replaces a bad engine."""
    words = source if source.startswith("--dummy-weights ") else quoted(source)
    return f"Rebuild it: wicore build {words} {quoted(path)} --force"


def read_manifest(path: Path) -> Manifest:
    """Read and validate `path/engine.json`.

    Raises EngineFormatError when the directory or the manifest is missing, when the manifest is not JSON, belongs to
    another program, has a newer format, lacks a field, names a file outside the directory or was edited.
    """
    build = f"Build one: wicore build SOURCE {quoted(path)}"
    if not present(path):
        raise EngineFormatError(f"engine {path} does not exist.", fix=build)
    if not os.path.isdir(path):
        raise EngineFormatError(
            f"{path} is a file; an engine is a directory.", fix="Build one: wicore build SOURCE OUTPUT"
        )
    manifest_path = path / MANIFEST_NAME
    if not present(manifest_path):
        raise EngineFormatError(f"{path} is not an engine: it has no {MANIFEST_NAME}.", fix=build)
    data = Door(path, EngineFormatError, fix="Build it again, to a new directory: wicore build SOURCE OUTPUT").json(
        manifest_path
    )
    if data.get("kind") != KIND:
        raise EngineFormatError(f"{manifest_path} was not written by wicore: its kind is not {KIND!r}.", fix=build)
    version = data.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise EngineFormatError(f"{manifest_path} has format_version {version!r}.", fix=rebuild_command(path))
    if version > FORMAT_VERSION:
        raise EngineFormatError(
            f"engine {path} has format {version}; this wicore reads up to {FORMAT_VERSION}.",
            fix=f"Upgrade: pip install -U wicore-trt. Or {_lower(rebuild_command(path))}",
        )
    try:
        return _parse(data)
    except (_InvalidFieldError, CheckpointError) as error:
        raise EngineFormatError(f"{manifest_path}: {error}", fix=rebuild_command(path)) from error


class _InvalidFieldError(ValueError):
    """A field of the manifest is missing, unknown or wrong; read_manifest adds the path."""


_TYPES: dict[str, type | tuple[type, ...]] = {
    "model_id": str,
    "spec": dict,
    "backend": str,
    "targets": list,
    "dtype": str,
    "kv_dtype": str,
    "page_tokens": int,
    "max_context": int,
    "quantization": (dict, type(None)),
    "tp_size": int,
    "files": dict,
    "weights_hash": str,
    "fingerprint": str,
    "tools": dict,
    "source": str,
    "created": str,
    "compiled": dict,
    "format_version": int,
}


def _parse(data: Mapping[str, Any]) -> Manifest:
    names = {f.name for f in fields(Manifest)}
    data = {"compiled": {}, **data}  # engines of before there were compiled ones lack it
    given = set(data) - {"kind"}
    if names != given:
        raise _InvalidFieldError(f"missing fields {sorted(names - given)}, unknown fields {sorted(given - names)}.")
    for name, kind in _TYPES.items():
        if not isinstance(data[name], kind) or isinstance(data[name], bool):
            raise _InvalidFieldError(f"field {name!r} is {data[name]!r}.")
    for name in ("page_tokens", "max_context", "tp_size"):
        if data[name] < 1:
            raise _InvalidFieldError(f"field {name!r} is {data[name]!r}; it must be positive.")
    for name in ("dtype", "kv_dtype"):
        if data[name] not in DTYPES:
            raise _InvalidFieldError(f"field {name!r} is {data[name]!r}; known: {', '.join(DTYPES)}.")
    if (data["dtype"] == "fp8") != bool(data["quantization"] and data["quantization"].get("base_dtype")):
        raise _InvalidFieldError("dtype and quantization do not agree.")
    fields_ = {name: data[name] for name in names}
    fields_["spec"] = Gemma3Spec.from_dict(data["spec"])
    fields_["files"] = {name: _file_entry(name, entry) for name, entry in data["files"].items()}
    manifest = Manifest(**fields_)
    if manifest.fingerprint != fingerprint_of(manifest):
        raise _InvalidFieldError("the fingerprint does not match the fields; the manifest was edited or damaged.")
    return manifest


def fingerprint_of(manifest: Manifest) -> str:
    """The fingerprint that a manifest with these fields must have."""
    return compute_fingerprint(
        spec=manifest.spec,
        weights_hash=manifest.weights_hash,
        dtype=manifest.dtype,
        kv_dtype=manifest.kv_dtype,
        quantization=manifest.quantization,
        tp_size=manifest.tp_size,
    )


def _file_entry(name: str, entry: object) -> FileEntry:
    pure = PurePosixPath(name)
    normal = str(pure) == name and name != "."
    if not normal or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise _InvalidFieldError(f"file name {name!r} leaves the engine directory.")
    if not isinstance(entry, dict) or set(entry) != {"bytes", "blake2b"}:
        raise _InvalidFieldError(f"entry of file {name!r} is {entry!r}.")
    size, digest = entry["bytes"], entry["blake2b"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise _InvalidFieldError(f"file {name!r} has size {size!r}.")
    if not isinstance(digest, str) or len(digest) != 2 * DIGEST_BYTES:
        raise _InvalidFieldError(f"file {name!r} has hash {digest!r}.")
    return FileEntry(size, digest)


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
