"""Guards every gRPC call: its key, its place among the open calls, reading, parsing, statuses, the access line.

Must not know what a call does. Invariants (I19): nothing of a call is read before its key is known to be good; a silent
stream ends; a call of our service ends with OK, with a status made from a WicoreError, or by the client. No text of an
unexpected exception reaches the client; a finished call writes one access line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

import grpc
from google.protobuf.message import Message

from wicore_trt.access.admission import Admission
from wicore_trt.access.calls import CURRENT, REQUEST_ID_HEADER, Call, make_call_id, read_key, write_access_line
from wicore_trt.access.keys import Identity
from wicore_trt.access.log import QuietLog
from wicore_trt.core.shares import Gate
from wicore_trt.errors import AuthenticationError, InvalidRequestError, WicoreError
from wicore_trt.serve.errors import abort_call
from wicore_trt.serve.intake import BriefRequestReader, RequestReader, find_host, parse_request, read_stream

log = logging.getLogger(__name__)

OWN_PREFIXES = ("/wicore.", "/vllm.")
HEALTH_PREFIX = "/grpc.health.v1.Health/"
MAX_CHECKS = MAX_WATCHES = 1024
"""Health checks need no key, so they have places of their own, and those that stay open too."""
MAX_METADATA_BYTES, ENTRY_BYTES = 16 << 10, 32
"""Metadata of a call, counted as HTTP/2 does. gRPC holds clients to this number once they have acknowledged its
settings, and takes 16 MiB from one that does not."""

Handler: TypeAlias = "grpc.RpcMethodHandler | None"
Run: TypeAlias = "Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]"


def read_metadata(details: grpc.HandlerCallDetails, key: str) -> str | None:
    """Return the first value of a metadata key as text, or None."""
    for name, value in details.invocation_metadata or ():
        if name == key:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


class CallReply:
    """Answer to one call: the call's id in initial metadata, then messages. The metadata is sent with the first
    message, as it costs a write of its own; a refused call has the id in its status."""

    def __init__(self, context: grpc.aio.ServicerContext, call_id: str) -> None:
        self._context, self._call_id = context, call_id
        self._begun = False

    def time_remaining(self) -> float | None:
        left: float | None = self._context.time_remaining()
        return left

    async def send_metadata(self) -> None:
        """Send the call's id now, so that the client knows that the call was taken before its first message."""
        if not self._begun:
            self._begun = True
            await self._context.send_initial_metadata(((REQUEST_ID_HEADER, self._call_id),))

    async def write_message(self, message: Message) -> None:
        if not self._begun:
            await self.send_metadata()
        await self._context.write(message)


# All methods are served as streams, which look the same on the wire: gRPC reads a unary request's message before any
# handler runs, and a stream's only when its handler asks. One generic handler wraps those of the services, because
# gRPC's interceptors would cost each call a chain of coroutines.
class Guard(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Wraps the methods of all `services`; health checks need no key. Requests are parsed here, not by gRPC, so that a
    malformed one (invalid UTF-8, truncated) is INVALID_ARGUMENT with our details rather than a bare UNKNOWN."""

    def __init__(self, admission: Admission, services: Sequence[grpc.GenericRpcHandler]) -> None:
        self._services = services
        self._keys = admission.keys
        self._calls = admission.calls
        self._counts = admission.counts
        self._checks = Gate(MAX_CHECKS, "health checks")
        self._watches = Gate(MAX_WATCHES, "health watches")
        self._requests, self._brief = RequestReader(), BriefRequestReader()
        self._refused = QuietLog(log, logging.WARNING)

    def service(self, details: grpc.HandlerCallDetails) -> Handler:
        """Find the handler of a call; None for a method that is not served."""
        metadata = details.invocation_metadata or ()
        if len(metadata) > MAX_METADATA_BYTES // ENTRY_BYTES or (
            sum(len(name) + len(value) + ENTRY_BYTES for name, value in metadata) > MAX_METADATA_BYTES
        ):
            return grpc.stream_stream_rpc_method_handler(self._refuse_metadata)
        health = details.method.startswith(HEALTH_PREFIX)
        header, method = partial(read_metadata, details), details.method.rpartition("/")[2]
        who = Identity() if health else self._keys.find_identity(read_key(header))
        if who is None:
            return grpc.stream_stream_rpc_method_handler(
                partial(self._refuse_call, Call.from_headers(method, Identity(), header))
            )
        handler = next(filter(None, (service.service(details) for service in self._services)), None)
        if handler is None:
            return None
        if health:
            return self._handle_health(handler)
        if not details.method.startswith(OWN_PREFIXES):
            return self._handle_foreign(handler, who)

        async def run(_: object, context: grpc.aio.ServicerContext) -> None:
            call = Call.from_headers(method, who, header)
            reply = CallReply(context, call.call_id)
            try:
                await run_call(call, lambda: self._answer_call(call, handler, context, reply), context)
            finally:
                self._counts.grpc[method, call.code] += 1

        return grpc.stream_stream_rpc_method_handler(run, response_serializer=handler.response_serializer)

    async def _answer_call(
        self, call: Call, handler: grpc.RpcMethodHandler, context: grpc.aio.ServicerContext, reply: CallReply
    ) -> None:
        with self._calls.hold_place(call.who.tenant):
            request = parse_request(handler, await self._requests.read_request(context))
            if handler.response_streaming:
                await handler.unary_stream(request, reply)
            else:
                await reply.write_message(await handler.unary_unary(request, reply))

    def _handle_health(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Handle a health check or watch. Anybody may call, so places go by the caller's address."""

        async def run(_: object, context: grpc.aio.ServicerContext) -> None:
            host = find_host(context.peer())
            with self._checks.hold_place(host):
                request = parse_request(handler, await self._brief.read_request(context, host))
            if not handler.response_streaming:
                await context.write(await handler.unary_unary(request, context))
                return
            with self._watches.hold_place(host):
                await handler.unary_stream(request, context)

        return grpc.stream_stream_rpc_method_handler(
            partial(run_foreign_call, run), response_serializer=handler.response_serializer
        )

    def _handle_foreign(self, handler: grpc.RpcMethodHandler, who: Identity) -> grpc.RpcMethodHandler:
        """Handle a stream of another service, which is reflection: it takes a place, and ends when it falls silent."""

        async def run(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            with self._calls.hold_place(who.tenant):
                parsed = (parse_request(handler, raw) async for raw in read_stream(requests))
                async for response in handler.stream_stream(parsed, context):
                    await context.write(response)

        return grpc.stream_stream_rpc_method_handler(
            partial(run_foreign_call, run), response_serializer=handler.response_serializer
        )

    async def _refuse_call(self, call: Call, _: object, context: grpc.aio.ServicerContext) -> None:
        CURRENT.set(call)
        self._refused("refused a call without a valid API key", peer=context.peer())
        self._counts.refused["grpc"] += 1
        error = AuthenticationError(
            "This server needs an API key.", fix="Send it as metadata: authorization: Bearer KEY."
        )
        await abort_call(context, error, call.call_id)

    async def _refuse_metadata(self, _: object, context: grpc.aio.ServicerContext) -> None:
        self._refused("refused a call with too much metadata", peer=context.peer())
        error = InvalidRequestError(
            f"The metadata have more than {MAX_METADATA_BYTES} bytes.", field="metadata", fix="Send less."
        )
        await abort_call(context, error, make_call_id())


async def run_foreign_call(run: Run, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    try:
        await run(requests, context)
    except WicoreError as error:
        await abort_call(context, error, make_call_id())
    except grpc.aio.BaseError:
        raise  # the handler has sent a status, or the client has left
    except Exception:
        call_id = make_call_id()
        log.exception("call %s failed unexpectedly", call_id)
        await abort_call(context, make_internal_error(call_id), call_id)


def make_internal_error(call_id: str) -> WicoreError:
    """Make the error that hides an unexpected exception from the client."""
    return WicoreError(f"Internal error; the server's log has it as {call_id}.")


async def run_call(call: Call, answer: Callable[[], Awaitable[None]], context: grpc.aio.ServicerContext) -> None:
    CURRENT.set(call)
    call.facts["peer"] = context.peer()
    if call.who.tenant:
        call.facts["tenant"] = call.who.tenant
    code = "OK"
    try:
        await answer()
    except asyncio.CancelledError:
        code = "DEADLINE_EXCEEDED" if context.time_remaining() == 0 else "CANCELLED"
        raise
    except WicoreError as error:
        code = error.grpc_code
        call.note_error(error)
        await abort_call(context, error, call.call_id)
    except grpc.aio.InternalError:
        # the client has left: the transport takes no messages, and gRPC is about to cancel this task
        code = "CANCELLED"
        await asyncio.sleep(1.0)
        raise
    except Exception:
        code = "INTERNAL"
        log.exception("call %s (%s) failed unexpectedly", call.call_id, call.method)
        await abort_call(context, make_internal_error(call.call_id), call.call_id)
    finally:
        write_access_line(call, code, generates=call.method == "Generate")
