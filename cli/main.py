"""`wicore`: finds the command, runs it and turns every failure into one line and an exit code.

Commands live one per file and are imported when they are asked for. Must not import anything heavy. Invariant: exit
codes are 0 ok, 1 failure, 2 usage, 3 recipe or settings, 4 environment unfit, 130 interrupt, and nothing else.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from wicore_trt.errors import EnvironmentUnfitError, WicoreError

PANELS = {
    "Engines": ("fetch", "convert", "build", "inspect"),
    "Running": ("serve", "generate", "bench"),
    "KV cache": ("kv",),
    "Machine": ("doctor", "recipes"),
}
"""Help panel to its commands in reading order; command `x` is `command` (or the typer app `app`) of cli/x.py."""

COMPLAIN_MS = 1000
"""How long an error waits for who reads it."""
MAX_LINE = 1000
"""Characters of an error. A pipe that takes anything takes as many."""

_COMMANDS = [name for names in PANELS.values() for name in names]


def _load(name: str, panel: str) -> Any:
    module = import_module(f"wicore_trt.cli.{name}")
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    if hasattr(module, "app"):
        single.add_typer(module.app, name=name, rich_help_panel=panel)
        return typer.main.get_group(single).commands[name]
    single.command(name, rich_help_panel=panel)(module.command)
    return typer.main.get_command(single)


class LazyGroup(TyperGroup):
    """Imports a command's module when the command, or the list of commands, is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return _COMMANDS

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for panel, names in PANELS.items():
            if cmd_name in names:
                return _load(cmd_name, panel)
        return None


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from wicore_trt import __version__

        print(f"wicore {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", envvar="WICORE_DEBUG", help="Show tracebacks.")] = False,
) -> None:
    """Build and serve Gemma 3 engines."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit."""
    _open_streams()
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: list[str]) -> int:
    """Run the command line; returns the exit code."""
    debug = "--debug" in args[:1] or os.environ.get("WICORE_DEBUG", "0") not in ("", "0")
    try:
        result = app(args, prog_name="wicore", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:  # the reader went away (`| head`)
        _forget_stdout()
        return 1
    except KeyboardInterrupt:
        return 130
    except WicoreError as error:
        if debug:
            raise
        _say(str(error))
        return error.exit_code
    except (OSError, MemoryError) as error:
        if debug:
            raise
        _say(_of_the_machine(error))
        _forget_stdout()
        return EnvironmentUnfitError.exit_code
    except Exception as error:
        code = _usage_error(error)
        if code is not None:
            return code
        if debug:
            raise
        _say(f"unexpected {type(error).__name__}: {error}")
        _complain("This is a bug in wicore. WICORE_DEBUG=1 shows the traceback.")
        return 1


def _open_streams() -> None:
    """Make the standard streams usable whatever the caller did to them.

    A closed one becomes /dev/null: otherwise the next file that is opened gets its number, and what some library prints
    lands in a weight file. Text that the terminal's encoding lacks is spelt out instead of ending a finished command in
    an error; bytes of file names pass as they are.
    """
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="wicore")


def _spelt_out(error: UnicodeError) -> tuple[bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    pieces = (
        bytes([ord(c) - 0xDC00]) if 0xDC80 <= ord(c) <= 0xDCFF else c.encode("ascii", "backslashreplace") for c in part
    )
    return b"".join(pieces), error.end


def _say(text: str) -> None:
    """An error on one line: line breaks of its parts become blanks, other control characters are spelt out."""
    line = " ".join(part.strip() for part in text.splitlines() if part.strip())
    _complain("error: " + "".join(c if c.isprintable() else _escaped(c) for c in line))


def _complain(line: str) -> None:
    """Print to stderr, unless it is a pipe that is full and that nobody reads: a server has to end all the same."""
    with suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(sys.stderr.fileno(), select.POLLOUT)
        if not poll.poll(COMPLAIN_MS):
            return
    print(line[:MAX_LINE], file=sys.stderr)


def _escaped(c: str) -> str:
    return c if "\udc80" <= c <= "\udcff" else c.encode("unicode_escape").decode("ascii")


def _of_the_machine(error: OSError | MemoryError) -> str:
    """What a failure that no command expected says of the machine: a full disk behind stdout, no memory."""
    if isinstance(error, MemoryError):
        return "this machine has too little memory for that."
    place = f"{error.filename}: " if error.filename else "reading or writing failed: "
    return f"{place}{error.strerror or error}."


def _forget_stdout() -> None:
    """Point stdout elsewhere, so that the interpreter's last flush is quiet too."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _usage_error(error: Exception) -> int | None:
    """Exit code of an error that the argument parser raised and can show itself, else None.

    Typer carries its own copy of click in newer releases, so these are known by shape and not by class.
    """
    if isinstance(error, typer.Abort):
        return 130
    show = getattr(error, "show", None)
    if show is None or not hasattr(error, "exit_code"):
        return None
    show()
    return int(error.exit_code)


if __name__ == "__main__":
    main()
