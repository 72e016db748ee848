"""Slots on disk whose bytes are to be overwritten, because a page with a time to live was in them.

It must not know pages, times or the index. Invariant: a slot that is taken for a new page is not overwritten after
`take` returned, and every other slot that was added is, or is still pending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from wicore_trt.kv.disk.files import Files, aligned_buffer, write_buffers
from wicore_trt.kv.disk.format import BLOCK_BYTES
from wicore_trt.kv.disk.space import DiskSpace


class Wiper:
    """Overwrites slots of `slot_bytes` payload, and their header blocks, with zeros. `wiped(slot)` hears of each, in
    the thread that runs."""

    def __init__(self, files: Files, space: DiskSpace, slot_bytes: int, wiped: Callable[[int], None]) -> None:
        self._files = files
        self._space = space
        self._wiped = wiped
        self._slot_bytes = slot_bytes
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._slot = -1  # that is overwritten just now

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def __contains__(self, slot: int) -> bool:
        return slot in self._pending or slot == self._slot

    def add(self, slots: Iterable[int]) -> None:
        """These slots hold nothing that anybody may read any more."""
        with self._changed:
            self._pending.update(slots)

    def take(self, slots: Iterable[int]) -> list[int]:
        """New bytes are about to be written over the whole of these slots. Waits while one of them is being
        overwritten; returns those that were pending."""
        with self._changed:
            self._changed.wait_for(lambda: self._slot not in slots)
            found = [slot for slot in slots if slot in self._pending]
            self._pending.difference_update(found)
            return found

    def run(self, limit_bytes: float) -> None:
        """Overwrite pending slots, some `limit_bytes` of them, from one thread at a time. OSError when that fails; the
        slot is then tried again."""
        done, zeros = 0, [aligned_buffer(BLOCK_BYTES), aligned_buffer(self._slot_bytes)] if self._pending else []
        while done < limit_bytes:
            with self._changed:
                if not self._pending:
                    return
                slot = self._slot = self._pending.pop()
            failed = True
            try:
                if slot < self._space.allocated:
                    fd, offset = self._space.locate(slot)
                    write_buffers(self._files, fd, zeros, offset)
                self._wiped(slot)
                failed = False
            finally:
                with self._changed:
                    self._slot = -1
                    if failed:
                        self._pending.add(slot)
                    self._changed.notify_all()
            done += self._space.stride
