"""Parts that benchmarks share: lines of progress, and the engine that is measured.

It must not know what is measured. Invariant: progress that goes to stderr leaves stdout to the results.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from wicore_trt.bench.report import ABSENT, list_versions

if TYPE_CHECKING:
    from wicore_trt.engine.directory import EngineDir

BEGUN = time.monotonic()


def say(text: str) -> None:
    """A line on stdout with the seconds since the process began."""
    print(f"[{time.monotonic() - BEGUN:6.1f} s] {text}", flush=True)


def note(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def installed() -> dict[str, str]:
    """`versions()`. Raises SystemExit without the native library: nobody who installs the package has such figures."""
    found = list_versions()
    if found["native"] == ABSENT:
        raise SystemExit(
            "error: wicore_trt has no native library here. Install it where a C++ compiler is: pip install -e ."
        )
    return found


@contextmanager
def measured_engine(path: Path | None, gguf: Path | None = None) -> Iterator[EngineDir]:
    """The engine at `path`, or Gemma 3 270M built with every option at its default, of `gguf` where it is given."""
    from wicore_trt.checkpoint.demo import fetch_model
    from wicore_trt.engine.build import build_engine
    from wicore_trt.engine.directory import open_engine

    if path is not None:
        yield open_engine(path)
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield build_engine(gguf or fetch_model("gemma3-270m"), Path(scratch) / "engine")
