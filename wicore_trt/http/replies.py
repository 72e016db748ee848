"""Answers that are ready, and the headers that go with them. Must not know routes."""

from __future__ import annotations

from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wicore_trt.access.calls import Call
from wicore_trt.http.context import Context


class Reply(Protocol):
    """An ASGI response."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def json_reply(body: object, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> Response:
    """A JSON answer; bytes are taken as they are."""
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    reply = Response(raw, status, media_type="application/json")
    reply.raw_headers.extend(headers or ())
    return reply


def span(seconds: float) -> bytes:
    """A span of time as x-ratelimit-reset-* has it: 6m12.5s, 1s, 20ms."""
    if seconds < 1:
        return b"%dms" % round(seconds * 1000)
    minutes, rest = divmod(seconds, 60)
    return (b"%dm" % minutes if minutes else b"") + f"{rest:.3f}".rstrip("0").rstrip(".").encode() + b"s"


def rate_headers(context: Context, call: Call) -> list[tuple[bytes, bytes]]:
    """What is left of the caller's requests and tokens."""
    found = []
    for kind, allowance in context.admission.rates.allowances(call.who).items():
        name = kind.encode()
        found += [
            (b"x-ratelimit-limit-" + name, b"%d" % allowance.limit),
            (b"x-ratelimit-remaining-" + name, b"%d" % allowance.remaining),
            (b"x-ratelimit-reset-" + name, span(allowance.reset_s)),
        ]
    return found
