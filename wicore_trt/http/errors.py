"""Convert exceptions to HTTP statuses and error bodies.

Only this module knows a WicoreError over HTTP; it must not know routes or engines. Invariant: every error has the
body {"error": {"message", "type", "param", "code"}}, or Anthropic's, with a message of bounded length
and without traceback.
"""

from __future__ import annotations

import logging

import msgspec

from wicore_trt.access.calls import Call
from wicore_trt.errors import AuthenticationError, ContextLengthError, InvalidRequestError, RateLimitError, WicoreError
from wicore_trt.request_fields import FIELDS

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""Status in the access line of a call whose client left; nobody gets it as an answer."""


STATUSES = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"), "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"), "NOT_FOUND": (404, "not_found_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"), "CANCELLED": (CLIENT_GONE, "cancelled_error"),
    "INTERNAL": (500, "server_error"), "FAILED_PRECONDITION": (500, "server_error"),
    "UNAVAILABLE": (503, "unavailable_error"), "DEADLINE_EXCEEDED": (504, "timeout_error"),
}  # fmt: skip
"""Status codes and their `type`, by the gRPC status of an error, so that each error has one meaning for both."""
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Types of errors in Anthropic's API, by status; others are invalid requests."""
CODES: dict[type, str] = {
    ContextLengthError: "context_length_exceeded", RateLimitError: "rate_limit_exceeded",
    AuthenticationError: "invalid_api_key", WicoreError: "internal",
}  # fmt: skip
"""Names of errors in OpenAI's API."""
PARAMS: dict[str | None, str | None] = {
    **{row.name: row.http for row in FIELDS.values() if row.http},
    **{"body": None, "prompt_token_ids": "prompt"},  # None: all of it
}
"""Fields of the plain types, by the names that requests give them."""


class HttpError(WicoreError):
    """Error that only HTTP has: a body that is too long, a method that does not exist."""

    def __init__(self, status: int, message: str, *, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.status = status


class ClientGoneError(Exception):
    """Client that left, so that nobody waits for an answer."""


def status_of(error: WicoreError) -> int:
    return error.status if isinstance(error, HttpError) else STATUSES[error.grpc_code][0]


def code_of(error: WicoreError) -> str | None:
    """Name an error for programs: OpenAI's name where it has one, else QueueFullError -> queue_full. Errors of
    fields have `param` and no code."""
    if type(error) in CODES:
        return CODES[type(error)]
    if isinstance(error, (HttpError, InvalidRequestError)):
        return None
    return error.name_kind()


def param_of(error: WicoreError) -> str | None:
    """Return the wrong field, as requests name it."""
    field = getattr(error, "field", None)
    return PARAMS.get(field, field)


def error_object(error: WicoreError) -> dict[str, object]:
    kind = "invalid_request_error" if isinstance(error, HttpError) else STATUSES[error.grpc_code][1]
    return {"error": {"message": error.tell_client(), "type": kind, "param": param_of(error), "code": code_of(error)}}


def anthropic_error_bytes(error: WicoreError, request_id: str | None = None) -> bytes:
    """Encode an error's body as Anthropic's API has it, with the wrong field."""
    kind = ANTHROPIC_TYPES.get(status_of(error), "invalid_request_error")
    message = error.tell_client()
    if isinstance(error, ContextLengthError) and error.most:
        message = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
    found = {"type": kind, "message": message, "param": param_of(error)}
    return msgspec.json.encode({"type": "error", "error": found, "request_id": request_id})


def error_bytes(error: WicoreError) -> bytes:
    return msgspec.json.encode(error_object(error))


def name_failure(call: Call, raised: Exception) -> WicoreError:
    """Note the error that ended a call; log any other exception and return an error to send in its place."""
    if isinstance(raised, WicoreError):
        call.note_error(raised)
        return raised
    log.error("call %s (%s) failed unexpectedly", call.call_id, call.method, exc_info=raised)
    return WicoreError(f"Internal error; the server's log has it as {call.call_id}.")


def error_headers(error: WicoreError) -> list[tuple[bytes, bytes]]:
    if status_of(error) == 401:
        return [(b"www-authenticate", b"Bearer")]
    if (retry_s := error.retry_after_s) is None:
        return []
    seconds = max(1, int(-(-retry_s // 1)))
    return [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % max(1, round(retry_s * 1000)))]
