"""JSON schemas in short. Must not know which. Invariant: a schema that was made is not changed."""

from __future__ import annotations

from typing import Any

TEXT, NUMBER, FLAG, OBJECT = ({"type": kind} for kind in ("string", "integer", "boolean", "object"))
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}


def object_of(required: str = "", /, **properties: Any) -> dict[str, Any]:
    """An object with these properties, of which the names in `required` must be there."""
    needed = {"required": required.split()} if required else {}
    return {"type": "object", "properties": properties, **needed}


def one_of(names: str) -> dict[str, Any]:
    """A value that is one of several words."""
    return {"enum": names.split()}


def either(*schemas: dict[str, Any]) -> dict[str, Any]:
    """A value that satisfies one of the schemas."""
    return {"anyOf": list(schemas)}


def list_of(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A list of such values."""
    return {"type": "array", "items": items, **more}
