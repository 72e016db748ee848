"""Tools of chat requests: taking apart their fields, and answers with calls in OpenAI's shape.

Must not know engines. Invariants: an answer has calls or text; ids of calls are the same in all chunks.
"""

from __future__ import annotations

import re
from typing import Any

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.http.bodies import ChatBody
from wicore_trt.http.generation import Totals
from wicore_trt.http.shapes import ChatShape, encode
from wicore_trt.http.structured import constraint_of
from wicore_trt.text.calls import CallFinder, Function, Piece, gathered
from wicore_trt.text.tools import AUTO, NONE, REQUIRED, Tools, make_function, make_tools
from wicore_trt.types import Completion, FinishReason, TextOutput

DESCRIBED = frozenset(("function", "parameters", "input_schema", "format", "tools"))
"""Keys of tools that say how they are called."""
_KIND = re.compile(r"(?!function$)[a-zA-Z0-9_.-]{1,64}")


def tools_of(body: ChatBody, facts: dict[str, Any]) -> Tools | None:
    """None where no function may be called. Tools that a server of its own would run, as a search of the web, are left
    out, and `facts` of the call say which. Raises InvalidRequestError, also where one of these must be called."""
    functions, left_out = [], dict[str, str]()
    for i, tool in enumerate(body.tools or ()):
        if (kind := _hosted(tool)) is not None:
            left_out[str(tool.get("name") or tool.get("server_label") or kind)] = kind
        else:
            functions.append(_function(f"tools[{i}]", tool))
    if left_out:
        facts["tools_left_out"] = ", ".join(dict.fromkeys(left_out.values()))
    choice, named = _choice(body.tool_choice, left_out)
    if choice == REQUIRED and left_out and not functions:
        raise _cannot_run(next(iter(left_out.values())))
    several = body.parallel_tool_calls is not False
    return make_tools(functions, choice, named, several=several, beside=constraint_of(body))


def _hosted(tool: dict[str, Any]) -> str | None:
    """The type of a tool that brings nothing to call it by: whoever knows the type runs it."""
    kind = tool.get("type")
    plain = isinstance(kind, str) and kind != "custom" and _KIND.fullmatch(kind) is not None
    return kind if plain and not DESCRIBED & tool.keys() else None


def _cannot_run(kind: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"tool_choice asks for {kind}, which this server cannot run.", field="tool_choice", fix="Leave it out."
    )


def _choice(given: object, left_out: dict[str, str]) -> tuple[str, str | None]:
    """none, auto or required, and the name of a function that must be called."""
    if given is None:
        return AUTO, None
    if isinstance(given, str) and given in (NONE, AUTO, REQUIRED):
        return given, None
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    for asked in (name, given.get("type") if isinstance(given, dict) else None):
        if isinstance(asked, str) and (asked in left_out or asked in left_out.values()):
            raise _cannot_run(left_out.get(asked, asked))
    if not isinstance(name, str):
        raise InvalidRequestError(
            f"tool_choice is none, auto, required or a function, got {shown(given)}.", field="tool_choice"
        )
    return REQUIRED, name


def _function(where: str, tool: dict[str, Any]) -> Function:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequestError(f"{where} must be of type function.", field=where)
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    return make_function(where, name, description, parameters, function.get("strict") is True)


class Calls:
    """Text and calls of an answer's sequences."""

    def __init__(self) -> None:
        self._finders: dict[int, CallFinder] = {}

    def read(self, index: int, output: TextOutput) -> tuple[dict[str, Any], str | None]:
        """What an output adds to a message, and how the message ends with it."""
        finder, reason = self._finders.setdefault(index, CallFinder()), output.finish_reason
        delta = _delta(finder.push(output.text) + (finder.end() if reason is not None else []))
        return delta, None if reason is None else _reason(reason, finder)


class ToolShape(ChatShape):
    """A conversation's answer that may have calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls = Calls()

    def chunk(self, index: int, output: TextOutput, totals: Totals) -> bytes:
        delta, reason = self._calls.read(index, output)
        if not (delta or reason or output.logprobs or self._continuous or self._token_ids):
            return b""
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(index, output) if output.logprobs else None,
            "finish_reason": reason,
            **({} if reason is None else {"stop_reason": output.stop_reason}),
            **({"token_ids": output.token_ids} if self._token_ids else {}),
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
    return "tool_calls" if finder.whole and reason is FinishReason.STOP else reason.value


def _delta(pieces: list[Piece]) -> dict[str, Any]:
    """What pieces add to a message: text, or calls, the parts of each put together."""
    text, calls = gathered(pieces)
    delta: dict[str, Any] = {"content": text} if text else {}
    return delta | ({"tool_calls": [_part(call) for call in calls]} if calls else {})


def _part(call: Piece) -> dict[str, Any]:
    """What a piece adds to a call."""
    if call.name is None:
        return {"index": call.call, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.call, "id": call.id, "type": "function", "function": function}
