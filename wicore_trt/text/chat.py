"""Render chat messages to prompt text with the model's own template.

Knows the shape of messages; must not know token ids or jinja2, which runs in a process of its own for all tokenizers.
Templates differ in what they take, so each is tried once with probes (`takes`), and messages are given in a form that
it takes. Invariants: the prompt has every message's text, or the caller gets an InvalidRequestError; no template takes
more of this process than the text of its answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from wicore_trt.errors import EngineFormatError, InvalidRequestError, shortened, shown
from wicore_trt.text.images import IMAGE_MARK, is_image_part
from wicore_trt.text.template_worker import LIMITS
from wicore_trt.worker_process import JobFailure, WorkerProcess

WORKER = WorkerProcess("wicore_trt.text.template_worker", LIMITS)
# OpenAI's newer name for the system role and Gemma's own name for the assistant are taken as what they mean.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "model": "assistant"}
REFUSED_KEYS = ("function_call", "audio", "images", "videos", "prefix", "partial")
"""Keys of messages that would change the answer. Other keys are the template's to read or to leave alone."""
_MAX_TEMPLATE = 1 << 18  # characters; Gemma's has 1,500
_OURS = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Names of a template that are the request's, and no variables of it."""
_HEADS = ("system", "developer")
SAID = "Qz1: {{x}} \\ \"é\"\n\n'日' 🙂"
_PART = {"type": "text", "text": SAID, "source_lang_code": "en", "target_lang_code": "de"}  # as TranslateGemma asks
PROBE, ANSWER = {"role": "user", "content": SAID}, {"role": "assistant", "content": "Qz2"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "qz_name",
        "description": "Qz4",
        "parameters": {"type": "object", "properties": {"qz_key": {"type": "string", "description": "Qz5"}}},
    },
}
_CALL = {"id": "call_0", "type": "function", "function": {"name": "qz_name", "arguments": {"qz_key": "Qz6"}}}
_CALLING = ({**ANSWER, "content": "", "tool_calls": [_CALL]}, {"role": "tool", "name": "qz_name", "content": "Qz7"})


def run_template(source: str, tokens: Mapping[str, str], values: Mapping[str, Any] | None) -> dict[str, str]:
    """Render `values` and `tokens` with a template; with `values` None list the names that it reads, one a line.
    Returns {"text"}, {"refused"} when it called raise_exception, or {"broken"}: why it has no text, as the end of a
    sentence. {"ended"} is added where the worker had to be ended."""
    job = json.dumps({"source": source, "tokens": dict(tokens), "values": values}, ensure_ascii=False)
    try:
        answer = WORKER.run_job(job.encode("utf-8", "surrogatepass"))
    except JobFailure as failure:
        return {"broken": str(failure), **({"ended": "1"} if failure.ended else {})}
    return {"text" if answer[:1] == b"t" else "refused": answer[1:].decode("utf-8", "surrogatepass")}


class TemplateRefusal(Exception):
    """Refusal of messages by the template itself, which called raise_exception."""


class ChatTemplate:
    """Template that compiles. Thread-safe; it runs in a process of its own (`text.template_worker`).
    `tokens` are the texts of special tokens (bos_token, ...) that templates may name; `origin` is for messages.
    `variables` are the names that the template reads. `fault` is why it can never chat, or None. `takes` are the
    inputs whose text it renders whole: "text", "parts" (contents that are lists), "answers" as text, "system",
    "developer", "later" (those two behind a turn), "neighbours" (consecutive turns of one role) and "tools" (their
    calls begin with CALL_MARK). Raises EngineFormatError when the template cannot be compiled."""

    def __init__(self, source: str, tokens: Mapping[str, str], origin: Path) -> None:
        self.source, self._tokens = source, dict(tokens)
        broken = f"it has more than {_MAX_TEMPLATE} characters" if len(source) > _MAX_TEMPLATE else None
        compiled = {} if broken else run_template(source, self._tokens, None)
        broken = broken or compiled.get("broken")
        if broken:
            fix = "Restore the model's own file."
            raise EngineFormatError(f"The chat template in {origin} is broken: {broken}.", fix=fix)
        self.variables = frozenset(compiled["text"].split("\n"))
        self.fault: str | None = None
        self._user: Mapping[str, Any] = PROBE
        self.takes = frozenset(("answers",))
        self.takes = self._try_forms()

    def run_probe(self, *more: Mapping[str, Any]) -> str | None:
        """Render a user's turn and `more` behind it, None where the template gives no text."""
        turns = [self._user, *(_shape_content(dict(turn), self.takes) for turn in more)]
        return self._run_template(turns, False).get("text")

    def _try_forms(self) -> frozenset[str]:
        takes: set[str] = set()
        for name, said in (("text", PROBE), ("parts", {"role": "user", "content": [_PART]})):
            found = self._run_template([said], True)
            text = found.get("text", "")
            if SAID in text and (name == "text" or "source_lang_code" not in text):  # a list as it is printed
                takes.add(name)
                self._user = PROBE if "text" in takes else said
            else:
                why = found.get("refused") or found.get("broken") or "it leaves text of the user out"
                self.fault = self.fault or shortened(why.removesuffix("."), 200)
            if "ended" in found:
                break
        if not takes:
            return frozenset()
        self.fault = None
        if "Qz2" in (self.run_probe(ANSWER) or "") or "parts" not in takes:
            takes.add("answers")
        answer, system = _shape_content(ANSWER, takes), _shape_content({"role": "system", "content": "Qz3"}, takes)
        user = self._user
        for name, words, messages in (
            ("system", ("Qz3",), [system, user]),
            ("developer", ("Qz3",), [{**system, "role": "developer"}, user]),
            ("later", ("Qz2", "Qz3"), [user, answer, system, user]),
            ("neighbours", ("Qz2", "Qz2"), [user, user, answer, answer, user]),
        ):
            text = self._run_template(messages, True).get("text", "")
            if all(text.count(word) == words.count(word) for word in words) and SAID in text:
                takes.add(name)
        if "tools" in self.variables:
            text = self._run_template([self._user, *_CALLING], True, [_TOOL]).get("text", "")
            if all(word in text for word in (CALL_MARK, "qz_name", "Qz4", "qz_key", "Qz5", "Qz6", "Qz7")):
                takes.add("tools")
        return frozenset(takes)

    def _run_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        opening: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> dict[str, str]:
        asked = {"messages": messages, "add_generation_prompt": opening, "tools": tools or None, "documents": None}
        return run_template(self.source, self._tokens, {**(variables or {}), **asked})

    def render_messages(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        functions: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt text of a conversation.
        A message is {"role", "content"}: role is system, developer, user, assistant or model; content is a string or
        a list of {"type": "text", "text": str} and {"type": "image"}; other keys go to the template. Calls, results of
        role tool and `functions`, {"name", "description", "parameters"}, need a template that takes tools. `variables`
        are the template's other names (chat_template_kwargs). Messages are given in a form that the template takes: a
        later system message as the user's, turns of one role in a row as one, parts as text, text as a part.
        Raises InvalidRequestError (fields "messages", "chat_template_kwargs") for invalid values, and when the
        template refuses, as Gemma's does for a conversation that the assistant begins."""
        turns = shaped_turns(messages, self.takes)
        tools = [{"type": "function", "function": dict(function)} for function in functions]
        answer = self._run_template(turns, add_generation_prompt, tools, checked_variables(variables))
        if "refused" in answer:
            problem = f"The chat template refuses these messages: {shortened(answer['refused'], 300)}"
            raise invalid_messages(problem) from TemplateRefusal()
        if "broken" in answer:
            raise invalid_messages(f"The chat template failed on these messages: {shortened(answer['broken'], 300)}.")
        return answer["text"]


CALL_MARK = "<start_function_call>call:"
"""Beginning of calls that `text.calls` reads: FunctionGemma's."""
CALL_TOKENS = ("<start_function_call>", "<end_function_call>", "<escape>")
"""Tokens of such calls, which are text of an answer though they are special."""


def checked_variables(given: object) -> dict[str, Any]:
    """Check chat_template_kwargs. Raises InvalidRequestError for no object, and for names of the request."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidRequestError("chat_template_kwargs must be an object.", field="chat_template_kwargs")
    if taken := sorted(_OURS & given.keys()):
        problem = f"chat_template_kwargs has {taken[0]}, which is a field of its own."
        raise InvalidRequestError(problem, field="chat_template_kwargs")
    try:
        json.dumps(given)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError("chat_template_kwargs must be JSON.", field="chat_template_kwargs") from None
    return dict(given)


def shaped_turns(messages: Sequence[Mapping[str, object]], takes: frozenset[str]) -> list[dict[str, Any]]:
    """Convert messages to a form that a template takes (see ChatTemplate). Raises InvalidRequestError."""
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(checked_messages(messages)):
        turn = _shape_message(f"messages[{index}]", message, takes)
        last = turns[-1]["role"] if turns else None
        follows = last in _HEADS and "later" not in takes
        if turn["role"] in _HEADS:
            if follows:
                turn["role"] = last
            elif "system" not in takes or (turns and "later" not in takes):
                turn["role"] = "user"
        alone = last == "tool" or (turn.keys() | (turns[-1] if turns else turn).keys()) & {"tool_calls"}
        if turn["role"] == last and not alone and (follows or "neighbours" not in takes):
            first, second = turns[-1]["content"], turn["content"]
            if _takes_text(last, takes):
                turns[-1]["content"] = "\n\n".join(content_text("messages", content) for content in (first, second))
            else:
                turns[-1]["content"] = [*first, *second]
        else:
            turns.append(turn)
    if all(ROLES.get(str(message.get("role"))) == "system" for message in messages):
        raise invalid_messages("messages hold no user turn.")
    return turns


def checked_messages(messages: object) -> Sequence[Mapping[str, Any]]:
    """Check that messages are objects with a known role and no key of REFUSED_KEYS. Raises InvalidRequestError."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise invalid_messages("messages must be a non-empty list.")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise invalid_messages(f"{where} must be an object with role and content.")
        role = message.get("role")
        if not isinstance(role, str) or role not in (*ROLES, "tool"):
            raise invalid_messages(f"{where}.role must be one of {', '.join((*ROLES, 'tool'))}, got {shown(role)}.")
        wrong = list(filter(message.get, REFUSED_KEYS))
        wrong += ["tool_calls"] if message.get("tool_calls") and ROLES.get(role) != "assistant" else []
        if wrong:
            raise invalid_messages(f"{where} has {wrong[0]}, which is not supported.")
    return messages


def _shape_message(where: str, message: Mapping[str, Any], takes: frozenset[str]) -> dict[str, Any]:
    given, content = str(message["role"]), message.get("content")
    role = given if given == "tool" or (given == "developer" and "developer" in takes) else ROLES[given]
    if content is None and role == "assistant":
        content = ""  # clients send an answer without text back so
    text = content_text(f"{where}.content", content)
    if isinstance(content, Sequence) and not isinstance(content, str):
        as_parts = "parts" in takes and not (role in _HEADS and len(content) > 1)  # of which Gemma's reads the first
        content = [dict(part) for part in content] if as_parts else text
    more = {key: value for key, value in message.items() if value is not None}
    return _shape_content({**more, "role": role, "content": content}, takes)


def _takes_text(role: str, takes: Collection[str]) -> bool:
    return ("text" if role == "user" else "answers") in takes or role == "tool"


def _shape_content(turn: dict[str, Any], takes: Collection[str]) -> dict[str, Any]:
    """Make a turn's text a part, where its role must have parts."""
    if isinstance(turn["content"], str) and not _takes_text(turn["role"], takes):
        return {**turn, "content": [{"type": "text", "text": turn["content"]}]}
    return turn


def content_text(where: str, content: object) -> str:
    """Return a content's text, with a mark at the place of each image. Raises InvalidRequestError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise invalid_messages(f"{where} must be a string or a list of parts.")
    texts = []
    for index, part in enumerate(content):
        if is_image_part(part):
            texts.append(IMAGE_MARK)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise invalid_messages(f'{where}[{index}] must be {{"type": "text", "text": ...}} or {{"type": "image"}}.')
    # Several parts are stripped and joined, as Gemma's template renders them.
    return texts[0] if len(texts) == 1 else "".join(text.strip() for text in texts)


def invalid_messages(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="messages")
