"""Converts messages of the wire contract to plain types and back.

Pure functions; must not know engines or calls. Invariants: an unset optional field takes the default of the plain type
(none is repeated here); errors name a field by its path in the message; `request_fields` defines the sampling fields.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from msgspec import structs

from wicore_trt.arithmetic import div_ceil
from wicore_trt.checks import check_count
from wicore_trt.errors import InvalidRequestError
from wicore_trt.images.files import read_image_url
from wicore_trt.kv.events import Event, EventSnapshot, Stored
from wicore_trt.kv.pages.page import Page
from wicore_trt.request_fields import FIELDS, SAMPLING
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import kv_pb2
from wicore_trt.text.calls import CallFinder, Function, gather_parts
from wicore_trt.text.tools import AUTO, MAX_TOOLS, NONE, REQUIRED, Tools, make_function, make_tools
from wicore_trt.types import (
    CacheHints,
    CachePriority,
    CacheStore,
    Constraint,
    ConstraintKind,
    EngineStats,
    FinishReason,
    ImageFile,
    SamplingParams,
    TextOutput,
    TierStats,
)

# A reader that fell behind gets its backlog in messages of this size; with 20 alternatives per token that is about
# 200 KiB, far below the 4 MiB that gRPC clients accept by default.
MAX_TOKENS_PER_MESSAGE = 512
# Some 100 KiB, and about 3 ms of the event loop's time.
MAX_PAGES_PER_MESSAGE = 1024

_CHOICES = {
    pb2.TOOL_CHOICE_UNSPECIFIED: AUTO,
    pb2.TOOL_CHOICE_AUTO: AUTO,
    pb2.TOOL_CHOICE_REQUIRED: REQUIRED,
    pb2.TOOL_CHOICE_NONE: NONE,
}
_FINISH = {reason: getattr(pb2, f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_PRIORITY = {kv_pb2.CACHE_PRIORITY_UNSPECIFIED: CachePriority.NORMAL} | {
    getattr(kv_pb2, f"CACHE_PRIORITY_{priority.name}"): priority for priority in CachePriority
}
_STORE = {kv_pb2.CACHE_STORE_UNSPECIFIED: CacheStore.ALL} | {
    getattr(kv_pb2, f"CACHE_STORE_{store.name}"): store for store in CacheStore
}


def read_sampling(message: Message, *, router: bool = False) -> dict[str, Any]:
    """Read the fields of SamplingParams that a message sets, by the table `request_fields`. `router`: they have the
    names of the routers' protocol, and its ways of leaving one out. Raises InvalidRequestError for too many items."""
    found: dict[str, Any] = {}
    for row in SAMPLING:
        name, unset = (row.router, row.unset) if router else (row.name, "absent")
        value = getattr(message, name)
        if row.most:
            check_count(value, row.most, name)
            found[row.name] = dict(value) if row.kind == "biases" else tuple(value)
        elif unset == "never" or (unset == "zero" and value) or (unset == "absent" and message.HasField(name)):
            found[row.name] = value
    return found


def read_sampling_params(message: pb2.SamplingParams) -> SamplingParams:
    """Convert sampling parameters. Raises InvalidRequestError for values out of range."""
    given = read_sampling(message)
    if message.HasField("constraint"):
        given["constraint"] = read_constraint(message.constraint)
    return SamplingParams(**given)


def read_constraint(message: pb2.Constraint) -> Constraint:
    """Convert a constraint. Raises InvalidRequestError for one that is empty or too long."""
    name = message.WhichOneof("kind")
    if name is None or (name == "json_object" and not message.json_object):
        raise InvalidRequestError("A constraint has exactly one kind.", field="constraint")
    return make_constraint(name, message, message.choice.texts)


def make_constraint(name: str, message: Message, choices: Iterable[str]) -> Constraint:
    """Make the constraint of field `name`, or of `choices`. Raises InvalidRequestError if empty or too long."""
    match kind := ConstraintKind(name):
        case ConstraintKind.JSON_OBJECT:
            return Constraint(kind)
        case ConstraintKind.CHOICE:
            return Constraint(kind, json.dumps([*choices], ensure_ascii=False))
    return Constraint(kind, getattr(message, name))


_PATHS = {"constraint": "sampling.constraint", "tools": "tools.functions", "tool_choice": "tools.choice"}


def find_field_path(name: str, prompt_kind: str | None) -> str:
    """Find the path in GenerateRequest of a field of TextRequest or SamplingParams; other names stay as they are."""
    if name in ("prompt", "prompt_token_ids", "messages"):
        return prompt_kind or "prompt"
    row = FIELDS.get(name)
    return row.grpc if row is not None and row.grpc else _PATHS.get(name, name)


def read_positive_seconds(message: Duration, field: str) -> float:
    """Read a positive, well-formed duration in seconds. Raises InvalidRequestError for others."""
    seconds = message.seconds + message.nanos / 1e9
    if not (abs(message.nanos) < 1_000_000_000 and seconds > 0):
        raise InvalidRequestError(f"{field} must be a positive duration, got {seconds:g} s.", field=field)
    return seconds


def read_cache_hints(message: kv_pb2.CacheHints) -> CacheHints:
    """Convert cache hints. Raises InvalidRequestError for values out of range."""
    if message.priority not in _PRIORITY:
        raise InvalidRequestError(f"{message.priority} is no CachePriority.", field="cache.priority")
    if message.store not in _STORE:
        raise InvalidRequestError(f"{message.store} is no CacheStore.", field="cache.store")
    ttl_s = read_positive_seconds(message.ttl, "cache.ttl") if message.HasField("ttl") else None
    return CacheHints(message.session, _PRIORITY[message.priority], ttl_s, _STORE[message.store])


def make_duration(seconds: float) -> Duration:
    fraction, whole = math.modf(seconds)
    return Duration(seconds=int(whole), nanos=int(fraction * 1e9))


def read_chat_messages(chat: pb2.Chat, most: int) -> tuple[tuple[dict[str, object], ...], tuple[ImageFile, ...]]:
    """Convert turns for the chat template, and their images. Raises InvalidRequestError for none or too many."""
    if not chat.messages:
        raise InvalidRequestError("A chat needs at least one message.", field="chat.messages")
    check_count(chat.messages, most, "chat.messages")
    images = list[ImageFile]()
    found = [_read_message(message, f"chat.messages[{i}]", images) for i, message in enumerate(chat.messages)]
    return tuple(found), tuple(images)


def _read_message(message: pb2.ChatMessage, where: str, images: list[ImageFile]) -> dict[str, object]:
    turn: dict[str, object] = {"role": message.role, "content": message.content}
    if message.parts:
        if message.content:
            raise InvalidRequestError("A message has content or parts.", field=f"{where}.parts")
        turn["content"] = [_read_part(part, f"{where}.parts[{i}]", images) for i, part in enumerate(message.parts)]
    if message.tool_calls:
        called = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in message.tool_calls]
        turn["tool_calls"] = [{"id": name, "function": function} for name, function in called]
    if message.HasField("tool_call_id"):
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _read_part(part: pb2.ContentPart, where: str, images: list[ImageFile]) -> dict[str, str]:
    if part.WhichOneof("part") != "image":
        return {"type": "text", "text": part.text}
    images.append(read_image(part.image, f"{where}.image"))
    return {"type": "image"}


def read_image(message: pb2.Image, where: str) -> ImageFile:
    """Read an image. Raises InvalidRequestError (`where`) for one without source, and for a URL that is none."""
    if message.HasField("url"):
        return read_image_url(message.url, where, crops=message.crops)
    return ImageFile(data=message.data, crops=message.crops, field=where)


def read_tools(message: pb2.Tools, constraint: Constraint | None) -> Tools | None:
    """Read the tools, None if none may be called; `constraint` is the request's. Raises InvalidRequestError."""
    check_count(message.functions, MAX_TOOLS, "tools.functions")
    functions = [_read_function(f"tools.functions[{i}]", function) for i, function in enumerate(message.functions)]
    named = message.function if message.HasField("function") else None
    if message.choice not in _CHOICES or (named is not None and message.choice):
        raise InvalidRequestError("tools has a choice or the name of a function.", field="tools.choice")
    beside = ("sampling.constraint", constraint) if constraint is not None else None
    several = message.parallel if message.HasField("parallel") else True
    return make_tools(functions, _CHOICES[message.choice], named, several=several, beside=beside)


def _read_function(where: str, message: pb2.Function) -> Function:
    try:
        parameters = json.loads(message.parameters) if message.HasField("parameters") else {}
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"The parameters of {where} must be JSON.", field=where) from None
    return make_function(where, message.name, message.description, parameters, message.strict)


def _fill_delta(delta: pb2.Delta, output: TextOutput, finder: CallFinder | None) -> None:
    if finder is None:
        delta.text = output.text
    else:
        pieces = finder.push_text(output.text) + (finder.end_output() if output.finish_reason is not None else [])
        delta.text, calls = gather_parts(pieces)
        for call in calls:
            delta.tool_calls.add(index=call.call, id=call.id, name=call.name, arguments=call.arguments)
    if len(output.token_ids) == 1:  # the usual case, for which `extend` costs twice as much
        delta.token_ids.append(output.token_ids[0])
    else:
        delta.token_ids.extend(output.token_ids)
    for entries, messages in ((output.logprobs, delta.logprobs), (output.prompt_logprobs, delta.prompt_logprobs)):
        for entry in entries:
            message = messages.add(token_id=entry.token_id, logprob=entry.logprob)
            for token_id, logprob in entry.top:
                message.top.add(token_id=token_id, logprob=logprob)


def _cut_output(output: TextOutput) -> Iterator[TextOutput]:
    """Cut an output into parts of at most MAX_TOKENS_PER_MESSAGE tokens; text and tokens need not be aligned."""
    scored = output.prompt_logprobs
    for i in range(0, len(scored), MAX_TOKENS_PER_MESSAGE):
        part = scored[i : i + MAX_TOKENS_PER_MESSAGE]
        yield TextOutput(output.request_id, output.index, "", (), prompt_logprobs=part)
    count = max(1, div_ceil(len(output.token_ids), MAX_TOKENS_PER_MESSAGE))
    size = len(output.text)
    for i in range(count):
        cut = slice(i * MAX_TOKENS_PER_MESSAGE, (i + 1) * MAX_TOKENS_PER_MESSAGE)
        piece = structs.replace(
            output,
            text=output.text[i * size // count : (i + 1) * size // count],
            token_ids=output.token_ids[cut],
            logprobs=output.logprobs[cut],
            prompt_logprobs=(),
        )
        yield piece if i == count - 1 else structs.replace(piece, finish_reason=None)


def make_responses(
    output: TextOutput, *, first_token_s: float | None, total_s: float, finder: CallFinder | None = None
) -> Iterator[pb2.GenerateResponse]:
    """Make the messages for one output; a reader that fell behind gets several. `first_token_s` and `total_s`: seconds
    since the request arrived, for the finish event. `finder`: the sequence's, where it may have calls."""
    size = max(len(output.token_ids), len(output.prompt_logprobs))
    for piece in _cut_output(output) if size > MAX_TOKENS_PER_MESSAGE else (output,):
        message = pb2.GenerateResponse(request_id=piece.request_id, index=piece.index)
        if piece.finish_reason is None:
            delta = message.delta
            delta.SetInParent()  # marks the event's kind even when it is empty
            _fill_delta(delta, piece, finder)
        else:
            _fill_delta(message.finish.delta, piece, finder)
            _fill_finish(message.finish, piece, first_token_s, total_s)
        yield message


def _fill_finish(finish: pb2.Finish, output: TextOutput, first_token_s: float | None, total_s: float) -> None:
    assert output.finish_reason is not None
    finish.reason = _FINISH[output.finish_reason]
    if isinstance(output.stop_reason, str):
        finish.stop_string = output.stop_reason
    elif output.stop_reason is not None:
        finish.stop_token_id = output.stop_reason
    if output.usage is not None:
        finish.usage.prompt_tokens = output.usage.prompt_tokens
        finish.usage.completion_tokens = output.usage.completion_tokens
        finish.usage.cached_tokens = output.usage.cached_tokens
    finish.timings.total.CopyFrom(make_duration(total_s))
    if first_token_s is not None:
        finish.timings.time_to_first_token.CopyFrom(make_duration(first_token_s))


def make_stats(now: EngineStats, streams_open: int) -> pb2.GetStatsResponse:
    return pb2.GetStatsResponse(
        uptime=make_duration(now.uptime_s), requests_running=now.requests_running,
        requests_waiting=now.requests_waiting, streams_open=streams_open,
        requests_finished=now.requests_finished, prompt_tokens=now.prompt_tokens,
        cached_prompt_tokens=now.cached_prompt_tokens, generated_tokens=now.generated_tokens, steps=now.steps,
        step_time=make_duration(now.step_seconds), preemptions=now.preemptions,
        pools=[pb2.PoolStats(**dataclasses.asdict(pool)) for pool in now.pools],
        kv=kv_pb2.KVStats(
            tiers=map(_tier_stats, now.kv.tiers), decisions=now.kv.decisions, parked=now.kv.parked,
            resumed=now.kv.resumed, event_sequence=now.kv.event_sequence,
        ),
    )  # fmt: skip


def _tier_stats(tier: TierStats) -> kv_pb2.TierStats:
    given = dataclasses.asdict(tier)
    read_time, write_time = make_duration(given.pop("read_seconds")), make_duration(given.pop("write_seconds"))
    return kv_pb2.TierStats(**given, read_time=read_time, write_time=write_time)


def make_kv_snapshot(snapshot: EventSnapshot) -> Iterator[kv_pb2.SubscribeKVEventsResponse]:
    """Convert a snapshot to messages: at least one, the first and the last marked."""
    size = MAX_PAGES_PER_MESSAGE
    slices = [(*name, i) for name, pages in snapshot.pages.items() for i in range(0, len(pages), size)]
    for number, piece in enumerate(slices or [None]):
        message = kv_pb2.SubscribeKVEventsResponse(epoch=snapshot.epoch, sequence=snapshot.sequence)
        message.snapshot.first, message.snapshot.last = number == 0, number >= len(slices) - 1
        if piece is not None:
            tier, group, start = piece
            pages = snapshot.pages[tier, group][start : start + size]
            _fill_pages(message.snapshot.pages.add(), tier, group, pages)
        yield message


def make_kv_events(epoch: int, events: list[Event]) -> Iterator[kv_pb2.SubscribeKVEventsResponse]:
    """Convert events to messages of about MAX_PAGES_PER_MESSAGE pages; an event is never cut."""
    message, size = kv_pb2.SubscribeKVEventsResponse(epoch=epoch), 0
    for event in events:
        size += _fill_event(message.events.events.add(sequence=event.sequence), event)
        message.sequence = event.sequence
        if size >= MAX_PAGES_PER_MESSAGE or event is events[-1]:
            yield message
            message, size = kv_pb2.SubscribeKVEventsResponse(epoch=epoch), 0


def _fill_event(message: kv_pb2.KVEvent, event: Event) -> int:
    """Convert an event; return its approximate size in pages."""
    if isinstance(event, Stored):
        _fill_pages(message.stored, event.tier, event.group, event.pages)
        return 1 + len(event.pages)
    message.removed.tier, message.removed.group, message.removed.cause = event.tier, event.group, event.cause
    message.removed.keys.extend(event.keys)
    return 1 + len(event.keys)


def _fill_pages(message: kv_pb2.KVPages, tier: str, group: str, pages: Iterable[Page]) -> None:
    message.tier, message.group = tier, group
    for page in pages:
        given = message.pages.add(key=page.key, parent=page.parent or b"", index=page.index, tenant=page.tenant)
        given.token_ids.extend(page.token_ids)
