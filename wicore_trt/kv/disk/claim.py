"""Who may use a directory of the disk tier: this user alone, and one process at a time. And what lies in it.

It must not know namespaces, slabs or limits. Invariant: at most one living process holds a directory's lock, and a
process that died holds none.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.disk.files import Files, NotOursError, check_directory, check_file, read_buffers, write_buffers
from wicore_trt.kv.disk.secret import SECRET

LOCK = "LOCK"
NAMESPACE = re.compile(r"[0-9a-f]{32}")
OURS = re.compile(r"namespace\.json(\.new)?|index|slab-\d{5}")
"""Names of namespace directories, and of the files in them."""


def claim_directory(files: Files, path: Path) -> None:
    """Make the directory, or check that it is ours, and close it to others. NotOursError when it is not."""
    files.makedirs(path)
    files.close_directory(path)


def root_directory(files: Files, path: Path) -> Path:
    """The directory that kv.disk_path names. A link there is followed if this user or root made it, once and for all:
    whoever moves it later moves nothing. NotOursError for another's link."""
    try:
        found = files.lstat(path)
    except FileNotFoundError:
        return path
    if not stat.S_ISLNK(found.st_mode):
        return path
    if found.st_uid not in (0, os.geteuid()):
        raise NotOursError(path, f"a symbolic link of user {found.st_uid}")
    return Path(os.path.realpath(path))


def check_contents(files: Files, path: Path) -> None:
    """Raise NotOursError when anything under a directory has a name of ours and is not what we put there: links, pipes,
    devices, sockets, files of other users or with a second name, and what others may write. Other names are theirs to
    use; they are counted and left alone."""
    for name in files.listdir(path):
        if name in (LOCK, SECRET, f"{SECRET}.new"):
            check_file(path / name, files.lstat(path / name), files.owner)
        elif NAMESPACE.fullmatch(name):
            check_directory(path / name, files.lstat(path / name), files.owner)
            for inner in filter(OURS.fullmatch, files.listdir(path / name)):
                check_file(path / name / inner, files.lstat(path / name / inner), files.owner)


def lock_directory(files: Files, path: Path) -> int:
    """The descriptor that holds the directory's lock; the kernel frees it with the process, however that ends."""
    fd = files.open(path / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        files.lock(fd)
        files.truncate(fd, 0)
        write_buffers(files, fd, [b"%d\n" % os.getpid()], 0)
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
        read_buffers(files, fd, [buffer], 0)
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
