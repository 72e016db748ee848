"""Guards every gRPC call: its key, its place among the open calls, reading, parsing, statuses, the access line.

Must not know what a call does. Invariants (I19): nothing of a call is read before its key is known to be good; a silent
stream ends; a call of our service ends with OK, with a status made from a WicoreError, or by the client. No text of an
unexpected exception reaches the client, and a status fits clients' metadata (8 KiB). A finished call writes one access
line.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from wicore_trt.access.admission import Admission
from wicore_trt.access.calls import CURRENT, REQUEST_ID_HEADER, Call, read_key, refuse_key, write_access_line
from wicore_trt.access.keys import Identity
from wicore_trt.access.log import QuietLog
from wicore_trt.core.shares import Gate
from wicore_trt.errors import AuthenticationError, ContextLengthError, InvalidRequestError, WicoreError
from wicore_trt.serve.intake import BriefRequestReader, RequestReader, find_host, parse_request, read_stream

log = logging.getLogger(__name__)

OWN_PREFIXES = ("/wicore.", "/vllm.")
HEALTH_PREFIX = "/grpc.health.v1.Health/"
MAX_CHECKS = MAX_WATCHES = 1024
"""Health checks need no key, so they have places of their own, and those that stay open too."""
MAX_METADATA_BYTES, ENTRY_BYTES = 16 << 10, 32
"""Metadata of a call, counted as HTTP/2 does. gRPC takes 16 MiB from clients that do not acknowledge its settings."""
DOMAIN = "wicore"
DETAILS = "grpc-status-details-bin"
"""Metadata in which clients of all languages look for the google.rpc.Status."""

Handler: TypeAlias = "grpc.RpcMethodHandler | None"
Context: TypeAlias = grpc.aio.ServicerContext
Run: TypeAlias = "Callable[[AsyncIterator[bytes], Context], Awaitable[None]]"


INTERNAL = "Internal error; the server's log has it as {}."
"""Text for a client on an unexpected exception."""


class DuplicateRequestError(InvalidRequestError):
    """Request id of the client's choice that a running request has."""

    grpc_code = "ALREADY_EXISTS"


def make_status(error: WicoreError, call_id: str) -> status_pb2.Status:
    """Make an error's google.rpc.Status: ErrorInfo, RequestInfo, and BadRequest and RetryInfo where they fit."""
    text = error.tell_client()
    kind = InvalidRequestError if isinstance(error, ContextLengthError) else type(error)
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=kind.name_kind().upper(), domain=DOMAIN),
        error_details_pb2.RequestInfo(request_id=call_id),
    ]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(max(1, round(error.retry_after_s * 1000)))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=grpc.StatusCode[error.grpc_code].value[0], message=text)
    for detail in details:
        status.details.add(type_url=f"type.googleapis.com/{detail.DESCRIPTOR.full_name}",
                           value=detail.SerializeToString())  # fmt: skip
    return status


async def abort_call(context: Context, error: WicoreError, call_id: str) -> None:
    """End the call with the error's status, and its id. Raises CancelledError when the client has left already."""
    status = make_status(error, call_id)
    metadata = ((DETAILS, status.SerializeToString()), (REQUEST_ID_HEADER, call_id))
    try:
        await context.abort(grpc.StatusCode[error.grpc_code], status.message, metadata)
    except grpc.aio.AbortError as ended:
        # gRPC keeps and re-raises it: its frames hold the call, and collecting such cycles would cost most of the time
        ended.__traceback__ = ended.__context__ = None
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def read_metadata(details: grpc.HandlerCallDetails, key: str) -> str | None:
    """Return the first value of a metadata key as text, or None."""
    for name, value in details.invocation_metadata or ():
        if name == key:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


class CallReply:
    """Answer to one call: the call's id in initial metadata, then messages. The metadata is sent with the first
    message, as it costs a write of its own; a refused call has the id in its status."""

    def __init__(self, context: Context, call_id: str) -> None:
        self._context, self._call_id = context, call_id
        self._begun = False

    def find_time_left(self) -> float | None:
        """Return the seconds to the call's deadline, more than 0; None without one."""
        left = self._context.time_remaining()
        return None if left is None else max(left, 1e-3)

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
        metadata, method = details.invocation_metadata or (), details.method.rpartition("/")[2]
        if len(metadata) > MAX_METADATA_BYTES // ENTRY_BYTES or (
            sum(len(name) + len(value) + ENTRY_BYTES for name, value in metadata) > MAX_METADATA_BYTES
        ):
            large = f"The metadata have more than {MAX_METADATA_BYTES} bytes."
            error: WicoreError = InvalidRequestError(large, field="metadata", fix="Send less.")
            return self._refuse_call(Call.from_headers(method, Identity(), lambda name: None), error)
        health = details.method.startswith(HEALTH_PREFIX)
        header = partial(read_metadata, details)
        who = Identity() if health else self._keys.find_identity(read_key(header))
        if who is None:
            self._counts.refused["grpc"] += 1
            error = refuse_key(header, "Send it as metadata: authorization: Bearer KEY.")
            return self._refuse_call(Call.from_headers(method, Identity(), header), error)
        handler = next(filter(None, (service.service(details) for service in self._services)), None)
        if handler is None:
            return None
        if health:
            run = partial(run_foreign_call, partial(self._answer_health, handler))
        elif not details.method.startswith(OWN_PREFIXES):
            run = partial(run_foreign_call, partial(self._answer_foreign, handler, who))
        else:
            run = partial(self._answer_own, handler, Call.from_headers(method, who, header))
        return grpc.stream_stream_rpc_method_handler(run, response_serializer=handler.response_serializer)

    def _refuse_call(self, call: Call, error: WicoreError) -> grpc.RpcMethodHandler:
        why = "without a valid API key" if isinstance(error, AuthenticationError) else "with too much metadata"

        async def refuse(_: object, context: Context) -> None:
            CURRENT.set(call)
            self._refused(f"refused a call {why}", peer=context.peer())
            await abort_call(context, error, call.call_id)

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _answer_own(self, handler: grpc.RpcMethodHandler, call: Call, _: object, context: Context) -> None:
        CURRENT.set(call)
        call.facts["peer"] = context.peer()
        if call.who.tenant:
            call.facts["tenant"] = call.who.tenant
        code, reply = "OK", CallReply(context, call.call_id)
        try:
            with self._calls.hold_place(call.who.tenant):
                request = parse_request(handler, await self._requests.read_request(context))
                if handler.response_streaming:
                    await handler.unary_stream(request, reply)
                else:
                    await reply.write_message(await handler.unary_unary(request, reply))
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
            await abort_call(context, WicoreError(INTERNAL.format(call.call_id)), call.call_id)
        finally:
            write_access_line(call, code, generates=call.method == "Generate")
            self._counts.grpc[call.method, code] += 1

    async def _answer_health(self, handler: grpc.RpcMethodHandler, _: object, context: Context) -> None:
        """Answer a health check or watch. Anybody may call, so places go by the caller's address."""
        host = find_host(context.peer())
        with self._checks.hold_place(host):
            request = parse_request(handler, await self._brief.read_request(context, host))
        if not handler.response_streaming:
            await context.write(await handler.unary_unary(request, context))
            return
        with self._watches.hold_place(host):
            await handler.unary_stream(request, context)

    async def _answer_foreign(
        self, handler: grpc.RpcMethodHandler, who: Identity, requests: AsyncIterator[bytes], context: Context
    ) -> None:
        """Answer a stream of another service, which is reflection: it takes a place, and ends when it falls silent."""
        with self._calls.hold_place(who.tenant):
            parsed = (parse_request(handler, raw) async for raw in read_stream(requests))
            async for response in handler.stream_stream(parsed, context):
                await context.write(response)


async def run_foreign_call(run: Run, requests: AsyncIterator[bytes], context: Context) -> None:
    try:
        await run(requests, context)
    except WicoreError as error:
        await abort_call(context, error, uuid.uuid4().hex)
    except grpc.aio.BaseError:
        raise  # the handler has sent a status, or the client has left
    except Exception:
        call_id = uuid.uuid4().hex
        log.exception("call %s failed unexpectedly", call_id)
        await abort_call(context, WicoreError(INTERNAL.format(call_id)), call_id)
