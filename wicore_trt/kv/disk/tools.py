"""What lies in the directory of a disk tier, read without a server and without its lock.

Checking and clearing are in disk_scrub.py. It must not know how a store schedules its I/O or why it evicts. Invariant:
`inspect` changes nothing, also while a server holds the directory.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wicore_trt.errors import NotFoundError
from wicore_trt.kv.disk.claim import LOCK, NAMESPACE
from wicore_trt.kv.disk.files import (
    Files,
    aligned_buffer,
    check_file,
    read_buffers,
    read_file,
    tree_bytes,
    write_buffers,
)
from wicore_trt.kv.disk.format import BLOCK_BYTES, FLAG_SEALED, FORMAT_VERSION, Namespace
from wicore_trt.kv.disk.index import FoundPages, record_type

_SLAB = re.compile(r"slab-\d{5}")
_JSON_BYTES = 1 << 16  # of a namespace.json, at most


@dataclass
class Use:
    """Pages and their bytes (slots times payload)."""

    pages: int = 0
    bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.pages += 1
        self.bytes += nbytes


@dataclass
class NamespaceReport:
    """What one namespace directory holds. `problem` says why a server would not use it; the rest is then empty.

    `tenants` maps tags (hexadecimal) to what they use. `oldest` and `newest`: seconds since 1970 at which the servers
    started that wrote the oldest and the newest page; None without pages.
    """

    name: str
    made_for: dict[str, Any] = field(default_factory=dict)
    slot_bytes: int = 0
    allocated_slots: int = 0
    used_slots: int = 0
    allocated_bytes: int = 0
    pages: int = 0
    encrypted_pages: int = 0
    groups: dict[str, Use] = field(default_factory=dict)
    tenants: dict[str, Use] = field(default_factory=dict)
    oldest: float | None = None
    newest: float | None = None
    problem: str | None = None


@dataclass
class DirectoryReport:
    """`used_by`: process that holds the directory (the numbers may be in motion then), None for nobody."""

    path: str
    used_by: int | None
    total_bytes: int
    namespaces: list[NamespaceReport]


class StoredNamespace:
    """One namespace directory, opened for reading. ValueError when its namespace.json is not that of its name."""

    def __init__(self, home: Path, files: Files) -> None:
        self.home, self._files = home, files
        facts = json.loads(read_file(files, home / "namespace.json", _JSON_BYTES))
        try:
            if facts["format"] != FORMAT_VERSION:
                raise ValueError(f"format {facts['format']}, not {FORMAT_VERSION}")
            self.namespace = Namespace(**facts["namespace"])
            self.slot_bytes, self.slab_slots = int(facts["slot_bytes"]), int(facts["slab_slots"])
        except (KeyError, TypeError) as error:
            raise ValueError("namespace.json lacks something") from error
        if self.namespace.digest.hex() != home.name:
            raise ValueError("namespace.json speaks of another namespace")
        if self.slot_bytes <= 0 or self.slot_bytes % BLOCK_BYTES or self.slab_slots < 1:
            raise ValueError("namespace.json has a geometry that cannot be")
        self.stride = BLOCK_BYTES + self.slot_bytes
        self.slabs = sorted(home / name for name in files.listdir(home) if _SLAB.fullmatch(name))
        self.allocated_slots = 0
        for path in self.slabs:
            found = files.lstat(path)
            check_file(path, found, files.owner)
            self.allocated_slots += min(found.st_size // self.stride, self.slab_slots)
        self.records = self._load()

    def found(self, *, sealed: bool, now: float = 0.0) -> FoundPages:
        """The complete pages in the index: those written with encryption, or those without; with `now` (seconds since
        1970) none whose time is over."""
        return FoundPages(self.records, self.namespace, FLAG_SEALED if sealed else 0, now)

    def passing(self, slots: list[int]) -> list[int]:
        """Those of the slots whose record says when the page's time is over, and that exist."""
        return [slot for slot in slots if slot < self.allocated_slots and self.records["expires"][slot]]

    def records_of(self, tenant: bytes) -> list[int]:
        """Slots whose index record names the tenant, also those that are not part of a complete page."""
        return [int(slot) for slot in np.flatnonzero(self.records["tenant"] == np.void(tenant))]

    def _load(self) -> NDArray[np.void]:
        record = record_type(self.namespace)
        try:
            fd = self._files.open(self.home / "index", os.O_RDONLY)
        except FileNotFoundError:
            return np.zeros(0, dtype=record)
        try:
            nbytes = self._files.fstat(fd).st_size // record.itemsize * record.itemsize
            buffer = aligned_buffer(max(nbytes, 1))[:nbytes]
            if nbytes:  # a server that has not written yet has an index without records
                read_buffers(self._files, fd, [buffer], 0)
        finally:
            self._files.close(fd)
        return np.frombuffer(buffer, dtype=record)

    def place(self, slot: int) -> tuple[Path, int]:
        """(slab, offset of the header block) of a slot."""
        slab, place = divmod(slot, self.slab_slots)
        return self.home / f"slab-{slab:05d}", place * self.stride

    def erase(self, slots: list[int]) -> None:
        """Clear the index records of these slots. OSError when that fails."""
        size = self.records.dtype.itemsize
        fd = self._files.open(self.home / "index", os.O_RDWR)
        try:
            for slot in slots:
                write_buffers(self._files, fd, [bytes(size)], slot * size)
        finally:
            self._files.close(fd)


def inspect(path: Path) -> DirectoryReport:
    """What lies in a disk tier's directory. Only reads; also while a server holds it.

    NotFoundError when there is no disk tier.
    """
    homes, files = namespace_homes(path), owned_files(path)
    reports = []
    for home in homes:
        try:
            reports.append(_describe(StoredNamespace(home, files)))
        except (ValueError, OSError, EOFError) as error:
            reports.append(NamespaceReport(home.name, problem=str(error)))
    return DirectoryReport(str(path), _holder(path), tree_bytes(files, path), reports)


def _describe(stored: StoredNamespace) -> NamespaceReport:
    report = NamespaceReport(stored.home.name, stored.namespace.facts, stored.slot_bytes, stored.allocated_slots)
    report.allocated_bytes = stored.allocated_slots * stored.stride
    report.groups = {group: Use() for group in stored.namespace.groups}
    for sealed in (False, True):
        found = stored.found(sealed=sealed)
        for page, slots in found:
            nbytes = len(slots) * stored.slot_bytes
            report.used_slots += len(slots)
            report.pages += 1
            report.encrypted_pages += sealed
            report.groups[page.group].add(nbytes)
            report.tenants.setdefault(page.tenant.hex(), Use()).add(nbytes)
        if len(found.write_ids):
            # Write ids go on from the nanosecond at which the server started.
            first, last = int(found.write_ids[0]) / 1e9, int(found.write_ids[-1]) / 1e9
            report.oldest = min(first, report.oldest or first)
            report.newest = max(last, report.newest or last)
    return report


def namespace_homes(path: Path) -> list[Path]:
    """The namespace directories under a path. NotFoundError when it is no disk tier's directory."""
    try:
        names = sorted(name for name in os.listdir(path) if NAMESPACE.fullmatch(name))
        homes = [path / name for name in names if stat.S_ISDIR(os.lstat(path / name).st_mode)]
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror}.", fix="Give the directory in kv.disk_path.") from error
    if not homes and not os.path.lexists(path / LOCK):
        raise NotFoundError(f"{path} holds no disk cache.", fix="Give the directory in kv.disk_path.")
    return homes


def owned_files(path: Path) -> Files:
    """The system for a look at a server's directory: root takes the files of the directory's owner, others their own.
    OSError when there is nothing at `path`."""
    files = Files()
    if os.geteuid() == 0:
        files.owner = os.stat(path).st_uid
    return files


def _holder(path: Path) -> int | None:
    """The process that holds the directory's lock, by the kernel's list. Asking with flock would disturb a server that
    starts just then. 0 when the kernel does not say which one (another container's)."""
    try:
        inode = os.lstat(path / LOCK).st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()  # 1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
            return max(0, int(fields[4]))
    return None
