"""One call of a client as the server keeps books of it: its id, its key, its access line.

Knows nothing of gRPC or HTTP: both read the same headers under the same rules. Invariants: an id stands in logs and
headers as it is; a finished call writes one access line.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from wicore_trt.access.keys import Identity
from wicore_trt.errors import InvalidRequestError

access_log = logging.getLogger("wicore_trt.access")

REQUEST_ID_HEADER = "x-request-id"
VALID_ID = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class Call:
    """One call in progress. Handlers put what the access line should tell into `facts`.

    `who` calls. `from_client` says that the client chose `call_id`, so that another call may have the same.
    """

    call_id: str
    method: str
    from_client: bool
    who: Identity
    started: float = field(default_factory=time.monotonic)  # time.monotonic(), seconds
    facts: dict[str, object] = field(default_factory=dict)
    code: str = ""  # how it ended

    @classmethod
    def begin(cls, method: str, who: Identity, offered_id: str) -> Call:
        """A call under the id that the client offered if that is one, else under a new one."""
        from_client = VALID_ID.fullmatch(offered_id) is not None
        return cls(offered_id if from_client else uuid.uuid4().hex, method, from_client, who)


def offered_key(header: Callable[[str], str | None]) -> str:
    """The key in `authorization: Bearer KEY` or `x-api-key: KEY`; `header` gives a header by its name."""
    scheme, _, token = (header("authorization") or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else header("x-api-key") or ""


def checked_id(request_id: str) -> str:
    """The id itself; raises InvalidRequestError unless it can stand in logs and metadata."""
    if not VALID_ID.fullmatch(request_id):
        raise InvalidRequestError("request_id must be 1 to 128 visible ASCII characters.", field="request_id")
    return request_id


def write_access_line(call: Call, code: str, level: int) -> None:
    """The line of a finished call; `code` is how it ended."""
    call.code = code
    facts = {"id": call.call_id, **call.facts, "total_ms": round((time.monotonic() - call.started) * 1000, 1)}
    access_log.log(level, "%s %s", call.method, code, extra={"facts": {"method": call.method, "code": code} | facts})
