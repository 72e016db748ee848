"""Tools of chat requests: what the model is told, what it is held to, and answers with calls in OpenAI's shape.

Must not know engines. Invariants: a request whose tools may be called is constrained, so that what looks like a call is
one; an answer has calls or text; ids of calls are the same in all chunks.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Any

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.http.bodies import ChatBody
from wicore_trt.http.generation import Totals
from wicore_trt.http.shapes import ChatShape, encode
from wicore_trt.text.calls import CallFinder, Function, Piece, calls_constraint
from wicore_trt.types import Completion, Constraint, FinishReason, TextOutput

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that may be called in an answer, and the constraint that the answer is under."""

    functions: tuple[Function, ...]
    constraint: Constraint


def tools_of(body: ChatBody) -> Tools | None:
    """None where no function may be called. Raises InvalidRequestError."""
    functions = [_function(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidRequestError("tools has a name twice.", field="tools")
    choice = _choice(body.tool_choice, names)
    if not functions or choice == "none":
        return None
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise InvalidRequestError(
            "response_format and tools exclude each other.", field="response_format", fix="Set tool_choice to none."
        )
    wanted = functions if choice in ("auto", "required") else [functions[names.index(choice[1:])]]
    several = body.parallel_tool_calls is not False
    constraint = calls_constraint(wanted, must=choice != "auto", several=several)
    return Tools(tuple(functions), constraint)


def _choice(given: object, names: list[str]) -> str:
    """none, auto, required, or "=" and the name of a function."""
    if given is None:
        return "auto"
    if isinstance(given, str) and given in ("none", "auto", "required"):
        if given == "required" and not names:
            raise InvalidRequestError("tool_choice is required, and there are no tools.", field="tool_choice")
        return given
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            f"tool_choice is none, auto, required or a function, got {shown(given)}.", field="tool_choice"
        )
    if name not in names:
        raise InvalidRequestError(f"tool_choice names {shown(name)}, which is none of the tools.", field="tool_choice")
    return f"={name}"


def _function(where: str, tool: dict[str, Any]) -> Function:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequestError(f"{where} must be of type function.", field=where)
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}.function.name must be 1 to 64 letters, digits, _, . or -, got {shown(name)}.", field=where
        )
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{where}.function.description must be a text.", field=where)
    parameters = parameters or {}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"{where}.function.parameters must be a schema of an object.", field=where)
    return Function(name, description or "", {"type": "object", **parameters}, function.get("strict") is True)


class ToolShape(ChatShape):
    """A conversation's answer that may have calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._finders: dict[int, CallFinder] = {}

    def chunk(self, index: int, output: TextOutput, totals: Totals) -> bytes:
        finder, reason = self._finders.setdefault(index, CallFinder()), output.finish_reason
        delta = _delta(finder.push(output.text) + (finder.end() if reason is not None else []))
        if not (delta or reason or output.logprobs or self._continuous):
            return b""
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(index, output) if output.logprobs else None,
            "finish_reason": None if reason is None else _reason(reason, finder),
            **({} if reason is None else {"stop_reason": output.stop_reason}),
        }
        raw = self._open.removesuffix(b'{"index":') + encode(choice) + b"]"
        return raw + (self._counts(totals) if self._continuous else self._tail)

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        finder = CallFinder()
        delta = _delta(finder.push(completion.text) + finder.end())
        calls = [{k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls", ())]
        message = {"role": "assistant", "content": delta.get("content"), "refusal": None}
        return {
            **super()._choice(index, completion),
            "message": message | ({"tool_calls": calls} if calls else {"content": delta.get("content", "")}),
            "finish_reason": _reason(completion.finish_reason, finder),
        }


def _reason(reason: FinishReason, finder: CallFinder) -> str:
    return "tool_calls" if finder.calls and reason is FinishReason.STOP else reason.value


def _delta(pieces: list[Piece]) -> dict[str, Any]:
    """What pieces add to a message: text, or calls, the parts of each put together."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.call is None:
            delta["content"] = delta.get("content", "") + piece.text
            continue
        call = calls.setdefault(piece.call, {"index": piece.call, "function": {"arguments": ""}})
        if piece.name is not None:
            call |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            call["function"] = {"name": piece.name, "arguments": ""}
        call["function"]["arguments"] += piece.arguments
    return delta | ({"tool_calls": list(calls.values())} if calls else {})
