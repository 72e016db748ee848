"""Convert Anthropic's Messages API: bodies to chats, answers to messages and their events.

Must not know engines or transports. Invariants: a stream's events open and close each block once, in order, and
blocks lie between message_start and message_delta.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from starlette.types import ASGIApp

from wicore_trt.access.calls import Call
from wicore_trt.access.entry import Totals
from wicore_trt.errors import InvalidRequestError, WicoreError, shown
from wicore_trt.http.blocks import Block, BlockShape, Change, named_event, was_cut
from wicore_trt.http.bodies import ChatBody, MessagesBody, PromptBody
from wicore_trt.http.client_tools import convert_message_tool
from wicore_trt.http.context import Context
from wicore_trt.http.conversation import ChatBuilder, make_chat_body, read_member, read_part, read_parts, rename_fields
from wicore_trt.http.convert import make_chat_request
from wicore_trt.http.errors import anthropic_error_bytes
from wicore_trt.http.openai import answer_requests, encode_prompt
from wicore_trt.http.replies import json_reply

CHAT_NAMES = {
    **dict.fromkeys(("messages", "prompt", "prompt_token_ids"), "messages"),
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Fields of the chat that a message becomes, by the names that its client knows."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def make_chat(body: PromptBody) -> ChatBody:
    """Make a chat of a request, or of a prompt whose tokens are counted. Raises InvalidRequestError."""
    choice = body.tool_choice
    asked: dict[str, Any] = {
        "tools": None if body.tools is None else list(map(convert_message_tool, body.tools)),
        "tool_choice": None if choice is None else _read_tool_choice(choice),
        "parallel_tool_calls": choice is None or choice.get("disable_parallel_tool_use") is not True,
    }
    if isinstance(body, MessagesBody):
        asked |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "response_format": _read_response_format(body),
        }
    return make_chat_body(body, _build_chat(body), **asked)


def _build_chat(body: PromptBody) -> ChatBuilder:
    found = ChatBuilder()
    if body.system:
        found.add_parts("system", read_parts(body.system, "system"))
    for i, message in enumerate(body.messages):
        where, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            problem = f"{where}.role must be user, assistant or system, got {shown(role)}."
            raise InvalidRequestError(problem, field=where)
        if not isinstance(content, list):
            found.add_parts(role, read_parts(content, f"{where}.content"))
            continue
        for j, block in enumerate(content):
            _add_block(found, role, block, f"{where}.content[{j}]")
    if found.last_role == "assistant":
        raise InvalidRequestError("The last message must be the user's.", field="messages")
    return found


def _add_block(found: ChatBuilder, role: str, block: Any, where: str) -> None:
    match role, block.get("type") if isinstance(block, dict) else None:
        case "user", "tool_result":
            parts = read_parts(block.get("content") or "", f"{where}.content")
            if block.get("is_error") is True:
                text = parts.pop(0) if isinstance(parts[0], str) else ""
                parts.insert(0, f"Error: {text}")
            found.add_result(read_member(block, "tool_use_id", where), parts, where)
        case "assistant", "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise InvalidRequestError(f"{where}.input must be an object, got {shown(given)}.", field=where)
            found.add_call(read_member(block, "id", where), read_member(block, "name", where), given)
        case "assistant", "thinking" | "redacted_thinking":
            pass  # of another model: what it thought is no part of the conversation
        case _:
            found.add_parts(role, [read_part(block, where)])


def _read_tool_choice(given: dict[str, Any]) -> Any:
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    if isinstance(kind, str) and kind in CHOICES:
        return CHOICES[kind]
    raise InvalidRequestError(f"tool_choice.type is auto, any, tool or none, got {shown(kind)}.", field="tool_choice")


def _read_response_format(body: MessagesBody) -> dict[str, Any] | None:
    formats = {"output_config.format": (body.output_config or {}).get("format"), "output_format": body.output_format}
    asked = [(field, given) for field, given in formats.items() if given is not None]
    if not asked:
        return None
    field, given = asked[-1]
    if len(asked) > 1:
        raise InvalidRequestError("output_format is the older name of output_config.format.", field=field)
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise InvalidRequestError(f"{field} must be of type json_schema.", field=field)
    if not isinstance(given.get("schema"), (dict, bool)):
        raise InvalidRequestError(f"{field}.schema must be a JSON schema.", field=field)
    return {"type": "json_schema", "json_schema": given}


class MessagesShape(BlockShape):
    def __init__(self, model: str, *, calls: bool) -> None:
        super().__init__(calls=calls)
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def make_whole(self, totals: Totals) -> dict[str, Any]:
        # A call without all of its arguments is none: stop_reason says that the answer was cut off.
        whole = (block for block in self.blocks if block.is_whole)
        content = [self._describe_block(block, block.name and json.loads(block.text)) for block in whole]
        return {**self._head, "content": content, **self._describe_end(), "usage": _count_usage(totals)}

    def open_sequence(self, index: int, totals: Totals) -> bytes:
        begun = {"content": (), "stop_reason": None, "stop_sequence": None, "usage": _count_usage(totals)}
        return named_event("message_start", message={**self._head, **begun}) + named_event("ping")

    def make_event(self, change: Change, block: Block, new: str) -> bytes:
        if change == "open":
            return named_event("content_block_start", index=block.number, content_block=self._describe_block(block, {}))
        if change == "close":
            return named_event("content_block_stop", index=block.number)
        is_text = block.name is None
        delta = {"type": "text_delta", "text": new} if is_text else {"type": "input_json_delta", "partial_json": new}
        return named_event("content_block_delta", index=block.number, delta=delta)

    def close_stream(self, totals: Totals) -> bytes:
        last = named_event("message_delta", delta=self._describe_end(), usage=_count_usage(totals))
        return last + named_event("message_stop")

    def break_stream(self, error: WicoreError) -> bytes:
        return b"event: error\ndata: " + anthropic_error_bytes(error) + b"\n\n"

    def _describe_end(self) -> dict[str, Any]:
        stop = self.last.stop_reason if self.last is not None else None
        if was_cut(self.last):
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "tool_use" if self.has_calls else "end_turn", "stop_sequence": None}

    def _describe_block(self, block: Block, given: Any) -> dict[str, Any]:
        if block.name is None:
            return {"type": "text", "text": block.text}
        return {"type": "tool_use", "id": f"toolu_{block.id[:24]}", "name": block.name, "input": given}


def _count_usage(totals: Totals) -> dict[str, Any]:
    return {
        "input_tokens": totals.prompt - totals.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.cached,
        "output_tokens": totals.output,
    }


async def serve_messages(context: Context, call: Call, body: MessagesBody) -> ASGIApp:
    """Answer a conversation."""
    model = context.require_serving().info.shown_as(body.model)
    chat = make_chat(body)
    with rename_fields(CHAT_NAMES):
        request = make_chat_request(chat, call.who.tenant, call.facts)
        shape = MessagesShape(model, calls=bool(request.functions))
        return await answer_requests(context, call, chat, [request], shape)


async def serve_count_tokens(context: Context, call: Call, body: PromptBody) -> ASGIApp:
    """Count the tokens of a conversation."""
    context.require_engine().info.shown_as(body.model)
    with rename_fields(CHAT_NAMES):
        tokens = await encode_prompt(context, call, make_chat(body))
    return json_reply({"input_tokens": len(tokens)})
