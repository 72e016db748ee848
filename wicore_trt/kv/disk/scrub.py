"""Checking and clearing the directory of a disk tier that no server holds.

`verify` reads every page that the index names and takes out what is damaged; `purge` removes all pages, those of a
namespace or those of a tenant. Both hold the directory's lock. Invariant: a page goes by its index record first, so
that a stop in between leaves no record of erased bytes; files that are not the disk tier's are never touched.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wicore_trt.errors import ConfigError, EnvironmentUnfitError, NotFoundError
from wicore_trt.kv.disk.cipher import TAG_FAULT, PageCipher
from wicore_trt.kv.disk.claim import SECRET, lock_directory
from wicore_trt.kv.disk.files import Files, aligned_buffer, read_buffers, write_buffers
from wicore_trt.kv.disk.format import BLOCK_BYTES, CHECK_BYTES, CorruptSlotError, SlotFormat, record_check
from wicore_trt.kv.disk.space import delete_namespace
from wicore_trt.kv.disk.tools import StoredNamespace, namespace_homes, owned_files
from wicore_trt.kv.pages.page import Page

Progress = Callable[[str, int, int], None]
"""progress(phase, done, total)"""

_IDENTITY_BYTES = 512  # of a header block; the rest of it is zero but for a checksum


@dataclass
class VerifyReport:
    """What a scrub found. `faults` counts by cause: pages, index records and namespaces that are damaged.

    `leftovers`: index records of pages that were being written when a server died, or whose time to live is over;
    harmless, and cleared like the rest.
    `unopened`: encrypted pages whose checksum is right, but whose tag was not checked for want of the key.
    """

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


class _TagUnread(PageCipher):
    """Stands for a cipher whose key is not at hand: what it should open stays as it is."""

    def __init__(self) -> None:
        pass

    def open(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Slots:
    """Reads the slots of one namespace, past the page cache where that is possible."""

    def __init__(self, stored: StoredNamespace, files: Files) -> None:
        self._stored, self._files = stored, files
        self._open: dict[Path, int] = {}
        self._block, self._payload = aligned_buffer(BLOCK_BYTES), aligned_buffer(stored.slot_bytes)

    def fault(self, page: Page, slots: tuple[int, ...], write_id: int, slot_format: SlotFormat) -> str | None:
        """Why a server would not get this page; None when it would."""
        try:
            for part, slot in enumerate(slots):
                path, offset = self._stored.place(slot)
                read_buffers(self._files, self._fd(path), [self._block, self._payload], offset)
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

    def overwrite(self, slot: int) -> None:
        path, offset = self._stored.place(slot)
        self._block[:] = bytes(BLOCK_BYTES)
        self._payload[:] = bytes(len(self._payload))
        write_buffers(self._files, self._fd(path), [self._block, self._payload], offset)

    def holding(self, tenant: bytes) -> Iterator[int]:
        """Slots whose header names the tenant, also those of pages that were evicted."""
        count = self._stored.allocated_slots
        for slot in range(count):
            path, offset = self._stored.place(slot)
            read_buffers(self._files, self._fd(path), [self._block], offset)
            if tenant in bytes(self._block[:_IDENTITY_BYTES]):
                yield slot

    def close(self) -> None:
        for fd in self._open.values():
            self._files.close(fd)

    def _fd(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = self._files.open_slab(path)
        return self._open[path]


def verify(
    path: Path, *, cipher: PageCipher | None = None, dry_run: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Read every indexed page of every namespace, check header, identity, checksum and, with `cipher`, the encryption
    tag, and clear the index records of what is damaged; `dry_run` only reports. Pages whose time to live is over, and
    what else has an end and is of no use, are overwritten with zeros.

    EnvironmentUnfitError when a server holds the directory, NotFoundError when there is no disk tier, ConfigError when
    `cipher` opens none of a namespace's pages (nothing of that namespace is then cleared).
    """
    report = VerifyReport()
    with _locked(path) as files:
        for home in namespace_homes(path):
            try:
                stored = StoredNamespace(home, files)
            except (ValueError, OSError, EOFError) as error:
                report.faults[f"namespace {home.name[:8]}: {error}"] += 1
                continue
            slots = _Slots(stored, files)
            try:
                bad = _scrub(stored, slots, cipher, report, progress)
                if bad and not dry_run:
                    for slot in stored.passing(bad):
                        slots.overwrite(slot)
                    stored.erase(bad)
                    report.erased_records += len(bad)
            finally:
                slots.close()
    return report


def _scrub(
    stored: StoredNamespace,
    slots: _Slots,
    cipher: PageCipher | None,
    report: VerifyReport,
    progress: Progress | None,
) -> list[int]:
    """Check one namespace; returns the slots whose records should go."""
    bad: list[int] = []
    stale: set[int] | None = None
    for sealed in (False, True):
        found = stored.found(sealed=sealed, now=time.time())
        stale = set(found.stale) if stale is None else stale & set(found.stale)
        slot_format = SlotFormat(stored.namespace, (cipher or _TagUnread()) if sealed else None)
        good, wrong_tags, total = 0, 0, len(found.write_ids)
        for done, ((page, places), write_id) in enumerate(zip(found, found.write_ids.tolist(), strict=True)):
            if progress is not None and done % 64 == 0:
                progress(f"Checking {stored.home.name[:8]}", done, total)
            fault = slots.fault(page, places, write_id, slot_format)
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


def purge(path: Path, *, namespace: str | None = None, tenant: bytes | None = None) -> PurgeReport:
    """Remove all pages and the secret that named them; or the pages of one namespace (its name, or how it begins); or
    those of one tenant (its tag), whose slots are then overwritten with zeros, also those of pages evicted before.

    EnvironmentUnfitError when a server holds the directory; NotFoundError when there is no disk tier or no such
    namespace; OSError when the file system refuses.
    """
    report = PurgeReport()
    with _locked(path) as files:
        homes = namespace_homes(path)
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
                _count(stored, tenant, report)
            if tenant is None:
                report.slots += stored.allocated_slots if stored is not None else 0
                report.namespaces.append(home.name)
                delete_namespace(files, home)
            elif stored is not None:
                _purge_tenant(stored, tenant, report, files)
        if namespace is None and tenant is None:
            with suppress(FileNotFoundError):  # nothing has a name of it any more
                files.unlink(path / SECRET)
    return report


def _count(stored: StoredNamespace, tenant: bytes | None, report: PurgeReport) -> None:
    for sealed in (False, True):
        for page, slots in stored.found(sealed=sealed):
            if tenant is None or page.tenant == tenant:
                report.pages += 1
                report.bytes += len(slots) * stored.slot_bytes


def _purge_tenant(stored: StoredNamespace, tenant: bytes, report: PurgeReport, files: Files) -> None:
    slots = _Slots(stored, files)
    try:
        held = set(slots.holding(tenant))
        stored.erase(sorted({*stored.records_of(tenant), *(slot for slot in held if slot < len(stored.records))}))
        for slot in sorted(held):
            slots.overwrite(slot)
    finally:
        slots.close()
    if held:
        report.slots += len(held)
        report.namespaces.append(stored.home.name)


@contextmanager
def _locked(path: Path) -> Iterator[Files]:
    """The directory's lock, so that no server works on it meanwhile."""
    namespace_homes(path)  # or lock_directory would make a lock file in any directory
    files = owned_files(path)
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
