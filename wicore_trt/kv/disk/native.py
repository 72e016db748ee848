"""Moves pages in threads of the native library, which need the interpreter only when pages begin and end.

The same as `PageMover` without encryption, byte for byte: plugins/cpu/src/disk.cpp. It must not know queues, deadlines
or eviction. Invariants: what a move points to lives until its report, or until it was dropped before it began; a write
gets its records from the thread that wrote its bytes, after them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from ctypes import Structure, byref, c_char, c_int64, c_uint64, c_void_p
from functools import partial
from queue import SimpleQueue
from typing import Any

from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.disk.format import CorruptSlotError
from wicore_trt.kv.disk.io import DiskOperation, Outcome
from wicore_trt.kv.disk.mover import DroppedError, Fault, Landed, PageMove, PageMover
from wicore_trt.plugins.cpu_library import open_library

_REPORTS = 64  # taken at a time
_DROPPED, _END = 6, 5  # wicore_disk_status of wicore_cpu.h
_CORRUPT = {1: "header checksum", 2: "another page, part, slot, write, namespace or format", 3: "payload checksum",
            4: "the buffers changed"}  # fmt: skip
_log = logging.getLogger(__name__)


class _Move(Structure):
    _fields_ = [
        ("write", c_int64), ("parts", c_int64), ("slot_bytes", c_int64), ("places", c_void_p),
        ("identity", ctypes.c_char_p), ("key", c_void_p), ("second_pairs", c_int64), ("page_bytes", c_int64),
        ("expected", ctypes.c_char_p), ("records_fd", c_int64), ("record_bytes", c_int64), ("records", ctypes.c_char_p),
    ]  # fmt: skip


class _Report(Structure):
    _fields_ = [("move", c_int64), ("status", c_int64), ("digest", c_uint64 * 2)]


def find_calls(files: Files) -> tuple[Any, Any] | None:
    """Addresses of the library's way to read and to write for `files`: None twice for the system's own, None where it
    does something else there."""
    return (None, None) if (files.preadv, files.pwritev) == (os.preadv, os.pwritev) else None


class NativeMover(PageMover):
    """Mover that ends moves with `IoPool.end_operation`. Those whose probe has no key for the library, as of several
    ranks, are made by threads of the interpreter: `begin` must not wait for a disk."""

    _end: Callable[[DiskOperation, Outcome], None]
    _more: Callable[[], None]

    def start_threads(
        self, threads: int, end: Callable[[DiskOperation, Outcome], None], more: Callable[[], None]
    ) -> bool:
        """Start the library's threads, and one that takes reports and then calls `more`. False for encrypted pages,
        where the library was not built, or where `files` makes calls of its own."""
        calls, library = find_calls(self._files), open_library()
        if self._format.encrypts or calls is None or library is None:
            return False
        library.wicore_disk_open.restype = c_void_p
        self._handle = c_void_p(library.wicore_disk_open(c_int64(threads), *calls))
        # these return at once: to give the interpreter away would only cost the time to get it back
        self._quick = ctypes.PyDLL(library._name)  # noqa: SLF001 -- ctypes' only name
        self._end, self._more, self._library, self._threads = end, more, library, threads
        self._others, self._lock = SimpleQueue[tuple[PageMove, DiskOperation, Landed] | None](), threading.Lock()
        self._helpers: list[threading.Thread] = []
        self._moves: dict[int, tuple[DiskOperation, Landed, tuple[object, ...]]] = {}  # by address
        if self._handle:
            threading.Thread(target=self._take_reports, name="wicore-disk-reports", daemon=True).start()
        return bool(self._handle)

    def begin(self, move: PageMove, op: DiskOperation, landed: Landed) -> Outcome | None:
        """Begin a move as `PageMover.begin` does; it goes on elsewhere."""
        slots, probe, size = move.slots, move.probe, len(move.parts[0])
        keyed: Any = getattr(probe.digest, "__self__", None) if probe is not None else None
        if probe is not None and not hasattr(keyed, "words"):
            with self._lock:
                while len(self._helpers) < self._threads:
                    self._helpers.append(threading.Thread(target=self._make_others, name="wicore-disk", daemon=True))
                    self._helpers[-1].start()
            self._others.put((move, op, landed))
            return None
        buffers, places = [c_char.from_buffer(part) for part in move.parts], list[int]()
        for slot, buffer in zip(slots, buffers, strict=True):
            places += [*self._space.locate_slot(slot), slot, ctypes.addressof(buffer)]
        array = (c_int64 * len(places))(*places)
        identity = self._format.pack_identity(move.page, 0, len(slots), slots[0], move.write_id, size)
        given = _Move(move.write, len(slots), size, ctypes.addressof(array), identity)
        if probe is not None:
            given.key, given.second_pairs, given.page_bytes = keyed.words.ctypes.data, keyed.second_pairs, probe.nbytes
            given.expected = move.expected.ljust(16, b"\0") if move.write else None
        if move.write:
            found = self._index.prepare_records(move.page, slots, move.write_id, move.expires)
            given.records_fd, given.record_bytes, given.records = found
        self._moves[ctypes.addressof(given)] = op, landed, (given, array, buffers, keyed)
        op.drop = partial(self._drop, given)
        self._quick.wicore_disk_begin(self._handle, byref(given))
        return None

    def close(self) -> None:
        """End the threads; no move is under way any more."""
        for _ in self._helpers:
            self._others.put(None)
        self._library.wicore_disk_close(self._handle)

    def _make_others(self) -> None:
        while (item := self._others.get()) is not None:
            _, op, _ = item
            outcome: Outcome | None = None
            try:
                outcome = super().begin(*item)
            except Exception:
                _log.exception("disk operation failed")
            self._end(op, outcome or Outcome.FAILED)
            self._more()

    def _drop(self, given: _Move) -> bool:
        dropped = bool(self._quick.wicore_disk_drop(self._handle, byref(given)))
        if dropped:
            del self._moves[ctypes.addressof(given)]
        return dropped

    def _take_reports(self) -> None:
        reports = (_Report * _REPORTS)()
        while count := self._library.wicore_disk_take_reports(self._handle, reports, c_int64(_REPORTS)):
            for report in reports[:count]:
                op, landed, _ = self._moves.pop(report.move)
                outcome = Outcome.FAILED
                try:
                    outcome = landed(_as_fault(report.status), bytes(report.digest))
                except Exception:
                    _log.exception("disk operation failed")
                self._end(op, outcome)
            self._more()


def _as_fault(status: int) -> Fault | None:
    if status < 0:
        return OSError(-status, os.strerror(-status))
    if status == _END:
        return EOFError("the file ends too early")
    if status == _DROPPED:
        return DroppedError()
    return CorruptSlotError(_CORRUPT[status]) if status else None
