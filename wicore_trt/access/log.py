"""Log output of the server process: short lines for people or JSON lines for machines, to stderr.

Invariants: a line that was logged for a call has its id. One record is one line of printable characters and bounded
length, whatever a client wrote; in the form for people a traceback follows on its own lines. Logging never waits for
the log's reader: lines without room are dropped, and counted in a line when there is room again.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from wicore_trt.access.calls import CURRENT
from wicore_trt.errors import shortened

MAX_LINES = 10_000
"""Lines that wait for the log's reader."""
CLOSE_S = 1.0
"""Seconds that the last lines may hold up the end of the process."""
QUIET_S = 10.0
"""Seconds between two lines of a kind that strangers can cause as often as they like."""
MAX_VALUE, MAX_MESSAGE = 512, 1024
"""Characters of a value in a line, and of its text; what a client wrote may be as long as a message."""
TOGETHER_S = 0.02
"""Lines that come so soon after one are written with it: to wake the thread that writes costs as much as a line."""
MOST_AT_ONCE = 64
"""Lines of one write; those that wait behind it count as waiting."""
MAX_TRACEBACK = 16_384
OTHERS = ("asyncio", "grpc.aio._server", "uvicorn.error", "websockets.server", "opentelemetry")
"""Loggers of libraries that this process runs; without a handler they would write to stderr, and wait for it."""
SILENT = "grpc._cython.cygrpc"
"""A logger that tells the value of each header that is not UTF-8, a key among them, with a traceback: a request of 100
KB took 0.8 s of the event loop for it. Callers of handlers log the exceptions that these raise."""


def _collect_facts(record: logging.LogRecord) -> dict[str, object]:
    call, facts = CURRENT.get(), getattr(record, "facts", None) or {}
    found: dict[str, object] = {"id": call.call_id} if call is not None else {}
    for key, value in facts.items():
        found[key] = shortened(value, MAX_VALUE) if isinstance(value, str) else value
    return found


class _Bounded(logging.Formatter):
    def formatException(self, ei: Any) -> str:
        return shortened(super().formatException(ei), MAX_TRACEBACK)


class LineFormatter(_Bounded):
    """Formats `2026-01-31 12:00:00 INFO message key=value ...`; values with spaces or quotes are quoted as in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        message = shortened(record.getMessage(), MAX_MESSAGE)
        head = f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')} {record.levelname} {message}"
        parts = [head if head.isprintable() else head.encode("unicode_escape").decode()]
        for key, value in _collect_facts(record).items():
            if key in ("method", "code"):  # already in the message
                continue
            text = str(value)
            plain = text.isprintable() and not set(' "=') & set(text)
            parts.append(f"{key}={text if plain else json.dumps(text)}")
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(_Bounded):
    """Formats one JSON object per line: time (RFC 3339, UTC), level, logger, message, facts, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname, "logger": record.name,
            "message": shortened(record.getMessage(), MAX_MESSAGE), **_collect_facts(record),
        }  # fmt: skip
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class DroppingHandler(logging.Handler):
    """Writes lines on its own thread by `write`, which may block for ever; queued lines are written together."""

    def __init__(self, write: Callable[[bytes], None], max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._write, self._max_lines = write, max_lines
        self._lines: deque[str] = deque()
        self._came = threading.Event()
        self._dropped, self._closed = 0, False
        self._thread = threading.Thread(target=self._run, name="wicore-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            room = self._max_lines - len(self._lines)
            if self._dropped and room:
                note = logging.LogRecord(
                    __name__, logging.WARNING, __file__, 0, f"{self._dropped} lines of the log were lost", None, None
                )
                self._lines.append(self.format(note))
                self._dropped, room = 0, room - 1
            if room <= 0:
                self._dropped += 1
                return
            self._lines.append(line)
            if not self._came.is_set():
                self._came.set()
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Wait up to CLOSE_S seconds for the queued lines to be written."""
        self._closed = True
        self._came.set()
        self._thread.join(CLOSE_S)
        super().close()

    def _run(self) -> None:
        closed = False
        while not closed:
            self._came.wait()
            if not self._closed:
                time.sleep(TOGETHER_S)
            self._came.clear()
            closed = self._closed
            while self._lines:
                lines: list[str] = []
                while self._lines and len(lines) < MOST_AT_ONCE:
                    lines.append(self._lines.popleft())
                with suppress(OSError, ValueError):  # nobody reads it
                    self._write(("\n".join(lines) + "\n").encode(errors="backslashreplace"))


def make_quiet_filter() -> Callable[[object], bool]:
    """Make a filter that passes a record at most every QUIET_S seconds: strangers can make libraries log."""
    last = -QUIET_S

    def passes(record: object) -> bool:
        nonlocal last
        now = time.monotonic()
        if now - last < QUIET_S:
            return False
        last = now
        return True

    return passes


class QuietLog:
    """Logs a message at most every QUIET_S seconds and says how often it was held back."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger, self._level, self._passes = logger, level, make_quiet_filter()
        self._held_back = 0

    def __call__(self, message: str, **facts: object) -> None:
        if not self._passes(message):
            self._held_back += 1
            return
        if self._held_back:
            facts["more_since_the_last_line"] = self._held_back
        self._held_back = 0
        self._logger.log(self._level, message, extra={"facts": facts})


def _open_stderr() -> Callable[[bytes], None]:
    """Return a writer to stderr past Python's buffer, whose lock would hold up the end of the process."""
    stream = sys.stderr
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):  # a stand-in, as under a test runner

        def write_text(line: bytes) -> None:
            stream.write(line.decode())

        return write_text

    def write(line: bytes) -> None:
        while line:
            line = line[os.write(number, line) :]

    return write


UNTOLD = ("logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks")


def set_level(level: str) -> None:
    logging.getLogger("wicore_trt").setLevel(level.upper())


def configure_logging(*, json_lines: bool = False, level: str = "INFO") -> None:
    """Send this package's log, and the errors of OTHERS, to stderr; replace any former set-up. Call it before grpc is
    imported, whose core writes to stderr itself and waits for its reader."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for name in UNTOLD:  # facts that no line shows, yet each record would look up
        setattr(logging, name, False)
    handler = DroppingHandler(_open_stderr())
    handler.setFormatter(JsonFormatter() if json_lines else LineFormatter())
    for name in ("wicore_trt", *OTHERS):
        logger = logging.getLogger(name)
        former, logger.handlers[:] = logger.handlers[:], [handler]
        for old in former:
            old.close()
        logger.propagate = False
        if name in OTHERS:
            logger.setLevel(logging.ERROR)
            logger.filters[:] = [make_quiet_filter()]
    set_level(level)
    logging.getLogger(SILENT).setLevel(logging.CRITICAL)
    logging.lastResort = handler  # for all other libraries
