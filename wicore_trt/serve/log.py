"""Log output of the server process: short lines for people or JSON lines for machines, to stderr.

Standard library only. Invariant: one record is one line of printable characters, whatever a client put into its names
and texts; in the form for people a traceback follows on lines of its own.
"""

from __future__ import annotations

import json
import logging
import sys
import time


def _facts(record: logging.LogRecord) -> dict[str, object]:
    facts = getattr(record, "facts", None)
    return facts if isinstance(facts, dict) else {}


class LineFormatter(logging.Formatter):
    """`2026-01-31 12:00:00 INFO message key=value ...`; values with spaces or quotes are quoted as in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')} {record.levelname} {record.getMessage()}"
        parts = [head if head.isprintable() else head.encode("unicode_escape").decode()]
        for key, value in _facts(record).items():
            if key in ("method", "code"):  # already in the message
                continue
            text = str(value)
            parts.append(f"{key}={text if text.isprintable() and ' ' not in text else json.dumps(text)}")
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, logger, message, facts, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure(*, json_lines: bool = False, level: str = "INFO") -> None:
    """Send this package's log to stderr. Calling it again replaces the former set-up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_lines else LineFormatter())
    logger = logging.getLogger("wicore_trt")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level)
