"""Documents name only files, modules, commands, settings and make targets that exist."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import typer
from repository import ROOT, tracked

from wicore_trt.cli import _vllm
from wicore_trt.cli.app import PANELS, app
from wicore_trt.config import KEYS

DOCUMENTS = [n for n in tracked() if n.endswith(".md") and n != "CHANGELOG.md" and not n.startswith("tests/")]
COMMANDS = {name for names in PANELS.values() for name in names}
FILE = re.compile(r"(?<![\w./~-])((?:[\w-]+/)*[\w-]+\.(?:py|cpp|h|proto|toml|md))\b(?!/)")
DIRECTORY = re.compile(r"`((?:wicore_trt|cli|recipes|plugins|tests|examples|docs)/[\w/-]*)`")
SYMBOL = re.compile(r"`(wicore_trt(?:\.\w+)+)")
PROGRAM = re.compile(r"python\s+-m\s+((?:benchmarks|tests)(?:\.\w+)+)")
COMMAND = re.compile(r"(?:^|[`$ ])wicore ([a-z]+)", re.M)
CALL = re.compile(r"(?:^|[`$;&( ])wicore ((?:[a-z]+ ?)+)([^`\n|;&#)]*)", re.M)
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
TARGETS = re.compile(r"`make ([a-z -]+)`|^    make ([a-z -]+)", re.M)
VARIABLE = re.compile(r"WICORE_[A-Z_]+")
SETTING = re.compile(rf"`((?:{'|'.join({key.partition('.')[0] for key in KEYS if '.' in key})})\.[a-z][a-z_]*)(?=[`:])")


def resolves(name: str) -> bool:
    """True for a module, or an attribute path inside one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[cut:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


@cache
def options_of(words: str) -> tuple[str, frozenset[str]]:
    """Command that `words` begin with, and its options; `wicore serve` has those of vLLM, too."""
    command: Any = typer.main.get_command(app)
    for word in words.split():
        inner = command.get_command(None, word) if hasattr(command, "get_command") else None
        if inner is None:
            break
        command = inner
    found = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--debug", "-h", "--help"}
    if command.name == "serve":
        found |= {*_vllm.RENAMED, *_vllm.UNNEEDED, *_vllm.UNNEEDED_VALUES, *_vllm.REFUSED}
    return command.name, frozenset(found)


def unknown_options(text: str) -> list[str]:
    """Options behind `wicore COMMAND` that the command lacks."""
    joined = re.sub(r"`([^`\n]+)\n([^`\n]+)`", r"`\1 \2`", text.replace("\\\n", " "))
    calls = [(*options_of(words), OPTION.findall(rest)) for words, rest in CALL.findall(joined)]
    return [f"{command} {name}" for command, options, given in calls for name in given if name not in options]


def unknown_names(text: str) -> list[str]:
    """What `text` names and the repository lacks."""
    files = tracked()
    found = [f for f in FILE.findall(text) if not any(n == f or n.endswith(f"/{f}") for n in files)]
    found += [d for d in DIRECTORY.findall(text) if not any(n.startswith(d.rstrip("/")) for n in files)]
    found += [s for s in SYMBOL.findall(text) if not resolves(s)]
    programs = [name.replace(".", "/") for name in PROGRAM.findall(text)]
    found += [p for p in programs if f"{p}.py" not in files and f"{p}/__main__.py" not in files]
    found += [f"wicore {c}" for c in COMMAND.findall(text) if c not in COMMANDS]
    found += unknown_options(text)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    words = {word for pair in TARGETS.findall(text) for word in " ".join(pair).split()}
    found += [f"make {word}" for word in sorted(words - targets)]
    variables = {"WICORE_" + key.replace(".", "__").upper() for key in KEYS} | {
        "WICORE_DEBUG",
        "WICORE_SECTION__KEY",
        "WICORE_",
    }
    found += [v for v in VARIABLE.findall(text) if v not in variables]
    found += [name for name in SETTING.findall(text) if name not in KEYS and not resolves(f"wicore_trt.{name}")]
    return found


@pytest.mark.parametrize("path", DOCUMENTS)
def test_documents_name_what_exists(path: str) -> None:
    assert not unknown_names((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("see `wicore_trt/kv/nothing.py`", ["wicore_trt/kv/nothing.py"]),
        ("see manifest.py and `wicore_trt/engine/`", []),
        ("`wicore_trt/nowhere/`", ["wicore_trt/nowhere/"]),
        (
            "`wicore_trt.engine.manifest.Manifest` and `wicore_trt.engine.manifest.No`",
            ["wicore_trt.engine.manifest.No"],
        ),
        ("`python -m benchmarks.kv.policies`, `python -m tests.oracle`", []),
        ("`python -m\nbenchmarks.kv.nothing --seeds 2`", ["benchmarks/kv/nothing"]),
        ("$ wicore build a b && wicore destroy c", ["wicore destroy"]),
        ("wicore kv plan --model m --modle n | wicore serve e --max-num-seqs 1 --device 0", ["plan --modle"]),
        ("run `make setup` or `make coffee`", ["make coffee"]),
        ("`kv.device_bytes`, `kv.*`, `kv.write_policy: selective` and `server.fronts`", ["server.fronts"]),
        ("WICORE_KV__DEVICE_BYTES=1 WICORE_KV__DEVICE_BITES=1", ["WICORE_KV__DEVICE_BITES"]),
    ],
)
def test_the_checker_sees_unknown_names(text: str, unknown: list[str]) -> None:
    assert unknown_names(text) == unknown
