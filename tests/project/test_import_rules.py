"""Imports point one way: types <- kv, schedule <- core <- serve <- cli; what decides never imports a device."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
from repository import imports, module_of, parse, python_sources

HEAVY = ("torch", "tensorrt", "grpc", "fastapi", "transformers", "triton", "numpy", "safetensors", "huggingface_hub")
PURE = ("wicore_trt.kv", "wicore_trt.schedule", "wicore_trt.types", "wicore_trt.errors", "wicore_trt.files")

# What moves bytes may use numpy: a restart reads millions of index records at once. What decides may not: its books are
# plain data, and a process that only plans, simulates or talks to a server does not load an array library.
NUMPY_STORES = ("wicore_trt.kv.disk.index", "wicore_trt.kv.disk.tools")
LOAD_NUMPY = {
    *NUMPY_STORES,
    *(f"wicore_trt.kv.{name}" for name in ("disk.mover", "disk.native", "disk.store", "tiers.open_tiers")),
}
"""The stores and what imports them."""

# Package: what of wicore_trt it may import, itself included. The first entry that fits a module counts.
ROOT_MODULES = (
    "arithmetic",
    "errors",
    "checks",
    "files",
    "memory",
    "cores",
    "memory_file",
    "progress",
    "scratch",
    "types",
    "recipe",
    "config",
    "collector",
    "child_process",
    "worker_process",
)
EVERYWHERE = ("wicore_trt.arithmetic", "wicore_trt.cores", "wicore_trt.request_fields", "wicore_trt.weight_format")
"""What every module may import."""
BACKEND = (*ROOT_MODULES, "model", "checkpoint", "engine", "runtime", "plugins")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "arithmetic": (),
    "request_fields": (),
    "weight_format": (),
    "errors": (),
    "checks": ("errors",),
    "collector": (),
    "files": ("errors",),
    "memory": ("errors",),
    "cores": ("memory",),
    "memory_file": ("types",),
    "progress": (),
    "scratch": ("errors", "files"),
    "types": ("errors", "checks"),
    "recipe": ("errors", "files"),
    "config": ("errors", "files", "recipe"),
    "model.ops": (),
    "model.gemma3": ("model.ops", "model.spec"),
    "model": ("errors", "model"),
    "plugins": ("errors", "plugins"),
    "child_process": (),
    "worker_process": ("errors",),
    "images": ("arithmetic", "errors", "types", "memory_file", "worker_process", "plugins.cpu_library", "images"),
    "text": ("collector", "errors", "checks", "files", "types", "worker_process", "text"),
    "grammar": ("errors", "types", "text", "grammar"),
    "checkpoint.tokenizer_check": ("errors", "files", "checkpoint", "text"),  # loads it as an engine will
    "checkpoint": ("errors", "files", "progress", "scratch", "model", "checkpoint"),
    "runtime.batch": ("types",),
    "runtime.executor": ("model.spec", "runtime.batch", "types"),
    "runtime": ("errors", "child_process", "collector", "files", "types", "model", "checkpoint", "plugins", "runtime"),
    "engine": (
        *("errors", "files", "progress", "scratch", "model", "checkpoint", "engine"),
        *("runtime.executor", "runtime.options"),
    ),
    "backends.torch.calibrate": (*BACKEND, "text", "backends.torch"),  # reads a text
    "backends.torch": (*BACKEND, "backends.torch"),
    "backends.triton": (*BACKEND, "backends.torch.vision", "backends.triton"),  # one image encoder
    "backends.tensorrt": (*BACKEND, "backends.tensorrt"),
    "backends.trtllm": (*BACKEND, "kv", "backends.trtllm"),  # our tiers behind its KV connector
    "kv.sizing": ("errors", "kv", "model", "plugins.code_layout", "plugins.layout"),
    "kv.tiers.open_tiers": ("errors", "memory", "config", "kv", "runtime.executor", "plugins.code_layout"),
    "kv.disk.native": ("kv.disk", "plugins.cpu_library"),  # its threads are the library's
    "kv": ("errors", "types", "collector", "kv", "model.spec", "runtime.executor"),
    "schedule": ("errors", "types", "kv", "schedule", "model.spec", "runtime.batch"),
    "core": (*ROOT_MODULES, "kv", "schedule", "model", "runtime", "engine", "text", "grammar", "images", "core"),
    "llm": ("errors", "types", "config", "core", "images"),
    "client": ("errors", "types", "images.files", "serve.gen"),
    "access.entry": (*ROOT_MODULES, "core.text_engine", "grammar.source", "access"),
    "access": (*ROOT_MODULES, "core.shares", "access"),
    "link": (*ROOT_MODULES, "kv.events", "kv.pages", "core", "link"),
    "process.checker": (*ROOT_MODULES, "access", "grammar", "process"),
    "process": (*ROOT_MODULES, "access", "core", "link", "process"),
    "serve.front": (*ROOT_MODULES, "access", "core", "engine", "link", "process", "text", "serve"),
    "serve.lifecycle": (*ROOT_MODULES, "core", "access", "serve", "http", "metrics"),  # starts both
    "serve.worker": (*ROOT_MODULES, "core", "kv.events", "kv.pages", "access", "serve", "text", "engine", "model.spec"),
    "serve": (*ROOT_MODULES, "core", "kv.events", "kv.pages", "access", "images.files", "serve", "text"),
    "metrics": (*ROOT_MODULES, "core.times", "access.admission", "metrics"),
    "http": (*ROOT_MODULES, "core", "access", "http", "images.files", "metrics", "text", "grammar"),
}


def top_level(tree: ast.Module) -> Iterator[str]:
    """Modules imported when the module is: not inside functions, not under TYPE_CHECKING."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield from imports(node)


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def violations(path: str, tree: ast.Module) -> list[str]:
    """Imports of one file that break a rule."""
    module = module_of(path)
    heavy = [h for h in HEAVY if h != "numpy" or module not in NUMPY_STORES]
    found = [name for name in imports(tree) if any(below(module, p) for p in PURE) for h in heavy if below(name, h)]
    inner = module.removeprefix("wicore_trt").lstrip(".")
    allowed = next((rule for prefix, rule in MAY_IMPORT.items() if below(inner, prefix)), None)
    for name in imports(tree):
        known = name.startswith(EVERYWHERE) or name in ("wicore_trt", "wicore_trt.__version__")
        if allowed is None or known or not below(name, "wicore_trt"):
            continue
        target = name.removeprefix("wicore_trt.")
        if not any(below(target, a) for a in allowed):
            found.append(name)
    if below(inner, "cli"):
        light = (
            *sys.stdlib_module_names,
            "typer",
            "wicore_trt.arithmetic",
            "wicore_trt.errors",
            "wicore_trt.progress",
            "wicore_trt.cli",
        )
        found += [name for name in top_level(tree) if not any(below(name, m) for m in light)]
    return found


def test_imports_follow_the_rules() -> None:
    found = {path: violations(path, parse(path)) for path in python_sources()}
    assert not any(found.values()), {path: what for path, what in found.items() if what}


@pytest.mark.parametrize(
    ("path", "source", "broken"),
    [
        ("wicore_trt/kv/pool.py", "def f():\n    import torch.nn", ["torch.nn"]),
        ("wicore_trt/kv/tiers/index.py", "import numpy as np", ["numpy"]),
        ("wicore_trt/kv/disk/index.py", "import numpy as np\nimport torch", ["torch"]),
        ("wicore_trt/schedule/queue.py", "from wicore_trt.core.loop import Loop", ["wicore_trt.core.loop.Loop"]),
        ("wicore_trt/model/gemma3.py", "from wicore_trt import errors", ["wicore_trt.errors"]),
        ("wicore_trt/core/loop.py", "from wicore_trt.serve import x", ["wicore_trt.serve.x"]),
        ("cli/x.py", "import torch\ndef f():\n    import numpy", ["torch"]),
        ("cli/x.py", "from wicore_trt.config import Settings", ["wicore_trt.config.Settings"]),
        ("cli/x.py", "if TYPE_CHECKING:\n    import torch", []),
        ("wicore_trt/kv/pool.py", "from wicore_trt.kv import manager", []),
    ],
)
def test_the_checker_sees_violations(path: str, source: str, broken: list[str]) -> None:
    assert violations(path, ast.parse(source)) == broken


def loaded(modules: Sequence[str]) -> str:
    """Heavy packages in a new process that imported these modules."""
    code = f"import sys, {', '.join(modules)}\nprint(*(m for m in {HEAVY} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_pure_packages_load_nothing_heavy() -> None:
    modules = [module_of(p) for p in python_sources() if any(below(module_of(p), pure) for pure in PURE)]
    light = [name for name in modules if name not in LOAD_NUMPY]
    assert len(light) > 30 and len(light) + len(LOAD_NUMPY) == len(modules)
    assert {
        f"wicore_trt.kv.{name}" for name in ("manager", "prefix.planner", "policy.policy", "tiers.index", "tiers.tiers")
    } < {*light}
    assert not loaded(light)


@pytest.mark.parametrize("module", sorted(LOAD_NUMPY))
def test_stores_load_numpy_alone(module: str) -> None:
    assert loaded([module]) == "numpy"


CHANGING = ("append", "extend", "insert", "pop", "remove")


def is_table(node: ast.AST) -> bool:
    """Whether this is a page table by the names that the product uses: `x.tables[...]`, `table`."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "tables"
    return isinstance(node, ast.Name) and node.id == "table"


def changes_of_tables(tree: ast.AST) -> Iterator[int]:
    """Lines that change a page table: its items, or all of it by a method, or the tables as a whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if is_table(node) or is_table(node.value):
                yield node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "tables":
            yield node.lineno
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in CHANGING and is_table(called.value):
            yield called.lineno


def test_page_tables_have_one_writer():
    """Whose methods replace the stamp, by which executors know that a table changed (I7)."""
    rooms, writer = ("wicore_trt/kv/", "wicore_trt/schedule/", "wicore_trt/core/"), "wicore_trt/kv/sequence_pages.py"
    trees = {path: parse(path) for path in python_sources() if path.startswith(rooms)}
    assert {path for path, tree in trees.items() if list(changes_of_tables(tree))} == {writer}
    methods = [node for node in ast.walk(trees[writer]) if isinstance(node, ast.FunctionDef)]
    changing = [method for method in methods if list(changes_of_tables(method))]
    assert {method.name for method in changing} == {"extend_table", "replace_slots", "set_window", "clear_tables"}
    for method in changing:
        assert "self.stamp" in ast.unparse(method), method.name
    seen = "pages.tables[g].extend(x)\ntable[i] = 1\ndel table[i:]\npages.tables = x\npages.tables[g] = x"
    assert list(changes_of_tables(ast.parse(seen))) == [1, 2, 3, 4, 5]
