"""The repository as these tests see it: its root, its files and what they import."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
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


@cache
def python_sources() -> tuple[str, ...]:
    """Python files of the product: neither tests nor generated code."""
    names = [n for n in tracked() if n.endswith(".py") and n.startswith(SOURCES) and not n.startswith(GENERATED)]
    assert "wicore_trt/types.py" in names, "a checkout without sources would pass every check"
    return tuple(names)


@cache
def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def parse(path: str) -> ast.Module:
    return ast.parse(read(path))


def module_of(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith("wicore_trt") else f"wicore_trt.{name}"


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules imported anywhere below `tree`; `from a import b` yields a.b, as b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
