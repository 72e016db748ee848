"""Who may use a directory of the disk tier: this user alone, and one process at a time. And what lies in it.

It must not know namespaces, slabs or limits. Invariant: at most one living process holds a directory's lock, and a
process that died holds none.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.disk_files import Files, read_all, write_all

LOCK = "LOCK"


def claim_directory(files: Files, path: Path) -> None:
    """Make the directory, or check that it is ours, and close it to others."""
    files.makedirs(path, 0o700)
    found = files.stat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise EnvironmentUnfitError(
            f"{path} is not a directory of this user.", fix="Give kv.disk_path a directory that this user owns."
        )
    if stat.S_IMODE(found.st_mode) != 0o700:
        files.chmod(path, 0o700)


def lock_directory(files: Files, path: Path) -> int:
    """The descriptor that holds the directory's lock; the kernel frees it with the process, however that ends."""
    fd = files.open(path / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        files.lock(fd)
        files.truncate(fd, 0)
        write_all(files, fd, [b"%d\n" % os.getpid()], 0)
        return fd
    except BlockingIOError as error:
        holder = _holder(files, fd)
        files.close(fd)
        raise EnvironmentUnfitError(
            f"{path} is in use by process {holder}.",
            fix="Give this server a kv.disk_path of its own, or stop that process.",
        ) from error
    except BaseException:
        files.close(fd)
        raise


def _holder(files: Files, fd: int) -> str:
    """The process id that the holder of the lock wrote; "?" when it cannot be read, as while the holder writes it."""
    try:
        buffer = memoryview(bytearray(min(files.fstat(fd).st_size, 32)))
        read_all(files, fd, [buffer], 0)
    except (OSError, EOFError):
        return "?"
    return bytes(buffer).decode(errors="replace").strip() or "?"


def disk_bytes(found: os.stat_result) -> int:
    """What a file counts for: its length or the space it takes, whichever is more."""
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
