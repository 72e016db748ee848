"""Claim on the directory of a disk tier by one user and one process, and the operator's secret in it.

The secret keys the names of pages and the tags of tenants. It must not know namespaces, slabs or limits. Invariants: at
most one living process holds a directory's lock, and one that died holds none; nobody has the secret without either the
operator's setting or this user's rights, and a server started again with the same setting or directory has the same.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.disk.files import Files, NotOursError, check_owned, move_buffers, read_file, write_file
from wicore_trt.types import REPLICA_HOME

LOCK, SECRET = "LOCK", "secret"
SECRET_BYTES = 32
NAMESPACE = re.compile(r"[0-9a-f]{32}")
OURS = re.compile(r"namespace\.json(\.new)?|index|slab-\d{5}")
"""Names of namespace directories, and of the files in them."""
SHARE_WAIT_S = 10.0
"""How long servers that start at once wait for another to give out the secret, which takes it milliseconds."""
_log = logging.getLogger(__name__)


def find_root(files: Files, path: Path) -> Path:
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
    devices, files of others or with a second name, and what others may write. Other names are left alone."""
    for name in files.listdir(path):
        if name in (LOCK, SECRET, f"{SECRET}.new"):
            check_owned(path / name, files.lstat(path / name), files.owner)
        elif NAMESPACE.fullmatch(name):
            check_owned(path / name, files.lstat(path / name), files.owner, directory=True)
            for inner in filter(OURS.fullmatch, files.listdir(path / name)):
                check_owned(path / name / inner, files.lstat(path / name / inner), files.owner)


def lock_directory(files: Files, path: Path) -> int:
    """The descriptor that holds the directory's lock; the kernel frees it with the process, however that ends."""
    fd = files.open(path / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        files.lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        files.truncate(fd, 0)
        move_buffers(files.pwritev, fd, [b"%d\n" % os.getpid()], 0)
        return fd
    except BlockingIOError as error:
        files.close(fd)
        try:
            holder = read_file(files, path / LOCK, 32).decode(errors="replace").strip() or "?"
        except (OSError, EOFError):  # as while the holder writes it
            holder = "?"
        raise EnvironmentUnfitError(
            f"{path} is in use by process {holder}.",
            fix="Give this server a kv.disk_path of its own, or stop that process.",
        ) from error
    except BaseException:
        files.close(fd)
        raise


def derive_secret(salt: str) -> bytes:
    """The secret of a server whose setting kv.salt is `salt`."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=SECRET_BYTES, person=b"wicore-kv-owner").digest()


def ensure_secret(files: Files, path: Path) -> bytes:
    """Find the secret in the directory of a disk tier, or that of replicas that were served from it, or draw one. The
    caller holds its lock. OSError when the file system refuses, or the file is not this user's alone."""
    found = read_secret(files, path)
    if found is None:
        others = (read_secret(files, home) for home in sorted(path.glob(REPLICA_HOME.format("[0-9]*"))))
        found = next(filter(None, others), None) or secrets.token_bytes(SECRET_BYTES)
        write_file(files, path / SECRET, found)
    return found


def share_secret(path: Path, replicas: int) -> None:
    """Give the directories of a server's replicas one secret, so that a tenant has one tag in all: that of the first
    one that has any, or of `path`. Servers that start at once take turns. Raises EnvironmentUnfitError."""
    files = Files()
    try:
        root = find_root(files, path)
        homes = [root / REPLICA_HOME.format(i) for i in range(replicas)]
        for home in homes:
            files.claim_directory(home)
        with _hold_directory(files, homes[0]):
            known = filter(None, (read_secret(files, home) for home in (*homes, root)))
            secret = next(known, None) or secrets.token_bytes(SECRET_BYTES)
            for home in homes:
                if read_secret(files, home) != secret:
                    write_file(files, home / SECRET, secret)
    except OSError as error:
        fix = "Give kv.disk_path a directory that this user owns and no other may write to."
        raise EnvironmentUnfitError(f"{error.filename or path}: {error.strerror}.", fix=fix) from error


@contextmanager
def _hold_directory(files: Files, path: Path) -> Iterator[None]:
    """Lock a directory itself for a `with`; its file LOCK may be a server's for long. OSError after SHARE_WAIT_S."""
    fd, until = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), time.monotonic() + SHARE_WAIT_S
    try:
        while True:
            try:
                files.lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        yield
    finally:
        files.close(fd)


def list_unused(path: Path, replicas: int) -> list[Path]:
    """List directories of pages below kv.disk_path that a server of so many replicas does not read, since those of
    another number made them. Nothing bounds their bytes, and no start removes them."""
    homes = {REPLICA_HOME.format(i) for i in range(replicas) if replicas > 1}
    found = [home for home in path.glob(REPLICA_HOME.format("[0-9]*")) if home.name not in homes]
    if homes:
        found += [entry for entry in path.glob("*") if NAMESPACE.fullmatch(entry.name)]
    return sorted(found)


def read_secret(files: Files, path: Path) -> bytes | None:
    """The secret in a directory; None when there is none. OSError as `ensure_secret`."""
    try:
        found = read_file(files, path / SECRET, SECRET_BYTES + 1)
    except FileNotFoundError:
        return None
    except EOFError:
        found = b""
    if len(found) == SECRET_BYTES:
        return found
    _log.warning("%s holds no secret; pages that were named with the old one will not be found", path / SECRET)
    return None
