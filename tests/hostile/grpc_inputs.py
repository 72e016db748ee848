"""Hostile gRPC: calls with bytes that no client would send, and HTTP/2 by hand."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from google.protobuf.message import Message
from http_inputs import HALF, READ, RESET, Step
from serve.raw_http2 import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, headers, literal
from values import bits, image_file, image_url, lark, regex, schema

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import kv_pb2

SERVICE = "/wicore.inference.v1.InferenceService/"
REQUESTS: dict[str, Callable[[], Message]] = {
    "Generate": pb2.GenerateRequest,
    "Abort": pb2.AbortRequest,
    "Tokenize": pb2.TokenizeRequest,
    "Detokenize": pb2.DetokenizeRequest,
    "GetModelInfo": pb2.GetModelInfoRequest,
    "GetServerInfo": pb2.GetServerInfoRequest,
    "GetStats": pb2.GetStatsRequest,
    "SubscribeKVEvents": kv_pb2.SubscribeKVEventsRequest,
}
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
DOUBLES = (5e-324, 1e-310, 1e308, float("nan"), float("inf"), -float("inf"), -0.0, -1.0, 1 - 1e-16, 100.0)
INTEGERS = (0, 1, 2, 20, 33, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
PRIORITY, RST, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = 2, 3, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class Call:
    """One call by a gRPC client: its messages as bytes, and when the client leaves."""

    path: str
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    timeout: float = 10.0
    leave: float | None = None
    gzip: bool = False


def sampling(rng: Random, **more: object) -> pb2.SamplingParams:
    given: dict[str, object] = {"max_tokens": rng.choice([1, 3, 20]), "ignore_eos": True, "temperature": 0.0}
    return pb2.SamplingParams(**(given | more))


def good(rng: Random, **more: object) -> pb2.GenerateRequest:
    return pb2.GenerateRequest(**({"text": "hello", "sampling": sampling(rng)} | more))


def generate(message: Message, **more: object) -> Call:
    return Call(f"{SERVICE}Generate", (message.SerializeToString(),), **more)


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def flipped(rng: Random) -> Call:
    """A good message with bits flipped."""
    name = rng.choice(["Generate"] * 5 + list(REQUESTS))
    message = good(rng) if name == "Generate" else REQUESTS[name]()
    if name == "Tokenize":
        message.text = "hello"
    elif name == "Detokenize":
        message.token_ids.extend([5, 6, 7])
    return Call(SERVICE + name, (bits(rng, message.SerializeToString()),), leave=1.0 if name[0] == "S" else None)


def made_up(rng: Random) -> Call:
    """Wire format by hand: huge, unknown, recursive, doubled and lying fields."""
    number = rng.choice([1, 3, 4, 5, 7, 8, 9, 11, 12, 1000, (1 << 29) - 1, 0])
    raw = rng.choice(
        [
            varint(number << 3 | 2) + varint(rng.choice([5, 1 << 31, (1 << 63) - 1])) + b"abc",
            varint(number << 3 | rng.randrange(8)) + rng.randbytes(12),
            (varint(7 << 3 | 2) + b"\x80\x80\x80\x80\x08"),
            varint(number << 3 | 3) * rng.choice([5, 5000]),
            varint(number << 3 | 3) * 40 + varint(number << 3 | 4) * 40,
            b"\x1a\x05hello" * rng.choice([2, 50_000]),
            b"\x1a\x02\xff\xfe",
            b"\x1a\x03\xed\xa0\x80",
            b"\x3a\x00" * 100_000,
            b"\x2a" + varint(400_000) + b"\x0a\x00" * 200_000,
            b"\x22" + varint(300_002) + b"\x0a" + varint(299_998) + b"\x05" * 299_998,
            rng.randbytes(rng.choice([1, 60, 5000])),
            b"",
            b"\xff" * 11,
            b"\x1a\x01a\x3a" + varint(500_000) + b"\x72\x00" * 250_000,
            b"\x1a\x01a\x3a" + varint(660_000) + (b"\x6a\x04\x08\x01\x10\x02") * 110_000,
        ]
    )
    return Call(SERVICE + rng.choice(["Generate", "Generate", "Tokenize", "Detokenize", "Abort"]), (raw,))


def extremes(rng: Random) -> Call:
    name = rng.choice(
        [f.name for f in pb2.SamplingParams.DESCRIPTOR.fields if not f.is_repeated and f.message_type is None]
    )
    kind = pb2.SamplingParams.DESCRIPTOR.fields_by_name[name].cpp_type
    value: object = rng.random() < 0.5
    if kind == 5:  # CPPTYPE_DOUBLE
        value = rng.choice(DOUBLES)
    elif name == "seed":
        value = rng.choice([-(1 << 63), -1, 0, (1 << 63) - 1])
    elif kind != 7:  # CPPTYPE_BOOL
        value = rng.choice(INTEGERS)
    return generate(good(rng, sampling=sampling(rng, **{name: value})), timeout=3.0)


def collections(rng: Random) -> Call:
    n = rng.choice([17, 1000, 1025, 20_000])
    return generate(
        rng.choice(
            [
                good(rng, sampling=sampling(rng, stop=["x" * (i % 300) for i in range(n)])),
                good(rng, sampling=sampling(rng, stop_token_ids=range(n))),
                good(rng, sampling=sampling(rng, logit_bias={i: rng.choice(DOUBLES) for i in range(n)})),
                good(rng, text="\U0001f9ff" * n * 3),
                good(rng, text=""),
                good(rng, token_ids=pb2.TokenIds(ids=[rng.choice([5, 96, 97, 1 << 31])] * n)),
                good(rng, chat=pb2.Chat(messages=[pb2.ChatMessage(role="user", content="a")] * n)),
                good(rng, chat=pb2.Chat(messages=[pb2.ChatMessage(role=rng.choice(["", "x", "tool"]), content="\0")])),
                good(rng, request_id=rng.choice(["", "a b", "a" * 129, "\u00e9"])),
                good(rng, request_id="same"),
                good(rng, model="x" * n),
                good(rng, cache_salt="s" * n),
                good(rng, priority=rng.choice([-3, 2, 1 << 30])),
                good(
                    rng,
                    cache=kv_pb2.CacheHints(session="s" * rng.choice([1, 257]), priority=rng.choice([0, 3, 99, -1])),
                ),
                pb2.GenerateRequest(),
            ]
        )
    )


def times(rng: Random) -> Call:
    message = good(rng)
    seconds, nanos = rng.choice(
        [(0, 0), (0, 1), (-1, 0), (1, -1), ((1 << 63) - 1, 999_999_999), (-(1 << 63), 0), (0, 1 << 30), (0, 10**7)]
    )
    span = message.timeout if rng.random() < 0.6 else message.cache.ttl
    span.seconds, span.nanos = seconds, nanos
    return generate(message, timeout=rng.choice([0.001, 0.05, 10.0]))


def constraints(rng: Random) -> Call:
    kinds = {"regex": regex(rng), "grammar": lark(rng), "json_schema": json.dumps(schema(rng)), "json_object": True}
    name = rng.choice(list(kinds))
    made = pb2.Constraint(**{name: kinds[name]})
    if rng.random() < 0.15:
        made = rng.choice(
            [
                pb2.Constraint(),
                pb2.Constraint(choice=pb2.Choice(texts=["c" * i for i in range(rng.choice([0, 2, 500]))])),
            ]
        )
    return generate(good(rng, sampling=sampling(rng, constraint=made, max_tokens=rng.choice([1, 4, 12]))))


def metadata(rng: Random) -> Call:
    more: tuple[tuple[str, str | bytes], ...] = rng.choice(
        [
            (("x-request-id", "a" * 200),),
            (("x-request-id", "a b"),),
            (("authorization", "Bearer " + "k" * 5000),),
            tuple((f"x-{i}", "v") for i in range(90)),
            (("b-bin", rng.randbytes(100)),),
            (("x-api-key", ""),),
            (("grpc-x", "1"),),
            (("te", "x"),),
        ]
    )
    return generate(good(rng), metadata=more)


def leaving(rng: Random) -> Call:
    """A client that cancels, or sends nothing, too much, or too many messages."""
    raw = good(rng, sampling=sampling(rng, max_tokens=300)).SerializeToString()
    path = rng.choice(
        [f"{SERVICE}Generate"] * 4
        + [f"{SERVICE}SubscribeKVEvents", f"{HEALTH}Watch", REFLECTION, f"{SERVICE}Nothing", "/x/y", HEALTH + "Check"]
    )
    messages = rng.choice([(raw,), (raw,), (), (raw, raw), (b"",), (b"x" * 5_000_000,), (bytes(3_000_000),)])
    return Call(path, messages, leave=rng.choice([0.0, 0.02, 0.3]), gzip=rng.random() < 0.3)


def http2(rng: Random) -> list[Step]:
    """Frames out of order, of wrong sizes, on wrong streams, in floods."""
    raw = good(rng).SerializeToString()
    message = b"\0" + len(raw).to_bytes(4, "big") + raw
    head, path = (
        SERVICE.encode() + b"Generate",
        rng.choice(
            [SERVICE.encode() + b"Generate", HEALTH.encode() + b"Check", b"/" + b"x" * 90, b"/\xff\xfe", b"", b"*"]
        ),
    )
    begin = PREFACE + frame(SETTINGS, 0, 0)
    call = frame(HEADERS, END_HEADERS, 1, headers(head))
    whole = call + frame(DATA, END_STREAM, 1, message)
    n = rng.choice([3, 50, 1000])
    resets = b"".join(
        frame(HEADERS, END_HEADERS | END_STREAM, 2 * i + 1, headers(head)) + frame(RST, 0, 2 * i + 1, b"\0\0\0\x08")
        for i in range(n)
    )
    made = rng.choice(
        [
            begin + frame(HEADERS, END_HEADERS | END_STREAM, 1, headers(path)),
            begin + frame(DATA, 0, 1, message),
            begin + call + frame(HEADERS, END_HEADERS, 1, headers(head)),
            begin + frame(HEADERS, END_HEADERS, rng.choice([0, 2, (1 << 31) - 1]), headers(head)),
            begin + call + frame(DATA, END_STREAM, 1, message) * 2,
            begin + whole + frame(DATA, 0, 3, b"x"),
            begin + frame(HEADERS, 0, 1, headers(head)) + frame(DATA, 0, 1, message),
            begin + frame(CONTINUATION, END_HEADERS, 1, headers(head)),
            begin + frame(HEADERS, 0, 1, headers(head)) + frame(CONTINUATION, 0, 1, literal(b"x", b"v" * 100)) * n,
            begin + frame(SETTINGS, 1, 0, b"x" * 6),
            begin + frame(SETTINGS, 0, 0, b"x" * 5),
            begin
            + frame(
                SETTINGS,
                0,
                0,
                struct.pack(">HI", rng.choice([1, 3, 4, 5, 6, 99]), rng.choice([0, 1, 1 << 31, (1 << 32) - 1])),
            )
            * n,
            begin + frame(PING, 0, 0, b"12345678") * n,
            begin + frame(PING, 0, 0, b"x"),
            begin + frame(PING, 0, 1, b"12345678"),
            begin + frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff") * 3,
            begin + frame(WINDOW, 0, 0, b"\0\0\0\0"),
            begin + call + frame(WINDOW, 0, 1, b"\x7f\xff\xff\xff") * 3,
            begin + frame(PUSH, END_HEADERS, 1, b"\0\0\0\2" + headers(head)),
            begin + frame(PRIORITY, 0, 1, b"\0\0\0\1\xff") * n,
            begin + frame(RST, 0, 1, b"\0\0\0\x08"),
            begin + frame(GOAWAY, 0, 0, b"\0" * 8) + whole,
            begin + frame(99, 255, 7, b"?" * 30),
            begin + frame(DATA, 8, 1, b"\xff"),
            begin + resets,
            begin + frame(HEADERS, END_HEADERS | END_STREAM, 1, rng.randbytes(60)),
            begin
            + frame(
                HEADERS,
                END_HEADERS,
                1,
                headers(head) + literal(b"grpc-timeout", rng.choice([b"1n", b"-1S", b"99999999H", b"x"])),
            ),
            begin
            + frame(
                HEADERS,
                END_HEADERS,
                1,
                headers(head, content_type=rng.choice([b"text/plain", b"application/grpc+json", b""])).replace(
                    b"te", b"te", 1
                ),
            ),
            begin
            + call
            + frame(
                DATA,
                END_STREAM,
                1,
                rng.choice(
                    [
                        b"\1",
                        b"\2\0\0\0\0",
                        b"\1\0\0\0\5hello",
                        b"\0\xff\xff\xff\xff",
                        b"\0\0\0\0\5hi",
                        message[:7],
                        message + message,
                    ]
                ),
            ),
            frame(SETTINGS, 0, 0) + whole,
            PREFACE[: rng.randrange(24)],
            PREFACE + rng.randbytes(300),
            b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
            b"\x16\x03\x01" + rng.randbytes(90),
            bits(rng, begin + whole),
            (begin + whole)[:9] + b"\xff\xff\xff" + (begin + whole)[9:],
            begin + struct.pack(">I", 1 << 23)[1:] + b"\0\0\0\0\0\1",
        ]
    )
    return [made, rng.choice([READ, READ, 0.1, RESET, HALF])]


def stalls(rng: Random) -> list[Step]:
    """A call that stops in the middle, or whose client takes nothing."""
    raw = good(rng, sampling=sampling(rng, max_tokens=300)).SerializeToString()
    window = struct.pack(">HI", 4, rng.choice([0, 1, 50]))
    made = (
        PREFACE
        + frame(SETTINGS, 0, 0, window)
        + frame(HEADERS, END_HEADERS, 1, headers(SERVICE.encode() + b"Generate"))
    )
    made += frame(DATA, END_STREAM, 1, b"\0" + len(raw).to_bytes(4, "big") + raw)
    cut = rng.choice([len(made), rng.randrange(10, len(made))])
    return [made[:cut], rng.choice([0.05, 0.4]), made[cut:], rng.choice([READ, RESET, HALF, 0.3])]


def pictures(rng: Random) -> Call:
    """Images of texts and of turns, for answers and for token counts."""
    images = [
        pb2.Image(**rng.choice([{"data": image_file(rng)}, {"url": image_url(rng)}, {}]), crops=rng.random() < 0.3)
        for _ in range(rng.choice([1, 1, 2, 17]))
    ]
    parts = [pb2.ContentPart(image=one) for one in images] + [
        pb2.ContentPart(text="<start_of_image>"),
        pb2.ContentPart(),
    ]
    rng.shuffle(parts)
    turns = [pb2.ChatMessage(role=rng.choice(["user", "user", "user", "system", "x"]), parts=parts)]
    leave = rng.choice([None, None, 0.01])
    match rng.randrange(3):
        case 0:
            return generate(good(rng, text=rng.choice(["a", "<start_of_image>"]), images=images), leave=leave)
        case 1:
            message = good(rng)
            message.chat.messages.extend(turns)
            return generate(message, leave=leave)
    return Call(f"{SERVICE}Tokenize", (pb2.TokenizeRequest(chat=pb2.Chat(messages=turns)).SerializeToString(),))


KINDS: dict[str, Callable[[Random], Call | list[Step]]] = {
    made.__name__: made
    for made in (
        flipped,
        made_up,
        extremes,
        collections,
        times,
        constraints,
        metadata,
        leaving,
        http2,
        stalls,
        pictures,
    )
}
