"""Where one process of a server runs, or the next one will: what it says, how it ends, when to start it again.

On the supervisor's event loop. It must not know what processes do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from wicore_trt.errors import WicoreError
from wicore_trt.process.child import Child, Fork, exit_code, how_it_ended

KILL_S, STOP_S = 1.0, 5.0
"""For a process that was killed to be gone; for the engine to end its step when it is told to stop, and for a front to
close after its grace time."""
QUICK_S, PATIENCE, SLOW_S, MAX_PAUSE_S = 10.0, 3, 5.0, 60.0
"""A process that ended before it was ready or so soon after, more than so many times in a row, is started again after
a pause of 1 s, 2 s, 4 s and so on, a minute at most; one that the system has no room for after SLOW_S."""


class Place:
    """Where one process runs, or the next one will."""

    def __init__(self) -> None:
        self.process: Child | Fork | None = None
        self.said: WicoreError | None = None  # why it ends
        self.restarts = -1
        self.build: str | None = None  # of the engine that it has opened, as it says
        self.began = 0.0
        self.killed = False  # by this process
        self._ready: float | None = None
        self._quick = 0

    def put(self, process: Child | Fork, heard: Callable[[dict[str, Any]], None], ended: Callable[[int], None]) -> None:
        """A process was started; `heard` gets its messages and `ended` its exit code, on the event loop."""
        self.process, self.said, self.killed = process, None, False
        self.began, self._ready = time.monotonic(), None
        self.restarts += 1
        loop, number = asyncio.get_running_loop(), process.control.fileno()

        async def reap() -> None:
            code = await exit_code(process, STOP_S)
            process.control.close()
            self.process = None
            ended(code)

        def on_message() -> None:
            received = process.control.receive()
            if received is None:
                loop.remove_reader(number)
                asyncio.ensure_future(reap())
                return
            for fd in received[1]:
                os.close(fd)
            heard(received[0])

        loop.add_reader(number, on_message)

    def close(self) -> None:
        """End the process, and hear no more of it."""
        if self.process is not None:
            asyncio.get_running_loop().remove_reader(self.process.control.fileno())
            self.process.kill()

    def bury(self) -> None:
        """Wait until the process is gone that was ended, and its template if it has one."""
        if self.process is not None:
            self.process.bury(KILL_S)

    def kill(self) -> None:
        """End the process, which is heard to end."""
        if self.process is not None:
            self.killed = True
            self.process.kill()

    def why(self, code: int) -> object:
        """Why it ended, with this exit code."""
        guess = ", probably out of memory" if -code == signal.SIGKILL and not self.killed else ""
        return self.said or how_it_ended(code) + guess

    def ready(self) -> None:
        """The process does what it is for."""
        self._ready = time.monotonic()

    def pause(self) -> float:
        """Seconds to wait before the next start: none, unless it keeps ending, killed for its memory say."""
        quick = self._ready is None or time.monotonic() - self._ready < QUICK_S
        self._quick = self._quick + 1 if quick else 0
        return min(MAX_PAUSE_S, 2.0 ** (self._quick - PATIENCE - 1)) if self._quick > PATIENCE else 0.0


class FrontPlace(Place):
    """That of a front."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.name = number, "front" if number == 1 else f"front-{number}"
        self.links = 0  # that it was given
        self.silent_s = 0.0  # for so long it has told nothing
        self.bound = self.serving = self.idle = False

    def begin(
        self, fork: Fork, heard: Callable[[FrontPlace, dict[str, Any]], None], ended: Callable[[FrontPlace, int], None]
    ) -> None:
        """The next front begins."""
        self.links, self.silent_s, self.bound, self.idle = 0, 0.0, False, False
        self.put(fork, partial(heard, self), partial(ended, self))
