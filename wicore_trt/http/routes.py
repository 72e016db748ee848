"""The one table of routes: path, method, body, handler, and what the OpenAPI document says of them.

Invariants: every route needs a key, but those that are named OPEN; what a route answers is JSON or an event stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from wicore_trt.access.calls import Call
from wicore_trt.http import bodies, native, openai
from wicore_trt.http.context import Context
from wicore_trt.http.fields import Fields
from wicore_trt.http.intake import decoded, read_body, validated
from wicore_trt.http.replies import Reply
from wicore_trt.http.socket import PATH, StreamSocket
from wicore_trt.http.waiting import unless_gone

OPEN = frozenset(("/health", "/ready"))
"""Paths that need no key."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. `handle` is called with the context, the call, and the body or the path's parameters."""

    path: str
    handle: Callable[..., Awaitable[Reply]]
    body: type[BaseModel] | None = None
    generates: bool = False
    fields: Fields | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.body is not None:
            every = bodies.EVERY_FIELD if self.generates else frozenset[str]()
            object.__setattr__(self, "fields", Fields.of(self.body.model_fields, every))

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"


OPERATIONS = (
    Operation("/v1/models", openai.models),
    Operation("/v1/models/{name:path}", openai.model),
    Operation("/v1/chat/completions", openai.chat, bodies.ChatBody, generates=True),
    Operation("/v1/completions", openai.completions, bodies.CompletionBody, generates=True),
    Operation("/v1/inference", native.inference, bodies.InferenceBody, generates=True),
    Operation("/v1/stats", native.stats),
    Operation("/tokenize", native.tokenize, bodies.TokenizeBody),
    Operation("/detokenize", native.detokenize, bodies.DetokenizeBody),
    Operation("/status", native.status),
    Operation("/version", native.version),
    Operation("/health", native.health),
    Operation("/ready", native.ready),
)


class Endpoint:
    """An operation as an ASGI application."""

    def __init__(self, context: Context, operation: Operation) -> None:
        self._context, self._operation = context, operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["state"]["call"]
        context, operation = self._context, self._operation
        arguments: dict[str, Any] = scope.get("path_params", {})
        if operation.body is not None:
            tenant, headers = call.who.tenant, Headers(scope=scope)
            raw = await read_body(receive, headers, context.max_body_bytes, context.room, tenant)
            scope["state"]["read"] = True
            value = decoded(raw, context.most_items())
            arguments = {"body": validated(operation.body, operation.fields, value)}
            del raw, value
        reply = await unless_gone(receive, operation.handle(context, call, **arguments))
        del arguments
        await reply(scope, receive, send)


def routes(context: Context, origins: Sequence[str] = ()) -> list[BaseRoute]:
    """The table as Starlette takes it, and the WebSocket."""
    found: list[BaseRoute] = [Route(o.path, Endpoint(context, o), methods=[o.method]) for o in OPERATIONS]
    return [*found, WebSocketRoute(PATH, StreamSocket(context, origins))]
