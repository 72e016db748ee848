"""Chat messages to prompt text by the model's own template.

Knows the shape of messages; it must not know token ids or jinja2. Invariant: every message's text is in the prompt or
the caller gets an InvalidRequestError; nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from wicore_trt.errors import EngineFormatError, InvalidRequestError, shortened, shown
from wicore_trt.text.template_process import run_template

# OpenAI's newer name for the system role and Gemma's own name for the assistant are taken as what they mean.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "model": "assistant"}
_KEYS = {"role", "content", "name"}
_IMAGE_PARTS = {"image", "image_url", "input_image"}
_MAX_TEMPLATE = 1 << 18  # characters; Gemma's has 1,500


class TemplateRefusal(Exception):
    """The template itself called raise_exception."""


class ChatTemplate:
    """A template that compiles. Thread-safe; it runs in a process of its own (`text.template_worker`).

    `tokens` are the special tokens' texts (bos_token, ...) that templates may name; `origin` is for messages.
    Raises EngineFormatError when the template cannot be compiled.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], origin: Path) -> None:
        self._source, self._tokens = source, dict(tokens)
        broken = f"it has more than {_MAX_TEMPLATE} characters" if len(source) > _MAX_TEMPLATE else None
        broken = broken or run_template(source, self._tokens, None).get("broken")
        if broken:
            raise EngineFormatError(
                f"The chat template in {origin} is broken: {broken}.", fix="Restore the model's own file."
            )

    def render(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool) -> str:
        """The prompt text of a conversation.

        A message is {"role", "content"}: the role is system or developer (first message only), user, assistant or
        model; the content a string or a list of {"type": "text", "text": str}. Several text parts are stripped and
        joined, which is how Gemma's template renders them. Turns of one role in a row become one. Raises
        InvalidRequestError (field "messages") otherwise, and when the template refuses, as Gemma's does for a
        conversation that the assistant begins.
        """
        values = {
            "messages": checked_turns(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        answer = run_template(self._source, self._tokens, values)
        if "refused" in answer:
            raise _invalid(
                f"The chat template refuses these messages: {shortened(answer['refused'], 300)}"
            ) from TemplateRefusal()
        if "broken" in answer:
            raise _invalid(f"The chat template failed on these messages: {shortened(answer['broken'], 300)}.")
        return answer["text"]


def checked_turns(messages: Sequence[Mapping[str, object]]) -> list[dict[str, str]]:
    """Messages as templates expect them: roles alternate. Raises InvalidRequestError."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise _invalid("messages must be a non-empty list.")
    turns: list[dict[str, str]] = []
    for index, message in enumerate(messages):
        turn = _turn(index, message)
        if turns and turns[-1]["role"] == turn["role"]:
            turns[-1]["content"] += f"\n\n{turn['content']}"
        elif turns and turn["role"] == "system":
            raise _invalid(f"messages[{index}]: a {message['role']} message must come first.")
        else:
            turns.append(turn)
    if turns[-1]["role"] == "system":
        raise _invalid("messages hold no user turn.")
    return turns


def _turn(index: int, message: object) -> dict[str, str]:
    """One checked message as templates expect it."""
    if not isinstance(message, Mapping):
        raise _invalid(f"messages[{index}] must be an object with role and content.")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _invalid(f"messages[{index}].role must be one of {', '.join(ROLES)}, got {shown(role)}.")
    surplus = sorted(str(key) for key, value in message.items() if key not in _KEYS and value)
    if surplus:
        raise _invalid(f"messages[{index}] has {shown(surplus[0])}, which is not supported.")
    content = message.get("content")
    if content is None and ROLES[role] == "assistant":
        content = ""  # clients send an answer without text back so
    return {"role": ROLES[role], "content": content_text(f"messages[{index}].content", content)}


def content_text(where: str, content: object) -> str:
    """The text of a message's content. Raises InvalidRequestError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise _invalid(f"{where} must be a string or a list of text parts.")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in _IMAGE_PARTS:
            raise _invalid(f"{where}[{index}]: {kind} parts are not supported yet.")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise _invalid(f'{where}[{index}] must be {{"type": "text", "text": ...}}.')
        texts.append(part["text"])
    return texts[0] if len(texts) == 1 else "".join(text.strip() for text in texts)


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="messages")
