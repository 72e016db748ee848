"""A client of a running server with the calls of `LLM`: `Client(address).generate(...)`, `.chat(...)`, `.stream(...)`.

Uses the API in serve/proto; needs the extra `serve` and no engine. Any thread may use it. It must not know how a server
works. Invariants: a call fails with the exception that `LLM` would raise; dropping a stream cancels its call.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from wicore_trt import errors
from wicore_trt.errors import WicoreError
from wicore_trt.images.files import take_images
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc, kv_pb2
from wicore_trt.types import (
    CacheHints,
    Completion,
    Constraint,
    ConstraintKind,
    EngineStats,
    FinishReason,
    ImageFile,
    ImageInfo,
    KVStats,
    ModelInfo,
    PoolStats,
    Prompt,
    SamplingParams,
    TextOutput,
    TierStats,
    TokenLogprob,
    Usage,
    pair_prompts,
    prompt_fields,
)

MAX_REPLY_BYTES = 64 << 20
_BY_CODE = {
    error.grpc_code: error
    for error in (
        errors.EnvironmentUnfitError,
        errors.AuthenticationError,
        errors.RequestCancelledError,
        errors.DeadlineError,
        errors.UnavailableError,
        errors.QueueFullError,
        errors.NotFoundError,
    )
}
_PLAIN: dict[type, type] = {
    pb2.GetModelInfoResponse: ModelInfo,
    pb2.GetStatsResponse: EngineStats,
    pb2.ImageInfo: ImageInfo,
    pb2.PoolStats: PoolStats,
    kv_pb2.KVStats: KVStats,
    kv_pb2.TierStats: TierStats,
}
"""Messages that tell a plain type, whose fields have the same names but for durations, which name their unit."""
_WIRE_NAMES = {f"{name}_seconds": f"{name}_time" for name in ("step", "read", "write")} | {"uptime_s": "uptime"}


class Client:
    """Client of the server at `address`, HOST:PORT. `ca`: file of trusted certificates, turns TLS on; `api_key`: a
    tenant's. Calls raise exceptions of `wicore_trt.errors`: InvalidRequestError with the field's name, QueueFullError
    with `retry_after_s`, UnavailableError (no server, or loading), AuthenticationError, DeadlineError."""

    def __init__(
        self, address: str = "127.0.0.1:50051", *, api_key: str | None = None, ca: str | Path | None = None
    ) -> None:
        options = [("grpc.max_receive_message_length", MAX_REPLY_BYTES)]
        if ca is not None:
            credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes())
            self._channel = grpc.secure_channel(address, credentials, options)
        else:
            self._channel = grpc.insecure_channel(address, options)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)  # made now: of a closed channel it would crash
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self.address = address
        self._closed = False

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the server takes requests. Raises UnavailableError after `timeout_s` seconds."""
        replies = self._ask_server(
            self._health.Watch, health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True
        )
        try:
            for reply in replies:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _error_of(error) from None
        finally:
            replies.cancel()
        raise errors.UnavailableError(f"{self.address} took no requests within {timeout_s:g} s.")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheHints | None = None,
        timeout_s: float | None = None,
    ) -> list[list[Completion]]:
        """Complete prompts (text, or token ids) together; result[i][j] is sequence j of prompt i. A prompt {"prompt":
        text, "images": files' bytes, paths or URLs} has "<start_of_image>" at the place of each image, or all at its
        beginning. `params` are for all prompts, or a list with one for each; `timeout_s` bounds each call."""
        calls = [self._start_call(prompt, its, cache, timeout_s) for prompt, its in pair_prompts(prompts, params)]
        try:
            return [_complete(call) for call in calls]
        finally:
            for call in calls:
                call.cancel()

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        cache: CacheHints | None = None,
        timeout_s: float | None = None,
    ) -> list[Completion]:
        """Return `params.n` next turns of a conversation of {"role", "content"} turns, by the model's chat template. A
        content is text, or parts {"type": "text", "text": ...} and {"type": "image", "image": bytes, path or URL}."""
        return _complete(self._start_call(messages, params, cache, timeout_s))

    def stream(
        self,
        prompt: Prompt | Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        cache: CacheHints | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[TextOutput]:
        """Yield the deltas of one prompt, or of the next turn of a conversation, as they come."""
        return _read_outputs(self._start_call(prompt, params, cache, timeout_s))

    def info(self) -> ModelInfo:
        """Return facts of the served engine; `build` is left empty."""
        found: ModelInfo = to_plain(self._ask_server(self._stub.GetModelInfo, pb2.GetModelInfoRequest()))
        return found

    def stats(self) -> EngineStats:
        """Return load and counters since the engine's start: for an operator of all, else of the key's own requests."""
        found: EngineStats = to_plain(self._ask_server(self._stub.GetStats, pb2.GetStatsRequest()))
        return found

    def has_chat_template(self) -> bool:
        """Tell whether the served model takes conversations; without a template it only completes text."""
        return self.info().chat

    def close(self) -> None:
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start_call(
        self,
        prompt: Prompt | Sequence[Mapping[str, object]],
        params: SamplingParams | None,
        cache: CacheHints | None,
        timeout_s: float | None,
    ) -> Any:
        message = pb2.GenerateRequest(sampling=_make_sampling(params or SamplingParams()))
        prompt, images = take_images(prompt, "chat.messages[{}].parts[{}].image")
        fields, left = prompt_fields(prompt), map(_make_image, images)
        if "messages" in fields:
            message.chat.messages.extend(_make_message(turn, left) for turn in fields["messages"])
        elif "prompt" in fields:
            message.text = fields["prompt"]
        else:
            message.token_ids.ids.extend(fields["prompt_token_ids"])
        message.images.extend(left)
        if cache is not None:
            message.cache.session = cache.session
            message.cache.priority = getattr(kv_pb2, f"CACHE_PRIORITY_{cache.priority.name}")
            message.cache.store = getattr(kv_pb2, f"CACHE_STORE_{cache.store.name}")
            if cache.ttl_s is not None:
                message.cache.ttl.FromNanoseconds(round(cache.ttl_s * 1e9))
        return self._ask_server(self._stub.Generate, message, timeout=timeout_s)

    def _ask_server(self, method: Callable[..., Any], message: Message, **options: Any) -> Any:
        """Call a method. Raises WicoreError when this client was closed."""
        if not self._closed:
            try:
                return method(message, metadata=self._metadata, **options)
            except grpc.RpcError as error:
                raise _error_of(error) from None
            except ValueError:
                if not self._closed:  # by another thread
                    raise
        raise WicoreError("This client was closed.", fix="Make another one.")


def to_plain(value: Any) -> Any:
    """Convert a message, or a value in one, to a plain type: durations in seconds, None for unset."""
    if isinstance(value, Duration):
        return value.ToNanoseconds() / 1e9
    if isinstance(value, Message):
        kind, known, given = _PLAIN[type(value)], value.DESCRIPTOR.fields_by_name, {}
        for name in (field.name for field in dataclasses.fields(kind)):
            wire = _WIRE_NAMES.get(name, name)
            if wire in known:
                plain = known[wire].message_type in (None, pb2.ImageInfo.DESCRIPTOR)
                unset = known[wire].has_presence and plain and not value.HasField(wire)
                given[name] = None if unset else to_plain(getattr(value, wire))
        return kind(**given)
    if isinstance(value, MutableSequence):
        return tuple(map(to_plain, value))
    return dict(value) if isinstance(value, Mapping) else value


def _make_message(turn: Mapping[str, Any], images: Iterator[pb2.Image]) -> pb2.ChatMessage:
    """Convert a turn; parts {"type": "image"} take the next of `images`."""
    if not isinstance(content := turn.get("content"), (list, tuple)):
        return pb2.ChatMessage(**turn)
    parts = []
    for part in content:
        match part:
            case {"type": "image"}:
                parts.append(pb2.ContentPart(image=next(images, None)))
            case {"type": "text", "text": str() as text}:
                parts.append(pb2.ContentPart(text=text))
            case _:
                raise errors.InvalidRequestError(f"No part of a message: {errors.shown(part)}.", field="messages")
    return pb2.ChatMessage(**{**turn, "content": "", "parts": parts})


def _make_image(image: ImageFile) -> pb2.Image:
    source = {"url": image.url} if image.url else {"data": image.data}
    return pb2.Image(crops=image.crops, **source)


def _make_sampling(params: SamplingParams) -> pb2.SamplingParams:
    message = pb2.SamplingParams(stop=params.stop, stop_token_ids=params.stop_token_ids, logit_bias=params.logit_bias)
    for field in message.DESCRIPTOR.fields:
        value = getattr(params, field.name)
        if field.containing_oneof is not None and value is not None:
            setattr(message, field.name, value)
    if params.constraint is not None:
        message.constraint.CopyFrom(constraint_message(params.constraint))
    return message


def constraint_message(given: Constraint) -> pb2.Constraint:
    """Convert a constraint. Raises InvalidRequestError for choices that are no list of texts."""
    match given.kind:
        case ConstraintKind.JSON_OBJECT:
            return pb2.Constraint(json_object=True)
        case ConstraintKind.CHOICE:
            try:
                return pb2.Constraint(choice=pb2.Choice(texts=json.loads(given.text)))
            except (TypeError, ValueError):
                raise errors.InvalidRequestError("The choices must be a list of texts.", field="constraint") from None
    message = pb2.Constraint()
    setattr(message, given.kind.value, given.text)
    return message


def _read_outputs(call: Any) -> Iterator[TextOutput]:
    try:
        for response in call:
            output = _output_of(response)
            if output.finish_reason is FinishReason.ERROR:
                raise WicoreError("The engine failed on this sequence.")
            yield output
    except grpc.RpcError as error:
        raise _error_of(error) from None
    finally:
        call.cancel()


def _complete(call: Any) -> list[Completion]:
    parts: dict[int, list[TextOutput]] = {}
    for output in _read_outputs(call):
        parts.setdefault(output.index, []).append(output)
    return [Completion.from_outputs(parts[i]) for i in sorted(parts)]


def _output_of(response: pb2.GenerateResponse) -> TextOutput:
    ended = response.WhichOneof("event") == "finish"
    finish, delta = response.finish, response.finish.delta if ended else response.delta
    stop = finish.WhichOneof("stop") if ended else None
    reason = FinishReason[pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_")] if ended else None
    usage = finish.usage
    return TextOutput(
        response.request_id,
        response.index,
        delta.text,
        tuple(delta.token_ids),
        _read_logprobs(delta.logprobs),
        reason,
        getattr(finish, stop) if stop is not None else None,
        Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) if ended else None,
        _read_logprobs(delta.prompt_logprobs),
    )


def _read_logprobs(entries: Iterable[pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(entry.token_id, entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
        for entry in entries
    )


def _error_of(error: Any) -> WicoreError:
    """Make the exception for a server's status; a status without our details is mapped by its code."""
    code, text = error.code(), error.details() or error.code().name
    status = rpc_status.from_call(error)
    if status is None and code is grpc.StatusCode.UNAVAILABLE:  # made by gRPC, not by our server
        address, why = re.search(r"(?:ipv[46]|unix|for):? ?(\S+): ", text), text.rpartition(": ")[2].rstrip("]")
        fix = "Start one (wicore serve) or give another address; where it has TLS, its certificates."
        return errors.UnavailableError(f"No server answers{f' at {address[1]}' if address else ''}: {why}.", fix=fix)
    details: dict[type, Any] = {}
    for packed in status.details if status is not None else ():
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                packed.Unpack(details.setdefault(kind, kind()))
    if code.name in ("INVALID_ARGUMENT", "ALREADY_EXISTS"):
        violations = getattr(details.get(error_details_pb2.BadRequest), "field_violations", ())
        return errors.InvalidRequestError(text, field=violations[0].field if violations else "")
    if code.name == "RESOURCE_EXHAUSTED":
        retry = details.get(error_details_pb2.RetryInfo)
        wait = retry.retry_delay.ToMilliseconds() / 1000 if retry is not None else 1.0
        return errors.QueueFullError(text, retry_after_s=wait)
    return _BY_CODE.get(code.name, WicoreError)(text)
