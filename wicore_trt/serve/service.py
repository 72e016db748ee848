"""Serves the calls of wicore.inference.v1.InferenceService.

Translates between messages and a TextEngine and owns nothing else; the guard turns WicoreError into statuses.
Invariants: a call that ends in any way closes its stream on the engine; the engine never waits for a reader; a
message's sizes are checked before it is converted; a tenant's answer reports that tenant's requests alone.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from wicore_trt import __version__
from wicore_trt.access.admission import Admission
from wicore_trt.access.calls import Call, check_request_id, get_current_call
from wicore_trt.access.entry import EntryState, GenerationCall
from wicore_trt.access.keys import Identity
from wicore_trt.checks import check_count
from wicore_trt.core.port import UNKNOWN, Change, Position
from wicore_trt.core.prompts import tokenize_prompt
from wicore_trt.core.shares import Gate
from wicore_trt.errors import AuthenticationError, DeadlineError, InvalidRequestError
from wicore_trt.serve import convert
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc, kv_pb2
from wicore_trt.serve.guard import CallReply, DuplicateRequestError
from wicore_trt.text.calls import CallFinder
from wicore_trt.types import EngineStats, FinishReason, SamplingParams, TextOutput, TextRequest

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine

SERVICE_NAME = pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
MAX_SUBSCRIBERS = 32
"""Streams of KV events. Each is sent every event, so their number times the engine's steps is work."""


class InferenceService(EntryState, inference_pb2_grpc.InferenceServiceServicer):
    """Serves one engine, attached when it is ready."""

    loading_fix = "Wait until the health check says SERVING."

    def __init__(self, *, max_message_bytes: int, admission: Admission) -> None:
        super().__init__(admission)
        self._max_message_bytes = max_message_bytes
        self._subscribers = Gate(MAX_SUBSCRIBERS, "KV event streams")
        self._started_at = Timestamp()
        self._started_at.GetCurrentTime()

    async def Generate(self, request: pb2.GenerateRequest, context: CallReply) -> None:
        call = get_current_call()
        engine = self.require_serving()
        own_s = convert.read_positive_seconds(request.timeout, "timeout") if request.HasField("timeout") else None
        timeout_s = min((limit for limit in (own_s, context.find_time_left()) if limit is not None), default=None)
        if request.HasField("request_id"):
            request_id = check_request_id(request.request_id)
        else:
            request_id = uuid.uuid4().hex if call.from_client else call.call_id
        if request_id != call.call_id:
            call.facts["request"] = request_id
        engine.info.shown_as(request.model if request.HasField("model") else None)
        with _name_fields(request):  # covers the stream, too: a constraint may fail late
            made = _text_request(engine, request, request_id, call.who.tenant, timeout_s)
            finders = defaultdict[int, CallFinder](CallFinder) if made.functions else None  # by sequence

            def messages(output: TextOutput, first_s: float | None, total_s: float) -> Iterator[Message]:
                finder = finders[output.index] if finders is not None else None
                return convert.make_responses(output, first_token_s=first_s, total_s=total_s, finder=finder)

            reasons = await self.relay_outputs(made, call, context, messages)
        if FinishReason.DEADLINE in reasons and timeout_s != own_s:
            raise DeadlineError("The call's deadline passed before the request finished.")

    async def relay_outputs(
        self,
        request: TextRequest,
        call: Call,
        reply: CallReply,
        messages: Callable[[TextOutput, float | None, float], Iterable[Message]],
    ) -> set[FinishReason]:
        """Run a request and write its outputs; return the reasons for which its sequences ended. `messages` makes those
        of an output, the seconds to its sequence's first token, and to now. While a write waits, outputs merge."""
        first_token_s: dict[int, float] = {}
        generation = await GenerationCall.submit_requests(self, call, [request])
        async with aclosing(generation):
            await reply.send_metadata()
            async for index, output in generation.stream_outputs(allow_cut=True):
                elapsed = monotonic() - call.started
                if output.token_ids:
                    first_token_s.setdefault(index, elapsed)
                for message in messages(output, first_token_s.get(index), elapsed):
                    await reply.write_message(message)
        return generation.reasons

    async def Abort(self, request: pb2.AbortRequest, context: CallReply) -> pb2.AbortResponse:
        request_id = check_request_id(request.request_id)
        return pb2.AbortResponse(aborted=self.require_engine().abort_request(request_id, get_current_call().who.tenant))

    async def Tokenize(self, request: pb2.TokenizeRequest, context: CallReply) -> pb2.TokenizeResponse:
        engine = self.require_engine()
        limit = engine.info.max_context_tokens
        kind, tenant = request.WhichOneof("input"), get_current_call().who.tenant
        if kind is None:
            raise InvalidRequestError("Give text or chat.", field="input")
        if kind == "text":
            add_bos = request.add_bos if request.HasField("add_bos") else True
            make: Callable[[], Sequence[int]] = partial(
                engine.tokenizer.encode, request.text, add_bos=add_bos, max_tokens=limit
            )
        else:
            prompt = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
            messages, images = convert.read_chat_messages(request.chat, limit)
            chat = TextRequest(
                uuid.uuid4().hex, SamplingParams(), messages=messages, images=images, tenant=tenant,
                add_generation_prompt=prompt,
            )  # fmt: skip
            chat = await engine.prepare_images(chat)
            make = partial(tokenize_prompt, engine.tokenizer, chat, limit, engine.info.images)
        try:
            token_ids = await engine.work(tenant, make)
        except InvalidRequestError as error:
            error.field = convert.find_field_path(error.field, kind)
            raise
        return pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, request: pb2.DetokenizeRequest, context: CallReply) -> pb2.DetokenizeResponse:
        engine = self.require_engine()
        skip, tenant = request.skip_special if request.HasField("skip_special") else True, get_current_call().who.tenant
        text = await engine.decode_ids(request.token_ids, tenant, "token_ids", skip_special=skip)
        return pb2.DetokenizeResponse(text=text)

    async def GetModelInfo(self, request: pb2.GetModelInfoRequest, context: CallReply) -> pb2.GetModelInfoResponse:
        known = pb2.GetModelInfoResponse.DESCRIPTOR.fields_by_name  # of the same names; the wire lacks `build`
        given = asdict(self.require_engine().info).items()
        return pb2.GetModelInfoResponse(**{name: value for name, value in given if value is not None and name in known})

    async def GetServerInfo(self, request: pb2.GetServerInfoRequest, context: CallReply) -> pb2.GetServerInfoResponse:
        if self.draining:
            state = pb2.SERVER_STATE_DRAINING
        else:
            state = pb2.SERVER_STATE_STARTING if self.engine is None else pb2.SERVER_STATE_SERVING
        return pb2.GetServerInfoResponse(
            version=__version__, state=state, started_at=self._started_at, max_message_bytes=self._max_message_bytes
        )

    async def GetStats(self, request: pb2.GetStatsRequest, context: CallReply) -> pb2.GetStatsResponse:
        return convert.make_stats(*await self.collect_stats(get_current_call().who))

    async def collect_stats(self, who: Identity) -> tuple[EngineStats, int]:
        """Collect statistics and the number of open Generate calls: of all for an operator, else of the tenant."""
        engine = self.require_engine()
        if who.operator:
            return await engine.engine.stats(), self.open.total()
        return await engine.read_tenant_stats(who.tenant), self.open[who.tenant]

    async def SubscribeKVEvents(self, request: kv_pb2.SubscribeKVEventsRequest, context: CallReply) -> None:
        after = (request.epoch, request.from_sequence - 1) if request.from_sequence > 0 else UNKNOWN
        replica = request.replica if request.HasField("replica") else None
        async with aclosing(self.follow_kv_events(get_current_call().who, after, replica)) as feed:
            async for epoch, found in feed:
                messages = (
                    convert.make_kv_events(epoch, found) if isinstance(found, list) else convert.make_kv_snapshot(found)
                )
                for message in messages:
                    await context.write_message(message)

    async def follow_kv_events(
        self, who: Identity, after: Position, replica: int | None
    ) -> AsyncGenerator[Change, None]:
        """Follow what the KV cache of a replica gains and loses: all pages for an operator, else the tenant's own.
        Raises InvalidRequestError for a replica that does not exist, or unless one of several is named, and
        AuthenticationError when the caller's key is revoked or stands for another caller."""
        whose, engine = None if who.operator else who.tenant, self.require_engine().engine
        if replica is not None:
            if replica >= len(engine.parts):
                raise InvalidRequestError(f"There is no replica {replica}.", field="replica")
            engine = engine.parts[replica]
        with self._subscribers.hold_place(who.tenant):
            async with aclosing(engine.kv_events(whose, after)) as feed:
                async for change in feed:
                    now = self.admission.check_identity(who)
                    if (now.tenant, now.operator) != (who.tenant, who.operator):
                        raise AuthenticationError("The API key stands for somebody else by now.", fix="Call again.")
                    yield change


@contextmanager
def _name_fields(request: pb2.GenerateRequest) -> Iterator[None]:
    """Rename the fields of errors to their paths in the message."""
    try:
        yield
    except InvalidRequestError as error:
        tools = error.field == "constraint" and bool(request.tools.functions)
        path = "tools.functions" if tools else convert.find_field_path(error.field, request.WhichOneof("prompt"))
        if error.field == "request_id":
            raise DuplicateRequestError(error.message, field=path, fix=error.fix) from error
        error.field = path
        raise


def _text_request(
    engine: TextEngine, request: pb2.GenerateRequest, request_id: str, tenant: str, timeout_s: float | None
) -> TextRequest:
    kind, limit = request.WhichOneof("prompt"), engine.info.max_context_tokens
    params = convert.read_sampling_params(request.sampling)
    tools = convert.read_tools(request.tools, params.constraint)
    if tools is not None and kind != "chat":
        raise InvalidRequestError("tools are for a chat.", field="tools")
    make = partial(
        TextRequest, request_id=request_id,
        params=params if tools is None else replace(params, constraint=tools.constraint),
        functions=tuple(function.describe_function() for function in tools.functions) if tools is not None else (),
        timeout_s=timeout_s, priority=request.priority, tenant=tenant, cache_salt=request.cache_salt,
        cache=convert.read_cache_hints(request.cache),
    )  # fmt: skip
    if request.images and kind != "text":
        raise InvalidRequestError("Images are of a text; a chat has them in its parts.", field="images")
    if kind == "token_ids":
        check_count(request.token_ids.ids, limit, "token_ids")
        return make(prompt_token_ids=tuple(request.token_ids.ids))
    if kind == "chat":
        messages, images = convert.read_chat_messages(request.chat, limit)
        return make(messages=messages, images=images)
    if kind == "text":
        check_count(request.images, limit, "images")
        images = tuple(convert.read_image(image, f"images[{i}]") for i, image in enumerate(request.images))
        add_bos = request.add_bos if request.HasField("add_bos") else True
        return make(prompt=request.text, images=images, add_bos=add_bos)
    raise InvalidRequestError("Give a prompt: text, token_ids or chat.", field="prompt")
