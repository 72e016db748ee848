"""HTTP/2 by hand, as much as a client needs that gRPC's own libraries would not be: frames, and headers as literals."""

from __future__ import annotations

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
HEALTH_CHECK = b"/grpc.health.v1.Health/Check"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that is not indexed (RFC 7541, 6.2.2); each part of at most 126 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def headers(path: bytes, **more: bytes) -> bytes:
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"x",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
        **{name.replace("_", "-").encode(): value for name, value in more.items()},
    }
    return b"".join(literal(name, value) for name, value in fields.items())


def connect(address: str) -> socket.socket:
    if address.startswith("unix:"):
        opened = socket.socket(socket.AF_UNIX)
        opened.connect(address.removeprefix("unix:"))
        return opened
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def call(address: str, path: bytes, window: int | None = None) -> socket.socket:
    """A connection on which a call of `path` was begun, and ended unless `window` is given, which is then the bytes of
    a stream that the client takes."""
    opened = connect(address)
    settings = b"" if window is None else struct.pack(">HI", 4, window)
    flags = END_HEADERS | (END_STREAM if window is None else 0)
    opened.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(HEADERS, flags, 1, headers(path)))
    return opened
