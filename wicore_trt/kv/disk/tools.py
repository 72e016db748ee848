"""The directory of a disk tier without a server: what lies in it, checking it, clearing it.

`inspect_directory` only reads, also while a server holds the directory; `verify_directory` and `purge_directory` hold
its lock. It must not know how a store schedules its I/O or why it evicts. Invariant: a page goes by its index record
first, so that a stop in between leaves no record of erased bytes; other files than the disk tier's are never touched.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from wicore_trt.errors import ConfigError, EnvironmentUnfitError, NotFoundError
from wicore_trt.kv.disk.cipher import TAG_FAULT, PageCipher
from wicore_trt.kv.disk.claim import LOCK, NAMESPACE, SECRET, lock_directory
from wicore_trt.kv.disk.files import Files, aligned_buffer, check_owned, move_buffers, read_file, tree_bytes
from wicore_trt.kv.disk.format import (
    BLOCK_BYTES,
    CHECK_BYTES,
    FLAG_SEALED,
    FORMAT_VERSION,
    CorruptSlotError,
    Namespace,
    SlotFormat,
    record_check,
    record_fields,
)
from wicore_trt.kv.disk.index import FoundPages, read_records
from wicore_trt.kv.disk.space import delete_namespace
from wicore_trt.kv.pages.page import Page
from wicore_trt.types import REPLICA_HOME

_SLAB = re.compile(r"slab-\d{5}")
_JSON_BYTES = 1 << 16  # of a namespace.json, at most
Progress = Callable[[str, int, int], None]
"""progress(phase, done, total)"""

_IDENTITY_BYTES = 512  # of a header block; the rest of it is zero but for a checksum


@dataclass
class Use:
    """Pages and their bytes (slots times payload)."""

    pages: int = 0
    bytes: int = 0

    def add_page(self, nbytes: int) -> None:
        self.pages += 1
        self.bytes += nbytes


@dataclass
class NamespaceReport:
    """Contents of a namespace directory. `problem` says why a server would not use it; the rest is then empty.
    `tenants` maps tags (hexadecimal) to what they use. `oldest` and `newest`: seconds since 1970 at which the servers
    started that wrote the oldest and the newest page; None without pages."""

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


@dataclass
class VerifyReport:
    """Result of `verify_directory`. `faults` counts by cause: pages, index records and namespaces that are damaged.
    `leftovers`: index records of pages that were being written when a server died, or whose time to live is over;
    harmless, and cleared like the rest. `unopened`: encrypted pages whose checksum is right, and tag unchecked."""

    pages: int = 0
    good: int = 0
    bytes: int = 0
    unopened: int = 0
    leftovers: int = 0
    erased_records: int = 0
    faults: Counter[str] = field(default_factory=Counter)


@dataclass
class PurgeReport:
    """`pages` and their `bytes` that could be found by a server, and all `slots` that were overwritten or deleted."""

    pages: int = 0
    slots: int = 0
    bytes: int = 0
    namespaces: list[str] = field(default_factory=list)


class StoredNamespace:
    """Namespace directory, opened, past the page cache if possible. ValueError if its namespace.json is not its own."""

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
        self.allocated_slots = 0
        for name in sorted(filter(_SLAB.fullmatch, files.listdir(home))):
            found = files.lstat(home / name)
            check_owned(home / name, found, files.owner)
            self.allocated_slots += min(found.st_size // self.stride, self.slab_slots)
        self.records = np.zeros(0, dtype=record_fields(self.namespace.page_tokens))
        with suppress(FileNotFoundError), files.hold_open(home / "index", os.O_RDONLY) as fd:
            count = files.fstat(fd).st_size // self.records.itemsize
            read = read_records(files, fd, self.namespace.page_tokens, count)
            self.records = np.concatenate([self.records, *map(np.array, read)])
        self._open: dict[Path, int] = {}
        self._block, self._payload = aligned_buffer(BLOCK_BYTES), aligned_buffer(self.slot_bytes)

    def find_pages(self, *, sealed: bool, now: float = 0.0) -> FoundPages:
        """Find the complete pages in the index, `sealed` or not, without those whose time is over at `now` (seconds
        since 1970)."""
        return FoundPages([self.records], self.namespace, FLAG_SEALED if sealed else 0, now)

    def find_fault(self, page: Page, slots: Sequence[int], write_id: int, slot_format: SlotFormat) -> str | None:
        """Find why a server would not get this page; None when it would."""
        try:
            for part, slot in enumerate(slots):
                fd, offset = self._locate(slot)
                move_buffers(self._files.preadv, fd, [self._block, self._payload], offset)
                slot_format.open(self._block, page, part, len(slots), slot, write_id, self._payload)
        except CorruptSlotError as error:
            return str(error)
        except FileNotFoundError:
            return "slab missing"
        except EOFError:
            return "slab too short"
        except OSError as error:
            return f"read error: {error.strerror}"
        return None

    def find_slots(self, tenant: bytes) -> set[int]:
        """Slots whose header names the tenant, also those of pages that were evicted."""
        found = set()
        for slot in range(self.allocated_slots):
            fd, offset = self._locate(slot)
            move_buffers(self._files.preadv, fd, [self._block], offset)
            if tenant in bytes(self._block[:_IDENTITY_BYTES]):
                found.add(slot)
        return found

    def overwrite_slot(self, slot: int) -> None:
        """Write zeros over a slot and its header block."""
        fd, offset = self._locate(slot)
        self._block[:], self._payload[:] = bytes(BLOCK_BYTES), bytes(len(self._payload))
        move_buffers(self._files.pwritev, fd, [self._block, self._payload], offset)

    def erase_records(self, slots: list[int]) -> None:
        """Clear the index records of these slots. OSError when that fails."""
        size = self.records.dtype.itemsize
        with self._files.hold_open(self.home / "index", os.O_RDWR) as fd:
            for slot in slots:
                move_buffers(self._files.pwritev, fd, [bytes(size)], slot * size)

    def _locate(self, slot: int) -> tuple[int, int]:
        """(file descriptor, offset of the header block) of a slot."""
        slab, place = divmod(slot, self.slab_slots)
        path = self.home / f"slab-{slab:05d}"
        if path not in self._open:
            self._open[path] = self._files.open_slab(path)
        return self._open[path], place * self.stride

    def close(self) -> None:
        """Close the slabs."""
        for fd in self._open.values():
            self._files.close(fd)


class _TagUnread(PageCipher):
    """Stands for a cipher whose key is not at hand: what it should open stays as it is."""

    def __init__(self) -> None:
        pass

    def open(self, *args: Any, **kwargs: Any) -> None:
        pass


def inspect_directory(path: Path) -> DirectoryReport:
    """Describe a disk tier's directory, also while a server holds it. NotFoundError when there is no disk tier."""
    homes, files = list_namespaces(path), open_as_owner(path)
    reports = []
    for home in homes:
        try:
            reports.append(_describe_namespace(StoredNamespace(home, files)))
        except (ValueError, OSError, EOFError) as error:
            reports.append(NamespaceReport(home.name, problem=str(error)))
    return DirectoryReport(str(path), _find_holder(path), tree_bytes(files, path), reports)


def _describe_namespace(stored: StoredNamespace) -> NamespaceReport:
    report = NamespaceReport(stored.home.name, stored.namespace.facts, stored.slot_bytes, stored.allocated_slots)
    report.allocated_bytes = stored.allocated_slots * stored.stride
    report.groups = {group: Use() for group in stored.namespace.groups}
    for sealed in (False, True):
        found = stored.find_pages(sealed=sealed)
        for page, slots in found:
            nbytes = len(slots) * stored.slot_bytes
            report.used_slots += len(slots)
            report.pages += 1
            report.encrypted_pages += sealed
            report.groups[page.group].add_page(nbytes)
            report.tenants.setdefault(page.tenant.hex(), Use()).add_page(nbytes)
        if len(found.write_ids):
            # Write ids go on from the nanosecond at which the server started.
            first, last = int(found.write_ids[0]) / 1e9, int(found.write_ids[-1]) / 1e9
            report.oldest = min(first, report.oldest or first)
            report.newest = max(last, report.newest or last)
    return report


def list_namespaces(path: Path) -> list[Path]:
    """The namespace directories under a path. NotFoundError when it is no disk tier's directory."""
    try:
        names = sorted(name for name in os.listdir(path) if NAMESPACE.fullmatch(name))
        homes = [path / name for name in names if stat.S_ISDIR(os.lstat(path / name).st_mode)]
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror}.", fix="Give the directory in kv.disk_path.") from error
    if not homes and not os.path.lexists(path / LOCK):
        raise NotFoundError(f"{path} holds no disk cache.", fix="Give the directory in kv.disk_path.")
    return homes


def list_tiers(path: Path) -> list[Path]:
    """List the directories of disk tiers under `path`, a server's kv.disk_path: those of replicas, and `path` itself if
    it is one or there is none."""
    found = sorted(path.glob(REPLICA_HOME.format("[0-9]*")))
    return [home for home in (path, *found) if os.path.lexists(home / LOCK)] or [path]


def add_reports(reports: Sequence[VerifyReport | PurgeReport]) -> Any:
    """Add up reports of one kind."""
    return reduce(lambda a, b: type(a)(*(getattr(a, f.name) + getattr(b, f.name) for f in fields(a))), reports)


def open_as_owner(path: Path) -> Files:
    """Make the system for a server's directory: root takes its owner's files, others their own. OSError without one."""
    files = Files()
    if os.geteuid() == 0:
        files.owner = os.stat(path).st_uid
    return files


def _find_holder(path: Path) -> int | None:
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


def verify_directory(
    path: Path, *, cipher: PageCipher | None = None, dry_run: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Read every indexed page of every namespace, check header, identity, checksum and, with `cipher`, the encryption
    tag, and clear the index records of what is damaged; `dry_run` only reports. Pages whose time to live is over, and
    what else has an end and is of no use, are overwritten with zeros.

    EnvironmentUnfitError when a server holds the directory, NotFoundError when there is no disk tier, ConfigError when
    `cipher` opens none of a namespace's pages (nothing of that namespace is then cleared)."""
    report = VerifyReport()
    with _lock_tier(path) as files:
        for home in list_namespaces(path):
            try:
                stored = StoredNamespace(home, files)
            except (ValueError, OSError, EOFError) as error:
                report.faults[f"namespace {home.name[:8]}: {error}"] += 1
                continue
            with closing(stored):
                bad = _check_namespace(stored, cipher, report, progress)
                if bad and not dry_run:
                    for slot in bad:
                        if slot < stored.allocated_slots and stored.records["expires"][slot]:
                            stored.overwrite_slot(slot)
                    stored.erase_records(bad)
                    report.erased_records += len(bad)
    return report


def _check_namespace(
    stored: StoredNamespace, cipher: PageCipher | None, report: VerifyReport, progress: Progress | None
) -> list[int]:
    """Check one namespace; returns the slots whose records should go."""
    bad: list[int] = []
    stale: set[int] | None = None
    for sealed in (False, True):
        found = stored.find_pages(sealed=sealed, now=time.time())
        stale = set(found.stale) if stale is None else stale & set(found.stale)
        slot_format = SlotFormat(stored.namespace, (cipher or _TagUnread()) if sealed else None)
        good, wrong_tags, total = 0, 0, len(found.write_ids)
        for done, ((page, places), write_id) in enumerate(zip(found, found.write_ids.tolist(), strict=True)):
            if progress is not None and done % 64 == 0:
                progress(f"Checking {stored.home.name[:8]}", done, total)
            fault = stored.find_fault(page, places, write_id, slot_format)
            report.pages += 1
            report.bytes += len(places) * stored.stride
            if fault is None:
                good += 1
            else:
                report.faults[fault] += 1
                wrong_tags += fault == TAG_FAULT
                bad += places
        report.good += good
        report.unopened += good if sealed and cipher is None else 0
        if wrong_tags and not good:
            fix = "Give the key file that the server used. Nothing was cleared."
            raise ConfigError(f"The key opens no page of namespace {stored.home.name[:8]}.", fix=fix)
        if progress is not None and total:
            progress(f"Checking {stored.home.name[:8]}", total, total)
    for slot in sorted(stale or ()):
        raw = stored.records[slot].tobytes()
        whole = record_check(raw[:-CHECK_BYTES]) == raw[-CHECK_BYTES:]
        report.leftovers += whole
        report.faults["index record"] += not whole
        bad.append(slot)
    report.faults += Counter()  # causes that were not met go
    return bad


def purge_directory(path: Path, *, namespace: str | None = None, tenant: bytes | None = None) -> PurgeReport:
    """Remove all pages and the secret that named them; or the pages of one namespace (its name, or how it begins); or
    those of one tenant (its tag), whose slots are then overwritten with zeros, also those of pages evicted before.
    EnvironmentUnfitError when a server holds it, NotFoundError without tier or namespace, OSError if it is refused."""
    report = PurgeReport()
    with _lock_tier(path) as files:
        homes = list_namespaces(path)
        if namespace is not None:
            homes = [home for home in homes if namespace and home.name.startswith(namespace)]
            if len(homes) != 1:
                what = "is the beginning of several" if homes else "is not in this directory"
                raise NotFoundError(f"Namespace {namespace!r} {what}.", fix="See: wicore kv inspect PATH")
        for home in homes:
            try:
                stored: StoredNamespace | None = StoredNamespace(home, files)
            except (ValueError, OSError, EOFError):
                stored = None  # damaged: it can be deleted, but holds no pages that a server would find
            if stored is not None:
                for page, slots in chain(stored.find_pages(sealed=False), stored.find_pages(sealed=True)):
                    if tenant is None or page.tenant == tenant:
                        report.pages += 1
                        report.bytes += len(slots) * stored.slot_bytes
            if tenant is None:
                report.slots += stored.allocated_slots if stored is not None else 0
                report.namespaces.append(home.name)
                delete_namespace(files, home)
            elif stored is not None:
                _purge_tenant(stored, tenant, report)
        if namespace is None and tenant is None:
            with suppress(FileNotFoundError):  # nothing has a name of it any more
                files.unlink(path / SECRET)
    return report


def _purge_tenant(stored: StoredNamespace, tenant: bytes, report: PurgeReport) -> None:
    with closing(stored):
        slots = stored.find_slots(tenant)
        named = np.flatnonzero(stored.records["tenant"] == np.void(tenant)).tolist()  # also of incomplete pages
        stored.erase_records(sorted({*named, *(slot for slot in slots if slot < len(stored.records))}))
        for slot in sorted(slots):
            stored.overwrite_slot(slot)
    if slots:
        report.slots += len(slots)
        report.namespaces.append(stored.home.name)


@contextmanager
def _lock_tier(path: Path) -> Iterator[Files]:
    """The directory's lock, so that no server works on it meanwhile."""
    list_namespaces(path)  # or lock_directory would make a lock file in any directory
    files = open_as_owner(path)
    try:
        fd = lock_directory(files, path)
    except EnvironmentUnfitError as error:
        raise EnvironmentUnfitError(
            error.message, fix="Stop the server first; `wicore kv inspect` works meanwhile."
        ) from error
    except OSError as error:
        fix = "Run this as the user of the server, and remove what is not the server's."
        raise EnvironmentUnfitError(f"{path} cannot be locked: {error.strerror}.", fix=fix) from error
    try:
        yield files
    finally:
        files.close(fd)
