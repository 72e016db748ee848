"""Checks constraints in a process of its own, which a constraint may crash.

Some kilobytes of grammar can overflow the stack of a grammar compiler, or take minutes and gigabytes. It must not know
requests. Invariants: a check ends after about CPU_S of processor time and costs the asking process neither its life nor
memory. A constraint that passes was compiled on STACK bytes, far fewer than the engine's.
"""

from __future__ import annotations

import logging
import os
import queue
import resource
import signal
import socket
import struct
import threading
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from hashlib import blake2b
from io import BufferedIOBase
from pathlib import Path

import msgspec

from wicore_trt.access.log import QuietLog
from wicore_trt.errors import InvalidRequestError, UnavailableError
from wicore_trt.grammar.source import check_constraint, make_refusal
from wicore_trt.process.child import Child, Control, describe_exit
from wicore_trt.types import Constraint, ConstraintKind

log = logging.getLogger(__name__)

CPU_S = 0.5
"""Processor time of one check. Schemas that people write take milliseconds."""
MEMORY = 512 << 20
"""Bytes of address space beside what the process has when it is ready."""
STACK = 2 << 20
WAIT_S, END_S = 60.0, 5.0
"""For an answer on a machine that is busy with other things; for a process that broke to be gone."""
KNOWN = 1024
"""Answers that are kept, by digests of what was asked."""
_HEAD = struct.Struct("<I")

_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Constraint).decode


class Checker:
    """Checks constraints, on any thread. The process starts with the first constraint, and again after it has ended."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[bytes, Future[str]]] = queue.SimpleQueue()
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = QuietLog(log, logging.WARNING)

    def check(self, constraint: Constraint) -> None:
        """Raise InvalidRequestError (field "constraint") for a constraint that cannot be kept or takes too much to
        check, and UnavailableError when no process can be started."""
        raw = _encode(constraint)
        name = blake2b(raw, digest_size=16).digest()
        with self._lock:
            if self._thread is None:  # a lasting thread: a child ends with the thread that started it
                thread = threading.Thread(target=self._run_checks, name="wicore-checker", daemon=True)
                thread.start()  # may raise; the next constraint tries again
                self._thread = thread
            reason = self._known.get(name)
        if reason is None:
            answer: Future[str] = Future()
            self._asked.put((raw, answer))
            reason = answer.result()
            with self._lock:
                self._known[name] = reason
                while len(self._known) > KNOWN:
                    self._known.popitem(last=False)
        if reason:
            raise InvalidRequestError(reason, field="constraint")

    def _run_checks(self) -> None:
        asked: _CheckerProcess | None = None
        while True:
            raw, answer = self._asked.get()
            try:
                asked = asked or _CheckerProcess()
            except Exception as error:  # no room for a process, or no file
                why = f"A constraint cannot be checked now: {error}."
                answer.set_exception(UnavailableError(why, fix="Try again soon."))
                continue
            try:
                answer.set_result(asked.ask(raw))
            except (OSError, EOFError):
                self._ended("a constraint ended the checker process; it is restarted for the next one", how=asked.end())
                asked = None
                answer.set_result(str(make_refusal("it takes too much time, memory or depth")))
            except Exception as error:
                answer.set_exception(error)


class _CheckerProcess:
    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._child = Child("wicore_trt.process.checker")
            self._child.control.send("start", [theirs.fileno()])
        self._sock.settimeout(WAIT_S)
        self._stream = self._sock.makefile("rwb")

    def ask(self, raw: bytes) -> str:
        """Return why it is refused, "" if it is not. Raises OSError or EOFError when the process ends or hangs."""
        _write_frame(self._stream, raw)
        return _read_frame(self._stream).decode()

    def end(self) -> str:
        with suppress(OSError):
            self._stream.close()
        self._sock.close()
        self._child.control.close()
        return describe_exit(self._child.wait_for_end(END_S))


def _write_frame(stream: BufferedIOBase, data: bytes) -> None:
    stream.write(_HEAD.pack(len(data)) + data)
    stream.flush()


def _read_frame(stream: BufferedIOBase) -> bytes:
    head = stream.read(_HEAD.size)
    data = stream.read(_HEAD.unpack(head)[0]) if head and len(head) == _HEAD.size else None
    if data is None:
        raise EOFError
    return data


def main(fd: int) -> int:
    """Run the checker process; `fd` is its control socket. Return the exit code."""
    received = Control.from_fd(fd).receive_message()
    if received is None:
        return 0
    with socket.socket(fileno=received[1][0]) as sock, sock.makefile("rwb") as stream:
        threading.stack_size(STACK)
        thread = threading.Thread(target=_serve_checks, args=(stream,))
        thread.start()
        thread.join()
    return 0


def _serve_checks(stream: BufferedIOBase) -> None:
    with suppress(InvalidRequestError):  # loads modules now, so that no constraint pays for them
        check_constraint(Constraint(ConstraintKind.REGEX, "a"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the asking process logs how this one ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    while True:
        try:
            constraint = _decode(_read_frame(stream))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF ends a process
        try:
            check_constraint(constraint)
            reason = ""
        except InvalidRequestError as error:
            reason = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write_frame(stream, reason.encode(errors="replace"))
