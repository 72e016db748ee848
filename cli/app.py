"""Commands of `wicore`, by panel, and the options in front of them.

Each command has a file, imported on use. Must not import anything heavy, nor know failures and exit codes, which are
`cli.main`'s. Invariant: a command that is not asked for is not imported.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from wicore_trt.errors import EnvironmentUnfitError

PANELS = {
    "Engines": ("fetch", "convert", "build", "inspect"),
    "Running": ("serve", "chat", "generate", "bench"),
    "KV cache": ("kv",),
    "Machine": ("doctor", "recipes"),
}
"""Help panel to its commands in reading order; command `x` is `command` (or the typer app `app`) of cli/x.py."""

_COMMANDS = [name for names in PANELS.values() for name in names]


def _load_command(name: str, panel: str) -> Any:
    module = import_module(f"wicore_trt.cli.{name}")
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    if hasattr(module, "app"):
        single.add_typer(module.app, name=name, rich_help_panel=panel)
        group: Any = typer.main.get_group(single).commands[name]
        for command in group.commands.values():
            _untype_flags(command)
        return _untype_flags(group)
    single.command(name, rich_help_panel=panel, cls=getattr(module, "COMMAND_CLASS", None))(module.command)
    return _untype_flags(typer.main.get_command(single))


def _untype_flags(command: Any) -> Any:
    """Hide the type beside flags in help, because they take no value; --help itself is made when help is shown."""
    of = command.get_params

    def params(ctx: Any) -> Any:
        found = of(ctx)
        for param in found:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return found

    command.get_params = params
    return command


class LazyGroup(TyperGroup):
    """Imports a command's module when the command, or the list of commands, is asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _untype_flags(self)

    def list_commands(self, ctx: Any) -> list[str]:
        return _COMMANDS

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for panel, names in PANELS.items():
            if cmd_name in names:
                return _load_command(cmd_name, panel)
        return None


app = typer.Typer(
    cls=LazyGroup, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        from wicore_trt import __version__

        print(f"wicore {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, Option("--debug", envvar="WICORE_DEBUG", help="Show tracebacks.")] = False,
) -> None:
    """Build and serve Gemma 3 engines."""
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries that commands load end the process for it, whatever paths are given
        raise EnvironmentUnfitError("The current directory no longer exists.", fix="Change to one that does.") from None
