"""The one door for files from outside: models, checkpoints, engines, recipes, downloads.

All code reads files of users and strangers through `UntrustedFiles`. The module knows sizes and JSON, not the meaning
of files. Invariant (I23): a file read here is regular, was opened without blocking, lies inside of the given directory,
and is read up to its limit; everything else is the given error, in one line.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from wicore_trt.errors import CheckpointError, WicoreError

SMALL_BYTES = 1 << 20
"""Limit of configurations, indexes, headers and recipes; those of Gemma 27B have up to 0.2 MB. JSON of a size takes 30
times as much memory."""

LIST_BYTES = 4 << 20
"""Limit of files with an entry per added token, or per tensor and rank: Gemma's tokenizer_config.json has 1.2 MB, the
config.json of a checkpoint of 27B for 8 GPUs 1 MB."""

TOKENIZER_BYTES = 64 << 20
"""Limit of one tokenizer file; Gemma's tokenizer.json has 33 MB."""
CONFIG_ENDS = "config_eos_token_id"
"""Key of an engine's generation_config.json: the ends that the model's config.json names, which no engine has."""

MAX_DEPTH = 32
"""Levels that objects and lists of a JSON file may nest; the files read here need five levels."""

_COPY_BYTES = 1 << 20
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_LONE_SURROGATE = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


@dataclass(frozen=True, slots=True)
class UntrustedFiles:
    """Reads files of one directory.

    Files must lie in `within` when all links are followed (None: the user named the file itself, so it may lie
    anywhere). A snapshot of the Hugging Face cache, models--*/snapshots/COMMIT, may link into the blobs of its own
    model. `error` is raised for everything that is wrong with a file, with `fix` as its remedy. With `seen` = {} the
    door remembers opened files, and refuses one that was since replaced, written to, or given another mode or name.
    """

    within: Path | None = None
    error: type[WicoreError] = CheckpointError
    fix: str | None = None
    seen: dict[str, tuple[int, ...]] | None = field(default=None, compare=False)

    @contextmanager
    def open_file(self, path: Path, *, limit: int | None = None, buffering: int = -1) -> Iterator[BinaryIO]:
        """Open the file for reading. OSError while it is being read becomes the door's error, too. `limit` is in bytes
        (None: any size, for readers that check every length against `size_of` the file)."""
        descriptor = self._open_descriptor(path, limit)
        with os.fdopen(descriptor, "rb", buffering=buffering) as file:
            try:
                yield file
            except OSError as error:
                raise self.make_error(path, f"cannot be read: {error.strerror or error}") from error

    def read_bytes(self, path: Path, *, limit: int = SMALL_BYTES) -> bytes:
        parts = io.BytesIO()
        with self.open_file(path, limit=limit, buffering=0) as file:
            while parts.tell() <= limit and (data := file.read(min(_COPY_BYTES, limit + 1 - parts.tell()))):
                parts.write(data)
        if parts.tell() > limit:
            raise self._too_large(path, parts.tell(), limit)
        return parts.getvalue()

    def read_text(self, path: Path, *, limit: int = SMALL_BYTES) -> str:
        """Read the file as UTF-8 text."""
        return self.decode_text(self.read_bytes(path, limit=limit), path)

    def read_json(self, path: Path, *, limit: int = SMALL_BYTES) -> dict[str, Any]:
        """Read the file as a JSON object; see `parse_json`."""
        value = self.parse_json(self.read_bytes(path, limit=limit), path)
        if not isinstance(value, dict):
            names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
            raise self.make_error(path, f"holds {names.get(type(value), 'a number')} where a JSON object belongs")
        return value

    def parse_json(self, data: bytes, path: Path | str) -> Any:
        """Parse JSON of the file (or part of one) named `path`: UTF-8, no key twice in an object, no NaN or Infinity,
        nested at most MAX_DEPTH."""
        text = self.decode_text(data, path)
        try:
            value = json.loads(
                text, object_pairs_hook=_without_doubles, parse_constant=_parse_finite, parse_float=_parse_finite
            )
            if _measure_depth(value) > MAX_DEPTH:
                raise RecursionError
            if _LONE_SURROGATE.search(text):
                json.dumps(value, ensure_ascii=False).encode("utf-8")
        except RecursionError:
            raise self.make_error(path, f"nests objects or lists more than {MAX_DEPTH} deep") from None
        except UnicodeEncodeError:
            raise self.make_error(path, "holds half of a surrogate pair, which is no text") from None
        except ValueError as error:
            raise self.make_error(path, f"is not valid JSON: {error}") from error
        return value

    def decode_text(self, data: bytes, path: Path | str) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.make_error(path, f"cannot be read as UTF-8 (byte {error.start} is wrong)") from error

    def copy_file(self, path: Path, target: Path, *, limit: int) -> Path:
        """Copy the file's bytes, at most `limit`, to `target`, which must not exist. OSError is the target's."""
        with (
            os.fdopen(self._open_descriptor(path, limit), "rb", buffering=0) as file,
            target.open("xb", buffering=0) as out,
        ):
            done = 0
            while True:
                try:
                    data = file.read(_COPY_BYTES)
                except OSError as error:
                    raise self.make_error(path, f"cannot be read: {error.strerror}") from error
                if not data:
                    break
                done += len(data)
                if done > limit:
                    raise self._too_large(path, done, limit)
                write_all(out, data)
        return target

    def check_file(self, path: Path) -> int:
        """Open the file and close it again; return its size in bytes."""
        with self.open_file(path) as file:
            return size_of(file)

    def check_unchanged(self) -> None:
        """Refuse when an opened file has been replaced or written to since: what was read may mix two versions."""
        for path in self.seen or ():
            self.check_file(Path(path))

    def make_error(self, path: Path | str, reason: str) -> WicoreError:
        return self.error(f"{path} {reason}.", fix=self.fix)

    def _open_descriptor(self, path: Path, limit: int | None) -> int:
        try:
            real = os.path.realpath(path, strict=True)
            self._check_inside(path, real)
            self._check_kind(path, os.stat(real, follow_symlinks=False), limit)  # opening a device can have effects
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY)
        except FileNotFoundError:
            if os.path.exists(path):  # a name that only leads to something open: a pipe in /dev/fd
                self._check_kind(path, os.stat(path), limit)
            dangling = os.path.islink(path)
            reason = f"is a link to {os.readlink(path)}, which does not exist" if dangling else "is missing"
            raise self.make_error(path, reason) from None
        except PermissionError as error:
            fix = "Let this user read it, and enter its directories."
            raise self.error(f"{path} cannot be read: {error.strerror}.", fix=fix) from error
        except (OSError, ValueError) as error:
            raise self.make_error(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
        try:
            status = os.fstat(descriptor)
            self._check_kind(path, status, limit)
            self._check_same(path, status)
            os.set_blocking(descriptor, True)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_inside(self, path: Path, real: str) -> None:
        if self.within is None:
            return
        root = Path(os.path.realpath(self.within))
        roots = [root]
        if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
            roots.append(root.parent.parent / "blobs")
        if not any(Path(real).is_relative_to(allowed) for allowed in roots):
            raise self.error(
                f"{path} is a link to {real}, outside of {self.within}.", fix="Put the file itself in its place."
            )

    def _check_same(self, path: Path, status: os.stat_result) -> None:
        if self.seen is not None:
            # a writer can reset mtime, and a new file can get the old inode: ctime shows both; a new link or mode
            # changes it, too, so that some unchanged files are refused
            now = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if self.seen.setdefault(str(path), now) != now:
                raise self.error(
                    f"{path} changed while it was being read.", fix="Run this again when nothing writes to it."
                )

    def _check_kind(self, path: Path, status: os.stat_result, limit: int | None) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise self.make_error(path, f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'special')}, not a regular file")
        if limit is not None and status.st_size > limit:
            raise self._too_large(path, status.st_size, limit)

    def _too_large(self, path: Path, size: int, limit: int) -> WicoreError:
        return self.make_error(path, f"has {size} bytes, more than the {limit} that such a file may have")


def is_present(path: Path) -> bool:
    """Tell whether something has this name, even a link that leads nowhere: it must then be read or refused. A
    directory that may not be searched counts as present, so that the door reports why it cannot be read."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return True


def size_of(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def quote_arg(path: object) -> str:
    """Quote a path or other argument for a shell: blanks, quotes, control characters, a leading dash."""
    word = str(path)
    if word.startswith("-"):
        word = f"./{word}"
    if all(c.isprintable() for c in word):
        return shlex.quote(word)
    escapes = {"\\": "\\\\", "'": "\\'"}
    spelt = (
        escapes.get(c, c) if c.isprintable() else "".join(f"\\x{b:02x}" for b in c.encode("utf-8", "surrogateescape"))
        for c in word
    )
    return "$'" + "".join(spelt) + "'"


def make_printable(text: str) -> str:
    r"""Spell out the bytes of file names that are no UTF-8 (\xff), so that the text can be stored and sent."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def write_all(out: io.FileIO, data: bytes | memoryview) -> None:
    """Write all bytes to an unbuffered file, which takes at most 2 GiB at a time."""
    view = memoryview(data)
    while view.nbytes:
        view = view[out.write(view) :]


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, and its folder, so that it is either whole or as before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file that nobody changes in place, or copy it where the file system cannot link."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice in one object")
        found[key] = value
    return found


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no JSON number that a float holds")
    return value


def _measure_depth(value: Any) -> int:
    """Measure how deep objects and lists of `json.loads` nest, without recursion; stops beyond MAX_DEPTH."""
    depth, values = 0, iter([value])
    while level := [item for item in values if type(item) is dict or type(item) is list]:
        depth += 1
        if depth > MAX_DEPTH:
            break
        values = chain.from_iterable([outer.values() if type(outer) is dict else outer for outer in level])
    return depth
