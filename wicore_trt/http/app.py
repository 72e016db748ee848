"""Check every request before its route: id, key, open calls; write errors and the access line.

Must not know what a route does. Invariants (I19): no body is read before the key is known to be good; every answer
has x-request-id, and every error a body of the shape that its route's clients know; no text of an unexpected
exception reaches the client; a request writes one access line. After an error the connection closes without reading
the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wicore_trt.access.admission import OTHER, VERBS
from wicore_trt.access.calls import (
    CURRENT,
    REQUEST_ID_HEADER,
    Call,
    check_host,
    read_key,
    refuse_key,
    write_access_line,
)
from wicore_trt.access.keys import EVERYBODY, Identity
from wicore_trt.access.log import QuietLog
from wicore_trt.errors import RateLimitError, WicoreError
from wicore_trt.http import errors
from wicore_trt.http.context import Context
from wicore_trt.http.page import load_assets
from wicore_trt.http.replies import json_reply, rate_headers
from wicore_trt.http.routes import OPEN, ROUTES, make_routes, name_path

log = logging.getLogger(__name__)

LOUD = frozenset(route.path for route in ROUTES if route.generates)
"""Paths whose access lines are INFO."""
ANTHROPIC = frozenset(route.path for route in ROUTES if route.anthropic)
KEYLESS = OPEN | load_assets().keys()
"""Paths that need no key: the probes', and the page's own files."""
LEFT_OUT = {"tools_left_out": "x-wicore-tools-left-out", "schema_left_out": "x-wicore-schema-left-out"}
"""Headers of answers to requests with tools that others run, and with a schema that is not kept whole, by the fact."""
MAX_TOLD = 512
EXPOSED = (
    *("x-request-id", "retry-after", "retry-after-ms", *LEFT_OUT.values()),
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
)


class HttpApp:
    def __init__(self, context: Context, routes: Sequence[BaseRoute]) -> None:
        self._context = context
        self._router = Router(routes, redirect_slashes=False, default=refuse_path)
        self._refused = QuietLog(log, logging.WARNING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        method = scope["method"] if scope["type"] == "http" else "WEBSOCKET"
        who = EVERYBODY if path in KEYLESS else self._context.admission.keys.find_identity(read_key(headers.get))
        call = Call.from_headers(f"{method} {path}", who or Identity(), headers.get)
        call.facts["peer"] = "{}:{}".format(*(scope.get("client") or ("unix", "")))
        if who is not None and who.tenant:
            call.facts["tenant"] = who.tenant
        models = "anthropic-version" in headers and path.startswith("/v1/models")
        call.anthropic = path in ANTHROPIC or models
        scope["state"]["call"] = call
        CURRENT.set(call)
        scope["app"] = self  # the router then raises for a wrong method, in place of an answer of its own
        answer = Answer(call, scope, receive, send)
        try:
            if self._context.local and not self._context.admission.keys.needed:
                # A stranger's page may have made the name up, and no key keeps it out.
                check_host(headers.get("host"), self._context.allowed_hosts)
            if who is None:
                self._refused("refused a request without a valid API key", peer=call.facts["peer"])
                self._context.admission.counts.refused["http"] += 1
                raise refuse_key(headers.get, "Send it as Authorization: Bearer KEY.")
            with nullcontext() if path in KEYLESS else self._context.admission.calls.hold_place(who.tenant):
                await self._router(scope, receive, answer)
        except errors.ClientGoneError:
            answer.status = errors.CLIENT_GONE
        except HTTPException as error:
            extra = [(k.encode(), v.encode()) for k, v in (error.headers or {}).items()]
            other = (error.headers or {}).get("Allow", "another method")
            wrong_path = f"There is no {path}. /openapi.json lists what there is."
            known = {404: wrong_path, 405: f"{method} is not allowed here. Use {other}."}
            why = known.get(error.status_code, error.detail)
            await answer.send_error(errors.HttpError(error.status_code, why), extra)
        except Exception as raised:
            rates = rate_headers(self._context, call) if isinstance(raised, RateLimitError) else ()
            await answer.send_error(errors.name_failure(call, raised), rates)
        except BaseException:
            answer.status = errors.CLIENT_GONE
            raise
        finally:
            write_access_line(call, str(answer.status), generates=path in LOUD)
            verb = method if method in VERBS else OTHER
            self._context.admission.counts.http[verb, name_path(path), str(answer.status)] += 1


async def refuse_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Raise HTTPException where no route fits; Starlette itself refuses a WebSocket there with a bare 403."""
    raise HTTPException(404)


class Answer:
    """Sends one request's answer, with the headers that all answers have; an error after it has begun breaks it off."""

    def __init__(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        self._call, self._scope, self._receive, self._send = call, scope, receive, send
        self._ids = [(REQUEST_ID_HEADER.encode(), call.call_id.encode())]
        if call.anthropic:
            self._ids.append((b"request-id", call.call_id.encode()))
        self._begun = False
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"].endswith("http.response.start") or message["type"] == "websocket.accept":
            self._begun = True
            self.status = message.get("status", 101)
            message["headers"] = headers = [*message.get("headers", ()), *self._ids]
            for key, head in LEFT_OUT.items():
                if key in self._call.facts:
                    headers.append((head.encode(), str(self._call.facts[key])[:MAX_TOLD].encode()))
        await self._send(message)

    async def send_error(self, error: WicoreError, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        if self._begun:
            self.status = errors.status_of(error)
            raise error
        found, sent, call = [*headers, *errors.error_headers(error)], Headers(scope=self._scope), self._call
        has_body = sent.get("content-length", "0") != "0" or "transfer-encoding" in sent
        if has_body and not self._scope["state"].get("read", False):
            found.append((b"connection", b"close"))
        body = errors.anthropic_error_bytes(error, call.call_id) if call.anthropic else errors.error_bytes(error)
        await json_reply(body, errors.status_of(error), found)(self._scope, self._receive, self)


def make_app(context: Context) -> ASGIApp:
    """Make the application of all routes. Web pages of the context's origins may call it."""
    app = HttpApp(context, make_routes(context))
    if not context.origins:
        return app
    return CORSMiddleware(
        app, allow_origins=context.origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=EXPOSED
    )
