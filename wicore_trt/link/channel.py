"""Messages over a stream socket between two processes of one server: a length (4 bytes, little endian) and bytes.

With its highest bit set a file comes along. It must not know their content. Invariants (I24): messages arrive whole and
in the order of `post`, which never waits; a peer that does not read is cut off at MAX_BACKLOG; a message that its
receiver cannot handle, or a file without room, ends the channel; `closed` is called once, on the loop's thread; no
file stays open.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

MAX_BACKLOG = 256 << 20
"""Bytes that wait for the other side. It is one of our own processes, so that much means that it hangs."""
READ_BYTES = 1 << 18
_HEAD, _FILE = 4, 1 << 31
_MAX_FILES = 64  # of one read


class Channel:
    """End of a link. `received` is called with each message and its file, -1 for none; both last until it returns.
    `closed` is called at the end. Both run on the thread of `loop`, where a channel must be constructed."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        received: Callable[[memoryview, int], None],
        closed: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock, self._loop = sock, loop
        self._received, self._closed = received, closed
        self._lock = threading.Lock()
        self._out: deque[tuple[memoryview, int]] = deque()
        self.backlog = 0
        """Bytes that the other side has not taken."""
        self.file_bytes = 0
        """Bytes of the files of messages that the other side has not taken."""
        self._in, self._files = bytearray(), deque[int]()
        self._open = True
        loop.add_reader(sock.fileno(), self._read_messages)

    def post(self, message: bytes, file: int = -1) -> None:
        """Send a message and an open file, which is closed here, from any thread; an ended channel sends nothing."""
        data = memoryview((len(message) | (_FILE if file >= 0 else 0)).to_bytes(_HEAD, "little") + message)
        with self._lock:
            if not self._open:
                return _close_file(file)
            first = not self._out
            if first:
                data, file = self._send_now(data, file)
            if not data:
                return
            self._out.append((data, file))
            self.backlog += len(data)
            self.file_bytes += _count_bytes(file)
            hangs = self.backlog > MAX_BACKLOG
        if hangs:
            self._call_soon(self.close)
        elif first:
            self._call_soon(self._write_later)

    def close(self) -> None:
        """End the channel; on the loop's thread."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            for file in [*(file for _, file in self._out), *self._files]:
                _close_file(file)
            self._out.clear()
            self._files.clear()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._closed()

    def read_sent(self) -> None:
        """Handle what the other side has sent and is here."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while self._open and poll.poll(0):
            self._read_messages()

    def _call_soon(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function)

    def _send_now(self, data: memoryview, file: int) -> tuple[memoryview, int]:
        """Send what the socket takes now and return the rest. `_read_messages` detects a broken socket."""
        with suppress(OSError):
            sent = self._sock.send(data) if file < 0 else socket.send_fds(self._sock, [data], [file])
            _close_file(file)
            return data[sent:], -1
        return data, file

    def _write_later(self) -> None:
        if self._open:
            self._loop.add_writer(self._sock.fileno(), self._write_backlog)

    def _write_backlog(self) -> None:
        with self._lock:
            while self._out:
                data, file = self._out.popleft()
                size = _count_bytes(file)
                rest, file = self._send_now(data, file)
                self.backlog -= len(data) - len(rest)
                self.file_bytes -= 0 if file >= 0 else size
                if rest:
                    self._out.appendleft((rest, file))
                    return
        self._loop.remove_writer(self._sock.fileno())
        with self._lock:
            again = bool(self._out)
        if again:  # posted in between
            self._write_later()

    def _read_messages(self) -> None:
        try:
            data, files, flags, _ = socket.recv_fds(self._sock, READ_BYTES, _MAX_FILES)
            self._files += files
            if flags & socket.MSG_CTRUNC:  # a file is lost, and the next one would be taken for it
                log.error("no room for a file that came over the link; closing it")
                data = b""
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._in += data
        start, end = 0, len(self._in)
        while end - start >= _HEAD:
            size, file = int.from_bytes(self._in[start : start + _HEAD], "little"), -1
            stop = start + _HEAD + (size & ~_FILE)
            if stop > end:
                break
            try:
                file = self._files.popleft() if size & _FILE else -1
                with memoryview(self._in)[start + _HEAD : stop] as message:
                    self._received(message, file)
            except Exception:  # a bug of ours; ending the channel fails its waiting calls
                log.exception("a message between front and engine could not be handled; closing the link")
                self.close()
            finally:
                _close_file(file)
            if not self._open:
                return
            start = stop
        del self._in[:start]


def _count_bytes(file: int) -> int:
    return os.fstat(file).st_size if file >= 0 else 0


def _close_file(file: int) -> None:
    if file >= 0:
        os.close(file)
