"""The operating system as the disk tier sees it: everything it does to files goes through `Files`.

It must not know pages, slots or limits. Tests put another `Files` in its place and so inject every fault. Invariants:
`move_buffers` moves all bytes or raises; a short transfer is never taken for a whole one. `Files` opens only
regular files with one name that belong to this user, and lets nobody else open them afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

ALIGN = 4096
_IOV_MAX = 1024
_FILL_BYTES = 1 << 20


def aligned_buffer(nbytes: int) -> memoryview:
    """`nbytes` (> 0) zero bytes of writable memory that begin at a page of memory, as O_DIRECT wants."""
    return memoryview(mmap.mmap(-1, nbytes))


def aligned_buffers(count: int, nbytes: int) -> list[memoryview]:
    """Cut an `aligned_buffer` into `count` buffers of `nbytes`, a multiple of ALIGN."""
    whole = aligned_buffer(count * nbytes)
    return [whole[at : at + nbytes] for at in range(0, count * nbytes, nbytes)]


class NotOursError(OSError):
    """Something lies where a file or directory of ours should: `filename` says where, `strerror` what it is."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(errno.EPERM, what, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def check_owned(
    path: Path, found: os.stat_result, owner: int, *, directory: bool = False, writable_by_others: bool = False
) -> None:
    """Raise NotOursError unless `found` is a file with one name, or a `directory`, that `owner` alone may write."""
    if stat.S_ISLNK(found.st_mode):
        raise NotOursError(path, "a symbolic link")
    if stat.S_IFMT(found.st_mode) != (stat.S_IFDIR if directory else stat.S_IFREG):
        raise NotOursError(path, "not a directory" if directory else "not a regular file")
    if found.st_nlink > 1 and not directory:
        raise NotOursError(path, f"a file with {found.st_nlink} names (hard links)")
    if found.st_uid != owner:
        raise NotOursError(path, f"owned by user {found.st_uid}, not by user {owner}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not writable_by_others:
        raise NotOursError(path, f"open to writes by others (mode {stat.S_IMODE(found.st_mode):o})")


class Files:
    """Thin calls; each raises OSError as the system does. `owner` is the user whose files may be opened."""

    owner = os.geteuid()

    lstat = staticmethod(os.lstat)
    fstat = staticmethod(os.fstat)
    listdir = staticmethod(os.listdir)
    unlink = staticmethod(os.unlink)
    rmdir = staticmethod(os.rmdir)
    replace = staticmethod(os.replace)
    close = staticmethod(os.close)
    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    truncate = staticmethod(os.ftruncate)
    lock = staticmethod(fcntl.flock)

    def claim_directory(self, path: Path) -> None:
        """Make a directory, and those above it that are missing, for this user alone whatever the umask is. One that
        is there is given mode 0700. NotOursError, and no change, unless it is a directory of this user."""
        missing = [path]
        while not os.path.lexists(missing[-1].parent):
            missing.append(missing[-1].parent)
        for directory in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)
                os.chmod(directory, 0o700)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            # says what it is
            check_owned(path, self.lstat(path), self.owner, directory=True, writable_by_others=True)
            raise
        try:
            check_owned(path, os.fstat(fd), self.owner, directory=True, writable_by_others=True)
            os.fchmod(fd, 0o700)
        finally:
            os.close(fd)

    def open(self, path: Path, flags: int) -> int:
        """Return a file descriptor; a file for writing then has mode 0600. Raises NotOursError, changing nothing, for
        anything but a file of ours; nothing that lies there can make this wait."""
        try:
            check_owned(path, os.lstat(path), self.owner)  # first: opening a device can do something to it
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(fd)
            check_owned(path, found, self.owner)
            if flags & (os.O_WRONLY | os.O_RDWR) and stat.S_IMODE(found.st_mode) != 0o600:
                os.fchmod(fd, 0o600)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextmanager
    def hold_open(self, path: Path, flags: int) -> Iterator[int]:
        """Open a file for the time of a `with`; as `open`."""
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            self.close(fd)

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

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Grow a file (no O_DIRECT) to offset + nbytes of real space: zeros where the file system cannot reserve it."""
        try:
            os.posix_fallocate(fd, offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            zeros = bytes(_FILL_BYTES)
            for at in range(offset, offset + nbytes, _FILL_BYTES):
                move_buffers(self.pwritev, fd, [memoryview(zeros)[: offset + nbytes - at]], at)

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still take on the file system."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


@cache
def in_memory(device: int) -> bool:
    """Say whether the file system with this `st_dev` is a tmpfs."""
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        found = [line for line in mounts if line.split()[2] == f"{os.major(device)}:{os.minor(device)}"]
        return any(" - tmpfs " in line for line in found)
    return False


def move_buffers(call: Callable[..., int], fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
    """Write all buffers one after another from `offset` on, or fill them: `call` is `Files.pwritev` or `preadv`.
    OSError when that fails, EOFError when the file ends too early."""
    left = list(buffers)
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
    """Read a file of ours, cut at `limit` bytes. OSError if that fails or it is not ours; EOFError if it shrank."""
    with files.hold_open(path, os.O_RDONLY) as fd:
        buffer = memoryview(bytearray(min(files.fstat(fd).st_size, limit)))
        move_buffers(files.preadv, fd, [buffer], 0)
        return bytes(buffer)


def write_file(files: Files, path: Path, data: bytes) -> None:
    """Put `data` into a file of ours, or leave it as it is, whenever the process dies. OSError when that fails."""
    new = path.with_name(f"{path.name}.new")
    with suppress(FileNotFoundError):  # left there by a process that died
        check_owned(new, files.lstat(new), files.owner)
        files.unlink(new)
    with files.hold_open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        move_buffers(files.pwritev, fd, [data], 0)
    files.replace(new, path)


def disk_bytes(found: os.stat_result) -> int:
    """Bytes that a file counts for: its length or the space it takes, whichever is more."""
    return max(found.st_size, found.st_blocks * 512)


def tree_bytes(files: Files, path: Path) -> int:
    """Bytes of everything under a path, directories included. Links are not followed; what cannot be seen is zero."""
    try:
        found = files.lstat(path)
        total = disk_bytes(found)
        for name in files.listdir(path) if stat.S_ISDIR(found.st_mode) else ():
            total += tree_bytes(files, path / name)
    except (FileNotFoundError, PermissionError):
        return 0
    return total
