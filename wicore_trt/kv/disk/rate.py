"""How fast a disk reads, for a directory that has no pages yet: a file without a name, written and read again.

It must not know pages. Invariant: nothing is left behind, whatever happens; a disk that cannot be rated is not.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from wicore_trt.kv.disk.files import aligned_buffer

PIECE_BYTES = 4 << 20
PIECES = 16
_log = logging.getLogger(__name__)


def rate_reads(directory: str, limit: int, threads: int, rated: Callable[[int, float], None]) -> threading.Thread:
    """In a thread: `rated(bytes, seconds)` hears how long `threads` readers took for PIECES pieces, or as many as fit
    `limit` bytes. It is not called when there is no room for one, or where the system refuses."""
    count = min(PIECES, limit // PIECE_BYTES)
    thread = threading.Thread(
        target=_rate, args=(directory, count, threads, rated), name="wicore-kv-disk-rate", daemon=True
    )
    thread.start()
    return thread


def _rate(directory: str, count: int, threads: int, rated: Callable[[int, float], None]) -> None:
    try:
        if count:
            rated(count * PIECE_BYTES, _seconds(directory, count, threads))
    except OSError as error:
        _log.debug("the disk of %s was not rated: %s", directory, error)


def _seconds(directory: str, count: int, threads: int) -> float:
    fd = _open(directory)
    try:
        memory = aligned_buffer(threads * PIECE_BYTES)
        buffers = [memory[at : at + PIECE_BYTES] for at in range(0, len(memory), PIECE_BYTES)]
        buffers[0][:] = secrets.token_bytes(PIECE_BYTES)
        _move(count, buffers, lambda buffer, at: os.pwritev(fd, [buffers[0]], at))
        os.fdatasync(fd)
        begun = time.perf_counter()
        _move(count, buffers, lambda buffer, at: os.preadv(fd, [buffer], at))
        return time.perf_counter() - begun
    finally:
        os.close(fd)


def _move(count: int, buffers: Sequence[memoryview], move: Callable[[memoryview, int], int]) -> None:
    """`move(buffer, place)` for all pieces, in a thread for each buffer; a disk that hangs holds up no end of the
    process."""
    places, failed = iter(range(0, count * PIECE_BYTES, PIECE_BYTES)), list[OSError]()

    def work(buffer: memoryview) -> None:
        try:
            for at in places:
                if move(buffer, at) != PIECE_BYTES:
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


def _open(directory: str) -> int:
    """A file without a name, past the page cache where the file system can."""
    flags = os.O_TMPFILE | os.O_RDWR
    with suppress(OSError):
        return os.open(directory, flags | os.O_DIRECT, 0o600)
    return os.open(directory, flags, 0o600)
