"""What every call passes through: request id, API key, parsing, errors to statuses, the access line.

Must not know what a call does. Invariants: a call of our service ends with OK, with a status made from a WicoreError,
or by the client; no text of an unexpected exception reaches the client; a finished call writes one access line.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from wicore_trt.errors import AuthenticationError, InvalidRequestError, WicoreError
from wicore_trt.serve.errors import abort

log = logging.getLogger(__name__)
access_log = logging.getLogger("wicore_trt.access")

REQUEST_ID_HEADER = "x-request-id"
VALID_ID = re.compile(r"[!-~]{1,128}")
OWN_PREFIX = "/wicore."
HEALTH_PREFIX = "/grpc.health.v1.Health/"

Handler: TypeAlias = "grpc.RpcMethodHandler | None"
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler | None"]]


@dataclass(slots=True)
class Call:
    """One call in progress. Handlers put what the access line should tell into `facts`.

    `from_client` says that the client chose `call_id`, so that another call may have the same.
    """

    call_id: str
    method: str
    from_client: bool
    started: float = field(default_factory=time.monotonic)  # time.monotonic(), seconds
    facts: dict[str, object] = field(default_factory=dict)


CURRENT_CALL: ContextVar[Call] = ContextVar("wicore_call")


def metadata_value(details: grpc.HandlerCallDetails, key: str) -> str | None:
    """First value of a metadata key as text, or None."""
    for name, value in details.invocation_metadata or ():
        if name == key:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the key, in `authorization: Bearer KEY` or `x-api-key: KEY`. Health checks need none."""

    def __init__(self, api_key: str) -> None:
        self._key = api_key.encode()

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        if details.method.startswith(HEALTH_PREFIX) or self._admits(details):
            return await continuation(details)
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    def _admits(self, details: grpc.HandlerCallDetails) -> bool:
        scheme, _, token = (metadata_value(details, "authorization") or "").partition(" ")
        offered = token.strip() if scheme.lower() == "bearer" else metadata_value(details, "x-api-key") or ""
        return hmac.compare_digest(offered.encode(), self._key)

    @staticmethod
    async def _refuse(_: bytes, context: grpc.aio.ServicerContext) -> None:
        error = AuthenticationError(
            "This server needs an API key.", fix="Send it as metadata: authorization: Bearer KEY."
        )
        await abort(context, error, uuid.uuid4().hex)


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps the methods of our own services.

    The request is parsed here, not by gRPC, so that a malformed one (invalid UTF-8, truncated) is INVALID_ARGUMENT
    with our details rather than a bare UNKNOWN.
    """

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(OWN_PREFIX):
            return handler
        offered = metadata_value(details, REQUEST_ID_HEADER) or ""
        from_client = VALID_ID.fullmatch(offered) is not None
        call_id = offered if from_client else uuid.uuid4().hex
        method = details.method.rpartition("/")[2]
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        parse = handler.request_deserializer

        async def run(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            return await guarded(Call(call_id, method, from_client), parse, behaviour, raw, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(run, response_serializer=handler.response_serializer)


async def guarded(
    call: Call,
    parse: Callable[[bytes], Any],
    behaviour: Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]],
    raw: bytes,
    context: grpc.aio.ServicerContext,
) -> Any:
    """Run one call: echo its id, parse, handle, turn exceptions into statuses, write the access line."""
    CURRENT_CALL.set(call)
    code = "OK"
    try:
        await context.send_initial_metadata(((REQUEST_ID_HEADER, call.call_id),))
        try:
            request = parse(raw)
        except DecodeError:
            raise InvalidRequestError(
                "The request is not a valid message of this call: truncated, or text that is not UTF-8.",
                field="request",
            ) from None
        return await behaviour(request, context)
    except asyncio.CancelledError:
        code = "DEADLINE_EXCEEDED" if context.time_remaining() == 0 else "CANCELLED"
        raise
    except WicoreError as error:
        code = error.grpc_code
        call.facts["error"] = str(error)
        await abort(context, error, call.call_id)
    except grpc.aio.InternalError:
        # The transport took no more messages: the client has left, and gRPC is about to cancel this task for it.
        code = "CANCELLED"
        await asyncio.sleep(1.0)
        raise
    except Exception:
        code = "INTERNAL"
        log.exception("call %s (%s) failed unexpectedly", call.call_id, call.method)
        await abort(context, WicoreError(f"Internal error; the server's log has it as {call.call_id}."), call.call_id)
    finally:
        write_access_line(call, code)


def write_access_line(call: Call, code: str) -> None:
    """One line per call: Generate at INFO, the small calls at DEBUG."""
    facts = {"id": call.call_id, **call.facts, "total_ms": round((time.monotonic() - call.started) * 1000, 1)}
    level = logging.INFO if call.method == "Generate" else logging.DEBUG
    access_log.log(level, "%s %s", call.method, code, extra={"facts": {"method": call.method, "code": code} | facts})
