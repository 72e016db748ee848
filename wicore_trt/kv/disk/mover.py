"""Moves pages between host buffers and their slots, in the caller's thread, and checks every byte of them.

`NativeMover` does the same in threads of the native library; this one is the fallback, the oracle, and the one for
encrypted pages. It must not know queues, deadlines or eviction. Invariant (I10): a read ends without a fault only when
the buffers hold what was sealed for this page, these slots and this write; a record is written after its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from wicore_trt.kv.disk.files import Files, aligned_buffers, move_buffers
from wicore_trt.kv.disk.format import BLOCK_BYTES, CorruptSlotError, SlotFormat
from wicore_trt.kv.disk.index import SlotIndex, find_runs
from wicore_trt.kv.disk.io import DiskOperation, Outcome, PageMove
from wicore_trt.kv.disk.space import DiskSpace

Fault = CorruptSlotError | EOFError | OSError
"""Why a page was not moved."""
Buffers = Sequence[memoryview]
Landed = Callable[[PageMove, Fault | None, bytes], None]
"""Called at the end of a move with the digest that its probe took; notes its outcome."""


class DroppedError(EOFError):
    """Nobody waits for the write any more, and it got no record."""


class PageMover:
    """`begin` moves pages at once. Any thread."""

    def __init__(self, slot_format: SlotFormat, space: DiskSpace, index: SlotIndex, files: Files) -> None:
        self._format, self._space, self._index, self._files = slot_format, space, index, files
        self._scratch = threading.local()

    def begin(self, moves: Sequence[PageMove], op: DiskOperation, landed: Landed) -> Outcome | None:
        """Move pages, and call `landed` for each. None: it goes on elsewhere, until `IoPool.end_operation`."""
        for move in moves:
            digest, fault = b"", None
            try:
                digest = self._write_page(move, op) if move.write else self._read_page(move)
            except (CorruptSlotError, EOFError, OSError) as error:
                fault = error
            landed(move, fault, digest)
        return Outcome.OK

    def close(self) -> None:
        """No move is under way any more."""

    def _write_page(self, move: PageMove, op: DiskOperation) -> bytes:
        count = len(move.slots)
        blocks, room = self._get_buffers(move)
        for part, (block, slot, data, space) in enumerate(zip(blocks, move.slots, move.parts, room, strict=False)):
            room[part] = self._format.seal(block, move.page, part, count, slot, move.write_id, data, space)
        self._move_runs(self._files.pwritev, move.slots, blocks, room)
        if op.timed_out:
            raise DroppedError
        digest = move.take_digest()
        if move.probe is not None and digest != move.expected:
            raise CorruptSlotError("the buffers changed")
        self._index.put_records(move.page, move.slots, move.write_id, move.expires)
        return digest

    def _read_page(self, move: PageMove) -> bytes:
        blocks, _ = self._get_buffers(move)
        self._move_runs(self._files.preadv, move.slots, blocks, move.parts)
        # first the digest: no bit can flip between it and the check
        digest = b"" if self._format.encrypts else move.take_digest()
        for part, (block, slot, data) in enumerate(zip(blocks, move.slots, move.parts, strict=False)):
            self._format.open(block, move.page, part, len(move.slots), slot, move.write_id, data)
        return move.take_digest() if self._format.encrypts else digest

    def _move_runs(self, call: Callable[..., int], slots: Sequence[int], blocks: Buffers, parts: Buffers) -> None:
        for first, last in find_runs(slots, self._space.slab_slots):
            iov = [buffer for part in range(first, last) for buffer in (blocks[part], parts[part])]
            fd, offset = self._space.locate_slot(slots[first])
            move_buffers(call, fd, iov, offset)

    def _get_buffers(self, move: PageMove) -> tuple[list[memoryview], list[memoryview]]:
        """Get this thread's own header blocks, and room for ciphertext, for at least a page's parts."""
        scratch, parts = self._scratch, len(move.slots)
        if len(getattr(scratch, "blocks", ())) < parts:
            scratch.blocks = aligned_buffers(parts, BLOCK_BYTES)
            scratch.room = aligned_buffers(parts, len(move.parts[0])) if self._format.encrypts else scratch.blocks
        return scratch.blocks, list(scratch.room)
