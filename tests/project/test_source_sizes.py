"""Files and functions stay small enough to read, and every module says what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from repository import GENERATED, ROOT, SOURCES, python_sources, tracked

MAX_FILE_LINES = 650  # a stop for runaway files, no target
MAX_FUNCTION_LINES = 80
CODE = (".py", ".cpp", ".cu", ".h", ".proto", ".yaml", ".js", ".css", ".html")


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, lines of the body without its docstring) of every function."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            yield node.name, (node.end_lineno or 0) - body[0].lineno + 1


def test_files_are_short() -> None:
    paths = [n for n in tracked() if n.startswith(SOURCES) and n.endswith(CODE) and not n.startswith(GENERATED)]
    assert len(paths) > 300
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in paths}
    assert not {path: n for path, n in lines.items() if n > MAX_FILE_LINES}, "split them by subject"


def test_functions_are_short_and_modules_are_described() -> None:
    trees = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in python_sources()}
    assert len(trees) > 300
    long = {(path, *found) for path, tree in trees.items() for found in functions(tree)}
    assert not {found for found in long if found[2] > MAX_FUNCTION_LINES}
    assert not [path for path, tree in trees.items() if not ast.get_docstring(tree)], "a module opens with a docstring"


def test_the_function_counter_counts() -> None:
    source = "def f():\n    '''Doc.\n\n    More.'''\n    a = 1\n    return a\n"
    assert list(functions(ast.parse(source))) == [("f", 2)]
