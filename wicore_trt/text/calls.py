"""Constrain calls of functions to be well-formed, and find them in a text as it comes.

A call is {"name": ..., "parameters": {...}}, several are a list of these; `text.turns` tells the model so. Must not
know requests or transports. Invariant: under the constraint an output is calls or a text, which its beginning
decides, and the texts of a call's arguments, put together, are JSON.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wicore_trt.types import Constraint, ConstraintKind

MAX_CALLS = 32
WHITESPACE = r" |\n[ \t]{0,32}"
"""Between the parts of JSON: what formatters write. Where any amount may come, weak models go on with it for ever."""
_FREE = r"TEXT: /[ \n\t]*[^\[\{ \n\t](?s:.*)/"
"""A text that does not begin as calls do. The first character that is no blank must tell: where both fit,
llguidance reads on in the longer one, which the text always is."""
_S = r"[ \n\t]*"
_LISTED = re.compile(rf"{_S}(?:\[{_S})?")
"""Blanks and a bracket that may come before the first call."""
_HEAD_PARTS = (
    *(r"\{", _S, *'"name"', _S, ":", _S, '"', "([a-zA-Z0-9_.-]{1,64})", '"'),
    *(_S, ",", _S, *'"parameters"', _S, ":", _S),
)
_HEAD = re.compile("".join(_HEAD_PARTS) + r"(?=\{)")
"""A call up to its arguments."""
_HEAD_SO_FAR = re.compile("".join(f"(?:{part}" for part in _HEAD_PARTS) + ")?" * len(_HEAD_PARTS))
"""Beginning, of any length, of a call up to its arguments."""
_NATIVE, _NATIVE_END, _QUOTE = "<start_function_call>call:", "<end_function_call>", "<escape>"
"""FunctionGemma's own form: call:NAME{KEY:VALUE,...}, texts between two _QUOTE."""
_NATIVE_CALL = re.compile(rf"{_NATIVE}([a-zA-Z0-9_.-]+)(\{{.*\}}){_NATIVE_END}", re.DOTALL)
_BLANKS = {"whitespace_pattern": WHITESPACE}
_OPENS = frozenset(("patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "if", "$ref"))
"""Keywords of a schema by which an object may have more properties than `properties` names."""


@dataclass(frozen=True, slots=True)
class Function:
    """Function that the model may call. `strict`: its whole schema must be enforced."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False

    def describe_function(self) -> dict[str, Any]:
        described = {"description": self.description} if self.description else {}
        return {"name": self.name, **described, "parameters": self.parameters}


def calls_constraint(
    functions: Sequence[Function], *, must: bool, several: bool, answer: Mapping[str, Any] | None = None
) -> Constraint:
    """Make the constraint for one call, or `several`, of these functions.
    Unless they `must` be called, text is allowed, too, or JSON of the schema `answer`, which must satisfy
    `tells_from_calls`."""
    schemas = {
        f"f{i}": _move_references(_close_schema(function.parameters), f"#/$defs/f{i}")
        for i, function in enumerate(functions)
    }
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
    strict = any(function.strict for function in functions)
    schema["x-guidance"] = _BLANKS if strict else {"lenient": True, "coerce_one_of": True} | _BLANKS
    text = json.dumps(schema, ensure_ascii=False)
    if must:
        return Constraint(ConstraintKind.JSON_SCHEMA, text)
    if answer is None:
        return Constraint(ConstraintKind.GRAMMAR, f"start: calls | TEXT |\ncalls: %json {text}\n{_FREE}")
    said = json.dumps({"x-guidance": _BLANKS, **answer}, ensure_ascii=False)
    return Constraint(ConstraintKind.GRAMMAR, f"start: calls | answer\ncalls: %json {text}\nanswer: %json {said}")


def lets_text_be(constraint: Constraint | None) -> bool:
    """Return True when a constraint of `calls_constraint` allows any text beside calls."""
    return constraint is not None and constraint.text.startswith("start: calls | TEXT")


def tells_from_calls(answer: Mapping[str, Any]) -> bool:
    """Return True when no JSON of a schema can be taken for a call: it has objects without both keys of a call."""
    named = answer.get("properties", {})
    closed = answer.get("type") == "object" and answer.get("additionalProperties") is False and isinstance(named, dict)
    return closed and not {"name", "parameters"} <= named.keys() and not _OPENS & answer.keys()


def _close_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Forbid parameters that a schema does not name: the function would not take them."""
    if "properties" not in schema or "additionalProperties" in schema or _OPENS & schema.keys():
        return schema
    return {**schema, "additionalProperties": False}


def _move_references(schema: Any, to: str) -> Any:
    """Rewrite a schema's references to its own root, which is now at `to`."""
    if isinstance(schema, Mapping):
        return {
            key: to + value[1:]
            if key == "$ref" and isinstance(value, str) and value[:1] == "#"
            else _move_references(value, to)
            for key, value in schema.items()
        }
    return [_move_references(item, to) for item in schema] if isinstance(schema, list) else schema


@dataclass(slots=True)
class TextPart:
    """Part of an output: text, or more of a call. A call's first part has `id` and `name`; `call` is its number."""

    text: str = ""
    call: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def gather_parts(pieces: Sequence[TextPart]) -> tuple[str, list[TextPart]]:
    """Join the text of some parts, and the parts of each call."""
    calls: dict[int, TextPart] = {}
    for piece in pieces:
        if piece.call is not None:
            call = calls.setdefault(piece.call, TextPart(call=piece.call, id=piece.id, name=piece.name))
            call.arguments += piece.arguments
    return "".join(piece.text for piece in pieces), [*calls.values()]


class CallFinder:
    """Splits one output into calls and text. `calls` is how many calls have begun."""

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""  # characters that are neither text nor call yet
        self._state = self._read_opening
        self._depth, self._in_string, self._escaped = 0, False, False

    @property
    def is_whole(self) -> bool:
        """True where there are calls, and the last one has all of its arguments."""
        return self.calls > 0 and self._state in (self._read_between, self._read_native)

    def push_text(self, text: str) -> list[TextPart]:
        found: list[TextPart] = []
        while text:
            text = self._state(text, found)
        return found

    def end_output(self) -> list[TextPart]:
        """Return the rest at the end of the output, without a call that was cut off before its arguments."""
        held, self._held = self._held, ""
        return [TextPart(text=held)] if held and not (self.calls or "{" in held or "[" in held) else []

    def _read_opening(self, text: str, found: list[TextPart]) -> str:
        held, self._held = self._held + text, ""
        begun = held.lstrip()
        if begun.startswith(_NATIVE):
            self._state = self._read_native
            return begun
        if begun and _NATIVE.startswith(begun):
            self._held = held
            return ""
        listed = _LISTED.match(held)
        assert listed is not None
        at = listed.end()
        if (head := _HEAD.match(held, at)) is not None:
            return self._begin_call(head, found)
        if _HEAD_SO_FAR.fullmatch(held, at):
            self._held = held
        else:
            self._state = self._read_text
            found.append(TextPart(text=held))
        return ""

    def _read_text(self, text: str, found: list[TextPart]) -> str:
        found.append(TextPart(text=text))
        return ""

    def _read_native(self, text: str, found: list[TextPart]) -> str:
        """Read FunctionGemma's calls, each as soon as it is whole."""
        call, end, self._held = (self._held + text).partition(_NATIVE_END)
        if not end:
            self._held = call
            return ""
        read = _NATIVE_CALL.search(call + end)
        if read is not None:
            arguments = json.dumps(_native_value(read[2], 0)[0], ensure_ascii=False)
            found.append(
                TextPart(call=self.calls, id=f"call_{uuid.uuid4().hex[:24]}", name=read[1], arguments=arguments)
            )
            self.calls += 1
        rest, self._held = self._held, ""
        return rest

    def _read_between(self, text: str, found: list[TextPart]) -> str:
        held = self._held + text
        at = held.find("{")
        if at >= 0 and (head := _HEAD.match(held, at)) is not None:
            return self._begin_call(head, found)
        self._held = held[at:] if at >= 0 else ""
        return ""

    def _begin_call(self, head: re.Match[str], found: list[TextPart]) -> str:
        found.append(TextPart(call=self.calls, id=f"call_{uuid.uuid4().hex[:24]}", name=head[1]))
        self.calls += 1
        self._state, self._held, self._depth = self._read_arguments, "", 0
        return head.string[head.end() :]

    def _read_arguments(self, text: str, found: list[TextPart]) -> str:
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
                    found.append(TextPart(call=self.calls - 1, arguments=text[: at + 1]))
                    self._state = self._read_between
                    return text[at + 1 :]
        found.append(TextPart(call=self.calls - 1, arguments=text))
        return ""


def _native_value(text: str, at: int) -> tuple[Any, int]:
    """Read a value of FunctionGemma's format at `at`; return it and its end, the text's end for an incomplete value."""
    if text.startswith(_QUOTE, at):
        said, _, _ = text[at + len(_QUOTE) :].partition(_QUOTE)
        return said, at + len(said) + 2 * len(_QUOTE)
    if text[at : at + 1] not in ("{", "["):
        word = re.compile(r"[^,}\]]*").match(text, at)
        assert word is not None
        try:
            return json.loads(word[0]), word.end()
        except ValueError:
            return word[0].strip(), word.end()
    named, items, at = text[at] == "{", list[Any](), at + 1
    while at < len(text) and text[at] not in "}]":
        key = ""
        if named:
            key, _, _ = text[at:].partition(":")
            at += len(key) + 1
        value, at = _native_value(text, at)
        items.append((key.strip().replace(_QUOTE, ""), value) if named else value)
        at += text[at : at + 1] == ","
    return dict(items) if named else items, at + 1
