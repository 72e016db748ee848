"""Bytes in files without names, which the processes of a server pass on and read without a copy.

Must not know what they mean. Invariant: nothing outlives the processes that have it open; a view's bytes stay as they
are once another process has its file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from wicore_trt.types import Bytes


class MemoryFile(mmap.mmap):
    """Map of a whole file, which is open while a view of it lives."""

    file = -1

    def __del__(self) -> None:
        os.close(self.file)


def make_file(size: int) -> MemoryFile:
    """Make a file of so many bytes, which are 0. Raises OSError."""
    file = os.memfd_create("bytes")
    try:
        os.ftruncate(file, size)
        made = MemoryFile(file, size)
    except BaseException:
        os.close(file)
        raise
    made.file = file
    return made


def open_parts(parts: Sequence[Bytes]) -> int:
    """Open a file that holds these parts in a row: the one that a single part is a view of, else a copy. Raises
    OSError."""
    whole = parts[0].obj if len(parts) == 1 and isinstance(parts[0], memoryview) else None
    if isinstance(whole, MemoryFile) and len(whole) == len(parts[0]):
        return os.dup(whole.file)
    with open(os.memfd_create("bytes"), "wb", buffering=0) as file:
        if os.writev(file.fileno(), parts) < sum(map(len, parts)):
            raise OSError("there is no memory for them")
        return os.dup(file.fileno())


def read_parts(file: int, sizes: Sequence[int]) -> list[memoryview]:
    """Map a file and return read-only views of its parts. Raises OSError for one that is shorter."""
    if os.fstat(file).st_size < sum(sizes):
        raise OSError("it is shorter than its parts")
    whole, at, parts = memoryview(mmap.mmap(file, sum(sizes), prot=mmap.PROT_READ)), 0, []
    for size in sizes:
        parts.append(whole[at : at + size])
        at += size
    return parts
