"""The operator's secret, which keys the names of pages and the tags of tenants.

It must not know names, tags or tiers. Invariant: whoever has neither the operator's setting nor this user's rights does
not have the secret, and a server that is started again with the same setting, or over the same disk tier, has the same.
"""

from __future__ import annotations

import logging
import os
import secrets
from hashlib import blake2b
from pathlib import Path

from wicore_trt.kv.disk.files import Files, read_buffers, write_buffers

SECRET_BYTES = 32
SECRET = "secret"  # a file's name
_log = logging.getLogger(__name__)


def secret_of(salt: str) -> bytes:
    """The secret of a server whose setting kv.salt is `salt`."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=SECRET_BYTES, person=b"wicore-kv-owner").digest()


def kept_secret(files: Files, path: Path) -> bytes:
    """The secret in the directory of a disk tier, drawn at random when there is none. The caller holds its lock.

    OSError when the file system refuses, or the file is not this user's alone.
    """
    found = read_secret(files, path)
    if found is not None:
        return found
    drawn, new = secrets.token_bytes(SECRET_BYTES), path / f"{SECRET}.new"
    fd = files.create(new)
    try:
        write_buffers(files, fd, [drawn], 0)
    finally:
        files.close(fd)
    files.replace(new, path / SECRET)
    return drawn


def read_secret(files: Files, path: Path) -> bytes | None:
    """The secret in a directory; None when there is none. OSError as `kept_secret`."""
    try:
        fd = files.open(path / SECRET, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        buffer = memoryview(bytearray(SECRET_BYTES))
        if files.fstat(fd).st_size == SECRET_BYTES:
            read_buffers(files, fd, [buffer], 0)
            return bytes(buffer)
    except EOFError:
        pass
    finally:
        files.close(fd)
    _log.warning("%s holds no secret; pages that were named with the old one will not be found", path / SECRET)
    return None
