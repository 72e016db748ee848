"""Write functions, calls and results as plain messages, and conversations in Gemma 3's turns for models without
template.

Gemma 3 has no tokens for calls. It is told the functions as JSON and calls one by answering with JSON alone; a
result is a turn of the user. It must not know token ids. Invariant: every message's text is in the prompt, or the
caller gets an InvalidRequestError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wicore_trt.text.chat import ROLES, checked_messages, content_text, invalid_messages
from wicore_trt.text.images import IMAGE_MARK, is_image_part

_PREAMBLE = (
    "You can call functions. To call one, answer with one line of JSON and nothing else, without Markdown: "
    '{"name": NAME, "parameters": {ARGUMENT: VALUE, ...}}. Several calls are a JSON list of these. '
    "The results follow in <tool_response>. Call a function only when you need it; otherwise answer in plain text.\n\n"
    "These are the functions, with JSON schemas of their parameters:\n"
)


def has_calls(messages: object) -> bool:
    """Return True when messages have calls of functions, or results."""
    return isinstance(messages, Sequence) and any(
        isinstance(m, Mapping) and (m.get("role") == "tool" or m.get("tool_calls")) for m in messages
    )


def render_turns(
    messages: Sequence[Mapping[str, object]], functions: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
) -> str:
    """Render a conversation, without BOS. Raises as `plain_messages` does."""
    turns = plain_messages(messages, functions)
    if turns[0]["role"] == "system":  # Gemma 3 has no such turn: the user's first one begins with it
        turns[:2] = [{"role": "user", "content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}]
    text = ""
    for turn in turns:
        text += f"<start_of_turn>{turn['role'].replace('assistant', 'model')}\n{turn['content']}<end_of_turn>\n"
    return text + "<start_of_turn>model\n" if add_generation_prompt else text


def plain_messages(
    messages: Sequence[Mapping[str, object]], functions: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """Make the conversation for a template that takes no tools.
    The functions, {"name", "description", "parameters"}, are in its system message, calls are text of the assistant
    and results text of the user; turns of one role in a row are one. Raises InvalidRequestError (field "messages")."""
    head: list[str] = []
    turns: list[tuple[str, list[str]]] = []
    for index, (message, calls, name) in enumerate(_name_results(messages)):
        role, content = ROLES.get(str(message["role"]), "user"), message.get("content")
        if role == "assistant":
            content = content or ""
        marks = ""
        if name is not None and isinstance(content, (list, tuple)):
            marks = IMAGE_MARK * sum(map(is_image_part, content))  # behind the JSON
            content = [part for part in content if not is_image_part(part)] or ("" if marks else content)
        text = content_text(f"messages[{index}].content", content).strip()
        if name is not None:
            text = f"<tool_response>\n{_encode_json({'name': name, 'content': text})}\n</tool_response>{marks}"
        if calls:
            found = [{"name": called, "parameters": parameters} for called, parameters in calls]
            text = "\n".join(filter(None, (text, _encode_json(found[0] if len(found) == 1 else found))))
        if role == "system" and not turns:
            head.append(text)
            continue
        role = "user" if role == "system" else role
        if not turns or turns[-1][0] != role:
            turns.append((role, []))
        turns[-1][1].append(text)
    if not turns:
        raise invalid_messages("messages hold no user turn.")
    if functions:
        head.append(_PREAMBLE + "\n".join(map(_encode_json, functions)))
    if head and turns[0][0] == "assistant":
        turns.insert(0, ("user", []))
    if head:
        turns.insert(0, ("system", head))
    return [{"role": role, "content": "\n\n".join(texts)} for role, texts in turns]


def tool_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """Make the conversation for a template that takes tools: arguments as objects, results with a function's name.
    Raises InvalidRequestError (field "messages")."""
    found = []
    for message, calls, name in _name_results(messages):
        named = [{"name": function, "arguments": arguments} for function, arguments in calls]
        given = message.get("tool_calls")
        ids = [call.get("id") for call in given] if isinstance(given, Sequence) else []
        called = [{"id": i, "type": "function", "function": f} for i, f in zip(ids, named, strict=False)]
        more = ({"tool_calls": called} if called else {}) | ({"name": name} if name is not None else {})
        found.append({**{key: value for key, value in message.items() if key != "tool_calls"}, **more})
    return found


def _name_results(
    messages: Sequence[Mapping[str, object]],
) -> Iterator[tuple[Mapping[str, Any], list[tuple[str, Any]], str | None]]:
    """Yield each message with its calls, and the name of the function whose result it is."""
    names: dict[str, str] = {}  # of functions, by the id of the call
    for index, message in enumerate(checked_messages(messages)):
        where, calls, name = f"messages[{index}]", list[tuple[str, Any]](), None
        if message.get("tool_calls"):
            calls = _read_calls(f"{where}.tool_calls", message["tool_calls"], names)
        if message["role"] == "tool":
            called = message.get("tool_call_id")
            if not isinstance(called, str) or called not in names:
                raise invalid_messages(f"{where} of role tool needs the tool_call_id of a call before it.")
            name = names[called]
        yield message, calls, name


def _read_calls(where: str, calls: object, names: dict[str, str]) -> list[tuple[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise invalid_messages(f"{where} must be a list.")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid_messages(f"{where}[{i}] must be a function call with a name.")
        arguments = function.get("arguments") or "{}"
        try:
            parameters = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise invalid_messages(f"{where}[{i}].function.arguments must be JSON.") from None
        found.append((function["name"], parameters))
        names[str(call.get("id"))] = function["name"]
    return found


def _encode_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
