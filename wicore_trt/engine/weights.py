"""Weight files of an engine as byte ranges: hash the tensors, leave one out.

Reads the safetensors container (https://github.com/huggingface/safetensors#format: u64 header length, JSON header,
data) without loading a tensor, so a 54 GB file needs a few MB. Invariant: the hash depends on names, dtypes, shapes
and contents of tensors, not on their order in the file nor on metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wicore_trt.engine.directory import READ_BYTES, hash_ranges
from wicore_trt.engine.manifest import DIGEST_BYTES
from wicore_trt.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors reference reader


@dataclass(frozen=True, slots=True)
class TensorRange:
    """One tensor of a safetensors file: its bytes are [start, end) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_tensor_ranges(path: Path) -> list[TensorRange]:
    """Tensors of a safetensors file in file order. Raises CheckpointError when the container is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} is not a safetensors file (header of {length} bytes in a file of {size}).")
        try:
            header = json.loads(file.read(length))
            base = 8 + length
            tensors = [
                TensorRange(
                    name,
                    info["dtype"],
                    tuple(info["shape"]),
                    base + info["data_offsets"][0],
                    base + info["data_offsets"][1],
                )
                for name, info in header.items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{path}: damaged safetensors header ({error!r}).") from error
    tensors.sort(key=lambda t: (t.start, t.end))
    at = base
    for tensor in tensors:
        if tensor.start != at or tensor.end < at:
            raise CheckpointError(f"{path}: tensor {tensor.name} does not follow the one before it.")
        at = tensor.end
    if at != size:
        raise CheckpointError(f"{path} has {size} bytes; its header describes {at}.")
    return tensors


def hash_weights(rank_files: Sequence[Path]) -> str:
    """Hex blake2b over (rank, name, dtype, shape, content) of every tensor, sorted by name."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for rank, path in enumerate(rank_files):
        tensors = sorted(read_tensor_ranges(path), key=lambda t: t.name)
        digests = hash_ranges(path, [(t.start, t.end) for t in tensors])
        for tensor, digest in zip(tensors, digests, strict=True):
            hasher.update(json.dumps([rank, tensor.name, tensor.dtype, tensor.shape, digest.hex()]).encode() + b"\n")
    return hasher.hexdigest()


def place_weights(source: Path, target: Path, *, drop: Sequence[str] = ()) -> None:
    """Put `source` at `target` without the tensors named in `drop`.

    With nothing to drop the file is hard-linked, or copied where the file system cannot link.
    """
    kept = [t for t in (tensors := read_tensor_ranges(source)) if t.name not in drop]
    if len(kept) < len(tensors):
        _rewrite(source, target, kept)
        return
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _rewrite(source: Path, target: Path, kept: Sequence[TensorRange]) -> None:
    header: dict[str, object] = {}
    at = 0
    for tensor in kept:
        size = tensor.end - tensor.start
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with source.open("rb") as reader, target.open("xb") as writer:
        writer.write(struct.pack("<Q", len(text)) + text)
        for tensor in kept:
            reader.seek(tensor.start)
            left = tensor.end - tensor.start
            while left:
                block = reader.read(min(READ_BYTES, left))
                if not block:
                    raise CheckpointError(f"{source} ended inside tensor {tensor.name}.")
                writer.write(block)
                left -= len(block)
