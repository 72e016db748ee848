"""Open an engine directory, verified, and describe one for its manifest.

Knows files, sizes and digests, not what files mean. Invariants (I22): an `EngineDir` opened with `verify=True` has
exactly the files and bytes that were built; `EngineDir.read` returns what was built; a file that the manifest does
not list is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wicore_trt.checkpoint.digest import hash_bytes
from wicore_trt.checkpoint.records import FileRecord, record_file
from wicore_trt.engine.manifest import KIND, MANIFEST_NAME, FileEntry, Manifest, read_manifest, rebuild_engine
from wicore_trt.engine.weights import hash_weights
from wicore_trt.errors import CheckpointError, EngineFormatError, list_some
from wicore_trt.files import LIST_BYTES, UntrustedFiles
from wicore_trt.model.spec import RankSpec
from wicore_trt.scratch import Product, find_unlisted
from wicore_trt.weight_format import VISION

_SYSTEM = "lost+found"
"""Name that file systems put into a directory, beside names that begin with a dot."""


@dataclass(frozen=True, slots=True)
class EngineDir:
    """Engine on disk. Made by `open_engine` only, so its manifest is valid and its files have their sizes."""

    path: Path
    manifest: Manifest

    @property
    def door(self) -> UntrustedFiles:
        return UntrustedFiles(self.path, EngineFormatError, fix=self.rebuild_advice)

    @property
    def rebuild_advice(self) -> str:
        return rebuild_engine(self.path, self.manifest)

    @property
    def rank_files(self) -> list[Path]:
        """Weight files in rank order."""
        return [self.path / f"rank{rank}.safetensors" for rank in range(self.manifest.tp_size)]

    @property
    def vision_file(self) -> Path | None:
        """Weight file of the image encoder `manifest.vision`; None for an engine that reads text alone."""
        return self.path / VISION if self.manifest.vision else None

    def local_part(self, rank: int | None = None) -> RankSpec:
        """Compute the part of the model that `rank` runs. Raises EngineFormatError for several ranks and none named."""
        if self.manifest.tp_size != 1 and rank is None:
            raise EngineFormatError(
                f"This engine is split over {self.manifest.tp_size} ranks, and backend {self.manifest.backend!r} "
                "runs one.",
                fix="Build it again with --tp 1.",
            )
        return self.manifest.spec.shard(rank or 0, self.manifest.tp_size)

    def read(self, name: str) -> bytes:
        """Read the file `name` and compare it with the manifest. Raises EngineFormatError for a file that the engine
        was not built with, is missing, damaged or cannot be read."""
        entry = self.manifest.files.get(name)
        if entry is None:
            raise self.make_damage_error(f"{name} is not in {MANIFEST_NAME}")
        data = self.door.read_bytes(self.path / name, limit=entry.bytes)
        if hash_bytes(data) != entry.blake2b:
            raise self.make_damage_error(_describe_corruption(name))
        return data

    def read_json(self, name: str) -> Any:
        """Read the JSON file `name` as `read` does. Raises EngineFormatError for invalid JSON, too."""
        return self.door.parse_json(self.read(name), self.path / name)

    def read_present(self, names: Iterable[str]) -> dict[str, bytes]:
        """Read the files among `names` that the engine was built with; returns contents by name."""
        return {name: self.read(name) for name in names if name in self.manifest.files}

    def find_unlisted(self) -> list[str]:
        """List files and directories that the engine was not built with, sorted; nothing reads them. Raises
        EngineFormatError for a directory that cannot be read."""
        try:
            found = find_unlisted(self.path, {MANIFEST_NAME, *self.manifest.files})
        except OSError as error:
            raise self.make_damage_error(f"{error.filename} cannot be read: {error.strerror}") from error
        tops = {name: name.split("/")[0] for name in found}
        return sorted(name for name, top in tops.items() if not top.startswith(".") and top != _SYSTEM)

    def make_damage_error(self, what: str) -> EngineFormatError:
        return EngineFormatError(f"engine {self.path}: {what}.", fix=self.rebuild_advice)


def open_engine(path: Path, *, verify: bool = True) -> EngineDir:
    """Open the engine at `path`.
    `verify=False` checks engine.json and the sizes of listed files, but no digests, and ignores unlisted files.
    Raises EngineFormatError that names the first bad file and the command that mends it."""
    path = Path(path)
    engine = EngineDir(path, read_manifest(path))
    for name, entry in engine.manifest.files.items():
        size = engine.door.check_file(path / name)
        if size != entry.bytes:
            state = "truncated" if size < entry.bytes else "too long"
            raise engine.make_damage_error(f"{name} is {state}: {size} bytes, built with {entry.bytes}")
    if not verify:
        return engine
    extra = engine.find_unlisted()
    if extra:
        fix = f"Move what is not the engine's elsewhere. {engine.rebuild_advice}"
        raise EngineFormatError(f"engine {path} holds {list_some(extra, 1)}, which it was not built with.", fix=fix)
    records: dict[str, FileRecord] = {}
    for name in engine.manifest.files:
        record = read_intact(engine, name)
        if record is None:
            raise engine.make_damage_error(_describe_corruption(name))
        records[name] = record
    if engine.manifest.dummy_weights:
        return engine
    weights = [*engine.rank_files, *filter(None, [engine.vision_file])]
    if hash_weights(records[file.name] for file in weights) != engine.manifest.weights_hash:
        raise engine.make_damage_error(f"the weights are not those that weights_hash in {MANIFEST_NAME} names")
    return engine


def read_intact(engine: EngineDir, name: str, moved: Callable[[int], None] = lambda count: None) -> FileRecord | None:
    """Read a file and return its record; None when its digest is not the manifest's, or a weight file has no header.
    `moved` gets the bytes done since its last call."""
    try:
        record = record_file(engine.path / name, engine.door, moved)
    except CheckpointError:
        return None
    return record if record.blake2b == engine.manifest.files[name].blake2b else None


def _describe_corruption(name: str) -> str:
    return f"{name} is corrupted (its digest differs from {MANIFEST_NAME})"


def _find_file_names(path: Path) -> set[str] | None:
    """Return the names of an engine's files, damaged or not; None when the directory is no engine."""
    try:
        data = UntrustedFiles(path, EngineFormatError).read_json(path / MANIFEST_NAME, limit=LIST_BYTES)
    except EngineFormatError:
        return None
    files = data.get("files")
    return {MANIFEST_NAME, *files} if data.get("kind") == KIND and isinstance(files, dict) else None


ENGINE = Product("engine", MANIFEST_NAME, _find_file_names)
"""Directory that `wicore build --force` may replace."""


def describe_files(partial: Path, weights: Mapping[str, FileRecord] | None = None) -> dict[str, FileEntry]:
    """Return sizes and digests of all files below `partial`, by POSIX name; those in `weights` are not read again."""
    records = dict(weights or {})
    for path in (p for p in partial.rglob("*") if p.is_file() and p.name != MANIFEST_NAME):
        name = path.relative_to(partial).as_posix()
        records[name] = records.get(name) or record_file(path)
    return {name: FileEntry(record.bytes, record.blake2b) for name, record in sorted(records.items())}
