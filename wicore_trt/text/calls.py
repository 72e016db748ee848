"""Calls of functions: the constraint that makes them well-formed, and finding them in a text as it comes.

A call is {"name": ..., "parameters": {...}}, several are a list of these; `text.turns` tells the model so. It must not
know requests or transports. Invariant: under the constraint every output is calls or a text, which its first characters
decide, and the texts of a call's arguments, put together, are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wicore_trt.types import Constraint, ConstraintKind

MAX_CALLS = 32
_FREE = r"TEXT: /[^\[\{](?s:.*)/"
"""A text that does not begin as calls do. The first character must tell: of what could be both, llguidance reads on in
the longer one, which the text always is."""
_SPACE = " \n\t"


@dataclass(frozen=True, slots=True)
class Function:
    """What the model may call. `strict`: nothing of the schema may be left out of account."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False

    def declared(self) -> dict[str, Any]:
        """As the model is told."""
        described = {"description": self.description} if self.description else {}
        return {"name": self.name, **described, "parameters": self.parameters}


def calls_constraint(functions: Sequence[Function], *, must: bool, several: bool) -> Constraint:
    """Outputs that call these functions; unless they `must`, a text will do too. `several` calls, or one."""
    schemas = {f"f{i}": _moved(function.parameters, f"#/$defs/f{i}") for i, function in enumerate(functions)}
    each = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, function in zip(schemas, functions, strict=True)
    ]
    one = {"anyOf": each} if len(each) > 1 else each[0]
    many = {"type": "array", "items": {"$ref": "#/$defs/call"}, "minItems": 1, "maxItems": MAX_CALLS}
    schema: dict[str, Any] = {"$defs": {**schemas, "call": one}}
    schema |= {"anyOf": [{"$ref": "#/$defs/call"}, many]} if several else {"$ref": "#/$defs/call"}
    if not any(function.strict for function in functions):
        schema["x-guidance"] = {"lenient": True, "coerce_one_of": True}
    text = json.dumps(schema, ensure_ascii=False)
    if must:
        return Constraint(ConstraintKind.JSON_SCHEMA, text)
    return Constraint(ConstraintKind.GRAMMAR, f"start: calls | TEXT |\ncalls: %json {text}\n{_FREE}")


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references to its own root lead to the place where it is now."""
    if isinstance(schema, Mapping):
        return {
            key: to + value[1:] if key == "$ref" and isinstance(value, str) and value[:1] == "#" else _moved(value, to)
            for key, value in schema.items()
        }
    return [_moved(item, to) for item in schema] if isinstance(schema, list) else schema


@dataclass(slots=True)
class Piece:
    """What a stretch of an output brings: text, or more of a call. `name` comes with the first piece of a call, whose
    number `call` is."""

    text: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


class CallFinder:
    """Calls and text of one output. `calls` is how many calls have begun."""

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""  # what is neither text nor call yet, or the beginning of a name
        self._state = self._opening
        self._depth, self._in_string, self._escaped = 0, False, False

    def push(self, text: str) -> list[Piece]:
        """The pieces that a text adds."""
        found: list[Piece] = []
        while text:
            text = self._state(text, found)
        return found

    def end(self) -> list[Piece]:
        """What is left when the output has ended."""
        held, self._held = self._held, ""
        return [Piece(text=held)] if held and self._state == self._opening else []

    def _opening(self, text: str, found: list[Piece]) -> str:
        held = self._held + text
        opens, at = _opens(held)
        if opens is None:
            self._held = held
            return ""
        self._held = ""
        self._state = self._name if opens else self._text
        return held[at:] if opens else held

    def _text(self, text: str, found: list[Piece]) -> str:
        found.append(Piece(text=text))
        return ""

    def _name(self, text: str, found: list[Piece]) -> str:
        """Up to the end of the string that is the name."""
        held = (self._held + text).lstrip(_SPACE)
        try:
            name, at = json.JSONDecoder().raw_decode(held)
        except ValueError:
            self._held = held
            return ""
        self._held = ""
        found.append(Piece(call=self.calls, name=str(name)))
        self.calls += 1
        self._state = self._before_arguments
        return held[at:]

    def _before_arguments(self, text: str, found: list[Piece]) -> str:
        at = text.find("{")
        if at < 0:
            return ""
        self._state, self._depth = self._arguments, 0
        return text[at:]

    def _arguments(self, text: str, found: list[Piece]) -> str:
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    found.append(Piece(call=self.calls - 1, arguments=text[: at + 1]))
                    self._state = self._between
                    return text[at + 1 :]
        found.append(Piece(call=self.calls - 1, arguments=text))
        return ""

    def _between(self, text: str, found: list[Piece]) -> str:
        """Up to the colon behind the next "name"; nothing else between two calls has one."""
        at = text.find(":")
        if at < 0:
            return ""
        self._state = self._name
        return text[at + 1 :]


def _opens(text: str) -> tuple[bool | None, int]:
    """Whether a text begins as calls do (None: it may yet), and where the first name follows."""
    at, parts = 0, ["[", "{", '"name"', ":"] if text[:1] == "[" else ["{", '"name"', ":"]
    for number, part in enumerate(parts):
        while number and text[at : at + 1] in tuple(_SPACE):
            at += 1
        seen = text[at : at + len(part)]
        if seen != part:
            return (None if part.startswith(seen) else False), at
        at += len(part)
    return True, at
