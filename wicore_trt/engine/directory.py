"""Open an engine directory, verified; write one, atomically.

Knows files, sizes and hashes, and nothing of tensors or backends. Invariants: an `EngineDir` that was opened with
`verify=True` has exactly the bytes that were built; at every moment the output path holds a whole engine or none.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wicore_trt.engine.manifest import (
    DIGEST_BYTES,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    read_manifest,
    rebuild_command,
)
from wicore_trt.errors import ConfigError, EngineFormatError
from wicore_trt.files import Door, size_of

HASH_CHUNK_BYTES = 64 << 20
READ_BYTES = 4 << 20

Progress = Callable[[str, int, int], None]
"""progress(phase, done, total): `done` of `total` in the phase's own unit (bytes, or tensors)."""


@dataclass(frozen=True, slots=True)
class EngineDir:
    """An engine on disk. Made by `open_engine` only, so its manifest is valid and its files have their sizes."""

    path: Path
    manifest: Manifest

    @property
    def rank_files(self) -> list[Path]:
        """Weight files in rank order."""
        return [self.path / f"rank{rank}.safetensors" for rank in range(self.manifest.tp_size)]


def open_engine(path: Path, *, verify: bool = True, progress: Progress | None = None) -> EngineDir:
    """Open the engine at `path`; `verify=False` checks the sizes of its files but not their hashes.

    Raises EngineFormatError, naming the first bad file, and the command that mends it.
    """
    path = Path(path)
    manifest = read_manifest(path)
    for rank in range(0 if manifest.dummy_weights else manifest.tp_size):
        if f"rank{rank}.safetensors" not in manifest.files:
            raise EngineFormatError(
                f"engine {path}: {MANIFEST_NAME} lists no weights for rank {rank} of {manifest.tp_size}.",
                fix=rebuild_command(path, manifest.source),
            )
    for name in manifest.files:
        _check_size(path, name, manifest)
    if verify:
        done, total = 0, manifest.total_bytes
        for name, entry in manifest.files.items():
            if progress:
                progress("verify", done, total)
            if _hash_or_refuse(path, name, manifest) != entry.blake2b:
                raise EngineFormatError(
                    f"engine {path}: {name} is corrupted (its hash differs from {MANIFEST_NAME}).",
                    fix=rebuild_command(path, manifest.source),
                )
            done += entry.bytes
        if progress:
            progress("verify", total, total)
    return EngineDir(path, manifest)


def file_state(engine: EngineDir, name: str) -> str:
    """ "ok" or "corrupted": the named file's content against the manifest."""
    return "ok" if hash_file(engine.path / name) == engine.manifest.files[name].blake2b else "corrupted"


def _check_size(path: Path, name: str, manifest: Manifest) -> None:
    fix = rebuild_command(path, manifest.source)
    size = Door(path, EngineFormatError, fix=fix).check(path / name)
    expected = manifest.files[name].bytes
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise EngineFormatError(f"engine {path}: {name} is {state}: {size} bytes, built with {expected}.", fix=fix)


def _hash_or_refuse(path: Path, name: str, manifest: Manifest) -> str:
    try:
        return hash_file(path / name)
    except EngineFormatError as error:
        raise EngineFormatError(error.message, fix=rebuild_command(path, manifest.source)) from error


def hash_file(path: Path) -> str:
    """Hex blake2b over the blake2b digests of the file's 64 MiB chunks.

    Two levels, so that a 54 GB file is hashed by all cores and not by one. Memory: READ_BYTES per core.
    """
    with Door(error=EngineFormatError).open(path, buffering=0) as file:
        descriptor, size = file.fileno(), size_of(file)

        def digest(at: int) -> bytes:
            hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
            end = min(size, at + HASH_CHUNK_BYTES)
            while at < end:
                block = os.pread(descriptor, min(READ_BYTES, end - at), at)
                if not block:
                    raise OSError(errno.EIO, f"short read at byte {at}")
                hasher.update(block)
                at += len(block)
            return hasher.digest()

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            digests = pool.map(digest, range(0, size, HASH_CHUNK_BYTES))
            return hashlib.blake2b(b"".join(digests), digest_size=DIGEST_BYTES).hexdigest()


def check_output(output: Path, *, force: bool) -> None:
    """Refuse an output that exists, unless `force` is set and it is an engine or an empty directory.

    Raises ConfigError. Called before the long work, and again by `replace_engine`.
    """
    if not output.exists() and not output.is_symlink():
        return
    if output.is_symlink() or not output.is_dir():
        raise ConfigError(f"{output} is not a directory.", fix="Choose another output.")
    if not any(output.iterdir()):
        return
    if not (output / MANIFEST_NAME).is_file():
        raise ConfigError(f"{output} exists and is not an engine, so it is left alone.", fix="Choose another output.")
    if not force:
        raise ConfigError(f"engine {output} already exists.", fix="Add --force to replace it.")


@contextmanager
def partial_directory(output: Path, kind: str = "partial") -> Iterator[Path]:
    """A scratch directory beside `output`, removed at the end if it is still there.

    Left-overs of dead processes for the same output are removed first.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(output, kind)
    partial = output.parent / f".{output.name}.{kind}-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_engine(partial: Path, output: Path, *, force: bool) -> None:
    """Make `partial` the engine at `output`: all of it reaches the disk, then it is renamed into place."""
    check_output(output, force=force)
    for path in [*sorted(p for p in partial.rglob("*") if p.is_file()), partial]:
        _fsync(path)
    if not output.exists():
        os.rename(partial, output)
    else:
        retired = output.parent / f".{output.name}.partial-{os.getpid()}-old"
        os.rename(output, retired)
        try:
            os.rename(partial, output)
        except OSError:
            os.rename(retired, output)
            raise
        shutil.rmtree(retired, ignore_errors=True)
    _fsync(output.parent)


def describe_files(partial: Path) -> dict[str, FileEntry]:
    """Sizes and hashes of all files below `partial`, by POSIX name."""
    files = sorted(p for p in partial.rglob("*") if p.is_file() and p.name != MANIFEST_NAME)
    return {p.relative_to(partial).as_posix(): FileEntry(p.stat().st_size, hash_file(p)) for p in files}


def _remove_stale(output: Path, kind: str) -> None:
    pattern = re.compile(re.escape(f".{output.name}.{kind}-") + r"(\d+)")
    for entry in output.parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match and (int(match[1]) == os.getpid() or not Path(f"/proc/{match[1]}").exists()):
            shutil.rmtree(entry, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
