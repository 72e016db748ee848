"""Messages over a stream socket between two processes of one server: a length (4 bytes, little endian) and bytes.

It must not know their content. Invariants (I24): messages arrive whole and in the order of `post`, which never waits; a
peer that does not read is cut off at MAX_BACKLOG; a message that its receiver cannot handle ends the channel; `closed`
is called once, on the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

MAX_BACKLOG = 256 << 20
"""Bytes that wait for the other side. It is one of our own processes, so that much means that it hangs."""
READ_BYTES = 1 << 18
TURN_BYTES = 1 << 20
"""Bytes after which the loop's thread writes on in its next turn, lest pixels hold up all that it serves."""
_HEAD = 4


class Channel:
    """End of a link. `received` is called with each message, which lasts until it returns, and `closed` at the end,
    both on the thread of `loop`, where it must be constructed."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        received: Callable[[memoryview], None],
        closed: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock, self._loop = sock, loop
        self._received, self._closed = received, closed
        self._lock = threading.Lock()
        self._out: deque[memoryview] = deque()
        self.backlog = 0
        """Bytes that the other side has not taken."""
        self._in = bytearray()
        self._open = True
        loop.add_reader(sock.fileno(), self._read_messages)

    def post(self, message: bytes) -> None:
        """Send a message, from any thread; do nothing when the channel has ended."""
        head = len(message).to_bytes(_HEAD, "little")
        parts = [head + message] if len(message) < READ_BYTES else [head, message]
        with self._lock:
            if not self._open:
                return
            first = not self._out
            for part in [memoryview(piece) for piece in parts]:
                data = part if self._out else self._send_now(part)
                if data:
                    self._out.append(data)
                    self.backlog += len(data)
            if not self._out:
                return
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
            self._out.clear()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._closed()

    def _call_soon(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function)

    def _send_now(self, data: memoryview) -> memoryview:
        """Send what the socket takes now and return the rest. `_read_messages` detects a broken socket."""
        with suppress(BlockingIOError, InterruptedError, BrokenPipeError, ConnectionResetError):
            return data[self._sock.send(data) :]
        return data

    def _write_later(self) -> None:
        if self._open:
            self._loop.add_writer(self._sock.fileno(), self._write_backlog)

    def _write_backlog(self) -> None:
        sent = 0
        with self._lock:
            while self._out:
                head = self._out.popleft()
                rest = self._send_now(head[:TURN_BYTES])
                count = min(len(head), TURN_BYTES) - len(rest)
                self.backlog, sent = self.backlog - count, sent + count
                if count < len(head):
                    self._out.appendleft(head[count:])
                if rest or sent >= TURN_BYTES:
                    return
        self._loop.remove_writer(self._sock.fileno())
        with self._lock:
            again = bool(self._out)
        if again:  # posted in between
            self._write_later()

    def _read_messages(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
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
            stop = start + _HEAD + int.from_bytes(self._in[start : start + _HEAD], "little")
            if stop > end:
                break
            try:
                with memoryview(self._in)[start + _HEAD : stop] as message:  # not copied: pixels are megabytes
                    self._received(message)
            except Exception:  # a bug of ours; ending the channel fails its waiting calls
                log.exception("a message between front and engine could not be handled; closing the link")
                self.close()
            if not self._open:
                return
            start = stop
        del self._in[:start]
