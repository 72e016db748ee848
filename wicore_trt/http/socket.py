"""Serve the WebSocket /v1/stream: several generations on one connection, as JSON frames.

Must not know uvicorn. Invariants: a generation ends with exactly one frame, done or error; an id is free again when
that was sent; when the connection ends all its generations end; a web page of another origin cannot connect; a
revoked key begins nothing on open connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from wicore_trt.access.calls import CURRENT, REQUEST_ID_HEADER, Call, write_access_line
from wicore_trt.access.entry import GenerationCall
from wicore_trt.core.shares import Gate
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.errors import InvalidRequestError, NotFoundError, RequestCancelledError, WicoreError
from wicore_trt.http.bodies import ChatBody, CompletionBody, read_fields
from wicore_trt.http.context import Context
from wicore_trt.http.convert import make_chat_request, make_completion_requests, name_field
from wicore_trt.http.errors import CLIENT_GONE, HttpError, error_object, name_failure, status_of
from wicore_trt.http.intake import decode_json, parse_body
from wicore_trt.http.shapes import AnswerCalls, ChatShape, describe_usage, encode
from wicore_trt.types import TextOutput

PATH = "/v1/stream"
MAX_SOCKETS = 256
MAX_OPEN = 64
"""Generations of one connection at the same time, on top of the limits that all calls have."""
MAX_FRAME = 4 << 20
"""Bytes of one frame; longer prompts go by POST."""
MAX_ID = 128


# in   {"type": "generate", "id": ID, ...}   the fields of /v1/chat/completions, or with `prompt` of /v1/completions
#      {"type": "cancel", "id": ID}
# out  {"type": "delta", "id", "index", "text", "logprobs", "finish_reason", "stop_reason"}, where tools may be called
#      with "tool_calls", as chunks of /v1/chat/completions have them
#      {"type": "done", "id", "usage"}
#      {"type": "error", "id", "error"}      ends the generation; `id` is null for a frame that has none
class FrameShape(ChatShape):
    """The frames of one generation. `calls`: functions may be called."""

    def __init__(self, frame_id: str, engine: TextEngine, *, calls: bool) -> None:
        super().__init__(engine.info.model_id, engine.tokenizer)
        self._calls = AnswerCalls() if calls else None
        self._delta = b'{"type":"delta","id":' + encode(frame_id) + b',"index":'

    def make_frame(self, index: int, output: TextOutput) -> bytes:
        """Make the frame of an output, b"" where there is nothing to send."""
        text, calls, reason = output.text, b"", output.finish_reason and output.finish_reason.value
        if self._calls is not None:
            delta, reason = self._calls.read_output(index, output)
            text, found = delta.get("content", ""), delta.get("tool_calls", [])
            calls = b',"tool_calls":' + encode(found) if found else b""
        if not (text or calls or reason or output.logprobs):
            return b""
        logprobs = encode(self._list_logprobs(index, output)["content"]) if output.logprobs else b"null"
        end = b"null"
        if reason is not None:
            end = b'"%b","stop_reason":%b' % (reason.encode(), encode(output.stop_reason))
        content = encode(text) + calls
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (self._delta, index, content, logprobs, end)


def check_origin(headers: Headers, origins: Sequence[str]) -> None:
    """Raise HttpError for a web page of another origin: browsers open WebSockets to any origin."""
    origin = headers.get("origin")
    if origin is None or origin in origins or "*" in origins:
        return
    try:
        host = urlsplit(origin).netloc
    except ValueError:
        host = None
    if host is None or host != headers.get("host"):
        raise HttpError(403, "Web pages of this origin may not connect.", fix="Set server.cors_origins.")


class StreamSocket:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._sockets = Gate(MAX_SOCKETS, "WebSockets")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["state"]["call"]
        check_origin(Headers(scope=scope), self._context.origins)
        with self._sockets.hold_place(call.who.tenant), self._context.body_budget.open_share(call.who.tenant) as hold:
            scope["state"]["hold"] = hold  # what has come of a message counts before it is whole
            await receive()  # websocket.connect
            await send({"type": "websocket.accept"})
            connection = Connection(self._context, call, send)
            try:
                while (message := await receive())["type"] != "websocket.disconnect":
                    await connection.take_frame((message.get("text") or "").encode() or message.get("bytes") or b"")
                    await asyncio.sleep(0)  # frames that came together do not hold up other connections
            finally:
                del scope["state"]["hold"]
                await connection.close_all()


class Connection:
    """Generations of one client, by their ids."""

    def __init__(self, context: Context, call: Call, send: Send) -> None:
        self._context, self._call, self._send = context, call, send
        self._open: dict[str, asyncio.Task[None]] = {}

    async def take_frame(self, raw: bytes) -> None:
        """Process a frame. Faults go to the client."""
        frame_id: str | None = None
        try:
            frame = decode_json(raw, self._context.max_items)
            given = frame.pop("id", None)
            if not isinstance(given, str) or not 0 < len(given) <= MAX_ID:
                raise InvalidRequestError(f"id is a text of 1 to {MAX_ID} characters.", field="id")
            frame_id = given
            kind = frame.pop("type", None)
            if kind == "cancel":
                if frame_id not in self._open:
                    raise NotFoundError("No generation has this id.")
                self._open[frame_id].cancel()
            elif kind == "generate":
                if frame_id in self._open:
                    raise InvalidRequestError("A generation with this id is open.", field="id")
                if len(self._open) >= MAX_OPEN:
                    raise InvalidRequestError(f"A connection has at most {MAX_OPEN} generations.", field="id")
                self._open[frame_id] = asyncio.ensure_future(self._run_generation(frame_id, frame, len(raw)))
                await asyncio.sleep(0)  # let it begin: a task that is cancelled before says nothing
            else:
                raise InvalidRequestError("type is generate or cancel.", field="type")
        except WicoreError as error:
            await self._send_error(frame_id, error)

    async def _run_generation(self, frame_id: str, frame: dict[str, Any], size: int) -> None:
        call = Call.from_headers(f"STREAM {PATH}", self._call.who, {REQUEST_ID_HEADER: self._call.call_id}.get)
        call.parent = self._call.parent
        CURRENT.set(call)  # of this task
        call.facts |= {"peer": self._call.facts["peer"], "frame": frame_id}
        status, context = CLIENT_GONE, self._context
        try:
            call.who = context.admission.check_identity(call.who)
            tenant = call.who.tenant
            with context.admission.calls.hold_place(tenant), context.body_budget.open_share(tenant) as hold:
                hold.grow_to(size)
                kind: type[ChatBody | CompletionBody] = CompletionBody if "prompt" in frame else ChatBody
                await self._relay_outputs(frame_id, parse_body(kind, read_fields(kind), frame), call)
            status = 200
        except asyncio.CancelledError:
            await self._send_error(frame_id, RequestCancelledError("The request was cancelled."))
        except OSError:
            pass  # the connection is gone
        except Exception as raised:
            status = status_of(raised) if isinstance(raised, WicoreError) else 500
            await self._send_error(frame_id, name_failure(call, raised))
        finally:
            del self._open[frame_id]
            write_access_line(call, str(status), generates=True)

    async def _relay_outputs(self, frame_id: str, body: ChatBody | CompletionBody, call: Call) -> None:
        engine = self._context.require_serving()
        engine.info.shown_as(body.model)
        for field in ("echo", "prompt_logprobs", "return_token_ids"):
            if (value := getattr(body, field, None)) is not None and value is not False:
                raise InvalidRequestError(f"{field} is not supported here.", field=field, fix="Use HTTP.")
        try:
            if isinstance(body, ChatBody):
                requests = [make_chat_request(body, call.who.tenant, call.facts)]
            else:
                requests = make_completion_requests(body, call.who.tenant)
            shape = FrameShape(frame_id, engine, calls=bool(requests[0].functions))
            generation = await GenerationCall.submit_requests(self._context, call, requests)
        except InvalidRequestError as error:
            raise name_field(error, body) from None
        try:
            async for index, output in generation.stream_outputs():
                frame = shape.make_frame(index, output)
                if frame:
                    await self._send({"type": "websocket.send", "text": frame.decode()})
        finally:
            await generation.aclose()
        await self._send_frame({"type": "done", "id": frame_id, "usage": describe_usage(generation.totals)})

    async def _send_error(self, frame_id: str | None, error: WicoreError) -> None:
        await self._send_frame({"type": "error", "id": frame_id, **error_object(error)})

    async def _send_frame(self, frame: dict[str, object]) -> None:
        with suppress(OSError):  # the connection is gone
            await self._send({"type": "websocket.send", "text": encode(frame).decode()})

    async def close_all(self) -> None:
        """End all generations, one after the other, so that other connections are not held up."""
        tasks = list(self._open.values())
        left = iter(tasks)
        try:
            for task in left:
                task.cancel()
                await asyncio.sleep(0)
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
