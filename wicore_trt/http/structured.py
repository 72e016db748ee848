"""Constraints on outputs as bodies ask for them: OpenAI's response_format, and the names that vLLM gives them.

Pure functions; must not know engines. Invariants: a body has at most one constraint; errors name the field that asked.
"""

from __future__ import annotations

from typing import Any

import msgspec

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.grammar.source import without_words
from wicore_trt.http.bodies import Generation, Knobs
from wicore_trt.types import Constraint, ConstraintKind

GUIDED = {
    "guided_json": ConstraintKind.JSON_SCHEMA,
    "guided_regex": ConstraintKind.REGEX,
    "guided_choice": ConstraintKind.CHOICE,
    "guided_grammar": ConstraintKind.GRAMMAR,
}
STRUCTURED = {kind.removeprefix("guided_"): found for kind, found in GUIDED.items()}
"""Names inside of structured_outputs, beside json_object."""
NAMES = GUIDED | {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    **dict.fromkeys(("ebnf", "grammar"), ConstraintKind.GRAMMAR),
    "allowed_token_ids": ConstraintKind.TOKENS,
}
"""Fields that are a constraint: vLLM's, SGLang's and llama.cpp's."""


def constraint_of(body: Knobs) -> tuple[str, Constraint] | None:
    """The field that asks for a constraint, and that. Raises InvalidRequestError."""
    found: list[tuple[str, Constraint]] = []
    if body.bad_words:
        found.append(("bad_words", _constraint("bad_words", ConstraintKind.GRAMMAR, without_words(body.bad_words))))
    if isinstance(body, Generation) and body.response_format is not None:
        found += [("response_format", made) for made in _response_format(body.response_format)]
    if isinstance(body, Generation) and body.structured_outputs is not None:
        found += [("structured_outputs", made) for made in _structured(body.structured_outputs)]
    given = {name: getattr(body, name, None) for name in NAMES}
    found += [(name, _constraint(name, NAMES[name], value)) for name, value in given.items() if value is not None]
    if len(found) > 1:
        raise InvalidRequestError(f"{found[0][0]} and {found[-1][0]} exclude each other.", field=found[-1][0])
    return found[0] if found else None


def named(error: InvalidRequestError, body: Knobs) -> InvalidRequestError:
    """An error under the name of the field that asked for what is wrong: tools, where they may be called."""
    if error.field == "prompt_logprobs" and getattr(body, "prompt_logprobs", None) is None:
        return InvalidRequestError(error.message, field="echo", fix="Leave echo or logprobs out.")
    if error.field != "constraint":
        return error
    found = constraint_of(body)
    tools = getattr(body, "tools", None) and getattr(body, "tool_choice", None) != "none"
    return InvalidRequestError(error.message, field="tools" if found is None or tools else found[0], fix=error.fix)


def _response_format(given: dict[str, Any]) -> list[Constraint]:
    kind = given.get("type")
    match kind:
        case "text":
            return []
        case "json_object" if isinstance(given.get("schema"), (dict, bool)):  # as llama.cpp takes it
            return [_constraint("response_format", ConstraintKind.JSON_SCHEMA, given["schema"])]
        case "json_object":
            return [Constraint(ConstraintKind.JSON_OBJECT)]
        case "json_schema":
            inside = given.get("json_schema")
            if not isinstance(inside, dict) or not isinstance(inside.get("schema"), (dict, bool)):
                raise InvalidRequestError(
                    "response_format.json_schema.schema must be a JSON schema.", field="response_format"
                )
            return [_constraint("response_format", ConstraintKind.JSON_SCHEMA, inside["schema"])]
    raise InvalidRequestError(
        f"response_format.type is text, json_object or json_schema, got {shown(kind)}.", field="response_format"
    )


def _structured(given: dict[str, Any]) -> list[Constraint]:
    names = ("json_object", *STRUCTURED)  # of the others the table of fields knows that they ask for nothing
    asked = {name: given[name] for name in names if given.get(name) not in (None, False)}
    if len(asked) != 1:
        raise InvalidRequestError("structured_outputs takes exactly one constraint.", field="structured_outputs")
    [(name, value)] = asked.items()
    if name == "json_object" and value is True:
        return [Constraint(ConstraintKind.JSON_OBJECT)]
    return [_constraint("structured_outputs", STRUCTURED[name], value)]


def _constraint(field: str, kind: ConstraintKind, value: object) -> Constraint:
    """A schema may come as JSON or as its text."""
    as_json = kind in (ConstraintKind.CHOICE, ConstraintKind.TOKENS) or (
        kind is ConstraintKind.JSON_SCHEMA and not isinstance(value, str)
    )
    if not as_json and not isinstance(value, str):
        raise InvalidRequestError(f"{field}: a {kind.value} is a text, got {shown(value)}.", field=field)
    try:
        return Constraint(kind, msgspec.json.encode(value).decode() if as_json else str(value))
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, field=field) from None
