"""Serve the routes of OpenAI's API: chat, completions, models.

Translates between bodies and generations and owns nothing else. Invariant: a generation that was started is closed,
by the response that streams it or here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import repeat
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from wicore_trt.access.calls import Call
from wicore_trt.access.entry import GenerationCall
from wicore_trt.core.prompts import tokenize_prompt
from wicore_trt.errors import InvalidRequestError
from wicore_trt.http.bodies import ChatBody, CompletionBody, GenerationFields, StreamOptions
from wicore_trt.http.context import Context
from wicore_trt.http.convert import make_chat_request, make_completion_requests, name_field
from wicore_trt.http.errors import name_failure
from wicore_trt.http.replies import EventStream, json_reply, rate_headers
from wicore_trt.http.shapes import ChatShape, CompletionShape, ResponseShape, ToolShape
from wicore_trt.types import TextRequest


async def serve_models(context: Context, call: Call) -> Response:
    """The served model under each of its names, the one that is shown first."""
    found = [_describe_model(context, call, name) for name in context.require_engine().info.names]
    if call.anthropic:
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
        return json_reply({"data": found, "has_more": False, **ends})
    return json_reply({"object": "list", "data": found})


async def serve_model(context: Context, call: Call, name: str) -> Response:
    """The served model."""
    return json_reply(_describe_model(context, call, context.require_engine().info.shown_as(name)))


def _describe_model(context: Context, call: Call, name: str) -> dict[str, object]:
    info, tokenizer = context.require_engine().info, context.require_engine().tokenizer
    chats = ["chat", "tools"] if tokenizer.chat_fault is None else []
    if call.anthropic:
        began = datetime.fromtimestamp(int(context.began), UTC).isoformat()
        return {"type": "model", "id": name, "display_name": name, "created_at": began}
    return {
        "id": name, "object": "model", "created": int(context.began), "owned_by": "wicore-trt",
        "max_model_len": info.max_context_tokens, "chat_template": info.chat,
        "capabilities": ["completions", *chats, *(["images"] if info.images is not None else [])],
        "chat_note": info.chat_note,
    }  # fmt: skip


async def serve_chat(context: Context, call: Call, body: ChatBody) -> ASGIApp:
    """Answer a conversation."""
    engine = context.require_serving()
    model, request = engine.info.shown_as(body.model), make_chat_request(body, call.who.tenant, call.facts)
    shape = (ToolShape if request.functions else ChatShape)(model, engine.tokenizer, **_read_wishes(body))
    return await answer_requests(context, call, body, [request], shape)


async def encode_prompt(context: Context, call: Call, body: ChatBody) -> tuple[int, ...]:
    """Encode a conversation to the token ids that a generation begins with, however many."""
    engine, tenant = context.require_engine(), call.who.tenant
    request = await engine.prepare_images(make_chat_request(body, tenant, call.facts))
    return await engine.work(tenant, partial(tokenize_prompt, engine.tokenizer, request, images=engine.info.images))


async def serve_completions(context: Context, call: Call, body: CompletionBody) -> ASGIApp:
    """Continue prompts."""
    engine = context.require_serving()
    model, requests = engine.info.shown_as(body.model), make_completion_requests(body, call.who.tenant)
    prompts: Sequence[str] = ()
    if body.echo:

        def decode_prompts() -> list[str]:
            decode = engine.tokenizer.decode
            texts = [r.prompt if r.prompt is not None else decode(r.prompt_token_ids or ()) for r in requests]
            return [text for text in texts for _ in range(requests[0].params.n)]

        prompts = await engine.work(call.who.tenant, decode_prompts)
    shape = CompletionShape(model, engine.tokenizer, prompts=prompts, top=body.logprobs, **_read_wishes(body))
    return await answer_requests(context, call, body, requests, shape)


def _read_wishes(body: GenerationFields) -> dict[str, Any]:
    options = body.stream_options or StreamOptions()
    counts = {"usage": bool(options.include_usage), "continuous": bool(options.continuous_usage_stats)}
    return {**counts, "token_ids": bool(body.return_token_ids), "prompt_top": body.prompt_logprobs}


async def answer_requests(
    context: Context, call: Call, body: GenerationFields, requests: Sequence[TextRequest], shape: ResponseShape
) -> ASGIApp:
    """Run the requests of a body and answer in a shape: as a stream, or when all of them have ended."""
    try:
        generation = await GenerationCall.submit_requests(context, call, requests)
    except InvalidRequestError as error:
        raise name_field(error, body) from None
    if body.stream:
        events, failed = stream_events(generation, shape), partial(name_failure, call)
        headers = rate_headers(context, call)
        return EventStream(events, generation.aclose, failed, headers, shape.done, shape.break_stream)
    try:
        raw = shape.make_answer(await generation.collect_completions(), generation.totals)
    except InvalidRequestError as error:  # a constraint that could not be kept to the end
        raise name_field(error, body) from None
    finally:
        await generation.aclose()
    return json_reply(raw, headers=rate_headers(context, call))


async def stream_events(generation: GenerationCall, shape: ResponseShape) -> AsyncIterator[bytes]:
    opened: set[int] = set()
    totals, sequences = generation.totals, len(generation.streams) * generation.n
    if await generation.wait_admitted():  # from here on a failure is an event
        opened.update(range(sequences))
        yield b"".join(map(shape.open_sequence, range(sequences), repeat(totals)))
    async for index, output in generation.stream_outputs():
        chunk = shape.make_chunk(index, output, totals)
        if index not in opened:
            opened.add(index)
            chunk = shape.open_sequence(index, totals) + chunk
        if chunk:
            yield chunk
    last = shape.close_stream(totals)
    if last:
        yield last
