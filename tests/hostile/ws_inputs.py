"""Hostile WebSockets: a handshake, then frames as a script of `http_inputs`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random

from http_inputs import HALF, HEAD, READ, RESET, Step
from values import bits, image_turns, lark, nested, raw_value, regex, schema

TEXT, BINARY, CONT, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10


def frame(
    rng: Random, kind: int, payload: bytes, *, fin: bool = True, mask: bool = True, rsv: int = 0, size: int = -1
) -> bytes:
    """One frame; `size` is what it says its length is."""
    size = len(payload) if size < 0 else size
    head = bytes([fin << 7 | rsv << 4 | kind])
    flag = mask << 7
    if size < 126:
        head += bytes([flag | size])
    elif size < 1 << 16:
        head += bytes([flag | 126]) + struct.pack(">H", size)
    else:
        head += bytes([flag | 127]) + struct.pack(">Q", size)
    if not mask:
        return head + payload
    key = rng.randbytes(4)
    repeated = (key * (len(payload) // 4 + 1))[: len(payload)]
    masked = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(len(payload), "big")
    return head + key + masked


def shake(rng: Random, *more: str, key: str = "dGhlIHNhbXBsZSBub25jZQ==", version: str = "13") -> bytes:
    head = ["GET /v1/stream HTTP/1.1", "host: x", "connection: upgrade", "upgrade: websocket", *more]
    head += [f"sec-websocket-key: {key}", f"sec-websocket-version: {version}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n"


def ask(rng: Random, name: str = "a", **more: object) -> bytes:
    body = {"type": "generate", "id": name, "prompt": "hello", "max_tokens": rng.choice([1, 5, 30]), "ignore_eos": True}
    return json.dumps(body | {"temperature": 0} | more).encode("utf-8", "surrogatepass")


def handshakes(rng: Random) -> list[Step]:
    return [
        rng.choice(
            [
                shake(rng, key="short"),
                shake(rng, key=""),
                shake(rng, version="12"),
                shake(rng, version="x"),
                shake(rng, "origin: http://evil.example"),
                shake(rng, "sec-websocket-extensions: permessage-deflate; x=" + "y" * 9000),
                shake(rng, "sec-websocket-protocol: " + "a," * 3000),
                shake(rng, "x: " + "v" * 70_000),
                shake(rng) + rng.randbytes(300),
                shake(rng, "content-length: 5") + b"hello",
                shake(rng).replace(b"GET", b"POST"),
                shake(rng).replace(b"stream", b"nowhere"),
                bits(rng, shake(rng)),
            ]
        ),
        READ,
    ]


def broken(rng: Random) -> list[Step]:
    """Frames that the protocol forbids."""
    made = rng.choice(
        [
            frame(rng, TEXT, ask(rng), mask=False),
            frame(rng, TEXT, ask(rng), rsv=rng.randrange(1, 8)),
            frame(rng, rng.choice([3, 7, 11, 15]), b"x"),
            frame(rng, CONT, b"no beginning"),
            frame(rng, TEXT, b"a", fin=False) + frame(rng, TEXT, b"b"),
            frame(rng, PING, b"p" * 200),
            frame(rng, PING, b"p", fin=False),
            frame(rng, CLOSE, b"\x03"),
            frame(rng, CLOSE, struct.pack(">H", rng.choice([0, 999, 1005, 1006, 1015, 2999, 5000, 65535]))),
            frame(rng, CLOSE, b"\x03\xe8\xff\xfe"),
            frame(rng, CLOSE, b"\x03\xe8" + b"r" * 123),
            frame(rng, TEXT, b"\xff\xfe{}"),
            frame(rng, TEXT, b"\xed\xa0\x80"),
            frame(rng, TEXT, b"", size=1 << 63),
            frame(rng, TEXT, b"", size=(1 << 64) - 1),
            frame(rng, TEXT, b"x", size=(4 << 20) + 1),
            frame(rng, TEXT, ask(rng))[: rng.randrange(1, 40)],
            bits(rng, frame(rng, TEXT, ask(rng))),
            rng.randbytes(rng.choice([10, 5000])),
        ]
    )
    return [shake(rng), HEAD, made, rng.choice([READ, 0.1, HALF])]


def fragments(rng: Random) -> list[Step]:
    """One message in many frames, with pings between them."""
    raw, count = ask(rng), rng.choice([2, 10, 900, 1500, 5000])
    pieces = [raw[i * len(raw) // count : (i + 1) * len(raw) // count] for i in range(count)]
    made = b"".join(
        frame(rng, TEXT if i == 0 else CONT, piece, fin=i == count - 1)
        + (frame(rng, PING, b"") if rng.random() < 0.1 else b"")
        for i, piece in enumerate(pieces)
    )
    return [shake(rng), HEAD, made, READ]


def floods(rng: Random) -> list[Step]:
    """Pings, pongs, empty or bad messages by the thousand."""
    one = rng.choice(
        [
            frame(rng, PING, b"p" * 125),
            frame(rng, PONG, b""),
            frame(rng, TEXT, b""),
            frame(rng, TEXT, b"{}"),
            frame(rng, BINARY, b"[" * 900),
        ]
    )
    return [shake(rng), one * rng.choice([100, 3000]), rng.choice([READ, 0.1, RESET])]


def messages(rng: Random) -> list[Step]:
    """JSON that is no request, or a strange one."""
    made = rng.choice(
        [
            nested(rng, rng.choice([10, 900, 100_000])).encode(),
            raw_value(rng).encode("utf-8", "surrogatepass"),
            bits(rng, ask(rng)),
            ask(rng, ""),
            ask(rng, "i" * 200),
            ask(rng, type="cancel"),
            ask(rng, type=7),
            ask(rng, id=None),
            ask(rng, id=[1]),
            ask(rng, prompt=["a"] * 3),
            ask(rng, echo=True),
            ask(rng, n=33),
            ask(rng, tools=[{}]),
            ask(rng, stream=True),
            ask(rng, guided_regex=regex(rng)),
            ask(rng, guided_json=schema(rng)),
            ask(rng, guided_grammar=lark(rng)),
            ask(rng, timeout=1e-9),
            ask(rng, messages=[{"role": "user", "content": "x"}]),
            ask(rng, prompt="a" * 3_000_000),
            ask(rng, max_tokens=2**31 - 1, timeout=0.2),
        ]
    )
    return [shake(rng), HEAD, frame(rng, rng.choice([TEXT, TEXT, BINARY]), made), READ]


def crowds(rng: Random) -> list[Step]:
    """Many generations on a connection, cancelled, doubled, abandoned."""
    made = b""
    for i in range(rng.choice([3, 64, 80])):
        made += frame(rng, TEXT, ask(rng, f"g{rng.choice([i, 0])}", max_tokens=200))
        if rng.random() < 0.4:
            made += frame(rng, TEXT, json.dumps({"type": "cancel", "id": f"g{rng.randrange(i + 1)}"}).encode())
    return [
        shake(rng),
        HEAD,
        made,
        rng.choice([0.0, 0.1, 0.3]),
        rng.choice([RESET, HALF, READ, frame(rng, CLOSE, b"\x03\xe8")]),
    ]


def pictures(rng: Random) -> list[Step]:
    """Generations with images, several on a connection, some of them cancelled or left."""
    made = b""
    for i in range(rng.choice([1, 1, 3])):
        body = {"type": "generate", "id": f"g{i}", "messages": image_turns(rng), "max_tokens": 3, "temperature": 0}
        made += frame(rng, TEXT, json.dumps(body).encode())
        if rng.random() < 0.3:
            made += frame(rng, TEXT, json.dumps({"type": "cancel", "id": f"g{i}"}).encode())
    return [shake(rng), HEAD, made, rng.choice([READ, READ, 0.02, 0.3]), rng.choice([READ, RESET, HALF])]


KINDS: dict[str, Callable[[Random], list[Step]]] = {
    made.__name__: made for made in (handshakes, broken, fragments, floods, messages, crowds, pictures)
}
