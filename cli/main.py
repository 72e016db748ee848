"""`wicore`: runs a command and turns every failure into one line and an exit code.

Imports next to nothing: `cli.app` has the commands and is imported once failures and Ctrl-C are handled. Invariant:
exit codes are 0 ok, 1 failure, 2 usage, 3 recipe or settings, 4 environment unfit, 130 interrupt, and nothing else.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import signal
import sys
from contextlib import suppress
from typing import Any

from wicore_trt.errors import EnvironmentUnfitError, WicoreError, missing_package

INTERRUPTED = 130
COMPLAIN_MS = 1000
"""Milliseconds that an error waits for its reader."""
MAX_LINE = 1000
"""Characters of an error. A pipe that takes anything takes as many."""
_interrupts: list[int] = []


def main(args: list[str] | None = None) -> None:
    try:
        signal.signal(signal.SIGINT, _handle_interrupt)
        _open_streams()
        code = run_command(sys.argv[1:] if args is None else args)
    except KeyboardInterrupt:  # before or behind the command
        code = INTERRUPTED
    if code == INTERRUPTED:
        # At once: what was begun is cleared up, and the interpreter's own end waits for threads and shows tracebacks.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _print_stderr("interrupted")
        os._exit(code)
    sys.exit(code)


def _handle_interrupt(number: int, frame: object) -> None:
    """Record SIGINT before raising: an interrupt that a library turns into another exception during its import counts
    too."""
    _interrupts.append(number)
    raise KeyboardInterrupt


def run_command(args: list[str]) -> int:
    """Run the command line; returns the exit code."""
    own = args[: args.index("--")] if "--" in args else args
    debug = "--debug" in own or os.environ.get("WICORE_DEBUG", "0") not in ("", "0")
    try:
        from wicore_trt.cli.app import app

        args = [arg for arg in own if arg != "--debug"] + args[len(own) :]  # it may stand behind the command too
        result = app(args, prog_name="wicore", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:  # the reader went away (`| head`)
        _forget_stdout()
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except WicoreError as error:
        if _interrupts:
            return INTERRUPTED
        if debug:
            raise
        field = getattr(error, "field", None) or ""
        _print_error(f"{field}: {error}" if field.startswith("--") else str(error))
        return error.exit_code
    except (OSError, MemoryError) as error:  # a full disk behind stdout, say: no command expected it
        if debug:
            raise
        if isinstance(error, MemoryError):
            _print_error("this machine has too little memory for that.")
        else:
            place = f"{error.filename}: " if error.filename else "reading or writing failed: "
            _print_error(f"{place}{error.strerror or error}.")
        _forget_stdout()
        return EnvironmentUnfitError.exit_code
    except Exception as error:
        if _interrupts or type(error).__name__ == "Abort":
            return INTERRUPTED
        # Newer releases of Typer carry their own copy of click: errors of usage are known by shape, not by class.
        if (show := getattr(error, "show", None)) and hasattr(error, "exit_code"):
            show()
            return int(error.exit_code)
        if debug:
            raise
        if lacking := missing_package(error.name if isinstance(error, ModuleNotFoundError) else None):
            _print_error(str(lacking))
            return lacking.exit_code
        _print_error(f"unexpected {type(error).__name__}: {error}")
        _print_stderr("This is a bug in wicore. WICORE_DEBUG=1 shows the traceback.")
        return 1


def _open_streams() -> None:
    """Make the standard streams usable whatever the caller did to them. A closed one becomes /dev/null: otherwise the
    next file that is opened gets its number, and some library's output lands in a weight file. Characters that the
    terminal's encoding lacks are spelt out, so that they do not end a finished command in an error; bytes of file names
    pass unchanged."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    codecs.register_error("wicore", _spelt_out)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sink = io.BufferedWriter(_Sink(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(sink, encoding=sys.stderr.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="wicore")


class _Sink(io.FileIO):
    """Standard error that accepts everything: unreadable progress must not end a build."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def _spelt_out(error: UnicodeError) -> tuple[bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    pieces = (
        bytes([ord(c) - 0xDC00]) if 0xDC80 <= ord(c) <= 0xDCFF else c.encode("ascii", "backslashreplace") for c in part
    )
    return b"".join(pieces), error.end


def _print_error(text: str) -> None:
    """Print an error on one line: line breaks of its parts become blanks, other control characters are spelt out."""
    line = " ".join(part.strip() for part in text.splitlines() if part.strip())
    kept = (c if c.isprintable() or "\udc80" <= c <= "\udcff" else ascii(c)[1:-1] for c in line)
    _print_stderr("error: " + "".join(kept))


def _print_stderr(line: str) -> None:
    """Print to stderr, unless it is a full pipe that nobody reads: a server has to end all the same."""
    with suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(sys.stderr.fileno(), select.POLLOUT)
        if not poll.poll(COMPLAIN_MS):
            return
    print(line[:MAX_LINE], file=sys.stderr)


def _forget_stdout() -> None:
    """Point stdout elsewhere, so that the interpreter's last flush cannot fail."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


if __name__ == "__main__":
    main()
