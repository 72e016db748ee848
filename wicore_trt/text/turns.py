"""Conversations as text in Gemma 3's format of turns, with what the model's own template does not know: functions that
the model may call, its calls, their results, and turns of one role in a row.

Gemma 3 has no tokens for calls. It is told the functions as JSON and calls one by answering with JSON alone; a result
is a turn of the user. It must not know token ids. Invariant: every message's text is in the prompt, or the caller gets
an InvalidRequestError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.text.chat import ROLES, content_text

_PREAMBLE = (
    "You can call functions. To call one, answer with one line of JSON and nothing else, without Markdown: "
    '{"name": NAME, "parameters": {ARGUMENT: VALUE, ...}}. Several calls are a JSON list of these. '
    "The results follow in <tool_response>. Call a function only when you need it; otherwise answer in plain text.\n\n"
    "These are the functions, with JSON schemas of their parameters:\n"
)
_KEYS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
_TURN_TOKENS = re.compile("<(?:start|end)_of_turn>")


def has_calls(messages: object) -> bool:
    """Whether there are calls of functions among the messages, or results."""
    return isinstance(messages, Sequence) and any(
        isinstance(m, Mapping) and (m.get("role") == "tool" or m.get("tool_calls")) for m in messages
    )


def render(
    messages: Sequence[Mapping[str, object]], functions: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
) -> str:
    """The text of a conversation, without BOS. `functions` are {"name", "description", "parameters"}.

    Raises InvalidRequestError (field "messages") for messages that are none.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise _invalid("messages must be a non-empty list.")
    head: list[str] = []
    turns: list[tuple[str, list[str]]] = []
    names: dict[str, str] = {}  # of functions, by the id of the call
    for index, message in enumerate(messages):
        role, text = _turn(index, message, names)
        if role == "system":
            if turns:
                raise _invalid(f"messages[{index}]: a {message['role']} message must come first.")
            head.append(text)
        elif turns and turns[-1][0] == role:
            turns[-1][1].append(text)
        else:
            turns.append((role, [text]))
    if not turns:
        raise _invalid("messages hold no user turn.")
    if functions:
        head.append(_PREAMBLE + "\n".join(json.dumps(function, ensure_ascii=False) for function in functions))
    if head and turns[0][0] == "model":
        turns.insert(0, ("user", [""]))
    if head:
        turns[0][1][:0] = head
    parted = ((role, "\n\n".join(texts)) for role, texts in turns)
    text = "".join(f"<start_of_turn>{role}\n{content}<end_of_turn>\n" for role, content in parted)
    return text + "<start_of_turn>model\n" if add_generation_prompt else text


def _turn(index: int, message: object, names: dict[str, str]) -> tuple[str, str]:
    """Whose turn it is in Gemma's words, and its text."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise _invalid(f"{where} must be an object with role and content.")
    given = message.get("role")
    role = "tool" if given == "tool" else ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise _invalid(f"{where}.role must be one of {', '.join((*ROLES, 'tool'))}, got {shown(given)}.")
    surplus = sorted(str(key) for key, value in message.items() if key not in _KEYS[role] and value)
    if surplus:
        raise _invalid(f"{where} has {shown(surplus[0])}, which is not supported.")
    content, calls = message.get("content"), message.get("tool_calls")
    if role == "assistant":
        text = content_text(f"{where}.content", content).strip() if content else ""
        made = _calls(f"{where}.tool_calls", calls, names) if calls else ""
        return "model", "\n".join(filter(None, (text, made)))
    text = content_text(f"{where}.content", content).strip()
    if role != "tool":
        return role, text
    called = message.get("tool_call_id")
    if not isinstance(called, str) or called not in names:
        raise _invalid(f"{where} of role tool needs the tool_call_id of a call before it.")
    # What comes from elsewhere begins and ends no turn.
    result = json.dumps({"name": names[called], "content": _TURN_TOKENS.sub("", text)}, ensure_ascii=False)
    return "user", f"<tool_response>\n{result}\n</tool_response>"


def _calls(where: str, calls: object, names: dict[str, str]) -> str:
    """Calls as the model made them."""
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise _invalid(f"{where} must be a list.")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _invalid(f"{where}[{i}] must be a function call with a name.")
        arguments = function.get("arguments") or "{}"
        try:
            parameters = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise _invalid(f"{where}[{i}].function.arguments must be JSON.") from None
        found.append({"name": function["name"], "parameters": parameters})
        names[str(call.get("id"))] = function["name"]
    return json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False)


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="messages")
