"""Weight files of an engine: hash their tensors, place them, leave some out.

Moves bytes in pieces of a few MB, so a 54 GB file needs no more. It must not know what the tensors mean. Invariant:
the hash depends on names, dtypes, shapes and contents of tensors, not on their order in the file nor on metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

from wicore_trt.checkpoint.safetensors_io import ITEM_BYTES, SafetensorsFile, SafetensorsWriter
from wicore_trt.engine.directory import READ_BYTES
from wicore_trt.engine.manifest import DIGEST_BYTES


def hash_weights(rank_files: Sequence[Path]) -> str:
    """Hex blake2b over (rank, name, dtype, shape, blake2b of the content) of every tensor, sorted by rank and name.

    Raises CheckpointError when a file is damaged.
    """
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for rank, path in enumerate(rank_files):
            file = SafetensorsFile(path)
            names = sorted(file.tensors)
            for name, digest in zip(names, pool.map(lambda name, f=file: _digest(f, name), names), strict=True):
                info = file.tensors[name]
                hasher.update(json.dumps([rank, name, info.dtype, info.shape, digest]).encode() + b"\n")
    return hasher.hexdigest()


def place_weights(source: Path, target: Path, *, drop: Collection[str] = ()) -> None:
    """Put `source` at `target` without the tensors named in `drop`.

    With nothing to drop the file is hard-linked, or copied where the file system cannot link.
    """
    file = SafetensorsFile(source)
    kept = [(name, info.dtype, info.shape) for name, info in file.tensors.items() if name not in drop]
    if len(kept) < len(file.tensors):
        with SafetensorsWriter(target, kept) as writer:
            for name, _, _ in kept:
                for block in _blocks(file, name):
                    writer.write(name, block)
        return
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def has_tensor(path: Path, name: str) -> bool:
    """True when the weight file holds tensor `name`."""
    return name in SafetensorsFile(path).tensors


def _digest(file: SafetensorsFile, name: str) -> str:
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for block in _blocks(file, name):
        hasher.update(block)
    return hasher.hexdigest()


def _blocks(file: SafetensorsFile, name: str) -> Iterator[bytes]:
    info = file.tensors[name]
    size = prod(info.shape) * ITEM_BYTES[info.dtype]
    for start in range(0, size, READ_BYTES):
        yield file.raw(name, start, min(size, start + READ_BYTES))
