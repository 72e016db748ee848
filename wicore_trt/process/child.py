"""A process of this server, and what is said between it and the supervisor.

Messages are small JSON objects over a socket pair that keeps their boundaries; file descriptors travel with them. It
must not know what a process does. Invariants: the supervisor never waits for a child that hangs, nor a front for a
supervisor that stands still; a child ends when its supervisor does, however and whenever that ends; a child leaves the
signals that ask a server to end to the supervisor; a child imports from where its parent does, so a folder that happens
to be the current one gives it nothing else.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from typing import Any, Self

from wicore_trt.errors import WicoreError, error_named, shortened

log = logging.getLogger(__name__)

MAX_MESSAGE = 1 << 17
MAX_FDS = 4
MAX_WAITING = 64
"""Messages that wait, behind what its socket holds, for a child to go on reading; then it counts as hung."""
BEAT_S = 1.0
"""How often the engine's process says that it gets on."""
DUMP = signal.SIGUSR1
"""Has it write the stacks of its threads."""
MAX_TEXT = 1 << 13
"""Characters of a text in a message; as JSON each may take six bytes."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CODE = """
import json, sys
_, fd, module, path, parent = sys.argv
sys.path[:] = json.loads(path)
from importlib import import_module
import_module("wicore_trt.process.child").belong_to(int(parent))
sys.exit(import_module(module).main(int(fd)))
"""


def belong_to(parent: int) -> None:
    """Have this process killed when the one that made it ends, also if it has ended already. SIGTERM, SIGINT and SIGHUP
    are the supervisor's: some service managers send them to every process of a service, and a child that obeyed would
    end requests that the supervisor lets finish."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Control:
    """One end of the socket pair between supervisor and child."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @staticmethod
    def pair() -> tuple[Rein, Control]:
        """The supervisor's end and the child's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Rein(ours, MAX_WAITING), Control(theirs)

    @classmethod
    def of_child(cls, fd: int) -> Self:
        """The child's end, by the number that it was started with."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: str, fds: Sequence[int] = (), **facts: Any) -> None:
        """Say something; nothing happens when the other side has ended, which `receive` tells."""
        data = json.dumps({"kind": kind, **facts}).encode()
        assert len(data) <= MAX_MESSAGE, "a control message is too long"
        self._put(data, fds)

    def _put(self, data: bytes, fds: Sequence[int]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._sock, [data], fds)

    def send_error(self, error: WicoreError) -> None:
        """Say why this process ends."""
        message, fix = shortened(error.message, MAX_TEXT), error.fix and shortened(error.fix, MAX_TEXT)
        self.send("failed", error=type(error).__name__, message=message, fix=fix)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and its file descriptors, which are the caller's then. None when the other side ended."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE, MAX_FDS)
        except ConnectionResetError:
            data, fds = b"", []
        return (json.loads(data), fds) if data else None

    def close(self) -> None:
        self._sock.close()


class Rein(Control):
    """An end on an event loop: the supervisor's, or a front's. While the loop runs `send` does not wait: what the other
    side does not take is kept until it does. A child that leaves more than `most` messages is let go, which ends it."""

    def __init__(self, sock: socket.socket, most: int | None = None) -> None:
        super().__init__(sock)
        sock.setblocking(False)
        self._most = most
        self._waiting: deque[tuple[bytes, list[int]]] = deque()

    def offer(self, kind: str, **facts: Any) -> bool:
        """Say something that is soon worth nothing, unless others wait to be taken; whether it was said."""
        if not self._waiting:
            self.send(kind, **facts)
        return not self._waiting

    def outlive_loop(self) -> None:
        """The loop has ended: from now on `send` waits until the other side has taken all."""
        self._sock.setblocking(True)
        while self._waiting:
            self._try(*self._waiting[0])
            self._forget()

    def _put(self, data: bytes, fds: Sequence[int]) -> None:
        if self._waiting or not self._try(data, fds):
            self._waiting.append((data, [os.dup(fd) for fd in fds]))
            if len(self._waiting) == 1:
                asyncio.get_running_loop().add_writer(self.fileno(), self._go_on)
        if self._most is not None and len(self._waiting) > self._most:
            log.error("process of control socket %d hangs; it is ended", self.fileno())
            self._sock.shutdown(socket.SHUT_RDWR)  # `receive` then says that the other side ended
            self._drop()

    def _try(self, data: bytes, fds: Sequence[int]) -> bool:
        try:
            super()._put(data, fds)
        except BlockingIOError:
            return False
        return True

    def _go_on(self) -> None:
        while self._waiting and self._try(*self._waiting[0]):
            self._forget()
        if not self._waiting:
            asyncio.get_running_loop().remove_writer(self.fileno())

    def _forget(self) -> None:
        for fd in self._waiting.popleft()[1]:
            os.close(fd)

    def _drop(self) -> None:
        if self._waiting:
            asyncio.get_running_loop().remove_writer(self.fileno())
        while self._waiting:
            self._forget()

    def close(self) -> None:
        self._drop()
        super().close()


def error_of(message: dict[str, Any]) -> WicoreError:
    """The error that a child said."""
    return error_named(message["error"], message["message"], fix=message["fix"])


class Child:
    """A running process of `module`, whose `main(fd)` gets the number of its control socket."""

    def __init__(self, module: str) -> None:
        self.control, theirs = Control.pair()
        fd = theirs.fileno()
        # A session of its own: what a terminal sends to all processes of the foreground reaches the supervisor alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, str(fd), module, json.dumps(sys.path), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(fd,), start_new_session=True,
        )  # fmt: skip
        theirs.close()

    def kill(self) -> None:
        self._process.kill()

    def dump(self) -> None:
        """Have it write the stacks of its threads, if it still does that."""
        self._process.send_signal(DUMP)

    def wait(self, timeout_s: float) -> int:
        """Wait for its end, kill it after so long; returns the exit code, negative for a signal."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    bury = wait


class Fork:
    """A process that a template made of itself. `pid` is None until the template has told it."""

    def __init__(self) -> None:
        self.control, self.theirs = Control.pair()
        self.pid: int | None = None
        self.code: Future[int] = Future()

    def kill(self) -> None:
        if self.pid is not None and not self.code.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        """As that of a child. The template tells the exit code."""
        try:
            code = self.code.result(timeout_s)
        except TimeoutError:
            self.kill()
            return -signal.SIGKILL
        self._inherit()
        return code

    def bury(self, timeout_s: float) -> None:
        """Wait until it is gone, whose template has been killed: the socket's other end is closed then."""
        ended = select.poll()
        ended.register(self.control.fileno(), 0)  # for what is always told
        if ended.poll(1000 * timeout_s):
            self._inherit()
        if not self.code.done():  # nobody is left who would tell it, and somebody may wait
            self.code.set_result(-signal.SIGKILL)

    def _inherit(self) -> None:
        if self.pid is not None:
            with suppress(ChildProcessError):  # ours to wait for where its template has ended and we are its heir
                os.waitpid(self.pid, 0)


async def exit_code(process: Child | Fork, timeout_s: float) -> int:
    """What its `wait` returns, on a thread; where there is no room for one, as soon as there is."""
    while True:
        try:
            return await asyncio.to_thread(process.wait, timeout_s)
        except RuntimeError as error:
            log.error("the end of a process cannot be waited for: %s; trying again", error)
            await asyncio.sleep(BEAT_S)


def named(place: str) -> Any:
    """The object at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
