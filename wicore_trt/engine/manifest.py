"""Parse, validate and write `engine.json`, which describes an engine directory as plain data.

It opens no weights and runs no backend. Invariant: a `Manifest` that was read is as it was written (its seal is
unbroken), has this format and agrees with itself and its spec. Its file names stay inside the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, Strict, TypeAdapter, ValidationError

from wicore_trt.checkpoint.digest import DIGEST_BYTES, SEAL, canonical_json, describe_broken_seal, make_seal
from wicore_trt.errors import CheckpointError, EngineFormatError
from wicore_trt.files import LIST_BYTES, UntrustedFiles, is_present, quote_arg
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.model.vision import VisionSpec
from wicore_trt.weight_format import PLAIN, VISION, WeightFormat, find_format

MANIFEST_NAME = "engine.json"
KIND = "wicore-engine"
FORMAT_VERSION, BLOCKS_VERSION = 2, 3
"""Formats of engines without and with Q4_0 weights; older readers refuse the second."""
DEFAULT_PAGE_TOKENS = 32
MAX_PAGE_TOKENS = 1 << 16
DUMMY_WEIGHTS = "dummy_weights"
"""Key of Manifest.compiled: the engine has no weight files, and its loader makes weights up."""
LORA, MMPROJ, TEXT_ONLY = "lora", "mmproj", "text_only"
"""Keys of Manifest.compiled: the directory of the adapter that was merged into the source, the file of its image
encoder, and whether that was to be left out."""
DUMMY_SOURCE = "--dummy-weights --model "
"""Beginning of Manifest.source for such an engine, before the model's name: it stands for a source in commands."""


def _check_file_name(name: str) -> str:
    pure = PurePosixPath(name)
    normal = str(pure) == name and name != "."
    if not normal or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise ValueError(f"file name {name!r} leaves the engine directory")
    return name


def _check_power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("it must be a power of two")
    return value


def _check_time(value: str) -> str:
    datetime.fromisoformat(value)
    return value


Whole = Annotated[int, Strict(), Field(ge=1, le=1 << 31)]
Hex = Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * DIGEST_BYTES}}}$")]
FileName = Annotated[str, AfterValidator(_check_file_name)]
Target = Annotated[str, Field(pattern="^(any|sm[0-9]{2,3})$")]
PageTokens = Annotated[int, Strict(), Field(ge=1, le=MAX_PAGE_TOKENS), AfterValidator(_check_power_of_two)]
Backend = Annotated[str, Field(pattern="^(torch|triton|tensorrt|tensorrt-llm)$")]
Dtype = Annotated[str, Field(pattern="^(float32|bfloat16|float16|fp8|q4_0)$")]
KVDtype = Annotated[str, Field(pattern="^(float32|bfloat16|float16|fp8)$")]
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size in bytes and digest (see `checkpoint.digest`) of one file of the engine."""

    __pydantic_config__ = _STRICT
    bytes: Annotated[int, Strict(), Field(ge=0, le=1 << 62)]
    blake2b: Hex


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything in `engine.json` but its seal. `dtype` is of the linear weights; for "fp8" and "q4_0",
    `quantization` has "base_dtype" (the dtype of all else) and what `WeightFormat.describe` gives. `page_tokens` is the
    default KV page size, `max_context` the longest sequence in tokens. `weights_hash` is over tensor contents, not over
    file bytes. `fingerprint` names what a KV page computed with this engine depends on. `revision` is the hub commit of
    the source, if any. `vision` is the image encoder, whose key engine.json lacks for an engine that reads text alone.
    `created` is ISO 8601, UTC. `compiled` is the backend's record of its files. `read_manifest` checks types and
    ranges."""

    __pydantic_config__ = _STRICT
    model_id: str
    spec: Annotated[Gemma3Spec, PlainValidator(Gemma3Spec.from_dict)]
    backend: Backend
    targets: Annotated[list[Target], Field(min_length=1)]
    dtype: Dtype
    kv_dtype: KVDtype
    page_tokens: PageTokens
    max_context: Whole
    quantization: dict[str, str] | None
    tp_size: Whole
    files: dict[FileName, FileEntry]
    weights_hash: Hex
    fingerprint: Hex
    tools: dict[str, str]
    source: str
    created: Annotated[str, AfterValidator(_check_time)]
    compiled: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    vision: Annotated[VisionSpec, PlainValidator(VisionSpec.from_dict)] | None = None
    format_version: Annotated[int, Strict()] = FORMAT_VERSION

    @property
    def base_dtype(self) -> str:
        """Dtype of activations and of unquantized weights."""
        return str(self.quantization["base_dtype"]) if self.quantization else self.dtype

    @property
    def weights(self) -> WeightFormat:
        """Storage format of linears and head. Raises KeyError for an unknown algo, dtype, head or kind."""
        said = self.quantization or {}
        kinds = filter(None, said.get("minimums", "").split(","))
        return find_format(said.get("algo"), self.base_dtype, said.get("head", ""), kinds)

    @property
    def dummy_weights(self) -> bool:
        """True when the engine has no weights and computes nothing sensible."""
        return bool(self.compiled.get(DUMMY_WEIGHTS))

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    @property
    def seal(self) -> str:
        """Name of this build alone, not of another of the same source: it covers all digests and the time."""
        return str(make_seal(self.to_dict())["digest"])

    def to_dict(self) -> dict[str, Any]:
        """Make the contents of `engine.json` but its seal."""
        data = {"kind": KIND, **asdict(self), "spec": self.spec.to_dict()}
        if self.vision is None:  # as before images were read
            del data["vision"]
        return data

    def to_json(self) -> str:
        data = self.to_dict()
        return json.dumps({**data, SEAL: make_seal(data)}, indent=2, sort_keys=True) + "\n"


def find_version(weights: WeightFormat) -> int:
    """Return the version of an engine's format."""
    return BLOCKS_VERSION if weights.group else FORMAT_VERSION


def compute_fingerprint(manifest: Manifest) -> str:
    """Return the hex blake2b of the canonical JSON of all that a KV page's content depends on, except page size."""
    names = ("weights_hash", "dtype", "kv_dtype", "quantization", "tp_size")
    facts = {"spec": manifest.spec.to_dict(), **{name: getattr(manifest, name) for name in names}}
    if manifest.vision:
        facts["vision"] = manifest.vision.to_dict()
    return hashlib.blake2b(canonical_json(facts), digest_size=DIGEST_BYTES, person=b"wicore-engine-1").hexdigest()


def rebuild_command(path: Path, source: str = "") -> str:
    """Return the sentence that says how to replace a bad engine whose manifest is not known; nor is `source` ""."""
    head = DUMMY_SOURCE if source.startswith(DUMMY_SOURCE) else ""
    return (
        f"Rebuild it: wicore build {head}{quote_arg(source.removeprefix(head) or 'SOURCE')} {quote_arg(path)} --force"
    )


def rebuild_engine(path: Path, manifest: Manifest, targets: Iterable[str] = (), page_tokens: int = 0) -> str:
    """Return the sentence that says how to build the engine at `path` again, or with more `targets` or other pages."""
    limit, pages = manifest.spec.max_position_embeddings, page_tokens or manifest.page_tokens
    options = {
        "--revision": quote_arg(manifest.revision) if manifest.revision else None,
        "--lora": quote_arg(manifest.compiled[LORA]) if LORA in manifest.compiled else None,
        "--mmproj": quote_arg(manifest.compiled[MMPROJ]) if MMPROJ in manifest.compiled else None,
        "--text-only": "" if TEXT_ONLY in manifest.compiled else None,
        "--dtype": manifest.dtype if manifest.dtype != "bfloat16" else None,
        "--kv-dtype": manifest.kv_dtype if manifest.kv_dtype != manifest.base_dtype else None,
        "--tp": manifest.tp_size if manifest.tp_size > 1 else None,
        "--page-tokens": pages if pages != DEFAULT_PAGE_TOKENS else None,
        "--max-context": manifest.max_context if manifest.max_context != limit else None,
    }
    if manifest.backend != "torch":
        options |= {"--backend": manifest.backend, "--target": ",".join(dict.fromkeys((*manifest.targets, *targets)))}
    words = [f"{name} {value}".rstrip() for name, value in options.items() if value is not None]
    return " ".join([rebuild_command(path, manifest.source).removesuffix(" --force"), *words, "--force"])


def read_manifest(path: Path) -> Manifest:
    """Read and validate `path/engine.json`.
    Raises EngineFormatError when the directory or the manifest is missing, is not JSON, or belongs to another
    program. It is raised, too, for another format, a manifest that was edited or damaged (naming the key) or
    contradicts itself."""
    build = f"Build one: wicore build SOURCE {quote_arg(path)}"
    if not is_present(path):
        if len(path.parts) == 2 and path.parent.name != "engines" and not is_present(path.parent):  # a hub id
            build = f"Build one: wicore build {quote_arg(path)} engines/{quote_arg(path.name)}"
        raise EngineFormatError(f"engine {path} does not exist.", fix=build)
    if not os.path.isdir(path):
        fix = "Build one: wicore build SOURCE OUTPUT"
        raise EngineFormatError(f"{path} is a file; an engine is a directory.", fix=fix)
    manifest_path = path / MANIFEST_NAME
    if not is_present(manifest_path):
        raise EngineFormatError(f"{path} is not an engine: it has no {MANIFEST_NAME}.", fix=build)
    data = UntrustedFiles(path, EngineFormatError, fix=rebuild_command(path)).read_json(manifest_path, limit=LIST_BYTES)
    if data.get("kind") != KIND:
        raise EngineFormatError(f"{manifest_path} was not written by wicore: its kind is not {KIND!r}.", fix=build)
    version, rebuild = data.get("format_version"), rebuild_command(path)
    if type(version) is not int or version < 1:
        raise EngineFormatError(f"{manifest_path} has no valid format_version.", fix=rebuild)
    if version > BLOCKS_VERSION:
        problem = f"engine {path} has format {version}; this wicore reads {FORMAT_VERSION} and {BLOCKS_VERSION}."
        raise EngineFormatError(problem, fix=f"Upgrade wicore-trt, or {rebuild[0].lower()}{rebuild[1:]}")
    if version < FORMAT_VERSION:
        raise EngineFormatError(
            f"engine {path} has format {version} of an older wicore, whose manifest cannot be verified; this one reads "
            f"{FORMAT_VERSION}.",
            fix=rebuild,
        )
    seal = data.pop(SEAL, None)
    broken = describe_broken_seal(data, seal)
    if broken:
        raise EngineFormatError(f"{manifest_path} was edited or damaged: {broken}.", fix=rebuild)
    del data["kind"]
    try:
        manifest = _ADAPTER.validate_python(data)
        _check_agreement(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise EngineFormatError(f"{manifest_path}: {where}: {first['msg']}.", fix=rebuild) from None
    except (ValueError, CheckpointError) as error:
        raise EngineFormatError(f"{manifest_path}: {error}", fix=rebuild) from error
    return manifest


_ADAPTER = TypeAdapter(Manifest)


def _check_agreement(manifest: Manifest) -> None:
    """Raise ValueError or CheckpointError for fields that contradict one another; read_manifest adds the path."""
    quantization, spec = manifest.quantization, manifest.spec
    if (manifest.dtype not in PLAIN) != (quantization is not None):
        raise ValueError("dtype and quantization do not agree.")
    if quantization is not None:
        try:
            weights = manifest.weights
            known = quantization == {**weights.describe(), "base_dtype": manifest.base_dtype}
        except KeyError:
            known = False
        if not known or manifest.base_dtype not in PLAIN or weights.storage != manifest.dtype:
            raise ValueError("quantization is not what an engine has.")
    if manifest.format_version != find_version(manifest.weights):
        raise ValueError("format_version and quantization do not agree.")
    if manifest.max_context > spec.max_position_embeddings:
        raise ValueError(f"max_context {manifest.max_context} is beyond the model's {spec.max_position_embeddings}.")
    spec.shard(0, manifest.tp_size)
    if (VISION in manifest.files) != (manifest.vision is not None and not manifest.dummy_weights):
        raise ValueError(f"files lists {VISION} for an engine without images, or lacks it.")
    if manifest.vision:
        manifest.vision.check_text(spec)
    for rank in range(0 if manifest.dummy_weights else manifest.tp_size):
        if f"rank{rank}.safetensors" not in manifest.files:
            raise ValueError(f"files lists no weights for rank {rank} of {manifest.tp_size}.")
    if manifest.fingerprint != compute_fingerprint(manifest):
        raise ValueError("the fingerprint does not match the fields.")
