"""The table of routes as Starlette takes it: reading, parsing, handling, answering.

Must not know what a route does. Invariant: a handler gets a body only when all of it has come and is valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from wicore_trt.access.calls import Call
from wicore_trt.http.context import Context
from wicore_trt.http.intake import decoded, read_body, validated
from wicore_trt.http.metrics import metrics
from wicore_trt.http.openapi import document
from wicore_trt.http.page import page_routes
from wicore_trt.http.replies import Reply, json_reply
from wicore_trt.http.socket import PATH, StreamSocket
from wicore_trt.http.table import OPERATIONS, Operation
from wicore_trt.http.waiting import unless_gone


class Endpoint:
    """An operation as an ASGI application."""

    def __init__(self, context: Context, operation: Operation) -> None:
        self._context, self._operation = context, operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["state"]["call"]
        context, operation = self._context, self._operation
        arguments: dict[str, Any] = scope.get("path_params", {})
        with context.room.hold(call.who.tenant) as hold:
            if operation.body is not None:
                raw = await read_body(receive, Headers(scope=scope), context.max_body_bytes, hold)
                scope["state"]["read"] = True
                value = decoded(raw, context.most_items())
                arguments = {"body": validated(operation.body, operation.fields, value)}
                del raw, value
            work = operation.handle(context, call, **arguments)
            del arguments
            reply = await unless_gone(receive, work)
        await reply(scope, receive, send)


async def openapi(context: Context, call: Call) -> Reply:
    """This document."""
    return json_reply(document())


OPENAPI, METRICS = Operation("/openapi.json", openapi), Operation("/metrics", metrics)


def routes(context: Context, origins: Sequence[str] = ()) -> list[BaseRoute]:
    """The table as Starlette takes it, and the WebSocket."""
    served = (*OPERATIONS, OPENAPI, METRICS)
    found: list[BaseRoute] = [Route(o.path, Endpoint(context, o), methods=[o.method]) for o in served]
    return [*found, *page_routes(), WebSocketRoute(PATH, StreamSocket(context, origins))]
