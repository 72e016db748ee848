"""Moves pages in threads of the native library, which need the interpreter only when pages begin and end.

The same as `PageMover` without encryption, byte for byte: plugins/cpu/src/disk.cpp. It must not know queues, deadlines
or eviction. Invariants: what a move points to lives until its report, or until it was dropped before it began; a write
gets its records from the thread that wrote its bytes, after them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
from collections.abc import Callable
from ctypes import Structure, addressof, c_char, c_int64, c_uint64, c_void_p
from functools import cache, partial
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


_MOVE_WORDS, _PART_WORDS, _EXPECTED = 12, 4, 16  # of wicore_disk_move and wicore_disk_part; bytes of a digest


@cache
def _move_format(parts: int) -> struct.Struct:
    """A wicore_disk_move with what it points to: its parts, a digest, the identity and `s` of records."""
    return struct.Struct(f"{_MOVE_WORDS + _PART_WORDS * parts}q")


class _Report(Structure):
    _fields_ = [("move", c_int64), ("status", c_int64), ("digest", c_uint64 * 2)]


def find_calls(files: Files) -> tuple[Any, Any] | None:
    """Addresses of the library's way to read and to write for `files`: None twice for the system's own, None where it
    does something else there."""
    return (None, None) if (files.preadv, files.pwritev) == (os.preadv, os.pwritev) else None


class NativeMover(PageMover):
    """Mover that ends moves with `IoPool.end_operation`. Moves whose probe has no key for the library, as of several
    ranks, run on threads of the interpreter: `begin` must not wait for a disk."""

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
        self._others, self._lock = SimpleQueue[int | None](), threading.Lock()
        self._queued: dict[int, tuple[PageMove, DiskOperation, Landed]] = {}  # of these, those not dropped
        self._helpers: list[threading.Thread] = []
        self._moves: dict[int, tuple[DiskOperation, Landed, tuple[object, ...]]] = {}  # by address
        self._key: tuple[Any, int] = None, 0
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
                    helper = threading.Thread(target=self._make_others, name="wicore-disk", daemon=True)
                    helper.start()  # raises where the system has no thread left: the move fails, none waits for ever
                    self._helpers.append(helper)
            number = id(op)
            self._queued[number] = move, op, landed
            op.drop = lambda: self._queued.pop(number, None) is not None
            self._others.put(number)
            return None
        buffers, places = list(map(c_char.from_buffer, move.parts)), list[int]()
        for slot, buffer in zip(slots, buffers, strict=True):
            places += (*self._space.locate_slot(slot), slot, addressof(buffer))
        identity = self._format.pack_identity(move.page, 0, len(slots), slots[0], move.write_id, size)
        fd, record_bytes, records = 0, 0, b""
        if move.write:
            fd, record_bytes, records = self._index.prepare_records(move.page, slots, move.write_id, move.expires)
        layout = _move_format(len(slots))
        memory = bytearray(layout.size) + move.expected.ljust(_EXPECTED, b"\0") + identity + records
        held = c_char.from_buffer(memory)
        at = addressof(held)
        behind, key, pairs, nbytes = at + layout.size, 0, 0, 0
        if probe is not None:
            key, pairs, nbytes = self._find_key(keyed), keyed.second_pairs, probe.nbytes
        layout.pack_into(
            memory, 0, move.write, len(slots), size, at + 8 * _MOVE_WORDS, behind + _EXPECTED, key, pairs, nbytes,
            behind if move.write and key else 0, fd, record_bytes, behind + _EXPECTED + len(identity), *places,
        )  # fmt: skip
        self._moves[at] = op, landed, (held, buffers, keyed)
        op.drop = partial(self._drop, at)
        self._quick.wicore_disk_begin(self._handle, c_void_p(at))
        return None

    def close(self) -> None:
        """End the threads; no move is under way any more."""
        for _ in self._helpers:
            self._others.put(None)
        self._library.wicore_disk_close(self._handle)

    def _make_others(self) -> None:
        while (number := self._others.get()) is not None:
            if (item := self._queued.pop(number, None)) is None:
                continue
            op, outcome = item[1], None
            try:
                outcome = super().begin(*item)
            except Exception:
                _log.exception("disk operation failed")
            self._end(op, outcome or Outcome.FAILED)
            self._more()

    def _find_key(self, keyed: Any) -> int:
        """Find the address of a digest's words, which numpy takes long for."""
        known, address = self._key
        if known is not keyed:
            self._key = keyed, address = keyed, keyed.words.ctypes.data
        return int(address)

    def _drop(self, at: int) -> bool:
        dropped = bool(self._quick.wicore_disk_drop(self._handle, c_void_p(at)))
        if dropped:
            del self._moves[at]
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
