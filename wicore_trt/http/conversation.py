"""Convert conversations of other APIs to messages of a chat.

Items and blocks have one builder, so tools, templates and limits are the same as in chat completions. Must not know
engines. Invariants: every text is in the messages, or the caller gets an InvalidRequestError with its path;
consecutive turns of one role are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.http.bodies import Body, ChatBody, Knobs
from wicore_trt.http.convert import IMAGES, TEXTS, read_image_part
from wicore_trt.types import ImageFile

MEDIA = frozenset(("input_file", "file", "input_audio", "document", "search_result"))
Part = str | ImageFile


@dataclass(slots=True)
class ChatMessage:
    role: str
    parts: list[Part] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def make_content(self) -> str | list[object]:
        """Return the text, or parts where there are images; texts that follow one another are one."""
        runs = groupby(filter(None, self.parts), lambda part: isinstance(part, str))
        found = [part for text, run in runs for part in (["\n\n".join(map(str, run))] if text else run)]
        if len(found) == 1 and isinstance(found[0], str) or not found:
            return "".join(map(str, found))
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in found]


class ChatBuilder:
    """Builds the turns of a chat. A message costs its own length, however many there are."""

    def __init__(self) -> None:
        self.turns: list[ChatMessage] = []
        self._called: set[str] = set()

    @property
    def last_role(self) -> str | None:
        return self.turns[-1].role if self.turns else None

    def add_parts(self, role: str, parts: Iterable[Part]) -> None:
        """Add a turn, or texts and images to the last turn of that role."""
        if self.last_role != role or self.turns[-1].more:
            self.turns.append(ChatMessage(role))
        self.turns[-1].parts += parts

    def add_call(self, call_id: str, name: str, arguments: str | Mapping[str, Any]) -> None:
        self._called.add(call_id)
        if self.last_role != "assistant":
            self.turns.append(ChatMessage("assistant"))
        function = {"name": name, "arguments": arguments}
        calls = self.turns[-1].more.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, parts: list[Part], where: str) -> None:
        """Add a function's result. Raises InvalidRequestError for a function that was not called."""
        if call_id not in self._called:
            raise InvalidRequestError(f"{where}: no call before it has the id {shown(call_id)}.", field=where)
        self.turns.append(ChatMessage("tool", parts, {"tool_call_id": call_id}))


def read_parts(content: object, where: str) -> list[Part]:
    """Read a text, or the texts and images of parts. Raises InvalidRequestError."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a text or a list of parts, got {shown(content)}.", field=where)
    return [read_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def read_part(part: object, where: str) -> Part:
    """Read a text or an image. Raises InvalidRequestError for any other part."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind in IMAGES:
        return read_image_part(part, where)
    if isinstance(kind, str) and kind in MEDIA:
        raise InvalidRequestError(f"{where}: {kind} is not supported yet.", field=where)
    if kind == "refusal":
        return read_member(part, "refusal", where)
    if not isinstance(kind, str) or kind not in TEXTS:
        raise InvalidRequestError(f"{where} must be a text or an image, got {shown(kind)}.", field=where)
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
    messages = [{"role": turn.role, "content": turn.make_content(), **turn.more} for turn in conversation.turns]
    return ChatBody.model_construct(messages=messages, **knobs, **fields)


@contextmanager
def rename_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields of a chat in errors as the client wrote them; paths inside of them, as of images, are its own."""
    try:
        yield
    except InvalidRequestError as error:
        found = names.get(error.field or "")
        if found is None:
            raise
        error.field = found
        raise
