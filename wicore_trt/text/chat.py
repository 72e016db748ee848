"""Chat messages to prompt text by the model's own template.

Knows jinja2 and the shape of messages; it must not know token ids. Invariant: every message's text is in the prompt or
the caller gets an InvalidRequestError; nothing is dropped silently.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wicore_trt.checks import shortened, shown
from wicore_trt.errors import EngineFormatError, InvalidRequestError

# OpenAI's newer name for the system role and Gemma's own name for the assistant are taken as what they mean.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "model": "assistant"}
_KEYS = {"role", "content", "name"}
_IMAGE_PARTS = {"image", "image_url", "input_image"}


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called raise_exception."""


class ChatTemplate:
    """A compiled template. Thread-safe.

    The environment is that of transformers' apply_chat_template: sandboxed, immutable, trimmed blocks, loop controls,
    the globals raise_exception and strftime_now, and a tojson filter that does not escape HTML.
    `tokens` are the special tokens' texts (bos_token, ...) that templates may name; `origin` is for messages.
    Raises EngineFormatError when the template cannot be compiled.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], origin: Path) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = _tojson
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise EngineFormatError(
                f"The chat template in {origin} is broken: {error}.", fix="Restore the model's own file."
            ) from error
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool) -> str:
        """The prompt text of a conversation.

        A message is {"role", "content"}: the role is system or developer (first message only), user, assistant or
        model; the content a string or a list of {"type": "text", "text": str}. Several text parts are stripped and
        joined, which is how Gemma's template renders them. Raises InvalidRequestError (field "messages") otherwise,
        and when the template refuses, as Gemma's does for turns that do not alternate.
        """
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise _invalid("messages must be a non-empty list.")
        turns = [_turn(index, message) for index, message in enumerate(messages)]
        if all(turn["role"] == "system" for turn in turns):
            raise _invalid("messages hold no user turn.")
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **self._tokens
            )
        except TemplateRefusal as error:
            raise _invalid(f"The chat template refuses these messages: {shortened(str(error.message), 300)}") from error
        except Exception as error:  # a template is a program from a file: whatever it does, the engine goes on
            raise _invalid(
                f"The chat template failed on these messages: {type(error).__name__}: {shortened(str(error), 300)}."
            ) from error


def _turn(index: int, message: object) -> dict[str, str]:
    """One checked message as templates expect it."""
    if not isinstance(message, Mapping):
        raise _invalid(f"messages[{index}] must be an object with role and content.")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _invalid(f"messages[{index}].role must be one of {', '.join(_ROLES)}, got {shown(role)}.")
    if index and _ROLES[role] == "system":
        raise _invalid(f"messages[{index}]: a {role} message must come first.")
    surplus = sorted(str(key) for key, value in message.items() if key not in _KEYS and value)
    if surplus:
        raise _invalid(f"messages[{index}] has {shown(surplus[0])}, which is not supported.")
    return {"role": _ROLES[role], "content": _text(f"messages[{index}].content", message.get("content"))}


def _text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise _invalid(f"{where} must be a string or a list of text parts.")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _IMAGE_PARTS:
            raise _invalid(f"{where}[{index}]: {kind} parts are not supported yet.")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise _invalid(f'{where}[{index}] must be {{"type": "text", "text": ...}}.')
        texts.append(part["text"])
    return texts[0] if len(texts) == 1 else "".join(text.strip() for text in texts)


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="messages")


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
