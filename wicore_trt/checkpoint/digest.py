"""Compute digests of files, or of each tensor of a weight file, and seals of JSON objects.

A digest is blake2b over the blake2b digests of 64 MiB pieces, so that all cores hash one large file, and a writer
hashes as it writes. A seal is the digest that `config.json` or `engine.json` carries of itself. Must not know what
files mean. Invariants: every byte of a file is in exactly one of its parts; an object with an unbroken seal has
exactly the keys and values that were sealed (white space and the order of keys do not count).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wicore_trt.cores import count_cores
from wicore_trt.files import UntrustedFiles

DIGEST_BYTES = 32
PIECE_BYTES = 64 << 20
READ_BYTES = 4 << 20
ANYWHERE = UntrustedFiles()
HEADER = "__header__"
"""The part of a weight file in front of its tensors: the size of the header, and the header."""


class Digest:
    def __init__(self) -> None:
        self._whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._piece = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._filled = 0

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view.nbytes:
            part = view[: PIECE_BYTES - self._filled]
            self._piece.update(part)
            self._filled += part.nbytes
            view = view[part.nbytes :]
            if self._filled == PIECE_BYTES:
                self._end_piece()

    def hexdigest(self) -> str:
        """Return the digest; nothing may be appended afterwards."""
        if self._filled:
            self._end_piece()
        return self._whole.hexdigest()

    def _end_piece(self) -> None:
        self._whole.update(self._piece.digest())
        self._piece, self._filled = hashlib.blake2b(digest_size=DIGEST_BYTES), 0


def hash_bytes(data: bytes) -> str:
    digest = Digest()
    digest.update(data)
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """Hash a file, by all cores with READ_BYTES of memory each; returns hex. Raises CheckpointError."""
    return hash_parts(path, {"": (0, ANYWHERE.check_file(path))})[""]


def hash_parts(
    path: Path,
    parts: Mapping[str, tuple[int, int]],
    door: UntrustedFiles = ANYWHERE,
    moved: Callable[[int], None] = lambda count: None,
) -> dict[str, str]:
    """Return hex digests, by name, of the byte ranges [first, end) of a file, computed by all cores.
    `moved` is called with the number of bytes done since its last call. Raises the door's error."""
    pieces = [
        (name, at, min(end, at + PIECE_BYTES))
        for name, (first, end) in parts.items()
        for at in range(first, end, PIECE_BYTES)
    ]
    wholes = {name: hashlib.blake2b(digest_size=DIGEST_BYTES) for name in parts}
    workers = min(len(pieces), count_cores())
    with door.open_file(path, buffering=0) as file, ThreadPoolExecutor(max(1, workers)) as pool:
        descriptor = file.fileno()
        run = pool.map if workers > 1 else map  # most files of an engine are one piece: they start no thread
        digests = run(lambda piece: _hash_piece(descriptor, piece[1], piece[2]), pieces)
        for (name, at, end), digest in zip(pieces, digests, strict=True):
            wholes[name].update(digest)
            moved(end - at)
    return {name: whole.hexdigest() for name, whole in wholes.items()}


def _hash_piece(descriptor: int, at: int, end: int) -> bytes:
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    while at < end:
        block = os.pread(descriptor, min(READ_BYTES, end - at), at)
        if not block:
            raise OSError(errno.EIO, f"short read at byte {at}")
        hasher.update(block)
        at += len(block)
    return hasher.digest()


def combine_digests(parts: Mapping[str, str]) -> str:
    """Return one hex digest for the digests of all parts of a weight file, in any order."""
    return hashlib.blake2b(canonical_json(dict(parts)), digest_size=DIGEST_BYTES, person=b"wicore-parts").hexdigest()


def canonical_json(value: object) -> bytes:
    """Encode JSON with sorted keys and fixed separators, so that bytes are equal exactly when values are."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


SEAL = "seal"
"""The key under which an object carries its seal, which is not under the seal."""
_SHORT_BYTES = 8
_SHOWN = 80


def make_seal(data: Mapping[str, Any]) -> dict[str, Any]:
    """Make the seal of a JSON object: the digest of its canonical form.
    Short digests of its values, and of theirs, tell later which of them was changed."""
    keys = {name: _seal_digest(value, _SHORT_BYTES) for name, value in _flatten_values(data).items()}
    return {"digest": _seal_digest(data, DIGEST_BYTES), "keys": keys}


def describe_broken_seal(data: Mapping[str, Any], seal: object) -> str | None:
    """Describe how `data` differs from the data that `seal` was made of, naming keys; None when it does not differ."""
    if not isinstance(seal, dict) or {*seal} != {"digest", "keys"} or not isinstance(seal["keys"], dict):
        return "its seal is missing or damaged"
    if seal == make_seal(data):
        return None
    leaves, keys = _flatten_values(data), seal["keys"]
    changed = [n for n, value in leaves.items() if n in keys and keys[n] != _seal_digest(value, _SHORT_BYTES)]
    found = {"was changed": changed, "is missing": {*keys} - {*leaves}, "was added": {*leaves} - {*keys}}
    named = [f"{sorted(names)[0][:_SHOWN]!r} {what}" for what, names in found.items() if names]
    return named[0] if named else "its seal was changed"


def _flatten_values(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by key; values of objects one level down by "key.key"."""
    leaves: dict[str, Any] = {}
    for name, value in data.items():
        inner = value if isinstance(value, dict) and value else None
        leaves |= {f"{name}.{key}": below for key, below in inner.items()} if inner else {name: value}
    return leaves


def _seal_digest(value: object, size: int) -> str:
    return hashlib.blake2b(canonical_json(value), digest_size=size, person=b"wicore-seal").hexdigest()
