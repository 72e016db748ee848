"""`wicore`: finds the command, runs it and turns every failure into one line and an exit code.

Commands live one per file and are imported when they are asked for. Must not import anything heavy. Invariant: exit
codes are 0 ok, 1 failure, 2 usage, 3 recipe or settings, 4 environment unfit, 130 interrupt, and nothing else.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from wicore_trt.errors import WicoreError

PANELS = {
    "Engines": ("fetch", "convert", "build", "inspect"),
    "Running": ("serve", "generate", "bench"),
    "KV cache": ("kv",),
    "Machine": ("doctor", "recipes"),
}
"""Help panel to its commands in reading order; command `x` is `command` (or the typer app `app`) of cli/x.py."""

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
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: list[str]) -> int:
    """Run the command line; returns the exit code."""
    debug = "--debug" in args[:1] or os.environ.get("WICORE_DEBUG", "0") not in ("", "0")
    try:
        result = app(args, prog_name="wicore", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        # The reader went away (`| head`); point stdout elsewhere so that the interpreter's last flush is quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except WicoreError as error:
        if debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        code = _usage_error(error)
        if code is not None:
            return code
        if debug:
            raise
        print(f"error: unexpected {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        print("This is a bug in wicore. WICORE_DEBUG=1 shows the traceback.", file=sys.stderr)
        return 1


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
