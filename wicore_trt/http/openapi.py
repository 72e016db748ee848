"""The OpenAPI document, made from the table of routes and the models of bodies. Must not know handlers' inside."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from wicore_trt import __version__
from wicore_trt.http.schemas import OBJECT, TEXT, object_of
from wicore_trt.http.table import OPEN, OPERATIONS, Operation

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
    400: "A field is wrong; `param` names it.",
    401: "No valid API key.",
    404: "No such model.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is no plain JSON.",
    429: "Too many requests or tokens; `retry-after` says when to come back.",
    500: "The engine or the server failed.",
    503: "The server starts or ends.",
    504: "The request's `timeout` passed.",
}


def document() -> dict[str, Any]:
    """The document of this version."""
    models = sorted({o.body for o in OPERATIONS if o.body is not None}, key=lambda model: model.__name__)
    _, found = models_json_schema([(m, "validation") for m in models], ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        path = operation.path.replace(":path", "")
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "WiCore-TRT", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**found.get("$defs", {}), "Error": ERROR, "AnthropicError": ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    statuses = [200, *([] if operation.path in OPEN else [401]), *operation.statuses]
    entry: dict[str, Any] = {
        "operationId": operation.handle.__name__,
        "summary": (operation.handle.__doc__ or "").partition("\n")[0],
        "responses": {str(status): _response(operation, status) for status in statuses},
    }
    if operation.path in OPEN:
        entry["security"] = []
    if "{name" in operation.path:
        entry["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        entry["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return entry


def _response(operation: Operation, status: int) -> dict[str, Any]:
    if status != 200:
        name = "AnthropicError" if operation.anthropic else "Error"
        content = {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        return {"description": MEANINGS[status], "content": content}
    found: dict[str, Any] = {JSON: {"schema": OBJECT}}
    if operation.streams:
        found["text/event-stream"] = {"schema": {}}  # tools disagree whether it is of the stream or of an event
    return {"description": "Done.", "content": found}
