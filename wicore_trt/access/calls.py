"""Books of a client's call: its id, its key, its access line.

Knows nothing of gRPC or HTTP, which read the same headers under the same rules. Invariants: logs and headers show an id
unchanged; a finished call writes one access line; no line holds prompts or answers.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from wicore_trt.access.keys import Identity
from wicore_trt.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    WicoreError,
    shortened,
    shown,
)
from wicore_trt.types import SamplingParams, TextRequest

access_log = logging.getLogger("wicore_trt.access")

REQUEST_ID_HEADER = "x-request-id"
VALID_ID = re.compile(r"[!-~]{1,128}")
PARENTS = ("traceparent", "tracestate")
"""Headers, and metadata of gRPC, that name a caller's span."""
span_sender: Callable[[Call], None] | None = None
"""Sends the span of an ended call, where the server sends traces (`access/tracing.py`)."""


@dataclass(slots=True)
class Call:
    """Call of `who` in progress. Handlers fill `facts` for the access line. `from_client`: the client chose the id, so
    another call may have the same."""

    call_id: str
    method: str
    from_client: bool
    who: Identity
    started: float = field(default_factory=time.monotonic)  # time.monotonic(), seconds
    facts: dict[str, object] = field(default_factory=dict)
    code: str = ""  # how it ended
    error: type[WicoreError] | None = None  # no instance, whose frames would hold the call in a reference cycle
    model: str = ""  # what is asked of it, for traces
    chat: bool = False
    anthropic: bool = False  # whether the client knows the shapes of Anthropic's API
    params: SamplingParams | None = None
    parent: dict[str, str] = field(default_factory=dict)  # headers that name the caller's span

    @classmethod
    def from_headers(cls, method: str, who: Identity, header: Callable[[str], str | None]) -> Call:
        """Make a call under the client's id if that is valid, else a new one. `header` returns a header by name."""
        offered_id = header(REQUEST_ID_HEADER) or ""
        from_client = VALID_ID.fullmatch(offered_id) is not None
        made = cls(offered_id if from_client else uuid.uuid4().hex, method, from_client, who)
        if span_sender is not None:
            made.parent = {name: text for name in PARENTS if (text := header(name))}
        return made

    def note_request(self, model: str, request: TextRequest) -> TextRequest:
        """Note the model and parameters of the request; return it with the id under which other processes log."""
        self.model, self.chat, self.params = model, request.messages is not None, request.params
        return replace(request, log_id=self.call_id)

    def note_first_token(self, parts: tuple[float, float] | None) -> None:
        """Note the time to the first token of the call, and its `parts` in seconds: queue and prefill."""
        self.facts["ttft_ms"] = round((time.monotonic() - self.started) * 1000, 1)
        if parts is not None:
            self.facts["queue_ms"], self.facts["prefill_ms"] = round(parts[0] * 1000, 1), round(parts[1] * 1000, 1)

    def note_error(self, error: WicoreError) -> None:
        """Note an error: its kind and field alone where its message quotes the request."""
        self.error = type(error)
        quotes = isinstance(error, (InvalidRequestError, NotFoundError)) or type(error) is WicoreError
        self.facts["error"] = type(error).__name__ if quotes else str(error)
        if isinstance(error, InvalidRequestError):
            self.facts["field"] = shortened(error.field)


CURRENT: ContextVar[Call | None] = ContextVar("wicore_call", default=None)
"""The call that code runs for, where it runs for one; every line that it logs has its id."""


def get_current_call() -> Call:
    call = CURRENT.get()
    assert call is not None
    return call


def read_key(header: Callable[[str], str | None]) -> str:
    """Read the key in `authorization: Bearer KEY` or `x-api-key: KEY`; `header` returns a header by name."""
    scheme, _, token = (header("authorization") or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else header("x-api-key") or ""


def refuse_key(header: Callable[[str], str | None], fix: str) -> AuthenticationError:
    """Make the error of a call whose key is not known; `fix` says how a call without one sends it."""
    if read_key(header):
        return AuthenticationError("This API key is not one of the server's.", fix="Ask its operator for another.")
    return AuthenticationError("This server needs an API key.", fix=fix)


def check_request_id(request_id: str) -> str:
    """Return the id. Raises InvalidRequestError unless it can stand in logs and metadata."""
    if not VALID_ID.fullmatch(request_id):
        raise InvalidRequestError("request_id must be 1 to 128 visible ASCII characters.", field="request_id")
    return request_id


def check_host(host: str | None, allowed: Sequence[str]) -> None:
    """Raise ForbiddenError for a Host header whose name is neither this machine's own nor `allowed`."""
    # a page behind DNS rebinding sends its own name; a client without Host header is no page
    name = (host or "localhost").rpartition("]")[0].removeprefix("[") or (host or "localhost").partition(":")[0]
    name = name.lower()
    if name == "localhost" or name.endswith(".localhost") or name in allowed or "*" in allowed:
        return
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return
    fix = "Set server.allowed_hosts."
    raise ForbiddenError(f"This server has no keys and does not answer to the name {shown(name)}.", fix=fix)


def find_network(host: str) -> str | None:
    """Find the network that one client can choose addresses from: an IPv4 address, the /64 of IPv6, or None."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)


def write_access_line(call: Call, code: str, *, generates: bool) -> None:
    """Write a finished call's line, and its span if it `generates` (else at DEBUG); `code` is the outcome."""
    call.code = code
    if generates and span_sender is not None:
        span_sender(call)
    facts = {"id": call.call_id, **call.facts, "total_ms": round((time.monotonic() - call.started) * 1000, 1)}
    level = logging.INFO if generates else logging.DEBUG
    access_log.log(level, "%s %s", call.method, code, extra={"facts": {"method": call.method, "code": code} | facts})
