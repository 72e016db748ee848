"""Convert OpenAI's Responses API: bodies to chats, answers to responses and their events.

Nothing is kept between requests: each brings its whole conversation. Must not know engines or transports.
Invariants: a stream's events are numbered from 0 without a gap; the last one has the whole response.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp

from wicore_trt.access.calls import Call
from wicore_trt.access.entry import Totals
from wicore_trt.errors import InvalidRequestError, WicoreError, shown
from wicore_trt.http.blocks import Block, BlockShape, Change, named_event, was_cut
from wicore_trt.http.bodies import ChatBody, ResponsesBody
from wicore_trt.http.client_tools import FORMS, Form, join_namespace, response_tools
from wicore_trt.http.context import Context
from wicore_trt.http.conversation import ChatBuilder, make_chat_body, read_member, read_parts, rename_fields
from wicore_trt.http.convert import make_chat_request
from wicore_trt.http.openai import answer_requests, encode_prompt
from wicore_trt.http.replies import json_reply
from wicore_trt.http.shapes import encode, token_entry
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import Completion, TextOutput

CHAT_NAMES = {
    **dict.fromkeys(("messages", "prompt", "prompt_token_ids"), "input"),
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Fields of the chat that a response becomes, by the names that its client knows."""
LOGPROBS = "message.output_text.logprobs"
ROLES = ("system", "developer", "user", "assistant")


def make_chat(body: ResponsesBody) -> tuple[ChatBody, dict[str, Form]]:
    """Make a chat of a request, and the forms of its calls by name. Raises InvalidRequestError."""
    tools, forms = response_tools(body.tools)
    logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not logprobs:
        raise InvalidRequestError(f"top_logprobs needs {LOGPROBS} in include.", field="top_logprobs")
    asked = make_chat_body(
        body, _build_chat(body), max_tokens=body.max_output_tokens, stream=body.stream, tools=tools,
        tool_choice=_read_tool_choice(body.tool_choice, forms), parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs, response_format=_read_response_format(body.text),
        logprobs=logprobs, top_logprobs=body.top_logprobs if logprobs else None,
    )  # fmt: skip
    return asked, forms


def _build_chat(body: ResponsesBody) -> ChatBuilder:
    found = ChatBuilder()
    if body.instructions:
        found.add_parts("system", [body.instructions])
    if isinstance(body.input, str):
        found.add_parts("user", [body.input])
        return found
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        match item.get("type") or "message":
            case "message":
                role = item.get("role")
                if role not in ROLES:
                    problem = f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}."
                    raise InvalidRequestError(problem, field=where)
                parts = read_parts(item.get("content"), f"{where}.content")
                found.add_parts("system" if role == "developer" else role, parts)
            case "function_call" | "custom_tool_call" as kind:
                key = "arguments" if kind == "function_call" else "input"
                text = read_member(item, key, where)
                name = join_namespace(item.get("namespace"), read_member(item, "name", where))
                given = text if key == "arguments" else {key: text}
                found.add_call(read_member(item, "call_id", where), name, given)
            case "function_call_output" | "custom_tool_call_output":
                parts = read_parts(item.get("output"), f"{where}.output")
                found.add_result(read_member(item, "call_id", where), parts, where)
            case "reasoning" | "web_search_call":
                pass  # of another model: what it thought, and where it looked, is no part of the conversation
            case str(kind) if kind in FORMS:
                name, form = FORMS[kind]
                found.add_call(_read_call_id(item, where), name, item.get(form.key) or {})
            case str(kind) if kind.removesuffix("_output") in FORMS:
                output = item.get("output")
                text = output if isinstance(output, str) else encode(output).decode()
                found.add_result(_read_call_id(item, where), [text], where)
            case kind:
                raise InvalidRequestError(f"{where}: {shown(kind)} is not supported.", field=where)
    return found


def _read_call_id(item: dict[str, Any], where: str) -> str:
    """Read the id of a call or of its result; items of Codex's first shell have it as their own id."""
    return read_member(item, "call_id" if item.get("call_id") is not None else "id", where)


def _read_tool_choice(given: object, forms: Mapping[str, Form]) -> Any:
    if not isinstance(given, dict):
        return given
    kind, name = given.get("type"), given.get("name")
    if kind in ("function", "custom"):
        inside = join_namespace(given.get("namespace"), name) if isinstance(name, str) else name
        return {"type": "function", "function": {"name": inside}}
    return {"type": "function", "function": {"name": kind}} if isinstance(kind, str) and kind in forms else given


def _read_response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    given = (text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidRequestError(f"text.format must be an object, got {shown(given)}.", field="text.format")
    if given.get("type") == "json_schema":
        if not isinstance(given.get("schema"), (dict, bool)):
            raise InvalidRequestError("text.format.schema must be a JSON schema.", field="text.format")
        return {"type": "json_schema", "json_schema": given}
    return given


class ResponsesShape(BlockShape):
    def __init__(
        self, body: ResponsesBody, model: str, tokenizer: Tokenizer, *, calls: bool, forms: Mapping[str, Form]
    ) -> None:
        """Take `forms` of calls by the model's names for them."""
        super().__init__(calls=calls)
        self._forms, self._tokenizer, self._numbers = forms, tokenizer, 0
        self._logprobs: list[dict[str, Any]] = []
        self._fresh: list[dict[str, Any]] = []  # what no delta has told yet
        self._delta = b""  # how a delta of the text begins
        text = body.text or {}
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model,
            "background": False, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {**text, "format": text.get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0, "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }  # fmt: skip

    def make_whole(self, totals: Totals) -> dict[str, Any]:
        return self._describe_response("incomplete" if was_cut(self.last) else "completed", totals)

    def open_sequence(self, index: int, totals: Totals) -> bytes:
        begun = self._describe_response("in_progress", None)
        return b"".join(self._number_event(f"response.{kind}", response=begun) for kind in ("created", "in_progress"))

    def take_output(self, output: TextOutput | Completion) -> None:
        found = [token_entry(self._tokenizer, entry) for entry in output.logprobs]
        self._logprobs += found
        self._fresh += found

    def make_event(self, change: Change, block: Block, new: str) -> bytes:
        if change == "delta" and block.name is None:  # made of ready bytes, because there is one for every token
            logprobs, self._fresh = self._fresh, []
            self._numbers += 1
            parts = (self._delta, encode(new), encode(logprobs), self._numbers - 1)
            return b'%b%b,"logprobs":%b,"sequence_number":%d}\n\n' % parts
        item_id, at = self._item_id(block), {"output_index": block.number}
        inside = {"item_id": item_id, **at, "content_index": 0}
        if change == "open":
            item = self._describe_item(block, "in_progress")
            added = self._number_event("response.output_item.added", **at, item=item)
            if block.name is not None:
                return added
            self._delta = named_event("response.output_text.delta", **inside, delta="").removesuffix(b'""}\n\n')
            return added + self._number_event("response.content_part.added", **inside, part=self._describe_part(""))
        if change == "delta":
            if self._find_form(block).key != "arguments":
                return b""  # the text of a value is known when all of its JSON is
            return self._number_event("response.function_call_arguments.delta", item_id=item_id, **at, delta=new)
        if block.name is None:
            events = self._number_event("response.output_text.done", **inside, text=block.text, logprobs=self._logprobs)
            events += self._number_event("response.content_part.done", **inside, part=self._describe_part(block.text))
        else:
            form = self._find_form(block)
            fields, events = form.make_fields(block.text), b""
            if form.key == "arguments":
                events = self._number_event("response.function_call_arguments.done", item_id=item_id, **at, **fields)
            elif form.key == "input":
                name, given = "response.custom_tool_call_input", fields["input"]
                events = self._number_event(f"{name}.delta", item_id=item_id, **at, delta=given)
                events += self._number_event(f"{name}.done", item_id=item_id, **at, input=given)
        item = self._describe_item(block, self._name_status(block))
        return events + self._number_event("response.output_item.done", **at, item=item)

    def _find_form(self, block: Block) -> Form:
        return self._forms.get(block.name or "") or Form(name=block.name)

    def close_stream(self, totals: Totals) -> bytes:
        response = self.make_whole(totals)
        return self._number_event(f"response.{response['status']}", response=response)

    def break_stream(self, error: WicoreError) -> bytes:
        failed = self._describe_response("failed", None)
        failed["error"] = {"code": "server_error", "message": error.tell_client()}
        return self._number_event("response.failed", response=failed)

    def _number_event(self, kind: str, **fields: Any) -> bytes:
        self._numbers += 1
        return named_event(kind, sequence_number=self._numbers - 1, **fields)

    def _describe_response(self, status: str, totals: Totals | None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        blocks = [] if status == "in_progress" else self.blocks
        return {
            **self._head, "status": status, "error": None, "incomplete_details": reason,
            "output": [self._describe_item(block, self._name_status(block)) for block in blocks],
            "usage": None if totals is None else _count_usage(totals),
        }  # fmt: skip

    def _name_status(self, block: Block) -> str:
        cut = block is self.blocks[-1] and (self.is_open if self.last is None else was_cut(self.last))
        return "incomplete" if cut else "completed"

    def _item_id(self, block: Block) -> str:
        return f"{'msg' if block.name is None else self._find_form(block).prefix}_{block.id}"

    def _describe_item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(block), "status": status}
        if block.name is None:
            content = [] if status == "in_progress" else [self._describe_part(block.text)]
            return {**head, "type": "message", "role": "assistant", "content": content}
        form, given = self._find_form(block), block.text if status != "in_progress" else ""
        return {**head, "type": form.item, "call_id": f"call_{block.id[:24]}", **form.make_fields(given)}

    def _describe_part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs if text else []}


def _count_usage(totals: Totals) -> dict[str, Any]:
    return {
        "input_tokens": totals.prompt,
        "input_tokens_details": {"cached_tokens": totals.cached, "cache_write_tokens": 0},
        "output_tokens": totals.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": totals.prompt + totals.output,
    }


async def serve_responses(context: Context, call: Call, body: ResponsesBody) -> ASGIApp:
    """Answer a conversation, as OpenAI's newer API asks."""
    engine = context.require_serving()
    model = engine.info.shown_as(body.model)
    chat, forms = make_chat(body)
    with rename_fields(CHAT_NAMES):
        request = make_chat_request(chat, call.who.tenant, call.facts)
        shape = ResponsesShape(body, model, engine.tokenizer, calls=bool(request.functions), forms=forms)
        return await answer_requests(context, call, chat, [request], shape)


async def serve_input_tokens(context: Context, call: Call, body: ResponsesBody) -> ASGIApp:
    """Count the tokens of a response's input."""
    context.require_engine().info.shown_as(body.model)
    with rename_fields(CHAT_NAMES):
        tokens = await encode_prompt(context, call, make_chat(body)[0])
    return json_reply({"object": "response.input_tokens", "input_tokens": len(tokens)})
