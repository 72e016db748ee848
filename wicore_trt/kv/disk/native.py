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
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char, c_int64, c_void_p, create_string_buffer
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from queue import SimpleQueue
from typing import Any

from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.disk.format import CorruptSlotError
from wicore_trt.kv.disk.io import DiskOperation, Outcome, PageMove
from wicore_trt.kv.disk.mover import DroppedError, Fault, Landed, PageMover
from wicore_trt.plugins.cpu_library import open_library

_REPORTS = 64  # taken at a time
_DROPPED, _END = 6, 5  # wicore_disk_status of wicore_cpu.h
_CORRUPT = {1: "header checksum", 2: "another page, part, slot, write, namespace or format", 3: "payload checksum",
            4: "the buffers changed"}  # fmt: skip
_log = logging.getLogger(__name__)


_MOVE_WORDS, _PART_WORDS = 12, 4  # of wicore_disk_move and wicore_disk_part
_EXPECTED, _IDENTITY = 16, 216  # bytes of a digest and of an identity


@cache
def _move_format(parts: int) -> struct.Struct:
    """A wicore_disk_move and its parts. Behind them lie a digest, the identity and records."""
    return struct.Struct(f"{_MOVE_WORDS + _PART_WORDS * parts}q")


_REPORT = struct.Struct("qq16s")  # wicore_disk_report: address of the move, status, digest


@dataclass(slots=True, eq=False)
class _Run:
    """Moves that began together, of which `left` are under way, and what they point to."""

    left: int
    landed: Landed
    held: tuple[object, ...]


def find_calls(files: Files) -> tuple[Any, Any] | None:
    """Find the library's calls to read and write for `files`: None twice for the system's own, None for any other."""
    return (None, None) if (files.preadv, files.pwritev) == (os.preadv, os.pwritev) else None


def has_key(digest: object) -> bool:
    """Check whether the library can take this digest."""
    return hasattr(getattr(digest, "__self__", None), "words")


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
        self._quick.wicore_disk_begin.argtypes = self._quick.wicore_disk_drop.argtypes = (c_void_p, c_void_p)
        self._end, self._more, self._library, self._threads = end, more, library, threads
        self._others, self._lock = SimpleQueue[int | None](), threading.Lock()
        self._queued: dict[int, tuple[Sequence[PageMove], DiskOperation, Landed]] = {}  # of these, those not dropped
        self._helpers: list[threading.Thread] = []
        self._moves: dict[int, tuple[DiskOperation, PageMove, _Run]] = {}  # by address
        self._key: tuple[Any, int] = None, 0
        if self._handle:
            threading.Thread(target=self._take_reports, name="wicore-disk-reports", daemon=True).start()
        return bool(self._handle)

    def begin(self, moves: Sequence[PageMove], op: DiskOperation, landed: Landed) -> Outcome | None:
        """Begin moves of one kind, with one digest or none, as `PageMover.begin` does; they go on elsewhere."""
        write, probe = moves[0].write, moves[0].probe
        keyed: Any = getattr(probe.digest, "__self__", None) if probe is not None else None
        if probe is not None and not has_key(probe.digest):
            with self._lock:
                while len(self._helpers) < self._threads:
                    helper = threading.Thread(target=self._make_others, name="wicore-disk", daemon=True)
                    helper.start()  # raises where the system has no thread left: the move fails, none waits for ever
                    self._helpers.append(helper)
            number = id(op)
            self._queued[number] = moves, op, landed
            op.drop = lambda: self._queued.pop(number, None) is not None
            self._others.put(number)
            return None
        behind = [self._pack_behind(move) for move in moves]
        layouts = [_move_format(len(move.slots)) for move in moves]
        memory = bytearray(sum(layout.size + len(rest) for layout, (rest, *_) in zip(layouts, behind, strict=True)))
        held, locate, buffers, places = c_char.from_buffer(memory), self._space.locate_slot, list[c_char](), list[int]()
        at, key, pairs = addressof(held), 0, 0
        base = at
        if probe is not None:
            key, pairs = self._find_key(keyed), keyed.second_pairs
        for move, layout, (rest, *index) in zip(moves, layouts, behind, strict=True):
            parts, after = list[int](), at + layout.size
            for slot, part in zip(move.slots, move.parts, strict=True):
                buffers.append(buffer := c_char.from_buffer(part))
                parts += (*locate(slot), slot, addressof(buffer))
            layout.pack_into(
                memory, at - base, write, len(move.slots), len(move.parts[0]), at + 8 * _MOVE_WORDS,
                after + _EXPECTED, key, pairs, move.probe.nbytes if move.probe is not None else 0,
                after if write and key else 0, *index, after + _EXPECTED + _IDENTITY, *parts,
            )  # fmt: skip
            memory[after - base : after - base + len(rest)] = rest
            places.append(at)
            at = after + len(rest)
        run = _Run(len(moves), landed, (held, buffers, keyed))
        self._moves.update(zip(places, zip(repeat(op), moves, repeat(run)), strict=False))
        op.drop, op.busy = partial(self._drop, places, run), lambda: run.left
        for place in places:
            self._quick.wicore_disk_begin(self._handle, place)
        return None

    def _pack_behind(self, move: PageMove) -> tuple[bytes, int, int]:
        """Pack what lies behind a wicore_disk_move and its parts; with the records' file and the bytes of each."""
        size, slots = len(move.parts[0]), move.slots
        identity = self._format.pack_identity(move.page, 0, len(slots), slots[0], move.write_id, size)
        if not move.write:
            return bytes(_EXPECTED) + identity, 0, 0
        fd, record_bytes, records = self._index.prepare_records(move.page, slots, move.write_id, move.expires)
        return move.expected.ljust(_EXPECTED, b"\0") + identity + records, fd, record_bytes

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

    def _drop(self, places: Sequence[int], run: _Run) -> bool:
        """Drop the moves of a run that did not begin; whether none is under way any more because of that."""
        with self._lock:
            dropped = [at for at in places if at in self._moves and self._quick.wicore_disk_drop(self._handle, at)]
            for at in dropped:
                del self._moves[at]
            run.left -= len(dropped)
            return bool(dropped) and not run.left

    def _take_reports(self) -> None:
        reports = create_string_buffer(_REPORT.size * _REPORTS)
        while count := self._library.wicore_disk_take_reports(self._handle, reports, c_int64(_REPORTS)):
            for at, status, digest in _REPORT.iter_unpack(reports.raw[: count * _REPORT.size]):
                op, move, run = self._moves[at]
                try:
                    run.landed(move, _as_fault(status) if status else None, digest)
                except Exception:
                    _log.exception("disk operation failed")
                with self._lock:
                    del self._moves[at]
                    run.left -= 1
                    over = not run.left
                if over:
                    self._end(op, Outcome.OK)
            self._more()


def _as_fault(status: int) -> Fault:
    if status < 0:
        return OSError(-status, os.strerror(-status))
    if status == _END:
        return EOFError("the file ends too early")
    return DroppedError() if status == _DROPPED else CorruptSlotError(_CORRUPT[status])
