"""The product stays small enough to read: line budgets by folder, and bounds on names, prose and circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import measure
import pytest
from measure import LISTS, count_lines, find_circles, list_prose, list_sentences, load_budgets, measure_figure, room_of
from repository import parse, python_sources

MAX_FUNCTION_LINES = 80
ADVICE = {
    "attribute_first_words": "begin with a noun and its unit: seconds that ..., bytes of ...",
    "class_names_twice": "give one of the two a name of its own (glossary in ARCHITECTURE.md)",
    "docstring_first_words": "begin with a verb or a noun of the glossary",
    "docstring_long_sentences": f"at most {measure.DOCSTRING_WORDS} words a sentence",
    "file_circles": "move what both need into one of them, or into a third file",
    "folder_circles": "imports go downwards only (ARCHITECTURE.md, Import directions)",
    "markdown_long_sentences": f"at most {measure.MARKDOWN_WORDS} words a sentence",
    "markdown_wide_lines": f"at most {measure.MARKDOWN_COLUMNS} columns",
    "one_word_function_names": "name functions verb + object",
    "private_reads_in_tests": "read something public, or give the class an `inspect()` of plain data",
    "vague_function_names": "name functions verb + object, never a participle or a preposition alone",
}


@pytest.mark.parametrize("room", load_budgets()["lines"])
def test_folders_keep_to_their_lines(room: str) -> None:
    lines, budget = count_lines(tuple(load_budgets()["lines"]))[room], load_budgets()["lines"][room]
    advice = "delete, or raise the budget in a commit that says why"
    assert lines <= budget, f"{room}: {lines} lines of {budget}; {advice}: tests/project/measure.py --set {room}"


def test_every_folder_has_a_budget() -> None:
    assert not count_lines(tuple(load_budgets()["lines"]))[""], "name the new folder in tests/project/budgets.toml"


@pytest.mark.parametrize("figure", LISTS)
def test_figures_keep_to_their_bounds(figure: str) -> None:
    value, bound = measure_figure(figure), load_budgets()["figures"][figure]
    listing = f"`python tests/project/measure.py -v {figure}` lists them"
    assert value <= bound, f"{figure}: {value}, at most {bound}; {ADVICE[figure]}; {listing}"


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, lines of the body without its docstring) of every function."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            yield node.name, (node.end_lineno or 0) - body[0].lineno + 1


def test_functions_are_short_and_modules_are_described() -> None:
    long = [(path, *found) for path in python_sources() for found in functions(parse(path))]
    assert not [found for found in long if found[2] > MAX_FUNCTION_LINES]
    assert not [path for path in python_sources() if not ast.get_docstring(parse(path))], "no docstring"


def test_the_function_counter_counts() -> None:
    source = "def f():\n    '''Doc.\n\n    More.'''\n    a = 1\n    return a\n"
    assert list(functions(ast.parse(source))) == [("f", 2)]


def test_lines_go_to_the_innermost_folder() -> None:
    rooms = ("wicore_trt", "wicore_trt/kv", "wicore_trt/kv/tiers")
    assert room_of("wicore_trt/kv/tiers/moves.py", rooms) == "wicore_trt/kv/tiers"
    assert room_of("wicore_trt/kv/new/x.py", rooms) == "wicore_trt/kv"
    assert room_of("wicore_trt/types.py", rooms) == "wicore_trt"
    assert room_of("wicore_trt/new/x.py", rooms) == ""


def test_circles_are_seen() -> None:
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert find_circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


SAMPLE = {
    "x.py": '"""Where a module is.\n\n' + "word " * 31 + '"""\nclass Twice:\n    def told(self): ...\n',
    "y.py": "class Twice:\n    def give_page(self): ...\n",
}


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "python_sources", lambda: [f"wicore_trt/{name}" for name in SAMPLE])
    monkeypatch.setattr(measure, "parse", lambda path: ast.parse(SAMPLE[path.removeprefix("wicore_trt/")]))
    monkeypatch.setattr(measure, "walk", measure.walk.__wrapped__)


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("class_names_twice", 1),
        ("docstring_first_words", 1),
        ("docstring_long_sentences", 1),
        ("one_word_function_names", 50),
        ("vague_function_names", 1),
    ],
)
@pytest.mark.usefixtures("sample")
def test_the_figures_count(figure: str, value: float) -> None:
    assert measure_figure(figure) == value


def test_private_reads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "tracked", lambda: ["tests/x.py", "wicore_trt/y.py"])
    monkeypatch.setattr(measure, "walk", lambda path: ast.walk(ast.parse("a._b + self._c + self.d._e + f.__g__ + h.i")))
    assert sorted(measure.find_private_reads()) == ["tests/x.py:1 a._b", "tests/x.py:1 self.d._e"]


def test_sentences_of_documents_are_cut() -> None:
    text = "# Head\n\nOne [a b](c d) two.\nThree; four\n- five\n  six\n\n| seven. | eight |\n\n```\nnine\n```\n"
    sentences = ["# Head", "One [a b] two.", "Three;", "four", "- five six"]
    assert [sentence for _, sentence in list_sentences(text)] == sentences
    lines = ["# Head", "One [a b](c d) two.", "Three; four", "- five", "  six"]
    assert [line for _, line in list_prose(text) if line] == lines
