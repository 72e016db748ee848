"""Prints progress, tables and JSON for every command.

Results go to stdout, progress and errors to stderr. Must not know commands. Invariant: without a TTY the output has no
control characters and progress is plain lines, one per phase and one every LINE_S seconds of a long one. rich honours
NO_COLOR.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wicore_trt.progress import Progress, ignore_progress

LINE_S = 10.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_json(data: object) -> None:
    print(json.dumps(data, indent=2, sort_keys=False, default=str))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table on stdout: drawn by rich on a TTY, aligned plain text otherwise."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*(Text(str(cell), style=_STYLES.get(str(cell), "")) for cell in row))
        Console().print(table)
        return
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    print(f"{title}:")
    for row in cells:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "corrupted": "red"}


def human_bytes(count: float) -> str:
    """Word bytes: 1536 -> "1.5 KiB"."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Progress]:
    """Make progress(phase, done, total): a bar on a TTY, else a line per phase, one more every LINE_S seconds."""
    if quiet:
        yield ignore_progress
    elif sys.stderr.isatty():
        with _show_bars() as report:
            yield report
    else:
        yield _print_lines()


@contextmanager
def _show_bars() -> Iterator[Progress]:
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TextColumn("{task.percentage:>3.0f}%"),
        bars.TimeElapsedColumn(), bars.TextColumn("left"), bars.TimeRemainingColumn(),
    )  # fmt: skip
    with bars.Progress(*columns, console=Console(stderr=True)) as display:
        tasks: dict[str, bars.TaskID] = {}

        def report(phase: str, done: int, total: int) -> None:
            whole = None if (done, total) == (0, 1) else total  # a phase without steps: the bar moves all the same
            if phase not in tasks:
                tasks[phase] = display.add_task(phase, total=whole)
            display.update(tasks[phase], completed=done, total=whole)

        yield report


def _print_lines() -> Progress:
    printed: dict[str, float] = {}

    def report(phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase not in printed:
            printed[phase] = now
            if phase != "read":  # a source that is refused gets one line, the error
                print(f"{phase} ...", file=sys.stderr, flush=True)
        elif now - printed[phase] >= LINE_S and total > 1:
            printed[phase] = now
            print(f"{phase} {100 * done // total} %", file=sys.stderr, flush=True)

    return report
