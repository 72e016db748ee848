"""Calls of gRPC written and read as HTTP/2 frames, which costs a client a fiftieth of what gRPC's own libraries take.

So a burst shows what the server takes. It must not know what is asked. Calls of one connection must fit the window that
a server grants at first.
"""

from __future__ import annotations

import asyncio
import struct
import time

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW = 0, 1, 4, 6, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_WINDOW_BYTES = 65_535
_HEAD = 9


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field that is not indexed (RFC 7541, 6.2.2); each part of at most 126 bytes."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


class Connection(asyncio.Protocol):
    """One connection to `path`. `opened` is set when the server has greeted."""

    def __init__(self, path: str, message: bytes) -> None:
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost", "te": "trailers",
                  "content-type": "application/grpc", "grpc-accept-encoding": "identity"}  # fmt: skip
        self._fields = b"".join(_literal(name.encode(), value.encode()) for name, value in fields.items())
        self._message = b"\0" + struct.pack(">I", len(message)) + message
        self._next, self._came = 1, b""
        self._open: dict[int, asyncio.Future[tuple[bool, float]]] = {}
        self._sent = 0.0
        self.opened = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        wide = _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20)) + _frame(
            _WINDOW, 0, 0, struct.pack(">I", 1 << 24)
        )
        transport.write(_PREFACE + wide)

    def ask(self, calls: int) -> list[asyncio.Future[tuple[bool, float]]]:
        """Begin so many calls at once; of each whether it was answered with a message, and the seconds until then, or
        until its end."""
        said = []
        for _ in range(calls):
            said.append(_frame(_HEADERS, _END_HEADERS, self._next, self._fields))
            said.append(_frame(_DATA, _END_STREAM, self._next, self._message))
            self._open[self._next] = asyncio.get_running_loop().create_future()
            self._next += 2
        assert calls * len(self._message) <= _WINDOW_BYTES, "too many calls for one connection"
        found, self._sent = list(self._open.values()), time.monotonic()
        self._transport.write(b"".join(said))
        return found

    def data_received(self, data: bytes) -> None:
        self._came += data
        while len(self._came) >= _HEAD:
            size, kind, flags = int.from_bytes(self._came[:3], "big"), self._came[3], self._came[4]
            if len(self._came) < _HEAD + size:
                return
            stream, payload = int.from_bytes(self._came[5:9], "big"), self._came[_HEAD : _HEAD + size]
            self._came = self._came[_HEAD + size :]
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                self._transport.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
                self.opened.set()
            elif kind == _DATA or kind == _HEADERS and flags & _END_STREAM:
                self._told(stream, answered=kind == _DATA)

    def _told(self, stream: int, *, answered: bool) -> None:
        waiting = self._open.pop(stream, None)
        if waiting is not None:
            waiting.set_result((answered, time.monotonic() - self._sent))

    def connection_lost(self, error: Exception | None) -> None:
        for waiting in self._open.values():
            waiting.set_exception(error or ConnectionResetError("the server closed the connection"))
