"""Choose the functions that a request's model is told of, and the constraint that makes its answer call them.

Must not know transports. Invariants: a request whose tools may be called is constrained, so that what looks like a
call is one; an answer format that cannot be told from calls is refused beside them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.text.calls import Function, calls_constraint, tells_from_calls
from wicore_trt.types import Constraint, ConstraintKind

MAX_TOOLS = 128
NONE, AUTO, REQUIRED = "none", "auto", "required"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that may be called in an answer, and the answer's constraint."""

    functions: tuple[Function, ...]
    constraint: Constraint


def make_function(where: str, name: object, description: object, parameters: object, strict: bool) -> Function:
    """Make a function from the client's field `where`. Raises InvalidRequestError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problem = f"The name of {where} must be 1 to 64 letters, digits, _, . or -, got {shown(name)}."
        raise InvalidRequestError(problem, field=where)
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"The description of {where} must be a text.", field=where)
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"The parameters of {where} must be a schema of an object.", field=where)
    return Function(name, description or "", {"type": "object", **parameters}, strict)


def make_tools(
    functions: Sequence[Function],
    choice: str,
    named: str | None,
    *,
    several: bool,
    beside: tuple[str, Constraint] | None,
) -> Tools | None:
    """Make the tools of a request, None where no function may be called.
    `choice` is NONE, AUTO or REQUIRED; the function `named` must be called. `beside` is the constraint of an answer
    without calls, and the field that asks for it. Raises InvalidRequestError with the field `tools`, `tool_choice`
    or the one in `beside`."""
    if len(functions) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(functions)} items; at most {MAX_TOOLS} are taken.", field="tools")
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidRequestError("tools has a name twice.", field="tools")
    if named is not None and named not in names:
        raise InvalidRequestError(f"tool_choice names {shown(named)}, which is none of the tools.", field="tool_choice")
    if choice == REQUIRED and not names:
        raise InvalidRequestError("tool_choice is required, and there are no tools.", field="tool_choice")
    if not functions or choice == NONE:
        return None
    wanted = [function for function in functions if named in (None, function.name)]
    constraint = calls_constraint(
        wanted, must=named is not None or choice == REQUIRED, several=several, answer=_read_schema(beside)
    )
    return Tools(tuple(functions), constraint)


def _read_schema(beside: tuple[str, Constraint] | None) -> dict[str, object] | None:
    if beside is None:
        return None
    name, constraint = beside
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        try:
            found = json.loads(constraint.text)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and tells_from_calls(found):
            return found
    raise InvalidRequestError(
        f"Beside tools, {name} must be a JSON schema of objects with additionalProperties: false, none with both "
        "`name` and `parameters`, as calls are.",
        field=name,
        fix="Or set tool_choice to none.",
    )
