"""The calls of wicore.inference.v1.InferenceService.

Translates between messages and a TextEngine and owns nothing else: no scheduling, no text work, no error formatting
(the interceptors turn WicoreError into statuses). Invariants: a stream that was opened on the engine is closed when its
call ends, however it ends; the engine never waits for a reader (TextEngine merges what is unread).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import aclosing, suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from wicore_trt import __version__
from wicore_trt.errors import DeadlineError, InvalidRequestError, NotFoundError, UnavailableError
from wicore_trt.serve import convert
from wicore_trt.serve.errors import DuplicateRequestError
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc, kv_pb2
from wicore_trt.serve.interceptors import CURRENT_CALL, VALID_ID, Call
from wicore_trt.types import FinishReason, TextRequest

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine, TextStream

T = TypeVar("T")

SERVICE_NAME = pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
# Larger inputs are tokenized on a thread: at some 3 MB/s this many characters hold up all streams for about 5 ms.
INLINE_SIZE = 16_384


async def _run(size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that takes time in proportion to `size`, on a thread when that would hold up the streams."""
    if size <= INLINE_SIZE:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one engine, attached when it is ready. `idle` is set while no Generate call is open."""

    def __init__(self, *, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._engine: TextEngine | None = None
        self._draining = False
        self._open = 0
        self._started_at = Timestamp()
        self._started_at.GetCurrentTime()
        self.idle = asyncio.Event()
        self.idle.set()

    def attach(self, engine: TextEngine) -> None:
        """Take requests from now on."""
        self._engine = engine

    def refuse_new(self) -> None:
        """Answer new Generate calls with UNAVAILABLE from now on."""
        self._draining = True

    @property
    def streams_open(self) -> int:
        """Generate calls in progress."""
        return self._open

    def _ready(self) -> TextEngine:
        if self._engine is None:
            raise UnavailableError("The engine is still loading.", fix="Wait until the health check says SERVING.")
        return self._engine

    async def Generate(self, request: pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        engine = self._ready()
        if self._draining:
            raise UnavailableError("The server is shutting down.", fix="Send the request to another server.")
        call = CURRENT_CALL.get()
        own_s = convert.positive_seconds(request.timeout, "timeout") if request.HasField("timeout") else None
        call_s = context.time_remaining()
        timeout_s = min((limit for limit in (own_s, call_s) if limit is not None), default=None)
        stream = await self._submit(engine, request, call, timeout_s)
        self._open += 1
        self.idle.clear()
        try:
            async with aclosing(stream):
                reasons = await self._relay(stream, call, context)
        finally:
            self._open -= 1
            if not self._open:
                self.idle.set()
        if FinishReason.DEADLINE in reasons and timeout_s != own_s:
            raise DeadlineError("The call's deadline passed before the request finished.")

    @staticmethod
    async def _submit(
        engine: TextEngine, request: pb2.GenerateRequest, call: Call, timeout_s: float | None
    ) -> TextStream:
        """Start a request on the engine; errors name fields by their path in the message."""
        if request.HasField("request_id"):
            request_id = checked_id(request.request_id)
        else:
            request_id = uuid.uuid4().hex if call.from_client else call.call_id
        if call.from_client:
            call.facts["call"] = call.call_id
        call.facts["id"] = request_id
        if request.HasField("model") and request.model != engine.info.model_id:
            raise NotFoundError(f"Model {request.model[:128]!r} is not served here; {engine.info.model_id!r} is.")
        try:
            text_request = await _text_request(engine, request, request_id, timeout_s)
            return engine.submit(text_request)
        except InvalidRequestError as error:
            path = convert.field_path(error.field, request.WhichOneof("prompt"))
            kind = DuplicateRequestError if error.field == "request_id" else InvalidRequestError
            raise kind(error.message, field=path, fix=error.fix) from error

    @staticmethod
    async def _relay(stream: TextStream, call: Call, context: grpc.aio.ServicerContext) -> set[FinishReason]:
        """Write a stream's outputs as messages; while a write waits for its reader, the engine merges what follows.

        Returns the reasons for which the sequences ended.
        """
        first_token_s: dict[int, float] = {}
        reasons: set[FinishReason] = set()
        tokens = 0
        async for output in stream:
            elapsed = monotonic() - call.started
            tokens += len(output.token_ids)
            if output.token_ids and output.index not in first_token_s:
                first_token_s[output.index] = elapsed
                call.facts.setdefault("ttft_ms", round(elapsed * 1000, 1))
            call.facts["tokens"] = tokens
            if output.finish_reason is not None:
                reasons.add(output.finish_reason)
                call.facts["finish"] = ",".join(sorted(reason.value for reason in reasons))
            if output.usage is not None:
                call.facts |= {"prompt": output.usage.prompt_tokens, "cached": output.usage.cached_tokens}
            first = first_token_s.get(output.index)
            for message in convert.responses(output, first_token_s=first, total_s=elapsed):
                await context.write(message)
        return reasons

    async def Abort(self, request: pb2.AbortRequest, context: grpc.aio.ServicerContext) -> pb2.AbortResponse:
        return pb2.AbortResponse(aborted=self._ready().abort(checked_id(request.request_id)))

    async def Tokenize(self, request: pb2.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb2.TokenizeResponse:
        tokenizer = self._ready().tokenizer
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequestError("Give text or chat.", field="input")
        try:
            if kind == "text":
                add_bos = request.add_bos if request.HasField("add_bos") else True
                token_ids = await _run(len(request.text), tokenizer.encode, request.text, add_bos=add_bos)
            else:
                prompt = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
                messages = convert.chat_messages(request.chat)
                size = request.chat.ByteSize()
                token_ids = await _run(size, tokenizer.apply_chat, messages, add_generation_prompt=prompt)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                error.message, field=convert.field_path(error.field, kind), fix=error.fix
            ) from error
        return pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb2.DetokenizeResponse:
        engine = self._ready()
        token_ids = list(request.token_ids)
        if token_ids and max(token_ids) >= engine.info.vocab_size:
            raise InvalidRequestError(
                f"Token id {max(token_ids)} is outside the vocabulary of {engine.info.vocab_size}.", field="token_ids"
            )
        skip = request.skip_special if request.HasField("skip_special") else True
        text = await _run(len(token_ids), engine.tokenizer.decode, token_ids, skip_special=skip)
        return pb2.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb2.GetModelInfoResponse:
        return convert.model_info(self._ready().info)

    async def GetServerInfo(
        self, request: pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb2.GetServerInfoResponse:
        if self._draining:
            state = pb2.SERVER_STATE_DRAINING
        else:
            state = pb2.SERVER_STATE_STARTING if self._engine is None else pb2.SERVER_STATE_SERVING
        return pb2.GetServerInfoResponse(
            version=__version__,
            state=state,
            started_at=self._started_at,
            max_message_bytes=self._max_message_bytes,
        )

    async def GetStats(self, request: pb2.GetStatsRequest, context: grpc.aio.ServicerContext) -> pb2.GetStatsResponse:
        return convert.stats(self._ready().stats(), self._open)

    async def SubscribeKVEvents(
        self, request: kv_pb2.SubscribeKVEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        log = self._ready().kv_events
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def on_event() -> None:  # on the engine's thread
            with suppress(RuntimeError):  # the loop is closed: the server ends
                loop.call_soon_threadsafe(changed.set)

        known = request.from_sequence > 0 and request.epoch == log.epoch
        position = request.from_sequence - 1 if known else -1  # -1 is always too old
        end_listening = log.listen(on_event)
        try:
            while True:
                changed.clear()
                events = log.since(position)
                if events is None:
                    snapshot = log.snapshot()
                    messages, position = convert.kv_snapshot(snapshot), snapshot.sequence
                elif events:
                    messages, position = convert.kv_events(log.epoch, events), events[-1].sequence
                else:
                    await changed.wait()
                    continue
                for message in messages:
                    await context.write(message)
        finally:
            end_listening()


def checked_id(request_id: str) -> str:
    """The id itself; raises InvalidRequestError unless it can stand in logs and metadata."""
    if not VALID_ID.fullmatch(request_id):
        raise InvalidRequestError("request_id must be 1 to 128 visible ASCII characters.", field="request_id")
    return request_id


async def _text_request(
    engine: TextEngine, request: pb2.GenerateRequest, request_id: str, timeout_s: float | None
) -> TextRequest:
    """The plain form of a request. Long prompts are tokenized here, on a thread, short ones by the engine."""
    kind = request.WhichOneof("prompt")
    if len(request.cache_salt) > convert.MAX_CACHE_SALT:
        raise InvalidRequestError(f"cache_salt takes at most {convert.MAX_CACHE_SALT} characters.", field="cache_salt")
    make = partial(
        TextRequest,
        request_id=request_id,
        params=convert.sampling_params(request.sampling),
        timeout_s=timeout_s,
        priority=request.priority,
        cache_salt=request.cache_salt,
        cache=convert.cache_hints(request.cache),
    )
    add_bos = request.add_bos if request.HasField("add_bos") else True
    if kind == "token_ids":
        return make(prompt_token_ids=tuple(request.token_ids.ids))
    if kind == "chat":
        messages = convert.chat_messages(request.chat)
        if request.chat.ByteSize() <= INLINE_SIZE:
            return make(messages=messages)
        return make(prompt_token_ids=tuple(await asyncio.to_thread(engine.tokenizer.apply_chat, messages)))
    if kind == "text":
        if len(request.text) <= INLINE_SIZE:
            return make(prompt=request.text, add_bos=add_bos)
        token_ids = await asyncio.to_thread(engine.tokenizer.encode, request.text, add_bos=add_bos)
        return make(prompt_token_ids=tuple(token_ids))
    raise InvalidRequestError("Give a prompt: text, token_ids or chat.", field="prompt")
