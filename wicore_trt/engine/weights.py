"""Place an engine's weight files, compare them with their checkpoint's records, and hash their contents.

Moves bytes in pieces of a few MB, so a 54 GB file needs no more memory. Must not know what tensors mean. Invariants:
every placed byte was compared with its record while it was read; the hash of weights depends on names, dtypes,
shapes and contents of tensors, not on their order in the file nor on metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from wicore_trt.checkpoint.digest import DIGEST_BYTES, HEADER, hash_parts
from wicore_trt.checkpoint.records import FileRecord, record_file
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, SafetensorsWriter, TensorInfo
from wicore_trt.errors import CheckpointError
from wicore_trt.files import link_or_copy


def hash_weights(ranks: Iterable[FileRecord]) -> str:
    """Return hex blake2b over (rank, name, dtype, shape, content digest) of all tensors, sorted by rank and name. The
    image encoder's file, if any, is the last."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for rank, file in enumerate(ranks):
        for name, info in sorted(file.tensors.items()):
            hasher.update(json.dumps([rank, name, info.dtype, info.shape, file.parts[name]]).encode() + b"\n")
    return hasher.hexdigest()


def place_weights(
    source: Path,
    target: Path,
    record: FileRecord,
    *,
    drop: Collection[str] = (),
    damaged: Callable[[str], CheckpointError],
    moved: Callable[[int], None] = lambda count: None,
) -> FileRecord:
    """Place `source` at `target` without the tensors named in `drop`, comparing it with `record` while it is read.
    With nothing to drop the file is hard-linked, or copied where the file system cannot link. Raises `damaged` of
    the first part that is not as recorded, also of a dropped one. `moved` is called with the number of bytes done
    since its last call."""
    file = SafetensorsFile(source)
    kept = [(name, info.dtype, info.shape) for name, info in file.tensors.items() if name not in drop]
    if len(kept) == len(file.tensors):
        link_or_copy(source, target)
        placed = record_file(target, moved=moved)
        if part := record.changed_part(placed.parts):
            raise damaged(part)
        return placed
    spans = {name: span for name, span in file.locate_parts().items() if name == HEADER or name in drop}
    found = hash_parts(source, spans, moved=moved)
    with SafetensorsWriter(target, kept) as writer:
        for name, _, _ in kept:
            for block in file.read_blocks(name):
                moved(writer.write(name, block))
            if writer.digests[name] != record.parts.get(name):
                raise damaged(name)
    if part := record.changed_part({**writer.digests, **found}):
        raise damaged(part)
    tensors = {name: TensorInfo(shape, tag) for name, tag, shape in kept}
    return FileRecord(writer.size, writer.digest, writer.digests, tensors)
