"""Convert conversations of other APIs to messages of a chat.

Items and blocks have one builder, so tools, templates and limits are those of chat completions. Must not know
engines. Invariants: every text is in the messages, or the caller gets an InvalidRequestError with its path;
consecutive turns of one role are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.http.bodies import Body, ChatBody, Knobs
from wicore_trt.http.convert import IMAGES, TEXTS

MEDIA = frozenset((*IMAGES, "input_file", "file", "input_audio", "document", "search_result"))


@dataclass(slots=True)
class ChatMessage:
    role: str
    texts: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


class ChatBuilder:
    """Builds the turns of a chat. A message costs its own length, however many there are."""

    def __init__(self) -> None:
        self.turns: list[ChatMessage] = []
        self._called: set[str] = set()

    @property
    def last_role(self) -> str | None:
        return self.turns[-1].role if self.turns else None

    def add_text(self, role: str, text: str) -> None:
        """Add a turn, or text to the last turn of that role."""
        if self.last_role != role or self.turns[-1].more:
            self.turns.append(ChatMessage(role))
        self.turns[-1].texts.append(text)

    def add_call(self, call_id: str, name: str, arguments: str | Mapping[str, Any]) -> None:
        self._called.add(call_id)
        if self.last_role != "assistant":
            self.turns.append(ChatMessage("assistant"))
        function = {"name": name, "arguments": arguments}
        calls = self.turns[-1].more.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, text: str, where: str) -> None:
        """Add a function's result. Raises InvalidRequestError for a function that was not called."""
        if call_id not in self._called:
            raise InvalidRequestError(f"{where}: no call before it has the id {shown(call_id)}.", field=where)
        self.turns.append(ChatMessage("tool", [text], {"tool_call_id": call_id}))


def read_text(content: object, where: str) -> str:
    """Read a text, or the texts of parts. Raises InvalidRequestError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a text or a list of parts, got {shown(content)}.", field=where)
    return "\n\n".join(read_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def read_part_text(part: object, where: str) -> str:
    """Read the text of a part. Raises InvalidRequestError for any other part."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in MEDIA:
        raise InvalidRequestError(f"{where}: {kind} is not supported yet.", field=where)
    if kind == "refusal":
        return read_member(part, "refusal", where)
    if not isinstance(kind, str) or kind not in TEXTS:
        raise InvalidRequestError(f"{where} must be a text, got {shown(kind)}.", field=where)
    return read_member(part, "text", where)


def read_member(item: object, name: str, where: str) -> str:
    """Read a string of an object. Raises InvalidRequestError where it has none of that name."""
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be a text, got {shown(value)}.", field=where)
    return value


def make_chat_body(body: Body, conversation: ChatBuilder, **fields: Any) -> ChatBody:
    """Make the chat that a body of another API asks for; `fields` are ChatBody's, of checked types."""
    knobs = {name: getattr(body, name, None) for name in Knobs.model_fields}
    messages = [
        {"role": turn.role, "content": "\n\n".join(filter(None, turn.texts)), **turn.more}
        for turn in conversation.turns
    ]
    return ChatBody.model_construct(messages=messages, **knobs, **fields)


@contextmanager
def rename_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields of a chat in errors as the client wrote them."""
    try:
        yield
    except InvalidRequestError as error:
        found = names.get((error.field or "").partition("[")[0])
        if found is None:
            raise
        error.field = found
        raise
