"""Record size and digest of a checkpoint's files, of weight files the digest of every tensor.

It must not know which files a checkpoint has. Invariant: a file without a described change has every byte that was
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wicore_trt.checkpoint.digest import ANYWHERE, HEADER, combine_digests, hash_parts
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, TensorInfo
from wicore_trt.files import UntrustedFiles

WEIGHTS = ".safetensors"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and digest of one file; of a weight file also the digests of its `parts` by name. Only a record of a file
    that was read or written now has its `tensors`."""

    bytes: int
    blake2b: str
    parts: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "blake2b": self.blake2b, **({"parts": dict(self.parts)} if self.parts else {})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FileRecord:
        return cls(int(data["bytes"]), str(data["blake2b"]), dict(data.get("parts", {})))

    def describe_change(self, file: Path) -> str | None:
        """Describe how `file` differs from the record, None for no difference.
        Raises CheckpointError for a file that cannot be read, and for a weight file whose header is damaged."""
        now = record_file(file)
        if not self.parts:
            return None if now.blake2b == self.blake2b else file.name
        return self.changed_part(now.parts)

    def changed_part(self, found: Mapping[str, str]) -> str | None:
        """Return the first part whose digest differs from the record, None where `found` has all parts."""
        names = (name for name in (*self.parts, *found) if self.parts.get(name) != found.get(name))
        name = next(names, None)
        return "the header" if name == HEADER else name


def file_entries(files: Mapping[str, FileRecord]) -> dict[str, dict[str, Any]]:
    return {name: record.to_dict() for name, record in sorted(files.items())}


def record_file(
    file: Path, door: UntrustedFiles = ANYWHERE, moved: Callable[[int], None] = lambda count: None
) -> FileRecord:
    """Record a file on disk. `moved` is called with the number of bytes done since its last call. Raises the door's
    error if unreadable, CheckpointError for a damaged weight header."""
    size = door.check_file(file)
    if file.suffix != WEIGHTS:
        return FileRecord(size, hash_parts(file, {"": (0, size)}, door, moved)[""])
    weights = SafetensorsFile(file)
    parts = hash_parts(file, weights.locate_parts(), door, moved)
    return FileRecord(size, combine_digests(parts), parts, weights.tensors)
