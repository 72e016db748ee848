"""Generations on their way from a connection to the application: in order, and refused here where that is known.

An application, its task and its context cost several times what it takes to say that there is no place. So a request of
a few kilobytes that came whole waits for its turn at the engine as plain data, and where the engine is known to refuse
it, is answered from there, in the bytes that the application would have sent. It must not know sockets or engines'
processes. Invariants: whatever is not plainly such a refusal goes to the application, which finds out by itself; each
request gets there or has its answer; nothing is told before the key is known to be good.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from wicore_trt.access.calls import Call, offered_key, write_access_line
from wicore_trt.access.keys import Identity
from wicore_trt.errors import QueueFullError, WicoreError
from wicore_trt.http.context import Context
from wicore_trt.http.errors import error_headers, error_maker, id_headers, status_of
from wicore_trt.http.intake import check_kind, decoded, prompt_bytes
from wicore_trt.http.table import OPERATIONS

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine

log = logging.getLogger(__name__)

BRIEF = 16 << 10
"""Bytes of a body that may wait here; longer ones wait in the application, where they are counted."""
PARKED = 1024
"""Requests that may wait here."""
GENERATES = {operation.path: operation for operation in OPERATIONS if operation.generates}

Start = Callable[["ExitStack | None"], None]
"""Starts the application, with a place that the request has (`TextEngine.place`) or none."""


class Asked(NamedTuple):
    """What decides about a request. `check` raises QueueFullError for one that the engine is known to refuse."""

    who: Identity
    headers: dict[str, str]
    came: float  # time.monotonic()
    check: Callable[[], None]


class Door:
    """The door of one server."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: dict[RequestResponseCycle, tuple[TextEngine, Callable[[], bool], Start]] = {}

    def begin(self, cycle: RequestResponseCycle, start: Start) -> None:
        """A request has come whole. Starts the application, now or when its turn has come, or answers."""
        engine = self._context.taking()
        if (
            engine is None
            or cycle.scope["path"] not in GENERATES
            or len(cycle.body) > BRIEF
            or len(engine.turns) >= PARKED
        ):
            start(None)
            return
        asked = None
        if engine.engine.bars or engine.turns.locked():
            asked, refused = self._look(engine, cycle)
            if asked is None:
                start(None)
            if asked is None or refused:
                return
        # In a context of its own: it comes to its turn in that of a request that gives one back.
        come = partial(copy_context().run, self._come, engine, cycle, start, asked)
        self._waiting[cycle] = engine, come, start
        engine.turns.ask(come)

    def left(self, cycle: RequestResponseCycle) -> None:
        """The client has left; where its request waits the application finds out."""
        found = self._waiting.pop(cycle, None)
        if found is not None:
            engine, come, start = found
            engine.turns.forget(come)
            start(None)

    def _come(self, engine: TextEngine, cycle: RequestResponseCycle, start: Start, asked: Asked | None) -> bool:
        """Its turn has come; whether it has a use for it."""
        del self._waiting[cycle]
        if engine.engine.bars and self._look(engine, cycle, asked)[1]:
            return False
        start(engine.place())
        return True

    def _look(
        self, engine: TextEngine, cycle: RequestResponseCycle, asked: Asked | None = None
    ) -> tuple[Asked | None, bool]:
        """What decides about it, and whether it is refused, and was told."""
        try:
            asked = asked or self._asked(engine, cycle)
            return asked, asked is not None and self._refused(cycle, asked)
        except Exception:  # a bug of ours; the application finds out
            log.exception("a request could not be looked at")
            return None, False

    def _asked(self, engine: TextEngine, cycle: RequestResponseCycle) -> Asked | None:
        """None where the application has something else to say, or may have."""
        scope, context = cycle.scope, self._context
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in reversed(list(scope["headers"]))}
        who = context.admission.keys.find(offered_key(headers.get))
        if who is None or scope["method"] != "POST" or "origin" in headers or cycle.waiting_for_100_continue:
            return None
        raw = bytes(cycle.body)
        try:
            context.check_host(headers.get("host"))
            check_kind(headers)
            value = decoded(raw, context.most_items())
        except WicoreError:
            return None
        priority = value.get("priority")
        if len(raw) > context.max_body_bytes or not (priority is None or type(priority) is int):
            return None
        return Asked(who, headers, time.monotonic(), engine.check(who.tenant, priority or 0, prompt_bytes(raw)))

    def _refused(self, cycle: RequestResponseCycle, asked: Asked) -> bool:
        """Whether it is refused, and was told."""
        if cycle.flow.write_paused or cycle.disconnected or self._context.draining:
            return False
        tenant, read = asked.who.tenant, False
        try:
            with self._context.admission.calls.place(tenant), self._context.room.hold(tenant) as hold:
                hold.grow(len(cycle.body))
                read = True
                asked.check()
        except QueueFullError as error:
            self._answer(cycle, asked, error, read=read)
            return True
        return False

    def _answer(self, cycle: RequestResponseCycle, asked: Asked, error: QueueFullError, *, read: bool) -> None:
        """As `http.app` does, at once. Where the body would not have been read the connection closes."""
        scope, path = cycle.scope, cycle.scope["path"]
        call = Call.begin(f"POST {path}", asked.who, asked.headers.get)
        call.started = asked.came
        call.facts["peer"] = "{}:{}".format(*(scope.get("client") or ("unix", "")))
        if asked.who.tenant:
            call.facts["tenant"] = asked.who.tenant
        call.failed(error)
        status, anthropic = status_of(error), GENERATES[path].anthropic
        body = error_maker(call.call_id, anthropic=anthropic)(error)
        fields = [
            *cycle.default_headers,
            (b"content-length", b"%d" % len(body)),
            (b"content-type", b"application/json"),
            *error_headers(error),
        ]
        close = (b"connection", b"close")
        if not read:
            fields.append(close)
        fields += id_headers(call.call_id, anthropic=anthropic)
        if self._context.origins:
            fields.append((b"vary", b"Origin"))
        if read and not cycle.keep_alive:
            fields.append(close)
        cycle.keep_alive = cycle.keep_alive and read
        head = b"".join((STATUS_LINE[status], *(b"%b: %b\r\n" % field for field in fields), b"\r\n"))
        cycle.response_started = cycle.response_complete = True
        cycle.transport.write(head + body)
        write_access_line(call, str(status), generates=True)
        self._context.admission.counts.ended_http("POST", path, status)
        if not cycle.keep_alive:
            cycle.transport.close()
        goes_on, cycle.on_response = cycle.on_response, _nothing  # as uvicorn does: the connection has its last request
        goes_on()


def _nothing() -> None:
    """In place of what holds the connection."""
