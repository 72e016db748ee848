"""A process of this server, and its messages to and from the supervisor: small JSON objects and file descriptors.

It must not know what a process does. Invariants (I24): the supervisor never waits for a hanging child, nor a front for
a stopped supervisor; children are tied to the supervisor (`child_process`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - asyncio would load it while no file can be opened
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from wicore_trt.child_process import child_command
from wicore_trt.errors import WicoreError, error_named, shortened

log = logging.getLogger(__name__)

MAX_MESSAGE = 1 << 17
MAX_FDS = 4
MAX_WAITING = 64
"""Messages that wait, behind what its socket holds, for a child to go on reading; then it counts as hung."""
BEAT_S = 0.25
"""Seconds between two beats, by which an engine's process says that it gets on."""
DUMP = signal.SIGUSR1
"""Signal that has a process write the stacks of its threads."""
MAX_TEXT = 1 << 13
"""Characters of a text in a message; as JSON each may take six bytes."""
KILL_S, STOP_S = 1.0, 5.0
"""Time for a killed process to be gone; for the engine to end its step, or a front to close after its grace time."""
QUICK_S, PATIENCE, MAX_PAUSE_S = 10.0, 3, 60.0
"""A process that ended before it was ready or within QUICK_S after, more than PATIENCE times in a row, is started again
after a pause of 1 s, 2 s, 4 s and so on, at most MAX_PAUSE_S."""


class Control:
    """End of the socket pair between supervisor and child. Where its socket does not block, `send` never waits:
    messages are queued on the event loop. A child that leaves more than `most` is cut off, which ends it."""

    def __init__(self, sock: socket.socket, most: int | None = None) -> None:
        self.sock, self._most = sock, most
        self.waiting: deque[tuple[bytes, list[int]]] = deque()

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def send(self, kind: str, fds: Sequence[int] = (), **facts: Any) -> None:
        """Send a message; ignore that the other side has ended, which `receive_message` reports."""
        data = json.dumps({"kind": kind, **facts}).encode()
        assert len(data) <= MAX_MESSAGE, "a control message is too long"
        if self.waiting or not self._try_write(data, fds):
            self.waiting.append((data, [os.dup(fd) for fd in fds]))
            if len(self.waiting) == 1:
                asyncio.get_running_loop().add_writer(self.sock.fileno(), self._write_waiting)
        if self._most is not None and len(self.waiting) > self._most:
            log.error("the process of control socket %d does not read its messages; ending it", self.sock.fileno())
            self.sock.shutdown(socket.SHUT_RDWR)  # `receive_message` then reports the end
            self._drop_waiting()

    def send_error(self, error: WicoreError) -> None:
        message, fix = shortened(error.message, MAX_TEXT), error.fix and shortened(error.fix, MAX_TEXT)
        self.send("failed", error=type(error).__name__, message=message, fix=fix)

    def receive_message(self) -> tuple[dict[str, Any], list[int]] | None:
        """Receive the next message and its file descriptors, which the caller closes; return None at the end."""
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, MAX_MESSAGE, MAX_FDS)
        except ConnectionResetError:
            data, fds = b"", []
        return (json.loads(data), fds) if data else None

    def leave_loop(self) -> None:
        """Send the queued messages after the loop has ended; from now on `send` waits for the other side."""
        self.sock.setblocking(True)
        while self.waiting:
            self._try_write(*self.waiting[0])
            self._drop_first()

    def close(self) -> None:
        self._drop_waiting()
        self.sock.close()

    def _try_write(self, data: bytes, fds: Sequence[int]) -> bool:
        try:
            socket.send_fds(self.sock, [data], fds)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass
        return True

    def _write_waiting(self) -> None:
        while self.waiting and self._try_write(*self.waiting[0]):
            self._drop_first()
        if not self.waiting:
            asyncio.get_running_loop().remove_writer(self.sock.fileno())

    def _drop_first(self) -> None:
        for fd in self.waiting.popleft()[1]:
            os.close(fd)

    def _drop_waiting(self) -> None:
        if self.waiting:
            asyncio.get_running_loop().remove_writer(self.sock.fileno())
        while self.waiting:
            self._drop_first()


def read_error(message: dict[str, Any]) -> WicoreError:
    return error_named(message["error"], message["message"], fix=message["fix"])


class Child(subprocess.Popen[bytes]):
    """Running process of `module`, whose `main(fd)` gets the number of its control socket; with more `environment`."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.control = Control(ours, MAX_WAITING)
        with theirs:
            fd = theirs.fileno()
            # a session of its own, so that a terminal's signals reach the supervisor alone
            super().__init__(
                child_command(module, fd), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(fd,),
                start_new_session=True,
                env=None if environment is None else {**os.environ, **environment},
            )  # fmt: skip

    def wait_for_end(self, timeout_s: float) -> int:
        """Wait for the end, kill after `timeout_s` seconds; return the exit code, negative for a signal."""
        try:
            return self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()


async def wait_for_exit(process: Child, timeout_s: float) -> int:
    """Return the exit code of `Child.wait_for_end`, waiting on a thread; retry while no thread can be started."""
    while True:
        try:
            return await asyncio.to_thread(process.wait_for_end, timeout_s)
        except RuntimeError as error:
            log.error("cannot wait for the end of a process: %s; trying again", error)
            await asyncio.sleep(BEAT_S)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class ChildSlot:
    """Place of one process, on the supervisor's event loop: the running process, why it ended, when the next starts."""

    def __init__(self) -> None:
        self.process: Child | None = None
        self.error: WicoreError | None = None  # why the process ends, as reported by it
        self.restarts = -1
        self.build: str | None = None  # of the engine directory that the process has opened
        self.loaded = False  # the process has told its build
        self.ranks = 1  # of an engine that has loaded
        self.ended_unready = False  # the last process ended before it had loaded
        self.started_at = 0.0
        self.silent_s = 0.0  # since the last beat
        self.stuck_s = 0.0  # that an engine has had work and ended no step, by its beats
        self.links = 0  # that the front was given to an engine
        self.killed = False  # by this process
        self.ready_at: float | None = None  # time.monotonic()
        self._quick_ends = 0

    def start_process(
        self, module: str, on_message: Callable[[dict[str, Any]], None], on_exit: Callable[[int], None],
        environment: Mapping[str, str] | None = None,
    ) -> Child:  # fmt: skip
        """Start `module`; `on_message` gets its messages, `on_exit` its exit code. Raises OSError."""
        process = self.process = Child(module, environment)
        self.error, self.build, self.loaded, self.ranks, self.killed = None, None, False, 1, False
        self.started_at, self.silent_s, self.stuck_s, self.ready_at = time.monotonic(), 0.0, 0.0, None
        self.restarts += 1
        loop, number = asyncio.get_running_loop(), process.control.sock.fileno()

        async def reap() -> None:
            code = await wait_for_exit(process, STOP_S)
            process.control.close()
            self.process, self.loaded, self.ended_unready = None, False, not self.loaded
            on_exit(code)

        def read_message() -> None:
            received = process.control.receive_message()
            if received is None:
                loop.remove_reader(number)
                asyncio.ensure_future(reap())
                return
            for fd in received[1]:
                os.close(fd)
            on_message(received[0])

        loop.add_reader(number, read_message)
        return process

    def kill_process(self) -> None:
        """Kill the process; `on_exit` is called as after any other end."""
        if self.process is not None:
            self.killed = True
            self.process.kill()

    def choose_pause(self) -> float:
        """Return the seconds until the next start: 0, unless the process keeps ending (say, for lack of memory)."""
        quick = self.ready_at is None or time.monotonic() - self.ready_at < QUICK_S
        self._quick_ends = self._quick_ends + 1 if quick else 0
        more = self._quick_ends - PATIENCE
        return min(MAX_PAUSE_S, 2.0 ** (more - 1)) if more > 0 else 0.0
