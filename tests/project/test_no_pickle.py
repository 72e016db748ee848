"""No file that is read can run code: nothing in the product loads pickles, in any disguise (I23)."""

from __future__ import annotations

import ast

import pytest
from repository import python_sources, read

MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pandas", "shelve")
YAML_LOADERS = ("unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "UnsafeLoader", "FullLoader")


def unsafe(source: str) -> list[str]:
    """What of `source` could run code from a file, one description per place."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
            found += [name for name in names if name.split(".")[0] in MODULES]
        elif isinstance(node, ast.Attribute) and node.attr in YAML_LOADERS:
            found.append(node.attr)
        elif isinstance(node, ast.Call):
            found += _call(ast.unparse(node.func), {word.arg: word.value for word in node.keywords}, node.args)
    return found


def _call(name: str, words: dict[str | None, ast.expr], args: list[ast.expr]) -> list[str]:
    def says(word: str, value: bool) -> bool:
        return isinstance(words.get(word), ast.Constant) and words[word].value is value

    found = []
    if name.split(".")[0] == "torch" and name.endswith((".load", ".save")) and "jit" not in name:
        # torch.save writes pickles as well; tensors go to safetensors.
        found += [name] if name.endswith(".save") or not says("weights_only", True) else []
    if "allow_pickle" in words and not says("allow_pickle", False):
        found.append(f"{name} with allow_pickle")
    if name.endswith(("__import__", "import_module")) and args and isinstance(args[0], ast.Constant):
        found += [args[0].value] if str(args[0].value).split(".")[0] in MODULES else []
    if name.endswith(("to_pickle", "read_pickle")) or name in ("yaml.load", "yaml.load_all"):
        safe = "SafeLoader" in ast.unparse(words.get("Loader", args[1] if len(args) > 1 else ast.Constant(None)))
        found += [] if safe else [name]
    return found


def test_no_pickle() -> None:
    found = {path: unsafe(read(path)) for path in python_sources()}
    assert not any(found.values()), {path: what for path, what in found.items() if what}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal",
        "def f():\n    from pickle import loads",
        "from cloudpickle import x",
        "import shelve as s",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.save(x, f)",
        "np.load(f, allow_pickle=True)",
        "np.save(f, x, allow_pickle=flag)",
        "importlib.import_module('dill')",
        "__import__('pickle')",
        "yaml.load(f)",
        "yaml.load(f, Loader=yaml.FullLoader)",
        "yaml.unsafe_load(f)",
    ],
)
def test_the_checker_sees_pickles(source: str) -> None:
    assert unsafe(source)


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f, weights_only=True)",
        "np.load(f, allow_pickle=False)",
        "np.load(f)",  # numpy refuses pickles unless told
        "yaml.load(f, Loader=yaml.SafeLoader)",
        "yaml.safe_load(f)",
        "json.load(f)",
        "torch.ops.load_library(f)",
        "import struct",
    ],
)
def test_the_checker_lets_the_rest_pass(source: str) -> None:
    assert not unsafe(source)
