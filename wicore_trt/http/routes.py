"""List the routes (path, method, body, handler); make Starlette's routes and /openapi.json of them.

Must not know what a route does. Invariants: every route needs a key, but those that are named OPEN; a handler gets a
body only when all of it has come and is valid.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette import routing
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from wicore_trt import __version__
from wicore_trt.access.admission import OTHER
from wicore_trt.access.calls import Call
from wicore_trt.http import bodies, messages, native, openai, responses
from wicore_trt.http.bodies import OBJECT, TEXT, object_of
from wicore_trt.http.context import Context
from wicore_trt.http.intake import decode_json, parse_body, read_body
from wicore_trt.http.metrics import serve_metrics
from wicore_trt.http.page import load_assets
from wicore_trt.http.replies import json_reply, run_unless_gone
from wicore_trt.http.socket import PATH, StreamSocket

OPEN = frozenset(("/health", "/ready", "/ping"))
"""Paths that need no key."""


@dataclass(frozen=True, slots=True)
class Route:
    """Route: path, body and handler. `handle` is called with the context, the call, and the body or path parameters."""

    path: str
    handle: Callable[..., Awaitable[ASGIApp]]
    body: type[BaseModel] | None = None
    generates: bool = False
    anthropic: bool = False
    """True where errors have Anthropic's shape."""

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    @property
    def statuses(self) -> tuple[int, ...]:
        """Statuses of its failures, beside 401 for a missing key."""
        if self.generates:
            return (400, 404, 408, 413, 415, 429, 500, 503, 504)
        if self.body is not None:
            return (400, 404, 408, 413, 415, 429, 503)
        return (404, 503) if "{" in self.path else (503,)


ROUTES = (
    Route("/v1/models", openai.serve_models), Route("/v1/models/{name:path}", openai.serve_model),
    Route("/v1/chat/completions", openai.serve_chat, bodies.ChatBody, generates=True),
    Route("/v1/responses", responses.serve_responses, bodies.ResponsesBody, generates=True),
    Route("/v1/responses/input_tokens", responses.serve_input_tokens, bodies.ResponsesBody),
    Route("/v1/completions", openai.serve_completions, bodies.CompletionBody, generates=True),
    Route("/v1/messages", messages.serve_messages, bodies.MessagesBody, generates=True, anthropic=True),
    Route("/v1/messages/count_tokens", messages.serve_count_tokens, bodies.PromptBody, anthropic=True),
    Route("/v1/inference", native.serve_inference, bodies.InferenceBody, generates=True),
    Route("/v1/stats", native.serve_stats), Route("/tokenize", native.serve_tokenize, bodies.TokenizeBody),
    Route("/detokenize", native.serve_detokenize, bodies.DetokenizeBody),
    Route("/tokenizer_info", native.serve_tokenizer_info), Route("/load", native.serve_load),
    Route("/ping", native.serve_ping), Route("/status", native.serve_status), Route("/version", native.serve_version),
    Route("/health", native.serve_health), Route("/ready", native.serve_ready),
)  # fmt: skip

_PATHS = frozenset((*(route.path for route in ROUTES), "/openapi.json", "/metrics", "/v1/stream"))
_MODEL = "/v1/models/"


def name_path(path: str) -> str:
    """Name a path by a bounded set: one of the table, else OTHER."""
    if path.startswith(_MODEL):
        return f"{_MODEL}{{name}}"
    return path if path in _PATHS else OTHER


JSON = "application/json"
_NULLABLE = {"type": ["string", "null"]}
ERROR = object_of(
    "error", error=object_of("message type param code", message=TEXT, type=TEXT, param=_NULLABLE, code=_NULLABLE)
)
ANTHROPIC_ERROR = object_of(
    "type error", type={"const": "error"}, request_id=_NULLABLE,
    error=object_of("type message param", type=TEXT, message=TEXT, param=_NULLABLE),
)  # fmt: skip
MEANINGS = {
    400: "A field is wrong; `param` names it.", 401: "No valid API key.", 404: "No such model.",
    408: "The body did not come in time.", 413: "The body is too long.", 415: "The body is no plain JSON.",
    429: "Too many requests or tokens; `retry-after` says when to come back.",
    500: "The engine or the server failed.", 503: "The server starts or ends.",
    504: "The request's `timeout` passed.",
}  # fmt: skip


async def serve_openapi(context: Context, call: Call) -> ASGIApp:
    """Serve the OpenAPI document."""
    models = sorted({route.body for route in ROUTES if route.body is not None}, key=lambda model: model.__name__)
    _, found = models_json_schema([(m, "validation") for m in models], ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for route in ROUTES:
        path = route.path.replace(":path", "")
        paths.setdefault(path, {})[route.method.lower()] = _describe_route(route)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "WiCore-TRT", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**found.get("$defs", {}), "Error": ERROR, "AnthropicError": ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }
    return json_reply(document)


def _describe_route(route: Route) -> dict[str, Any]:
    statuses = [200, *([] if route.path in OPEN else [401]), *route.statuses]
    entry: dict[str, Any] = {
        "operationId": route.handle.__name__.removeprefix("serve_"),
        "summary": (route.handle.__doc__ or "").partition("\n")[0],
        "responses": {str(status): _describe_response(route, status) for status in statuses},
    }
    if route.path in OPEN:
        entry["security"] = []
    if "{name" in route.path:
        entry["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        entry["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return entry


def _describe_response(route: Route, status: int) -> dict[str, Any]:
    if status != 200:
        name = "AnthropicError" if route.anthropic else "Error"
        content = {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        return {"description": MEANINGS[status], "content": content}
    found: dict[str, Any] = {JSON: {"schema": OBJECT}}
    if route.body is not None and "stream" in route.body.model_fields:
        found["text/event-stream"] = {"schema": {}}  # tools disagree whether it is of the stream or of an event
    return {"description": "Done.", "content": found}


@dataclass(frozen=True, slots=True)
class Endpoint:
    context: Context
    route: Route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["state"]["call"]
        context, model = self.context, self.route.body
        arguments: dict[str, Any] = scope.get("path_params", {})
        with context.body_budget.open_share(call.who.tenant) as hold:
            if model is not None:
                raw = await read_body(receive, Headers(scope=scope), context.max_body_bytes, hold)
                scope["state"]["read"] = True
                arguments = {"body": parse_body(model, bodies.read_fields(model), decode_json(raw, context.max_items))}
                del raw
            work = self.route.handle(context, call, **arguments)
            del arguments
            reply = await run_unless_gone(receive, work)
        await reply(scope, receive, send)


def make_routes(context: Context) -> list[routing.BaseRoute]:
    """Make Starlette's routes of the table, the page and the WebSocket."""
    served = (*ROUTES, Route("/openapi.json", serve_openapi), Route("/metrics", serve_metrics))
    found = [routing.Route(r.path, Endpoint(context, r), methods=[r.method]) for r in served]
    page = [routing.Route(path, asset, methods=["GET"]) for path, asset in load_assets().items()]
    return [*found, *page, routing.WebSocketRoute(PATH, StreamSocket(context))]
