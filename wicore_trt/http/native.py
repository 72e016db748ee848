"""Serve the product's own routes: tokens, one-shot inference, statistics, health.

Must not know transports. Invariant: a tenant's answer has that tenant's requests alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from starlette.responses import Response
from starlette.types import ASGIApp

from wicore_trt import __version__
from wicore_trt.access.calls import Call
from wicore_trt.access.entry import GenerationCall
from wicore_trt.errors import InvalidRequestError, UnavailableError
from wicore_trt.http.bodies import ChatBody, DetokenizeBody, InferenceBody, TokenizeBody
from wicore_trt.http.context import Context
from wicore_trt.http.convert import make_inference_request
from wicore_trt.http.openai import encode_prompt
from wicore_trt.http.replies import json_reply, rate_headers


async def serve_health(context: Context, call: Call) -> Response:
    """The process lives; says nothing of the engine."""
    return json_reply({"status": "ok"})


async def serve_ping(context: Context, call: Call) -> Response:
    """Health, as SageMaker asks for it."""
    return json_reply({})


async def serve_load(context: Context, call: Call) -> Response:
    """Open generations of all clients, as load balancers of vLLM ask for it; a tenant hears of its own."""
    return json_reply({"server_load": _count_open(context, call)})


async def serve_tokenizer_info(context: Context, call: Call) -> Response:
    """The tokenizer, as its files say."""
    return json_reply(context.require_engine().tokenizer.describe_config())


async def serve_ready(context: Context, call: Call) -> Response:
    """Requests are taken now."""
    if context.state not in ("serving", "degraded"):
        raise UnavailableError(f"The server is {context.state}.")
    return json_reply({"status": "ready" if context.state == "serving" else context.state})


async def serve_version(context: Context, call: Call) -> Response:
    """The product's version."""
    return json_reply({"version": __version__})


async def serve_status(context: Context, call: Call) -> Response:
    """State, model and open requests; an operator hears of everybody's."""
    state = context.state
    model, engine = None if state == "starting" else asdict(context.require_engine().info), context.engine
    parts = engine.engine.parts if engine is not None else ()
    replicas = {"replicas": [part.dead or "serving" for part in parts]} if len(parts) > 1 else {}
    about = {"state": state, "version": __version__, "uptime_s": round(time.time() - context.began, 3)}
    return json_reply({**replicas, **about, "requests_open": _count_open(context, call), "model": model})


def _count_open(context: Context, call: Call) -> int:
    """Count open generations: of the caller, or of everybody for an operator."""
    return context.open.total() if call.who.operator else context.open[call.who.tenant]


async def serve_stats(context: Context, call: Call) -> Response:
    """Counters since start and gauges of the engine."""
    engine, who = context.require_engine(), call.who
    found = await engine.engine.stats() if who.operator else await engine.read_tenant_stats(who.tenant)
    answer = asdict(found)
    if who.operator:
        answer["latency"] = {
            name: {"bounds_s": seen.bounds, "counts": seen.counts, "total_s": seen.total}
            for name, seen in (("first_token", engine.times.first), ("inter_token", engine.times.gap))
        }
    return json_reply(answer)


async def serve_tokenize(context: Context, call: Call, body: TokenizeBody) -> ASGIApp:
    """Token ids of a text or a conversation."""
    engine = context.require_engine()
    engine.info.shown_as(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Give exactly one of prompt and messages.", field="prompt")
    limit = engine.info.max_context_tokens
    if body.prompt is not None:
        add_bos = body.add_special_tokens is not False
        make = partial(engine.tokenizer.encode, body.prompt, add_bos=add_bos, max_tokens=limit)
        tokens: Sequence[int] = await engine.work(call.who.tenant, make)
    else:
        asked = body.model_dump(include={*TokenizeBody.model_fields} & {*ChatBody.model_fields})
        tokens = await encode_prompt(context, call, ChatBody.model_construct(**asked))
    answer: dict[str, object] = {"count": len(tokens), "max_model_len": limit, "tokens": tokens}
    if body.return_token_strs:
        read = engine.tokenizer.token_bytes
        answer["token_strs"] = await engine.work(
            call.who.tenant, lambda: [read(token).decode(errors="replace") for token in tokens]
        )
    return json_reply(answer)


async def serve_detokenize(context: Context, call: Call, body: DetokenizeBody) -> ASGIApp:
    """The text of token ids."""
    engine = context.require_engine()
    engine.info.shown_as(body.model)
    skip = body.skip_special_tokens is not False
    text = await engine.decode_ids(body.tokens, call.who.tenant, "tokens", skip_special=skip)
    return json_reply({"prompt": text})


async def serve_inference(context: Context, call: Call, body: InferenceBody) -> ASGIApp:
    """Continue one prompt, in one answer."""
    context.require_serving().info.shown_as(body.model)
    request = make_inference_request(body, call.who.tenant)
    generation = await GenerationCall.submit_requests(context, call, [request])
    try:
        [done] = await generation.collect_completions()
    finally:
        await generation.aclose()
    answer = {
        "id": request.request_id, "content": done.text, "token_count": generation.totals.output,
        "latency_ms": round((time.monotonic() - call.started) * 1000, 1), "finish_reason": done.finish_reason.value,
    }  # fmt: skip
    return json_reply(answer, headers=rate_headers(context, call))
