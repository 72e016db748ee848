"""docs/files.md lists every source file with the first line of its docstring; this keeps the list true."""

from __future__ import annotations

import ast
import re

from repository import ROOT, python_sources, tracked

FILES = "docs/files.md"


def first_line(path: str) -> str:
    """First line of a Python module's docstring, or of a C++ file's opening comment."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    return re.sub(r"^// ?", "", text.split("\n")[0])


def expected() -> str:
    """The list as it should be."""
    names = [n for n in python_sources() if not n.endswith("__init__.py")]
    names += [n for n in tracked() if n.startswith("plugins/") and n.endswith((".cpp", ".h"))]
    lines, folder = [], ""
    for name in sorted(names, key=lambda n: (n.rpartition("/")[0], n)):
        parent, _, leaf = name.rpartition("/")
        if parent != folder:
            lines += ["", f"**{parent}/**", ""]
            folder = parent
        lines.append(f"- `{leaf}`: {first_line(name)}")
    return "\n".join(lines) + "\n"


def test_every_file_has_its_line() -> None:
    written = (ROOT / FILES).read_text(encoding="utf-8").partition("\n")[2].partition("\n**")
    assert "".join(written[1:]) == expected(), f"{FILES} is out of date: python tests/project/test_file_list.py"


if __name__ == "__main__":
    head = (ROOT / FILES).read_text(encoding="utf-8").partition("\n**")[0]
    (ROOT / FILES).write_text(head + expected(), encoding="utf-8")
