"""The repository as these tests see it: its root and its files."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("wicore_trt", "cli", "recipes", "plugins")
GENERATED = ("wicore_trt/serve/gen/",)


@cache
def tracked() -> tuple[str, ...]:
    """Files under version control, and new ones that are not ignored, by POSIX path."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(name for name in done.stdout.splitlines() if (ROOT / name).is_file())


def python_sources() -> list[str]:
    """Python files of the product: neither tests nor generated code."""
    return [n for n in tracked() if n.endswith(".py") and n.startswith(SOURCES) and not n.startswith(GENERATED)]
