"""Who holds a directory, and what a second process is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.disk.claim import LOCK, lock_directory
from wicore_trt.kv.disk.files import Files


class Counting(Files):
    """Counts descriptors; the holder of the lock cuts the file when the other has seen its length, where `cuts`."""

    def __init__(self, *, cuts: bool = False) -> None:
        self.descriptors: set[int] = set()
        self.cuts = cuts

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self.descriptors.add(fd)
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        self.descriptors.remove(fd)

    def fstat(self, fd: int) -> os.stat_result:
        found = super().fstat(fd)
        if self.cuts:
            super().truncate(fd, 0)
        return found


@pytest.mark.parametrize("cuts", [False, True])
def test_a_directory_in_use_is_refused_even_while_its_holder_writes_its_name(tmp_path: Path, cuts: bool) -> None:
    holder, other = Files(), Counting(cuts=cuts)
    holder.claim_directory(tmp_path)
    held = lock_directory(holder, tmp_path)
    who = r"\?" if cuts else str(os.getpid())
    with pytest.raises(EnvironmentUnfitError, match=f"in use by process {who}\\."):
        lock_directory(other, tmp_path)
    assert not other.descriptors
    holder.close(held)
    fd = lock_directory(other, tmp_path)
    assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n" and other.descriptors == {fd}
    other.close(fd)
