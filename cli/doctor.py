"""`wicore doctor`: checks whether this machine is fit to build and serve, and says how to mend it.

Runs with a broken or bare installation too: the standard library only at import, and no check can raise. Invariant: a
row that is not ok says how to mend it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def command(
    engine: Annotated[Path | None, Argument(help="Engine directory to verify as well.")] = None,
    cache_dir: Annotated[
        Path | None, Option(help="Directory of the KV disk tier and downloads. Default: ~/.cache.")
    ] = None,
    port: Annotated[int, Option(help="gRPC port that the server will listen on.")] = 50051,
    http_port: Annotated[int, Option(help="And its HTTP port.")] = 8000,
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine; exit 4 when something makes it unfit. Never touches the network."""
    from wicore_trt.cli._checks import FAIL, check_machine
    from wicore_trt.cli._ui import print_json, print_table

    rows = check_machine(engine=engine, cache_dir=cache_dir or Path.home() / ".cache", port=port, http_port=http_port)
    if json:
        print_json({"fit": all(r.state != FAIL for r in rows), "checks": [r._asdict() for r in rows]})
    else:
        print_table("doctor", ("check", "state", "found"), [(r.name, r.state, r.found) for r in rows])
        for row in rows:
            if row.fix:
                print(f"{row.state}: {row.name}: {row.fix}")
    if any(row.state == FAIL for row in rows):
        raise typer.Exit(4)
