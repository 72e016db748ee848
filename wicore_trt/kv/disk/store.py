"""The disk tier's byte mover: pages between host buffers and slots on disk, in threads, checked on every read.

It decides nothing about eviction and must not know requests. Invariant (I10, I11): a read ends with OK only when the
buffers hold exactly the bytes that the last acknowledged write put into these slots for this page. The bytes of a page
with a time to live are overwritten when it leaves, for whatever reason; until then, also while it is written, an index
record says when its time is over, so that a restart ends it too."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from wicore_trt.cores import count_cores
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.disk.cipher import PageCipher
from wicore_trt.kv.disk.files import Files, NotOursError
from wicore_trt.kv.disk.format import BLOCK_BYTES, GROUP_BYTES, CorruptSlotError, Namespace, SlotFormat
from wicore_trt.kv.disk.index import SlotIndex
from wicore_trt.kv.disk.io import DiskOperation, IoPool, Outcome, PageMove, Probe
from wicore_trt.kv.disk.mover import DroppedError, Fault, PageMover
from wicore_trt.kv.disk.native import NativeMover, has_key
from wicore_trt.kv.disk.space import SLAB_BYTES, DiskSpace, Wiper
from wicore_trt.kv.pages.page import Page

WIPE_BYTES = 8 << 20
"""How much is overwritten at a time, so that reads and writes get their turn."""
QUEUE_LIMIT = 512
"""Reads, and writes, that wait at a tier's store."""
DISK_THREADS = max(1, min(8, count_cores() // 2))
"""Eight feed any disk, with the checks of what they read; where cores are few they compute."""
DISK_TIMEOUT_S = 10.0
"""A read, or a write since it was begun, counts as failed after so long, and its page is computed again."""
EXPIRED = 1
"""An end long ago, in seconds since 1970: of bytes that are to be overwritten."""
_MAX_PARTS = 65535
_log = logging.getLogger(__name__)


class DiskStore:
    """Slots under `path` for pages of one namespace.

    `slot_bytes` is a slot's payload, a multiple of 4096. The files never pass `limit_bytes` and leave `free_bytes` on
    their file system. `threads` run the operations, of the native library if `native` (`NativeMover.start_threads`);
    reads and writes wait in queues of `queue_limit` each; TIMEOUT comes after `timeout_s`.

    EnvironmentUnfitError when another has the directory, the limit holds no slot, or the file system refuses."""

    def __init__(  # noqa: PLR0913
        self,
        path: Path,
        *,
        namespace: Namespace,
        slot_bytes: int,
        limit_bytes: int,
        free_bytes: int,
        threads: int,
        queue_limit: int,
        timeout_s: float,
        cipher: PageCipher | None = None,
        files: Files | None = None,
        slab_bytes: int = SLAB_BYTES,
        native: bool = True,
    ) -> None:
        assert slot_bytes > 0 and slot_bytes % BLOCK_BYTES == 0 and threads > 0 and queue_limit > 0 and timeout_s > 0
        assert all(len(group.encode()) <= GROUP_BYTES for group in namespace.groups)
        self._files = files or Files()
        self._format = SlotFormat(namespace, cipher)
        try:
            self._space = DiskSpace(
                path, namespace, slot_bytes, limit_bytes=limit_bytes, free_bytes=free_bytes,
                slab_bytes=slab_bytes, files=self._files,
            )  # fmt: skip
            try:
                self._index = SlotIndex(self._space.index_path, namespace, self._format, self._files)
                self._index.resize_to(self._space.allocated)
            except BaseException:
                self._space.close()
                raise
        except NotOursError as error:
            raise EnvironmentUnfitError(
                f"The disk tier does not use {error.filename}: it is {error.strerror}.",
                fix="Remove it, or give kv.disk_path a directory that this user owns and no other may write to.",
            ) from error
        except OSError as error:
            raise EnvironmentUnfitError(
                f"The disk tier cannot use {path}: {error.strerror or error}.",
                fix="Give kv.disk_path a directory on a local disk that this user may write to.",
            ) from error
        self.num_slots = self._space.num_slots
        self.secret = self._space.secret
        """The operator's secret as this directory keeps it: `claim.ensure_secret`."""
        self._slot_bytes = slot_bytes
        # The write that each slot holds; 0 for none. A read is checked against it, so that an older version of a page,
        # left by a write that the disk lost, is not taken for the newest.
        self._written = array("Q", bytes(8 * self.num_slots))
        self._expires = array("I", bytes(4 * self.num_slots))
        self.ending: dict[bytes, int] = {}
        self._wiper = Wiper(self._files, self._space, slot_bytes, lambda slot: self._index.forget_slots((slot,)))
        self._numbering = threading.Lock()
        self._last_id = time.time_ns()  # beyond all earlier write ids, unless the clock was set back: see recover
        self._logged: set[tuple[str, int | None]] = set()
        where = (self._format, self._space, self._index, self._files)
        mover = NativeMover(*where)
        native = native and mover.start_threads(
            threads, lambda *ended: self._pool.end_operation(*ended), lambda: self._pool.begin_urgent()
        )
        self._mover = mover if native else PageMover(*where)
        self._pool = IoPool(
            threads, queue_limit, timeout_s, chore=self._run_chore, end=self._end_store,
            elsewhere=native,
        )  # fmt: skip

    @property
    def now(self) -> float:
        """Seconds since 1970, and not before the newest write: the clock may have been set back since."""
        return max(time.time(), self._last_id / 1e9)

    @property
    def existing_slots(self) -> int:
        """Slots that have their place on the file system; the others are made when they are written first."""
        return self._space.allocated

    @property
    def spare_bytes(self) -> int:
        """Bytes that limit, file system and free-space floor leave at present."""
        return self._space.spare_bytes

    @property
    def queue_depth(self) -> int:
        """Operations whose buffers have not come back."""
        return len(self._pool.live)

    @property
    def stalled(self) -> bool:
        """True while all threads hang in operations that timed out; until one comes back nothing is accepted."""
        return self._pool.stalled

    def reads_together(self, digest: object) -> bool:
        """True where pages that are read with one call, and this digest, are not read one after the other."""
        return isinstance(self._mover, NativeMover) and has_key(digest)

    def recover_pages(self) -> Iterator[tuple[Page, Sequence[int]]]:
        """Pages of this namespace that the index names and whose time is not over, oldest write first. Call it once,
        before the first write. `ending` then says by key when the time of those that have one is over, in seconds since
        1970; it counts on whether the server runs or not. Nothing is recovered from an index that cannot be read."""
        try:
            found = self._index.load_pages(time.time())
        except (OSError, EOFError) as error:
            self._log_once("recover", error)
            return iter(())
        self._last_id = max(self._last_id, found.last_write)
        allocated = self._space.allocated
        self._written[:allocated] = array("Q", found.per_slot(found.write_ids, allocated).tobytes())
        self._expires[:allocated] = array("I", found.per_slot(found.expires, allocated).tobytes())
        self.ending = found.find_ends()
        self._wiper.add_slots(found.passing)
        self._index.forget_slots(sorted({*found.stale}.difference(found.passing)))
        self._pool.request_chore()
        return iter(found)

    def write_page(
        self,
        page: Page,
        slots: Sequence[int],
        parts: Sequence[memoryview],
        done: Callable[[Outcome], None],
        *,
        probe: Probe | None = None,
        expected: bytes = b"",
        expires: int = 0,
    ) -> bool:
        """Write the page's parts, one buffer per slot, each starting at a multiple of 4096.

        False, and nothing was done, when the queue is full or all threads hang. Else `done` is called from another
        thread: with OK, FAILED or NO_SPACE; or with TIMEOUT, and RETURNED when buffers and slots are free again.
        `probe` looks at the buffers after they were written and before the page is acknowledged: CORRUPT when their
        digest is not `expected`. `expires`: seconds since 1970 at which the page's time is over; 0 for never."""
        held, buffers = self._check_slots(slots, parts)

        def finish_write(outcome: Outcome) -> None:
            if outcome is Outcome.RETURNED:  # it may have succeeded after all, but was never acknowledged
                for slot in held:
                    self._expires[slot] = expires or self._expires[slot]
                self.erase_slots(held)
            done(move.outcome if outcome is Outcome.OK else outcome)

        move = PageMove(page, held, buffers, probe, write=True, expires=expires, expected=expected)
        return self._pool.submit_operation(partial(self._run_write, move), finish_write)

    def read_pages(self, moves: Sequence[PageMove], done: Callable[[Outcome], None]) -> bool:
        """Read pages' parts into their buffers, with digests of one kind. As `write_page`, but `done` hears OK when it
        is over, and each move has its outcome: CORRUPT when the slots hold anything else. Buffers mean something after
        OK alone. The probe looks at them before they are checked, lest a bit flip between; at encrypted ones behind."""
        for move in moves:
            self._check_slots(move.slots, move.parts)
        return self._pool.submit_operation(partial(self._run_reads, moves), done, urgent=True, pages=len(moves))

    def erase_slots(self, slots: Sequence[int]) -> None:
        """The slots hold nothing any more. Reads of them fail at once; the index follows soon, in a thread. So do the
        bytes of a page with a time to live: they are overwritten before its record goes."""
        passing = [slot for slot in slots if self._expires[slot] or slot in self._wiper]
        for slot in slots:
            self._written[slot] = self._expires[slot] = 0
        if passing:
            self._index.leave_records(passing)
            self._wiper.add_slots(passing)
        self._index.forget_slots([slot for slot in slots if slot not in passing])
        self._pool.request_chore()

    def stamp_page(self, page: Page, slots: Sequence[int], expires: int) -> None:
        """A written page has another end now: seconds since 1970, 0 for never. The index follows soon, in a thread."""
        write_id = self._written[slots[0]]
        if write_id and self._expires[slots[0]] != expires:
            for slot in slots:
                self._expires[slot] = expires
            self._index.stamp_records(page, slots, write_id, expires)
            self._pool.request_chore()

    def get_expiry(self, slots: Sequence[int]) -> int:
        """End of the time of the page in these slots: seconds since 1970, 0 for never."""
        return self._expires[slots[0]]

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish what was accepted and give the directory free, but return after `timeout_s` at the latest. Threads
        that hang then keep the directory's lock until they come back or the process ends."""
        self._pool.close(timeout_s)

    # --- in the I/O threads --------------------------------------------------------------------------------------

    def _run_write(self, move: PageMove, op: DiskOperation) -> Outcome | None:  # OK: as the move says
        slots = move.slots
        taken = self._wiper.take_slots(slots)
        passing = move.expires or (EXPIRED if taken else 0)  # what lies there must go too, should this write fail
        for slot in slots:
            self._written[slot], self._expires[slot] = 0, passing
        try:
            if not self._space.ensure_slot(max(slots), self._index.resize_to):
                self.erase_slots(slots)
                return Outcome.NO_SPACE
            if passing:
                self._index.put_records(move.page, slots, 0, passing)  # if we die now, the next life overwrites them
            self._index.flush_records()  # before data changes: no record may name what was just overwritten
        except OSError as error:
            self._land_write(move, error, b"")
            return Outcome.OK
        with self._numbering:
            # A time, so that `now` of the next life is not before it. This life may have lasted for days.
            move.write_id = self._last_id = max(self._last_id + 1, time.time_ns())
        return self._mover.begin([move], op, self._land_write)

    def _land_write(self, move: PageMove, fault: Fault | None, digest: bytes) -> None:
        if fault is None:
            for slot in move.slots:  # the end once more: it was erased if somebody dropped the page meanwhile
                self._written[slot], self._expires[slot] = move.write_id, move.expires
            move.outcome = Outcome.OK
        elif not isinstance(fault, DroppedError):
            self.erase_slots(move.slots)
            full = isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT)
            move.outcome = Outcome.NO_SPACE if full else Outcome.FAILED
            if isinstance(fault, CorruptSlotError):
                move.outcome = Outcome.CORRUPT
            else:
                self._log_once("write", fault)

    def _run_reads(self, moves: Sequence[PageMove], op: DiskOperation) -> Outcome | None:
        written, begun = self._written, list[PageMove]()
        for move in moves:
            move.write_id = written[move.slots[0]]
            if not move.wanted():
                move.outcome = Outcome.UNWANTED
            elif not move.write_id or any(written[slot] != move.write_id for slot in move.slots):
                move.outcome = Outcome.CORRUPT
            else:
                begun.append(move)
        return self._mover.begin(begun, op, self._land_read) if begun else Outcome.OK

    def _land_read(self, move: PageMove, fault: Fault | None, digest: bytes) -> None:
        move.digest, move.outcome = digest, Outcome.OK
        if fault is not None:
            move.outcome = Outcome.FAILED if isinstance(fault, OSError) else Outcome.CORRUPT
            self._log_once("read", fault)

    def _run_chore(self) -> None:
        """Between operations: overwrite what is to be, some of it at a time, and bring the index up to date."""
        try:
            try:
                self._wiper.wipe_slots(WIPE_BYTES)
            finally:
                self._index.flush_records()
        except OSError as error:  # the next chore tries again
            self._log_once("cleaning", error)
            return
        if self._wiper.pending:
            self._pool.request_chore()

    def _end_store(self) -> None:
        self._mover.close()
        try:
            with suppress(OSError):  # what is left has its record, and the next life overwrites it
                self._wiper.wipe_slots(math.inf)
            self._index.close()
        finally:
            self._space.close()

    def _check_slots(
        self, slots: Sequence[int], parts: Sequence[memoryview]
    ) -> tuple[tuple[int, ...], tuple[memoryview, ...]]:
        assert len(slots) == len(parts) == len(set(slots)) and 0 < len(slots) <= _MAX_PARTS
        assert min(slots) >= 0 and max(slots) < self.num_slots
        assert set(map(len, parts)) == {self._slot_bytes}, "one buffer of slot_bytes per slot"
        return tuple(slots), tuple(parts)

    def _log_once(self, what: str, error: Exception) -> None:
        """Warn of the first failure of a kind; a bad disk must not flood the log."""
        kind = (f"{what}: {type(error).__name__}", getattr(error, "errno", None))
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("disk tier: %s failed: %s (more of the same are not logged)", what, error)
