"""The routes of OpenAI's API: chat, responses, completions, models.

Translates between bodies and generations and owns nothing else. Invariant: a generation that was started is closed, by
the response that streams it or here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.responses import Response

from wicore_trt.access.calls import Call
from wicore_trt.core.text_engine import prompt_ids
from wicore_trt.errors import InvalidRequestError, WicoreError
from wicore_trt.http import convert, structured
from wicore_trt.http.bodies import ChatBody, CompletionBody, ResponsesBody, StreamOptions
from wicore_trt.http.bodies import Generation as GenerationBody
from wicore_trt.http.context import Context
from wicore_trt.http.conversation import naming
from wicore_trt.http.generation import Generation
from wicore_trt.http.replies import Reply, json_reply, rate_headers
from wicore_trt.http.responses import CHAT_NAMES, ResponsesShape, chat_of
from wicore_trt.http.shapes import ChatShape, CompletionShape, Shape
from wicore_trt.http.sse import EventStream
from wicore_trt.http.tools import ToolShape, tools_of
from wicore_trt.types import TextRequest

log = logging.getLogger(__name__)


async def models(context: Context, call: Call) -> Response:
    """The served model under each of its names, the one that is shown first."""
    found = [_model(context, call, name) for name in context.engine().info.names]
    if call.anthropic:
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
        return json_reply({"data": found, "has_more": False, **ends})
    return json_reply({"object": "list", "data": found})


async def model(context: Context, call: Call, name: str) -> Response:
    """The served model."""
    return json_reply(_model(context, call, context.check_model(name)))


def _model(context: Context, call: Call, name: str) -> dict[str, object]:
    info, tokenizer = context.engine().info, context.engine().tokenizer
    chats = ["chat"] if tokenizer.chat_fault is None else []
    if call.anthropic:
        began = datetime.fromtimestamp(int(context.began), UTC).isoformat()
        return {"type": "model", "id": name, "display_name": name, "created_at": began}
    return {
        "id": name,
        "object": "model",
        "created": int(context.began),
        "owned_by": "wicore-trt",
        "max_model_len": info.max_context_tokens,
        "chat_template": info.chat,
        "capabilities": ["completions", *chats, *(["tools"] if chats else [])],
        "chat_note": info.chat_note,
    }


async def chat(context: Context, call: Call, body: ChatBody) -> Reply:
    """Answer a conversation."""
    engine = context.serving()
    model = context.check_model(body.model)

    def shape(calls: bool) -> Shape:
        return (ToolShape if calls else ChatShape)(model, engine.tokenizer, **_wishes(body))

    return await converse(context, call, body, shape)


async def responses(context: Context, call: Call, body: ResponsesBody) -> Reply:
    """Answer a conversation, as OpenAI's newer API asks."""
    engine = context.serving()
    model = context.check_model(body.model)
    asked, forms = chat_of(body)
    with naming(CHAT_NAMES):
        return await converse(
            context, call, asked, lambda calls: ResponsesShape(body, model, engine.tokenizer, calls=calls, forms=forms)
        )


async def converse(context: Context, call: Call, body: ChatBody, shape: Callable[[bool], Shape]) -> Reply:
    """Answer a conversation in the shape of answers that have calls, or have none."""
    tools = tools_of(body, call.facts)
    request = convert.chat_request(body, call.who.tenant, tools)
    return await _answer(context, call, body, [request], shape(tools is not None))


async def input_tokens(context: Context, call: Call, body: ResponsesBody) -> Reply:
    """Count the tokens of a response's input."""
    context.check_model(body.model)
    with naming(CHAT_NAMES):
        tokens = await prompt_of(context, call, chat_of(body)[0])
    return json_reply({"object": "response.input_tokens", "input_tokens": len(tokens)})


async def prompt_of(context: Context, call: Call, body: ChatBody) -> tuple[int, ...]:
    """The token ids that a conversation begins a generation with, however many."""
    engine, tenant = context.engine(), call.who.tenant
    request = convert.chat_request(body, tenant, tools_of(body, call.facts))
    return await engine.work(tenant, partial(prompt_ids, engine.tokenizer, request))


async def completions(context: Context, call: Call, body: CompletionBody) -> Reply:
    """Continue prompts."""
    engine = context.serving()
    model = context.check_model(body.model)
    requests = convert.completion_requests(body, call.who.tenant)
    prompts: Sequence[str] = ()
    if body.echo:
        prompts = await engine.work(call.who.tenant, lambda: _echoes(context, requests))
    shape = CompletionShape(model, engine.tokenizer, prompts=prompts, top=body.logprobs, **_wishes(body))
    return await _answer(context, call, body, requests, shape)


def _echoes(context: Context, requests: Sequence[TextRequest]) -> list[str]:
    """The text of each sequence's prompt."""
    decode = context.engine().tokenizer.decode
    texts = [r.prompt if r.prompt is not None else decode(r.prompt_token_ids or ()) for r in requests]
    return [text for text, request in zip(texts, requests, strict=True) for _ in range(request.params.n)]


def _wishes(body: GenerationBody) -> dict[str, Any]:
    options = body.stream_options or StreamOptions()
    told = {"usage": bool(options.include_usage), "continuous": bool(options.continuous_usage_stats)}
    return {**told, "token_ids": bool(body.return_token_ids), "prompt_top": body.prompt_logprobs}


async def _answer(
    context: Context, call: Call, body: GenerationBody, requests: Sequence[TextRequest], shape: Shape
) -> Reply:
    try:
        generation = await Generation.start(context, call, requests)
    except InvalidRequestError as error:
        raise structured.named(error, body) from None
    headers = rate_headers(context, call)
    if body.stream:

        def failed(raised: Exception) -> WicoreError:
            log.error("call %s (%s) failed unexpectedly", call.call_id, call.method, exc_info=raised)
            return WicoreError(f"Internal error; the server's log has it as {call.call_id}.")

        return EventStream(
            events(generation, shape), generation.aclose, failed, context.keep_alive_s, headers,
            done=shape.done, broken=shape.broken,
        )  # fmt: skip
    try:
        raw = shape.answer(await generation.completions(), generation.totals)
    except InvalidRequestError as error:  # a constraint that could not be kept to the end
        raise structured.named(error, body) from None
    finally:
        await generation.aclose()
    return json_reply(raw, headers=rate_headers(context, call))


async def events(generation: Generation, shape: Shape) -> AsyncIterator[bytes]:
    """The chunks of a generation."""
    opened: set[int] = set()
    totals = generation.totals
    if await generation.admitted():  # from here on a failure is an event
        opened.update(range(generation.sequences))
        yield b"".join(shape.opening(index, totals) for index in sorted(opened))
    async for index, output in generation.outputs():
        opening = b"" if index in opened else shape.opening(index, totals)
        opened.add(index)
        chunk = opening + shape.chunk(index, output, totals)
        if chunk:
            yield chunk
    last = shape.closing(totals)
    if last:
        yield last
