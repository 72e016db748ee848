"""Threads that run disk operations, with a bounded queue and a deadline for each.

It must not know what an operation does. Invariant: `done` of an accepted operation is called once with its outcome, or
with TIMEOUT and, when no thread touches its buffers any more, with RETURNED.
"""

from __future__ import annotations

import enum
import errno
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from wicore_trt.kv.disk.files import aligned_buffers
from wicore_trt.kv.pages.page import Page

CHORE_WAIT_S = 1.0
AHEAD, URGENT_AHEAD = 8, 16
"""Operations that may have begun for each thread elsewhere, and pages above which no urgent one begins."""
RATE_PIECE_BYTES, RATE_PIECES = 4 << 20, 16
_log = logging.getLogger(__name__)


class Outcome(enum.Enum):
    """End of a disk operation."""

    OK = "ok"
    CORRUPT = "corrupt"
    """Checksum, identity or format is wrong; the buffers mean nothing."""
    FAILED = "failed"
    """The system reported an error, or the store was closed."""
    NO_SPACE = "no_space"
    UNWANTED = "unwanted"
    """Left out because nobody waits for it any more; no buffer was touched."""
    TIMEOUT = "timeout"
    """Not done in time. The buffers may still be touched until RETURNED."""
    RETURNED = "returned"
    """Follows TIMEOUT: nobody touches the buffers any more."""


class Probe(NamedTuple):
    """Digest of a page's `nbytes` in its buffers, taken in the disk's thread while they are there."""

    digest: Callable[[Sequence[memoryview]], bytes]
    nbytes: int


class PageMove(Struct, eq=False):
    """Page to read from `slots` or to write there, one buffer a slot. A write ends with CorruptSlotError and without a
    record unless the digest of `probe` is `expected`. A read is left out where `wanted`, asked in another thread before
    anything is read, says no. `outcome`, and `digest` of what was read, mean something when its operation is over."""

    page: Page
    slots: Sequence[int]
    parts: Sequence[memoryview]
    probe: Probe | None = None
    wanted: Callable[[], bool] = lambda: True
    write: bool = False
    write_id: int = 0
    expires: int = 0
    expected: bytes = b""
    outcome: Outcome = Outcome.FAILED
    digest: bytes = b""

    def take_digest(self) -> bytes:
        """Have the probe take its digest now; nothing without one."""
        if self.probe is None:
            return b""
        left, parts = self.probe.nbytes, list[memoryview]()
        for part in self.parts:
            parts.append(part[:left])
            left -= len(parts[-1])
        return self.probe.digest(parts)


Run = Callable[["DiskOperation"], Outcome | None]
Told = Callable[[Outcome], None]
Call = Callable[[], None]


class DiskOperation:
    """Submitted operation on some `pages`. `run` may look at `timed_out` to leave out what nobody waits for any more;
    None: it goes on elsewhere, until `IoPool.end_operation`. `drop` ends it there before it begins, if that is still
    possible; `busy` counts the threads that are in it, or will be."""

    def __init__(self, run: Run, done: Told, *, urgent: bool = False, pages: int = 1) -> None:
        self.run = run
        self.deadline = math.inf
        self.urgent, self.pages = urgent, pages
        self.drop: Callable[[], bool] = lambda: False
        self.busy: Callable[[], int] = lambda: 1
        self.timed_out = False
        self._done = done
        self._finished = False
        # Held while `done` runs, so that RETURNED never overtakes TIMEOUT.
        self._lock = threading.Lock()

    def finish(self, outcome: Outcome) -> None:
        """No thread touches the buffers any more."""
        with self._lock:
            self._finished = True
            self._report_outcome(Outcome.RETURNED if self.timed_out else outcome)

    def expire(self) -> None:
        """The deadline passed, unless the operation finished just now."""
        with self._lock:
            if not self._finished and not self.timed_out:
                self.timed_out = True
                self._report_outcome(Outcome.TIMEOUT)

    def _report_outcome(self, outcome: Outcome) -> None:
        try:
            self._done(outcome)
        except Exception:  # the caller's mistake must not cost an I/O thread
            _log.exception("callback of a disk operation failed")


class IoPool:
    """`threads` daemon threads. Urgent operations go first; each kind waits in a queue of `queue_limit` pages. One that
    is not urgent is late only when begun `timeout_s` ago, or when none was done for so long.

    `chore` runs in a thread after `request_chore` when nothing else waits or it waited for CHORE_WAIT_S; `end` runs in
    the last thread that leaves. `elsewhere`: `threads` elsewhere run the operations, and one here begins those that are
    not urgent. Urgent ones are begun by who submits them, or when others end by who calls `begin_urgent`."""

    def __init__(
        self, threads: int, queue_limit: int, timeout_s: float, chore: Call, end: Call, *, elsewhere: bool = False
    ) -> None:
        self._limit = queue_limit
        self._timeout_s = timeout_s
        self._chore = chore
        self._end = end
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._watch = threading.Condition(self._lock)
        self._urgent: deque[DiskOperation] = deque()
        self._normal: deque[DiskOperation] = deque()
        self.live: dict[DiskOperation, None] = {}  # until their buffers are back
        self._waiting: dict[DiskOperation, None] = {}  # those that may still time out, in the order of deadlines
        self._running: set[DiskOperation] = set()
        self._hung: set[DiskOperation] = set()  # of these, those that timed out
        self._begun = self._pages_begun = 0  # of these, those that are not urgent; pages of all of them
        self._nudged = False
        self._nudged_at = 0.0
        self._done_at = -math.inf
        self._chore_runs = False
        self._closing = self._unwatched = False  # nothing waits, so the watchdog must be told of what comes
        self._elsewhere, self._threads, self._left = elsewhere, threads, 1 if elsewhere else threads
        self._ended = threading.Event()
        for number in range(self._left):
            threading.Thread(target=self._run_operations, name=f"wicore-disk-{number}", daemon=True).start()
        threading.Thread(target=self._watch_deadlines, name="wicore-disk-watchdog", daemon=True).start()

    @property
    def stalled(self) -> bool:
        """True while every thread is in an operation that timed out."""
        return len(self._hung) >= len(self._running) and sum(op.busy() for op in tuple(self._hung)) >= self._threads

    def submit_operation(self, run: Run, done: Told, *, urgent: bool = False, pages: int = 1) -> bool:
        """False, and nothing was done, when the queue is full, all threads hang, or the pool is closed."""
        with self._lock:
            queue = self._urgent if urgent else self._normal
            if self._closing or sum(map(attrgetter("pages"), queue)) >= self._limit or self.stalled:
                return False
            op = DiskOperation(run, done, urgent=urgent, pages=pages)
            self._start_clock(op)
            self.live[op] = None
            queue.append(op)
            if not (urgent and self._elsewhere):
                self._work.notify()
        if urgent and self._elsewhere:
            self.begin_urgent()
        return True

    def begin_urgent(self) -> None:
        """Begin urgent operations that go on elsewhere, unless enough have begun. Any thread."""
        while self._urgent:
            with self._lock:
                if not self._urgent or self._pages_begun >= self._threads * URGENT_AHEAD:
                    return
                self._running.add(op := self._urgent.popleft())
                self._pages_begun += op.pages
            self._run_operation(op)

    def request_chore(self) -> None:
        """Run the chore soon."""
        with self._lock:
            if not self._nudged:
                self._nudged, self._nudged_at = True, time.monotonic()
                self._work.notify()

    def close(self, timeout_s: float) -> None:
        """Take no more operations and wait for those accepted. After `timeout_s` the rest is given up: FAILED when it
        never started, else TIMEOUT. Returns at the latest then; threads that hang are left behind."""
        with self._lock:
            self._closing = True
            self._work.notify_all()
            self._watch.notify_all()
        if self._ended.wait(timeout_s):
            return
        with self._lock:
            queued = [*self._urgent, *self._normal]
            self._urgent.clear()
            self._normal.clear()
            running = list(self._running)
            for op in queued:
                del self.live[op]
                self._waiting.pop(op, None)
        for op in queued:
            op.finish(Outcome.FAILED)
        for op in running:
            op.expire()

    def _start_clock(self, op: DiskOperation) -> None:
        """Begin its time now."""
        op.deadline = time.monotonic() + self._timeout_s
        if self._unwatched:
            self._unwatched = False
            self._watch.notify()
        self._waiting.pop(op, None)
        self._waiting[op] = None

    def _run_chore(self, op: DiskOperation) -> Outcome:
        try:
            self._chore()
        finally:
            with self._lock:
                self._chore_runs = False
        return Outcome.OK

    def _take_operation(self) -> DiskOperation | None:
        """The next operation, with the chore as the last of them, or None when this thread is to leave."""
        with self._lock:
            while True:
                chore = self._nudged and not self._chore_runs and not self._closing
                late = chore and time.monotonic() >= self._nudged_at + CHORE_WAIT_S
                queue = self._normal if self._elsewhere else self._urgent or self._normal
                may = not self._elsewhere or self._begun < self._threads * AHEAD
                if queue and may and not late:
                    op = queue.popleft()
                elif self._closing and not queue and not self._urgent and not self._running:
                    return None
                elif chore and (late or not queue):
                    self._nudged, self._chore_runs = False, True
                    op = DiskOperation(self._run_chore, lambda outcome: None)
                else:
                    self._work.wait()
                    continue
                self._running.add(op)
                self._pages_begun += op.pages
                if not op.urgent:
                    self._begun += 1
                    self._start_clock(op)
                return op

    def end_operation(self, op: DiskOperation, outcome: Outcome) -> None:
        """Note the end of one that went on elsewhere: nobody touches its buffers any more."""
        with self._lock:
            self._leave_running(op)
            self.live.pop(op, None)
            self._waiting.pop(op, None)
            if not op.timed_out:
                self._done_at = time.monotonic()
        op.finish(outcome)

    def _leave_running(self, op: DiskOperation) -> None:
        self._running.discard(op)
        self._hung.discard(op)
        self._begun -= not op.urgent
        self._pages_begun -= op.pages
        if self._closing:
            self._work.notify_all()
        elif self._normal if self._elsewhere and not op.urgent else not self._elsewhere:
            self._work.notify()

    def _run_operation(self, op: DiskOperation) -> None:
        outcome: Outcome | None = Outcome.FAILED
        try:
            outcome = op.run(op)
        except Exception:
            _log.exception("disk operation failed")
        if outcome is not None:
            self.end_operation(op, outcome)

    def _run_operations(self) -> None:
        while (op := self._take_operation()) is not None:
            self._run_operation(op)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            try:
                self._end()
            except Exception:
                _log.exception("disk tier did not close cleanly")
            self._ended.set()

    def _watch_deadlines(self) -> None:
        while (expired := self._next_expired()) is not None:
            op, queued = expired
            op.expire()
            if queued:
                op.finish(Outcome.RETURNED)

    def _next_expired(self) -> tuple[DiskOperation, bool] | None:
        """Wait for the next operation that is late, and whether it never started; None when all is over."""
        with self._lock:
            while True:
                op = next(iter(self._waiting), None)
                if op is None:
                    if self._closing:
                        return None
                    self._unwatched = True
                    self._watch.wait()
                    continue
                left = op.deadline - time.monotonic()
                if left > 0:
                    self._watch.wait(left)
                    continue
                del self._waiting[op]
                queued = op not in self._running
                if queued and not op.urgent and self._done_at > op.deadline - self._timeout_s:
                    self._start_clock(op)
                    continue
                if queued:
                    (self._urgent if op in self._urgent else self._normal).remove(op)
                elif op.drop():
                    queued = True
                    self._leave_running(op)
                else:
                    self._hung.add(op)
                if queued:
                    del self.live[op]
                return op, queued


def rate_reads(directory: str, limit: int, threads: int, rated: Callable[[int, float], None]) -> threading.Thread:
    """Rate a disk whose directory has no pages yet, in a thread, by a file without a name that is written and read:
    `rated(bytes, seconds)` hears how long `threads` readers took for RATE_PIECES pieces, or as many as fit `limit`
    bytes. It is not called when there is no room for one, or where the system refuses."""
    count = min(RATE_PIECES, limit // RATE_PIECE_BYTES)

    def rate() -> None:
        try:
            if count:
                rated(count * RATE_PIECE_BYTES, _time_reads(directory, count, threads))
        except OSError as error:
            _log.debug("the disk of %s was not rated: %s", directory, error)

    thread = threading.Thread(target=rate, name="wicore-kv-disk-rate", daemon=True)
    thread.start()
    return thread


def _time_reads(directory: str, count: int, threads: int) -> float:
    flags = os.O_TMPFILE | os.O_RDWR
    try:
        fd = os.open(directory, flags | os.O_DIRECT, 0o600)  # past the page cache where the file system can
    except OSError:
        fd = os.open(directory, flags, 0o600)
    try:
        buffers = aligned_buffers(threads, RATE_PIECE_BYTES)
        buffers[0][:] = secrets.token_bytes(RATE_PIECE_BYTES)
        _move_pieces(count, buffers, lambda buffer, at: os.pwritev(fd, [buffers[0]], at))
        os.fdatasync(fd)
        begun = time.perf_counter()
        _move_pieces(count, buffers, lambda buffer, at: os.preadv(fd, [buffer], at))
        return time.perf_counter() - begun
    finally:
        os.close(fd)


def _move_pieces(count: int, buffers: Sequence[memoryview], move: Callable[[memoryview, int], int]) -> None:
    """Call `move(buffer, offset)` for all pieces, in a daemon thread for each buffer, as a disk may hang."""
    offsets, failed = iter(range(0, count * RATE_PIECE_BYTES, RATE_PIECE_BYTES)), list[OSError]()

    def work(buffer: memoryview) -> None:
        try:
            for at in offsets:
                if move(buffer, at) != RATE_PIECE_BYTES:
                    raise OSError(errno.EIO, "a short transfer")
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(buffer,), daemon=True) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
