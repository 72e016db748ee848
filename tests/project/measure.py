"""Measures of the product's size and style: the figures that budgets.toml bounds.

`python tests/project/measure.py` prints each figure beside its bound, `-v NAME` lists what counts for one of them,
`--set NAME...` writes today's figure into budgets.toml (a folder's lines plus 5 %; `all` for each of them).
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, pairwise

from repository import GENERATED, ROOT, SOURCES, imports, module_of, parse, python_sources, read, tracked

BUDGETS = ROOT / "tests/project/budgets.toml"
CODE = (".py", ".cpp", ".cu", ".h", ".proto", ".js", ".css", ".html")
SLACK = 1.05

# A docstring begins with a verb or a noun: none of these says what a thing is or does.
FIRST_WORDS = re.compile(
    r"^(What|Who|That|Those|One|The same|Whose|Which|This|It|As|Where|When|Whether|How|All|So|Of|To|For|In|By|With|From"
    r"|Not|None|Each|Every|Some|Any|Both|Such|There|These|Its|Their)\b"
)
# As a function's whole name these tell neither what is done nor to what.
VAGUE_NAMES = """
told came left asked found looked went gone made given taken had has kept seen said known wanted due done here there
of at on anew again still once other another much many enough whole alone apart beside ends come goes go
"""
DOCSTRING_WORDS, MARKDOWN_WORDS, MARKDOWN_COLUMNS = 30, 35, 110
DOCUMENTS = [
    name
    for name in tracked()
    if name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
    or (name.startswith("docs/") and name.endswith(".md"))
]


@cache
def walk(path: str) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(parse(path)))


@cache
def load_budgets() -> dict[str, dict[str, float]]:
    """Tables of budgets.toml: `lines` by folder, `figures` by name."""
    return tomllib.loads(BUDGETS.read_text(encoding="utf-8"))


def room_of(path: str, rooms: Iterable[str]) -> str:
    """Folder among `rooms` that holds `path`, the innermost; files right inside wicore_trt/ belong to `wicore_trt`."""
    held = [room for room in rooms if path.startswith(f"{room}/") and (room != "wicore_trt" or path.count("/") == 1)]
    return max(held, key=len, default="")


def count_lines(rooms: Iterable[str]) -> Counter[str]:
    """Lines of code by folder, without generated code; the key "" counts what no folder of `rooms` holds."""
    lines = Counter(dict.fromkeys(rooms, 0))
    for path in tracked():
        if path.startswith(SOURCES) and path.endswith(CODE) and not path.startswith(GENERATED):
            lines[room_of(path, rooms)] += len(read(path).splitlines())
    return lines


def list_functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function below wicore_trt/ with the file that holds it."""
    for path in python_sources():
        if path.startswith("wicore_trt/"):
            for node in walk(path):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield path, node


def count_words(name: str) -> int:
    return len([word for word in name.split("_") if word])


def find_one_word_names() -> list[str]:
    """Functions whose name is one word (`__init__` as well)."""
    return [f"{path}:{node.lineno} {node.name}" for path, node in list_functions() if count_words(node.name) == 1]


def share_one_word_names() -> float:
    """Per cent of all functions below wicore_trt/ whose name is one word, rounded up to a tenth."""
    functions = len(list(list_functions()))
    return math.ceil(1000 * len(find_one_word_names()) / functions) / 10


def find_vague_names() -> list[str]:
    return [
        f"{p}:{node.lineno} {node.name}" for p, node in list_functions() if node.name.strip("_") in VAGUE_NAMES.split()
    ]


def list_docstrings() -> Iterator[tuple[str, str]]:
    """(place, text) of every docstring of the product."""
    for path in python_sources():
        for node in walk(path):
            described = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module))
            if described and (text := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'lineno', 1)}", text


def find_first_words() -> list[str]:
    """Docstrings that begin with a pronoun, a preposition or the like."""
    return [f"{place} {text.splitlines()[0]}" for place, text in list_docstrings() if FIRST_WORDS.match(text)]


def find_attribute_first_words() -> list[str]:
    """Strings below a constant or a field of the product that begin so."""
    found = []
    for path in python_sources():
        bodies = [node.body for node in walk(path) if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Module))]
        for above, node in chain.from_iterable(map(pairwise, bodies)):
            described = isinstance(above, (ast.Assign, ast.AnnAssign)) and isinstance(node, ast.Expr)
            text = str(getattr(node.value, "value", "")) if described else ""
            if FIRST_WORDS.match(text):
                found.append(f"{path}:{node.lineno} {text.splitlines()[0]}")
    return found


def find_long_sentences() -> list[str]:
    """Docstrings' sentences of more than DOCSTRING_WORDS words; lists and clauses behind a colon count alone."""
    found = []
    for place, text in list_docstrings():
        for sentence in re.split(r"(?<=[.:;?!])\s+|\n\n|\n\s*[-*|]", text):
            if (words := len(sentence.split())) > DOCSTRING_WORDS:
                found.append(f"{place} {words} words: {sentence[:80]!r}")
    return found


def find_equal_classes() -> list[str]:
    """Public classes of the product whose names exist more than once."""
    places = defaultdict(list)
    for path in python_sources():
        for node in walk(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def list_prose(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of Markdown's lines outside of code, tables and comments."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "|", "<!--", "![", "  |")):
            yield number, line


def find_wide_lines() -> list[str]:
    """Lines of documents over MARKDOWN_COLUMNS columns; code, tables and single links count for nothing."""
    lines = ((path, number, line) for path in DOCUMENTS for number, line in list_prose(read(path)))
    wide = [(p, n, line) for p, n, line in lines if len(line) > MARKDOWN_COLUMNS and " " in line.strip()]
    return [f"{path}:{number} {len(line)} columns" for path, number, line in wide]


def list_sentences(text: str) -> Iterator[tuple[int, str]]:
    """(number of a line near it, sentence) of Markdown's prose; an item of a list, and a heading, end a sentence."""
    part: list[str] = []
    last = 0
    for number, line in [*list_prose(text), (0, "")]:
        begins = not line.strip() or re.match(r"\s*([-*]|\d+\.)\s|#", line) or number != last + 1
        if begins and part:
            prose = re.sub(r"\]\([^)]*\)", "]", " ".join(part))  # the text of a link, without its address
            yield from ((last, sentence) for sentence in re.split(r"(?<=[.:;?!])[\"')*]*\s+", prose))
            part = []
        if line.strip():
            part.append(line.strip())
        last = number


def find_long_prose() -> list[str]:
    """Documents' sentences of more than MARKDOWN_WORDS words."""
    sentences = [(path, number, text) for path in DOCUMENTS for number, text in list_sentences(read(path))]
    long = [(p, n, text) for p, n, text in sentences if len(text.split()) > MARKDOWN_WORDS]
    return [f"{path}:{number} {len(text.split())} words: {text[:80]!r}" for path, number, text in long]


def find_private_reads() -> list[str]:
    """Private members (`x._y`) of objects other than `self` and `cls` in tests."""
    found = []
    for path in tracked():
        if path.startswith("tests/") and path.endswith(".py"):
            for node in walk(path):
                if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                    continue
                if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                    found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    return found


@cache
def import_graph() -> dict[str, set[str]]:
    """Files of the product that each file imports anywhere in its code, deferred and for types alone too."""
    modules = {module_of(path): path for path in python_sources()}
    graph: dict[str, set[str]] = {path: set() for path in modules.values()}
    for path in graph:
        for name in imports(parse(path)):
            while name not in modules and name:
                name = name.rpartition(".")[0]
            if name and name != "wicore_trt":
                graph[path].add(modules[name])
    return graph


def find_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Largest sets of nodes that reach each other; a node alone counts where it names itself."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        todo = [*graph[start]]
        while todo:
            if (node := todo.pop()) not in seen:
                seen.add(node)
                todo += graph.get(node, ())
        reached[start] = seen
    circles = {tuple(sorted(b for b in seen if a in reached.get(b, ()))) for a, seen in reached.items() if a in seen}
    return [[*circle] for circle in sorted(circles)]


def find_file_circles() -> list[str]:
    """Circles of files that import each other."""
    return [" <-> ".join(circle) for circle in find_circles(import_graph())]


def find_folder_circles() -> list[str]:
    """Circles of folders that import each other; a module right inside wicore_trt/ stands for itself."""
    graph: dict[str, set[str]] = defaultdict(set)
    for path, others in import_graph().items():
        graph[folder_of(path)] |= {folder_of(other) for other in others} - {folder_of(path)}
    return [" <-> ".join(circle) for circle in find_circles(graph)]


def folder_of(path: str) -> str:
    return path if path.count("/") == 1 and path.startswith("wicore_trt/") else path.rpartition("/")[0]


LISTS: dict[str, Callable[[], list[str]]] = {
    "attribute_first_words": find_attribute_first_words,
    "class_names_twice": find_equal_classes,
    "docstring_first_words": find_first_words,
    "docstring_long_sentences": find_long_sentences,
    "file_circles": find_file_circles,
    "folder_circles": find_folder_circles,
    "markdown_long_sentences": find_long_prose,
    "markdown_wide_lines": find_wide_lines,
    "one_word_function_names": find_one_word_names,
    "private_reads_in_tests": find_private_reads,
    "vague_function_names": find_vague_names,
}
"""By figure: what counts for it, one description each."""


def measure_figure(name: str) -> float:
    """Today's value of a figure: how many offend, or for one-word names their share in per cent."""
    return share_one_word_names() if name == "one_word_function_names" else len(LISTS[name]())


def set_budgets(names: list[str]) -> None:
    """Write today's figures of `names` (folders, figures, or `all`) into budgets.toml."""
    text = BUDGETS.read_text(encoding="utf-8")
    lines = count_lines(load_budgets()["lines"])
    for name in load_budgets()["lines"]:
        if name in names or "all" in names:
            text = re.sub(
                rf'^"?{re.escape(name)}"? = .*$', f'"{name}" = {math.ceil(lines[name] * SLACK)}', text, flags=re.M
            )
    for name in load_budgets()["figures"]:
        if name in names or "all" in names:
            text = re.sub(rf"^{name} = [\d.]+", f"{name} = {measure_figure(name)}", text, flags=re.M)
    BUDGETS.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-v", metavar="NAME", dest="listed", choices=LISTS)
    parser.add_argument("--set", metavar="NAME", nargs="+")
    args = parser.parse_args()
    if args.set:
        set_budgets(args.set)
    if args.listed:
        print(*LISTS[args.listed](), sep="\n")
        return
    lines = count_lines(load_budgets()["lines"])
    for room, budget in load_budgets()["lines"].items():
        print(f"{room:32} {lines[room]:7} lines of {budget:6}")
    product = [p for p in tracked() if p.startswith(SOURCES) and not p.startswith(GENERATED)]
    total = sum(len(read(p).splitlines()) for p in product if p.endswith((".py", ".cpp", ".cu", ".h")))
    print(f"{'Python, C++ and headers':32} {total:7} lines, without generated code")
    for name, bound in load_budgets()["figures"].items():
        print(f"{name:32} {measure_figure(name):7} of {bound:6}")


if __name__ == "__main__":
    main()
