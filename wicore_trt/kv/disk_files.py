"""The operating system as the disk tier sees it: everything it does to files goes through `Files`.

It must not know pages, slots or limits. Tests put another `Files` in its place and so inject every fault. Invariant:
`read_all` and `write_all` move all bytes or raise; a short transfer is never taken for a whole one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

ALIGN = 4096
_IOV_MAX = 1024
_FILL_BYTES = 1 << 20


def aligned_buffer(nbytes: int) -> memoryview:
    """`nbytes` (> 0) zero bytes of writable memory that begin at a page of memory, as O_DIRECT wants."""
    return memoryview(mmap.mmap(-1, nbytes))


class Files:
    """Thin calls; each raises OSError as the system does."""

    def makedirs(self, path: Path, mode: int) -> None:
        os.makedirs(path, mode, exist_ok=True)

    def stat(self, path: Path) -> os.stat_result:
        return os.stat(path)

    def lstat(self, path: Path) -> os.stat_result:
        return os.lstat(path)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def chmod(self, path: Path, mode: int) -> None:
        os.chmod(path, mode)

    def listdir(self, path: Path) -> list[str]:
        return os.listdir(path)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def open(self, path: Path, flags: int) -> int:
        """A file descriptor; new files have mode 0600, links are not followed."""
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

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
                write_all(self, fd, [memoryview(zeros)[: offset + nbytes - at]], at)

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


def write_all(files: Files, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
    """Write all buffers one after another from `offset` on. OSError when that fails."""
    _move(files.pwritev, fd, buffers, offset)


def read_all(files: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
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
