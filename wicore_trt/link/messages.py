"""Messages between the processes of one server, as msgpack.

Both ends have the same version, so fields need no compatibility. Plain data; it must not know sockets. Invariant: a
decoded message holds values of its declared types, and decoded requests are validated again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
from msgspec import Struct

from wicore_trt.errors import InvalidRequestError, QueueFullError, WicoreError, error_named
from wicore_trt.kv.events import Event, EventSnapshot, Stored
from wicore_trt.kv.pages.page import Page
from wicore_trt.memory_file import open_parts, read_parts
from wicore_trt.types import EngineStats, GenerateRequest, ModelInfo, TokenOutput

PAGES = 1024
"""Pages of a message that is part of a snapshot."""

# --- to the engine ---------------------------------------------------------------------------------------------------


class Add(Struct, tag=0, array_like=True):
    """Request for the engine. Answered by Done or Refused. `pixels`: bytes of those of each span of its content, which
    lie in the message's file instead (`encode_request`, `read_request`)."""

    call: int
    request: GenerateRequest
    pixels: tuple[int, ...] = ()


class Abort(Struct, tag=1, array_like=True):
    """Ends a request, or one of its sequences. Not answered."""

    request_key: str
    index: int | None


class AskStats(Struct, tag=2, array_like=True):
    """Asks for the statistics of the engine, or of one tenant. Answered by Done."""

    call: int
    tenant: str | None


class Follow(Struct, tag=3, array_like=True):
    """Asks for the changes of the KV cache from this position on. Answered by one change at a time, or Refused."""

    call: int
    tenant: str | None
    epoch: int
    position: int


class More(Struct, tag=4, array_like=True):
    """Asks for the next change."""

    call: int


class Unfollow(Struct, tag=5, array_like=True):
    call: int


ToEngine = Add | Abort | AskStats | Follow | More | Unfollow

# --- from the engine -------------------------------------------------------------------------------------------------


class Welcome(Struct, tag=0, array_like=True):
    """First message. Request keys of this link begin with `prefix`; `pid` is the engine's process."""

    prefix: str
    info: ModelInfo
    pid: int


class Outputs(Struct, tag=1, array_like=True):
    """Outputs of one step for the requests of this link."""

    outputs: list[TokenOutput]


class Done(Struct, tag=2, array_like=True):
    call: int
    stats: EngineStats | None = None


class Refused(Struct, tag=3, array_like=True):
    """Error of `wicore_trt.errors`, by the name of its class."""

    call: int
    kind: str
    message: str
    fix: str | None = None
    field: str | None = None
    retry_after_s: float | None = None
    pace_s: float | None = None

    @classmethod
    def from_error(cls, call: int, error: WicoreError) -> Refused:
        field = error.field if isinstance(error, InvalidRequestError) else None
        full = error if isinstance(error, QueueFullError) else None
        retry_s, pace_s = (full.retry_after_s, full.pace_s) if full is not None else (None, None)
        return cls(call, type(error).__name__, error.message, error.fix, field, retry_s, pace_s)

    def to_error(self) -> WicoreError:
        made = error_named(self.kind, self.message, fix=self.fix, field=self.field, retry_after_s=self.retry_after_s)
        if isinstance(made, QueueFullError):
            made.pace_s = self.pace_s
        return made


class KVChanges(Struct, tag=4, array_like=True):
    """Events, or pages of a snapshot as if they were stored; `last` marks the last part, which More answers."""

    call: int
    epoch: int
    sequence: int
    snapshot: bool
    last: bool
    items: list[Event]


class Down(Struct, tag=5, array_like=True):
    """Says that the engine broke and takes no more requests. Outputs that end its requests follow."""

    why: str


FromEngine = Welcome | Outputs | Done | Refused | KVChanges | Down


def split_change(call: int, epoch: int, found: EventSnapshot | list[Event]) -> Iterator[KVChanges]:
    """Split a change into messages: events in one; a snapshot by PAGES pages, then an empty last one."""
    if isinstance(found, list):
        yield KVChanges(call, epoch, found[-1].sequence, False, True, found)
        return
    for (tier, group), pages in found.pages.items():
        for start in range(0, len(pages), PAGES):
            part = Stored(found.sequence, tier, group, pages[start : start + PAGES])
            yield KVChanges(call, epoch, found.sequence, True, False, [part])
    yield KVChanges(call, epoch, found.sequence, True, True, [])


def join_change(parts: list[KVChanges]) -> tuple[int, EventSnapshot | list[Event]]:
    """Join all messages of a change, the last one included."""
    end, items = parts[-1], [item for part in parts for item in part.items]
    if not end.snapshot:
        return end.epoch, items
    pages: dict[tuple[str, str], list[Page]] = {}
    for item in items:
        assert isinstance(item, Stored)
        pages.setdefault((item.tier, item.group), []).extend(item.pages)
    return end.epoch, EventSnapshot(end.sequence, end.epoch, {name: tuple(found) for name, found in pages.items()})


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def encode_request(call: int, request: GenerateRequest) -> tuple[bytes, int]:
    """Encode Add; return it with a file in memory that holds its pixels, -1 where there are none. Raises OSError."""
    parts = [span.pixels for span in request.content]
    if not any(parts):
        return encode(Add(call, request)), -1
    bare = replace(request, content=tuple(replace(span, pixels=b"") for span in request.content))
    return encode(Add(call, bare, tuple(map(len, parts)))), open_parts(parts)


def read_request(message: Add, file: int) -> GenerateRequest:
    """Return the request of a message, with the pixels of its file. Raises OSError."""
    if not message.pixels:
        return message.request
    places = zip(message.request.content, read_parts(file, message.pixels), strict=True)
    return replace(message.request, content=tuple(replace(span, pixels=found) for span, found in places))
