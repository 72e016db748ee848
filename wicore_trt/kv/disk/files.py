"""The operating system as the disk tier sees it: everything it does to files goes through `Files`.

It must not know pages, slots or limits. Tests put another `Files` in its place and so inject every fault. Invariants:
`read_buffers` and `write_buffers` move all bytes or raise; a short transfer is never taken for a whole one. What
`Files` opens is a regular file with one name that belongs to this user, and after that nobody else may open it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

ALIGN = 4096
_IOV_MAX = 1024
_FILL_BYTES = 1 << 20


def aligned_buffer(nbytes: int) -> memoryview:
    """`nbytes` (> 0) zero bytes of writable memory that begin at a page of memory, as O_DIRECT wants."""
    return memoryview(mmap.mmap(-1, nbytes))


class NotOursError(OSError):
    """Something lies where a file or directory of ours should: `filename` says where, `strerror` what it is."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(errno.EPERM, what, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def check_file(path: Path, found: os.stat_result, owner: int) -> None:
    """Raise NotOursError unless `found` is a regular file with one name, of user `owner`, which no other may write."""
    if stat.S_ISLNK(found.st_mode):
        raise NotOursError(path, "a symbolic link")
    if not stat.S_ISREG(found.st_mode):
        raise NotOursError(path, "not a regular file")
    if found.st_nlink > 1:
        raise NotOursError(path, f"a file with {found.st_nlink} names (hard links)")
    _check_owner(path, found, owner)


def check_directory(path: Path, found: os.stat_result, owner: int, *, writable_by_others: bool = False) -> None:
    """Raise NotOursError unless `found` is a directory of user `owner`, which no other may write."""
    if stat.S_ISLNK(found.st_mode):
        raise NotOursError(path, "a symbolic link")
    if not stat.S_ISDIR(found.st_mode):
        raise NotOursError(path, "not a directory")
    _check_owner(path, found, owner, writable_by_others=writable_by_others)


def _check_owner(path: Path, found: os.stat_result, owner: int, *, writable_by_others: bool = False) -> None:
    if found.st_uid != owner:
        raise NotOursError(path, f"owned by user {found.st_uid}, not by user {owner}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not writable_by_others:
        raise NotOursError(path, f"open to writes by others (mode {stat.S_IMODE(found.st_mode):o})")


class Files:
    """Thin calls; each raises OSError as the system does. `owner` is the user whose files may be opened."""

    owner = os.geteuid()

    def makedirs(self, path: Path) -> None:
        """A directory and those above it that are missing, for this user alone whatever the umask is."""
        missing = [path]
        while not os.path.lexists(missing[-1].parent):
            missing.append(missing[-1].parent)
        for directory in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)
                os.chmod(directory, 0o700)

    def lstat(self, path: Path) -> os.stat_result:
        return os.lstat(path)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def close_directory(self, path: Path) -> None:
        """Give a directory mode 0700. NotOursError, and no change, unless it is a directory of this user."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            check_directory(path, self.lstat(path), self.owner, writable_by_others=True)  # says what it is
            raise
        try:
            check_directory(path, os.fstat(fd), self.owner, writable_by_others=True)
            os.fchmod(fd, 0o700)
        finally:
            os.close(fd)

    def listdir(self, path: Path) -> list[str]:
        return os.listdir(path)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def open(self, path: Path, flags: int) -> int:
        """A file descriptor. What is opened for writing then has mode 0600. NotOursError for anything but a file of
        ours, which is left as it is; nothing that lies there can make this wait."""
        try:
            check_file(path, os.lstat(path), self.owner)  # first: opening a device can do something to it
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(fd)
            check_file(path, found, self.owner)
            if flags & (os.O_WRONLY | os.O_RDWR) and stat.S_IMODE(found.st_mode) != 0o600:
                os.fchmod(fd, 0o600)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def create(self, path: Path) -> int:
        """A descriptor to write a new file; what was left there by a process that died goes."""
        with suppress(FileNotFoundError):
            check_file(path, self.lstat(path), self.owner)
            self.unlink(path)
        return self.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def open_slab(self, path: Path) -> int:
        """An existing file for reading and writing, past the page cache where the file system allows it."""
        fd = -1
        try:
            fd = self.open(path, os.O_RDWR | os.O_DIRECT)
            self.preadv(fd, [aligned_buffer(ALIGN)], 0)  # some file systems refuse only now
            return fd
        except OSError as error:
            if fd >= 0:
                self.close(fd)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        return self.open(path, os.O_RDWR)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Grow a file (no O_DIRECT) to offset + nbytes with space that is really there; zeros are written where the
        file system cannot reserve it."""
        try:
            os.posix_fallocate(fd, offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            zeros = bytes(_FILL_BYTES)
            for at in range(offset, offset + nbytes, _FILL_BYTES):
                write_buffers(self, fd, [memoryview(zeros)[: offset + nbytes - at]], at)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still take on the file system."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def lock(self, fd: int) -> None:
        """Take the lock of an open file for this process until the descriptor is closed; BlockingIOError when another
        holds it."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_buffers(files: Files, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
    """Write all buffers one after another from `offset` on. OSError when that fails."""
    _move(files.pwritev, fd, buffers, offset)


def read_buffers(files: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill all buffers from `offset` on. OSError when that fails, EOFError when the file ends too early."""
    _move(files.preadv, fd, buffers, offset)


def _move(
    call: Callable[[int, list[memoryview], int], int], fd: int, buffers: Sequence[memoryview | bytes], offset: int
) -> None:
    left = [memoryview(buffer) for buffer in buffers]
    while left:
        moved = call(fd, left[:_IOV_MAX], offset)
        if moved <= 0:
            raise EOFError("the file ends too early")
        offset += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]


def read_file(files: Files, path: Path, limit: int) -> bytes:
    """Read a file of ours, cut at `limit` bytes. OSError when it cannot be opened or read, or is not ours;
    EOFError when it became shorter meanwhile."""
    fd = files.open(path, os.O_RDONLY)
    try:
        buffer = memoryview(bytearray(min(files.fstat(fd).st_size, limit)))
        read_buffers(files, fd, [buffer], 0)
        return bytes(buffer)
    finally:
        files.close(fd)


def write_file(files: Files, path: Path, data: bytes) -> None:
    """Put `data` into a file of ours, or leave it as it is, whenever the process dies. OSError when that fails."""
    new = path.with_name(f"{path.name}.new")
    fd = files.create(new)
    try:
        write_buffers(files, fd, [data], 0)
    finally:
        files.close(fd)
    files.replace(new, path)


def disk_bytes(found: os.stat_result) -> int:
    """Bytes that a file counts for: its length or the space it takes, whichever is more."""
    return max(found.st_size, found.st_blocks * 512)


def tree_bytes(files: Files, path: Path) -> int:
    """Bytes of everything under a path, directories included. Links are not followed; what cannot be seen is zero."""
    try:
        found = files.lstat(path)
        total = disk_bytes(found)
        if stat.S_ISDIR(found.st_mode):
            total += sum(tree_bytes(files, path / name) for name in files.listdir(path))
    except (FileNotFoundError, PermissionError):
        return 0
    return total
