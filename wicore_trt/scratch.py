"""Writes a directory that appears whole under its name, and replaces nothing but its own kind.

It knows files and names, not their meaning. Invariants (I22): only a directory with our marker and a free lock is
removed; a former output is removed only if it is listed file by file, that was asked for, and the new one is there. A
process that dies at any moment loses nothing, and the next run for the same output clears up.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from wicore_trt.errors import ConfigError, EnvironmentUnfitError, list_some
from wicore_trt.files import is_present, quote_arg

MARKER = "marker"
_NEW, _WORK, _TAKEN, _OLD = "new", "work", "taken", "old"
_MAX_NAME = 100  # bytes, so that a scratch name has 141: file systems allow 255, encrypting ones 143
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)


@dataclass(frozen=True, slots=True)
class Product:
    """Kind of directory that a command makes. `listed` returns the names of all files of such a directory (POSIX,
    relative), or None for another directory; it must not raise for a damaged one, which --force replaces. `manifest` is
    the file that `listed` reads."""

    name: str
    manifest: str
    listed: Callable[[Path], Collection[str] | None]


# A scratch directory lies beside the output and has a random name. Its process keeps the marker locked, in whatever
# container:
# .NAME.wicore-RANDOM/marker   "wicore scratch", NAME; flock
#                   /new      the directory that is being made
#                   /work     files that are needed meanwhile
#                   /taken    found at the output, not looked at yet: goes back, never removed unseen
#                             (just before an exchange, the directory to be put there)
#                   /old      the same after a look; listed files are removed, others stay
# /taken and /old are removed only when the new directory has its name (`new` is gone), or another whole one stands
# there. Where the file system exchanges two names in one call, a replaced output is never missing.
@dataclass(frozen=True, slots=True)
class Scratch:
    """Directory to fill for `output`, and to publish."""

    output: Path
    folder: Path
    product: Product
    force: bool
    source: Path | None

    @property
    def directory(self) -> Path:
        """Directory that gets the name `output` in `publish_output`."""
        return self.folder / _NEW

    @property
    def work(self) -> Path:
        """Empty directory for files that vanish with the scratch."""
        return self.folder / _WORK

    def publish_output(self) -> None:
        """Give the finished directory its name, after all of it has reached the disk and the output has been checked
        again. Raises ConfigError, with nothing changed, when something came into its way."""
        for folder, _, files in os.walk(self.directory, topdown=False):
            for file in files:
                _sync_path(Path(folder, file))
            _sync_path(Path(folder))
        check_output(self.output, self.product, force=self.force, source=self.source)
        taken, old = self.folder / _TAKEN, self.folder / _OLD
        if _is_empty(self.output):  # a rename replaces it, unless something appears in it
            os.chmod(self.directory, stat.S_IMODE(os.lstat(self.output).st_mode))
        elif is_present(self.output):
            if self._exchange_directories(taken):
                return
            os.rename(self.output, taken)  # from here on nobody can add to it by its name
            check_output(taken, self.product, force=self.force, source=None, name=self.output)
            os.replace(taken, old)
        try:
            os.replace(self.directory, self.output)
        except OSError as error:
            if not is_present(self.output):
                raise
            raise ConfigError(
                f"{self.output} appeared while this ran, so it is left alone.", fix="Choose another output."
            ) from error
        _sync_path(self.output.parent)

    def _exchange_directories(self, taken: Path) -> bool:
        """Exchange new and old directory, then check the old one; False if the file system has no call for it."""
        # The new one waits at `taken`, so that whatever is found there after a kill is checked before it is removed.
        os.rename(self.directory, taken)
        if not exchange_names(taken, self.output):
            os.rename(taken, self.directory)
            return False
        try:
            check_output(taken, self.product, force=self.force, name=self.output)
        except (ConfigError, OSError):
            exchange_names(taken, self.output)
            raise
        os.replace(taken, self.folder / _OLD)
        _sync_path(self.output.parent)
        return True

    def publish_file(self, file: Path) -> None:
        """Give a finished file its name. Raises ConfigError when that is no longer free."""
        _sync_path(file)
        try:
            os.link(file, self.output)
        except FileExistsError as error:
            raise ConfigError(
                f"{self.output} appeared while this ran, so it is left alone.", fix="Choose another output."
            ) from error
        except OSError:  # a file system without hard links
            check_output(self.output, self.product, force=False)
            os.rename(file, self.output)
        _sync_path(self.output.parent)


@contextmanager
def replace_output(
    output: Path, product: Product, *, force: bool, source: str | Path | None = None
) -> Iterator[Scratch]:
    """Yield a Scratch to fill and publish; without publishing it vanishes with the block. `force` replaces a directory
    of the same kind; `source` is being read and must not lie in it. Clears up after killed processes; an output that
    one had taken away comes back unless this block publishes. Raises ConfigError if something is in the way,
    EnvironmentUnfitError for an OSError of the block."""
    output = resolve_parents(output)
    origin = None if source is None else Path(os.path.expanduser(source))
    try:
        with _clear_stale(output, product):
            check_output(output, product, force=force, source=origin)
            with _make_parents(output.parent), _make_folder(output, product) as folder:
                yield Scratch(output, folder, product, force, origin)
    except OSError as error:
        raise EnvironmentUnfitError(
            f"Writing {output} failed: {error.strerror or error}.", fix="Check free space and permissions there."
        ) from error


def exchange_names(one: Path, other: Path) -> bool:
    """Exchange two names of one file system in one step; return False, with nothing done, where that cannot be."""
    try:
        call = ctypes.CDLL(None).renameat2
    except AttributeError:  # a C library older than the call
        return False
    # On failure the caller renames instead, and those calls tell the reason.
    return bool(call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def clear_up(output: Path, product: Product) -> None:
    """Remove what killed processes left beside a finished output."""
    with suppress(OSError), _clear_stale(output, product):
        pass


def resolve_parents(path: Path | str) -> Path:
    """Return the absolute path that the kernel takes `path` for; its last part may be a link. Raises
    EnvironmentUnfitError when the current directory is gone."""
    path = Path(path)
    try:
        if ".." not in path.parts:
            return Path(os.path.abspath(path))
        # `..` behind a link leads to the parent of what the link names, which the text of the path does not say.
        if path.name == "..":
            return Path(os.path.realpath(path))
        return Path(os.path.realpath(path.parent)) / path.name
    except FileNotFoundError as error:
        raise EnvironmentUnfitError(
            f"{path} is relative, and the current directory no longer exists.", fix="Give an absolute path."
        ) from error


def check_output(
    output: Path, product: Product, *, force: bool, source: Path | None = None, name: Path | None = None
) -> None:
    """Refuse an output that is in the way. Allowed are nothing, an empty directory, and with `force` one of the same
    kind that holds its listed files only, and not the source. Refused are mount points and the current directory, whose
    users would be left in a deleted one. `name`: for errors. Raises ConfigError, and OSError for unreadable ones."""
    name = name or output
    if os.path.islink(output):
        raise ConfigError(
            f"{name} is a symbolic link.", fix=f"Name the directory itself: {quote_arg(os.path.realpath(output))}"
        )
    try:
        status = os.lstat(output)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{name} is not a directory.", fix="Choose another output.")
    if _is_mounted(output):
        raise ConfigError(f"{name} is a mount point, which nothing can replace.", fix="Name a new directory in it.")
    if os.path.samestat(status, os.stat(".")):
        raise ConfigError(
            f"{name} is the current directory, which would be replaced.", fix="Name a new directory in it."
        )
    if not os.listdir(output):
        return
    listed = product.listed(output)
    if listed is None:
        raise ConfigError(
            f"{name} exists and is not a readable {product.name}, so it is left alone.",
            fix="Choose another output, or remove it yourself.",
        )
    if not force:
        raise ConfigError(f"The {product.name} {name} already exists.", fix="Add --force to replace it.")
    if source is not None and Path(os.path.realpath(source)).is_relative_to(os.path.realpath(output)):
        raise ConfigError(f"The source {source} lies in {name}, which would be replaced.", fix="Choose another output.")
    odd = find_unlisted(output, frozenset(listed))
    if odd:
        raise ConfigError(
            f"{name} holds what the {product.name} does not list: {list_some(odd, 3)}.",
            fix="Move it elsewhere; nothing was changed.",
        )


def find_unlisted(directory: Path, listed: Collection[str]) -> list[str]:
    """Find the files, links and empty or unreadable directories below `directory` that are not listed, by POSIX names
    in it. Raises OSError for a directory that holds something listed and cannot be read."""
    parents = {str(parent) for name in listed for parent in Path(name).parents}
    found: list[str] = []

    def look(folder: Path, ours: bool) -> None:
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda e: e.name)
        except OSError:
            if ours:
                raise
            entries = []
        if not entries and not ours:
            found.append(folder.relative_to(directory).as_posix())
        for entry in entries:
            name = Path(entry.path).relative_to(directory).as_posix()
            if entry.is_dir(follow_symlinks=False):
                look(Path(entry.path), name in parents)
            elif name not in listed:
                found.append(name)

    look(directory, ours=True)
    return found


@contextmanager
def _make_folder(output: Path, product: Product) -> Iterator[Path]:
    """Make a scratch directory with marker and lock; settle it at the end."""
    while True:
        folder = output.parent / f"{_make_prefix(output)}{secrets.token_hex(16)}"
        folder.mkdir(mode=0o700)
        lock = _write_marker(folder, output)
        if lock is not None:
            break
    try:
        for name in (_NEW, _WORK):
            (folder / name).mkdir()
        yield folder
    finally:
        _settle_folder(folder, output, product)
        os.close(lock)


def _write_marker(folder: Path, output: Path) -> int | None:
    """Lock and write the marker; None when another process took the new, still empty directory for a left-over."""
    try:
        lock = os.open(folder / MARKER, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        with suppress(OSError):  # a file system without locks: nobody can lock it later either, so it is never removed
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            os.write(lock, _describe_marker(output))
            return lock
    except BaseException:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    os.close(lock)
    return None


@contextmanager
def _clear_stale(output: Path, product: Product) -> Iterator[None]:
    """Clear up after killed processes. A directory in which one of them left the only output is settled at the end."""
    held: list[tuple[Path, int]] = []
    try:
        for folder, lock in _left_behind(output):
            free = not is_present(output) or _is_empty(output)
            if not free or not any(is_present(folder / name) for name in (_TAKEN, _OLD)):
                _settle_folder(folder, output, product)
                os.close(lock)
            else:
                held.append((folder, lock))
        yield
    finally:
        for folder, lock in held:
            _settle_folder(folder, output, product)
            os.close(lock)


def _left_behind(output: Path) -> Iterator[tuple[Path, int]]:
    """Yield scratch directories for `output` whose process is gone, each with its lock, now ours."""
    pattern = re.compile(re.escape(_make_prefix(output)) + "[0-9a-f]{32}")
    try:
        names = sorted(os.listdir(output.parent))
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # none yet, or not to be listed
        return
    for name in names:
        folder = output.parent / name
        if not pattern.fullmatch(name) or not _own_directory(folder):
            continue
        try:
            lock = os.open(folder / MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            with suppress(OSError):
                folder.rmdir()  # killed before it had a marker; goes only when it is empty
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status, content = os.fstat(lock), os.read(lock, 1 << 16)
        except OSError:  # its process lives, or the file system has no locks
            os.close(lock)
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink and content == _describe_marker(output):
            yield folder, lock
            continue
        if not content and status.st_nlink:  # killed before it wrote the marker
            with suppress(OSError):
                os.unlink(folder / MARKER)
                folder.rmdir()
        os.close(lock)


def _settle_folder(folder: Path, output: Path, product: Product) -> None:
    """Remove a scratch directory, the marker last. The former output goes back unless the new one is there."""
    published = not is_present(folder / _NEW)
    for name in (_TAKEN,) if published else (_OLD, _TAKEN):  # a replaced `old` may be half removed
        if is_present(folder / name) and (not is_present(output) or (not published and _is_empty(output))):
            with suppress(OSError):  # something appeared there
                os.rename(folder / name, output)
    whole = None if os.path.islink(output) or not os.path.isdir(output) else product.listed(output)
    replaced = published or (whole is not None and all(is_present(output / name) for name in whole))
    with suppress(ConfigError, OSError):
        if replaced:
            check_output(folder / _TAKEN, product, force=True)
            os.replace(folder / _TAKEN, folder / _OLD)  # checked: a later process may remove it
    if is_present(folder / _TAKEN) or (is_present(folder / _OLD) and not replaced):
        _remove_tree(folder / _WORK)  # its place is taken, and its owner will look for it
        if not published:
            for name in os.listdir(folder / _NEW):  # `new` itself says that nothing was published
                _remove_tree(folder / _NEW / name)
        return
    _remove_listed(folder / _OLD, product)
    for name in (_WORK, _NEW):
        _remove_tree(folder / name)
    with suppress(OSError):
        if os.listdir(folder) == [MARKER]:  # without its marker nobody may remove what is left
            os.unlink(folder / MARKER)
        folder.rmdir()


def _is_empty(directory: Path) -> bool:
    """Tell whether it is an empty directory, and no link to one."""
    with suppress(OSError):
        return stat.S_ISDIR(os.lstat(directory).st_mode) and not os.listdir(directory)
    return False


def _is_mounted(directory: Path) -> bool:
    """Tell whether something is mounted there, even a directory of the same file system; False without /proc."""
    with suppress(OSError):
        points = [line.split(b" ")[4] for line in Path("/proc/self/mountinfo").read_bytes().splitlines()]
        name = os.fsencode(os.path.realpath(directory))
        return name in (re.sub(rb"\\(\d{3})", lambda code: bytes([int(code[1], 8)]), point) for point in points)
    return False


def _remove_listed(directory: Path, product: Product) -> None:
    """Remove the files that a product lists, its manifest last, and the directories that are empty then. Files that a
    process added since the check stay."""
    listed = product.listed(directory) or ()
    for folder, folders, files in os.walk(directory, topdown=False):
        for name in sorted((*folders, *files), key=product.manifest.__eq__):
            path = Path(folder, name)
            if path.relative_to(directory).as_posix() in listed:
                with suppress(OSError):
                    os.unlink(path)
        with suppress(OSError):
            os.rmdir(folder)


def _remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        os.unlink(path)


def _own_directory(path: Path) -> bool:
    """Tell whether it is a directory that this user made, and no link: strangers' markers count for nothing."""
    with suppress(OSError):
        status = os.lstat(path)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _make_prefix(output: Path) -> str:
    """Return `.NAME.wicore-`, with the digest of a NAME that leaves no room for the random part."""
    name = os.fsencode(output.name)
    return f".{hashlib.sha256(name).hexdigest() if len(name) > _MAX_NAME else output.name}.wicore-"


def _describe_marker(output: Path) -> bytes:
    return b"wicore scratch\n" + os.fsencode(output.name)


@contextmanager
def _make_parents(parent: Path) -> Iterator[None]:
    """Make a directory and its missing parents; remove those that are still empty at the end."""
    missing = []
    while not os.path.isdir(parent) and parent != parent.parent:
        missing.append(parent)
        parent = parent.parent
    made: list[Path] = []
    try:
        for path in reversed(missing):
            with suppress(FileExistsError):
                path.mkdir()
                made.append(path)
        yield
    finally:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir()


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
