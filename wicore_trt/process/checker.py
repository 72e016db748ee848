"""Checks constraints in a process of its own, which a constraint may crash.

Some kilobytes of grammar can overflow the stack of a grammar compiler, or take minutes and gigabytes. It must not know
requests. Invariants: a check ends after about LIMITS of processor time and costs the asking process neither its life
nor memory. A constraint that passes was compiled on a stack far smaller than the engine's.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b

import msgspec

from wicore_trt.access.log import QuietLog
from wicore_trt.errors import InvalidRequestError
from wicore_trt.grammar.source import check_constraint, make_refusal
from wicore_trt.types import Constraint, ConstraintKind
from wicore_trt.worker_process import JobFailure, WorkerLimits, WorkerProcess, serve_jobs

log = logging.getLogger(__name__)

LIMITS = WorkerLimits(cpu_seconds=0.5, memory=512 << 20, answer=1 << 20, stack=2 << 20)
"""Schemas that people write take milliseconds."""
KNOWN = 1024
"""Answers that are kept, by digests of what was asked."""
WORKER = WorkerProcess("wicore_trt.process.checker", LIMITS)

_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Constraint).decode


class Checker:
    """Checks constraints, on any thread. The process starts with the first constraint, and again after it has ended."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()
        self._ended = QuietLog(log, logging.WARNING)

    def check(self, constraint: Constraint) -> None:
        """Raise InvalidRequestError (field "constraint") for a constraint that cannot be kept or takes too much to
        check, and UnavailableError when no process can be started."""
        raw = _encode(constraint)
        name = blake2b(raw, digest_size=16).digest()
        with self._lock:
            reason = self._known.get(name)
        if reason is None:
            reason = self._find_reason(raw)
            with self._lock:
                self._known[name] = reason
                while len(self._known) > KNOWN:
                    self._known.popitem(last=False)
        if reason:
            raise InvalidRequestError(reason, field="constraint")

    def _find_reason(self, raw: bytes) -> str:
        """Return why a constraint is refused, "" if it is not."""
        try:
            return WORKER.run_job(raw).decode()
        except JobFailure as failure:
            self._ended("a constraint ended the checker process; it is restarted for the next one", how=str(failure))
            return str(make_refusal("it takes too much time, memory or depth"))


def main() -> None:
    """Answer jobs until stdin ends: a constraint, and why it is refused or nothing."""
    with suppress(InvalidRequestError):  # loads modules now, so that no constraint pays for them
        check_constraint(Constraint(ConstraintKind.REGEX, "a"))
    serve_jobs(_answer_job, LIMITS)


def _answer_job(raw: bytes) -> bytes:
    try:
        check_constraint(_decode(raw))
    except InvalidRequestError as error:
        return str(error).encode(errors="replace")
    return b""
