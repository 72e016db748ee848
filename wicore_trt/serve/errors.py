"""Converts exceptions to gRPC statuses with google.rpc details.

Only this module knows how a WicoreError looks on the wire; must not know services or engines. Invariant: a status never
carries a traceback, and its text stays within the metadata limits of gRPC clients (8 KiB by default).
"""

from __future__ import annotations

import asyncio
import re

import grpc
from google.protobuf import duration_pb2, message
from google.rpc import error_details_pb2, status_pb2

from wicore_trt.access.calls import REQUEST_ID_HEADER
from wicore_trt.errors import UNAVAILABLE_RETRY_S, ContextLengthError, InvalidRequestError, WicoreError, shortened

DOMAIN = "wicore"
MAX_MESSAGE_CHARS = 512
DETAILS = "grpc-status-details-bin"
"""Where clients of all languages look for the google.rpc.Status."""


class DuplicateRequestError(InvalidRequestError):
    """Request id of the client's choice that a running request has."""

    grpc_code = "ALREADY_EXISTS"


def find_reason(error: WicoreError) -> str:
    """Return ErrorInfo.reason of an error: QueueFullError -> QUEUE_FULL."""
    kind = InvalidRequestError if isinstance(error, ContextLengthError) else type(error)
    name = kind.__name__.removesuffix("Error")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()


def make_status(error: WicoreError, call_id: str) -> status_pb2.Status:
    """Make an error's google.rpc.Status: ErrorInfo, RequestInfo, and BadRequest and RetryInfo where they fit."""
    text = shortened(str(error), MAX_MESSAGE_CHARS)
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=find_reason(error), domain=DOMAIN),
        error_details_pb2.RequestInfo(request_id=call_id),
    ]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    retry_s = UNAVAILABLE_RETRY_S if error.grpc_code == "UNAVAILABLE" else getattr(error, "retry_after_s", None)
    if retry_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(max(1, round(retry_s * 1000)))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=grpc.StatusCode[error.grpc_code].value[0], message=text)
    for detail in details:
        status.details.add(type_url=f"type.googleapis.com/{detail.DESCRIPTOR.full_name}",
                           value=detail.SerializeToString())  # fmt: skip
    return status


async def abort_call(context: grpc.aio.ServicerContext, error: WicoreError, call_id: str) -> None:
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
