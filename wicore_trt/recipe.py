"""Recipes: YAML files of settings, by name from the package or by path.

Reads YAML with line numbers and knows the settings by name only. Invariant: every value that is returned has a known
key and carries "file:line" of where it was written.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from wicore_trt.errors import ConfigError
from wicore_trt.files import UntrustedFiles

PACKAGE = "wicore_trt.recipes"
SUFFIX = ".yaml"
_LISTED = 20  # most names in a message; only settings are more
REMOVED = dict.fromkeys(("server.fronts", "WICORE_SERVER__FRONTS"), "Remove it: a server has one front.")
"""Advice on settings that are no more."""


def list_recipes() -> list[str]:
    return sorted(p.name.removesuffix(SUFFIX) for p in files(PACKAGE).iterdir() if p.name.endswith(SUFFIX))


def resolve_recipe(recipe: str | Path) -> Path:
    """Find the file of a packaged recipe's name, or of a path. Raises ConfigError with the names that exist."""
    path = Path(recipe)
    if os.path.exists(path) and not os.path.isdir(path):
        return path
    text = str(recipe)
    names = list_recipes()
    if text in names:
        return Path(str(files(PACKAGE).joinpath(text + SUFFIX)))
    if "/" in text or text.endswith((SUFFIX, ".yml")):
        raise ConfigError(f"recipe {text} does not exist.", fix=f"Recipes by name: {', '.join(names)}.")
    raise ConfigError(f"there is no directory and no recipe {text!r}.", fix=did_you_mean(text, names))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known names, else all of them, or say what prints all settings."""
    if name in REMOVED:
        return REMOVED[name]
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Known: {', '.join(known)}." if len(known) <= _LISTED else "wicore serve --print-config shows all settings."


def read_recipe(path: Path, keys: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Read {dotted key: (value, "recipe file:line")} of a recipe whose keys must all be in `keys`. Raises ConfigError
    with file and line for bad YAML and for an unknown, repeated or misplaced key."""
    try:
        loader = yaml.SafeLoader(UntrustedFiles(error=ConfigError, fix="Give a YAML file of settings.").read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}.") from error
    try:
        root = loader.get_single_node()
        found: dict[str, tuple[Any, str]] = {}
        if root is not None:
            _walk(loader, root, "", path, keys, found)
        return found
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: {error.problem or error.context}.", fix="Check the YAML there.") from error
    finally:
        loader.dispose()


def _walk(
    loader: yaml.SafeLoader,
    node: yaml.Node,
    prefix: str,
    path: Path,
    keys: Collection[str],
    found: dict[str, tuple[Any, str]],
) -> None:
    sections = {key.rpartition(".")[0] for key in keys}
    if not isinstance(node, yaml.MappingNode):
        what = f"section {prefix.removesuffix('.')!r}" if prefix else "a recipe"
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {what} must be a mapping of settings.")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        key = prefix + str(key_node.value)
        if key in seen:
            raise ConfigError(f"{where}: {key} is given twice.")
        seen.add(key)
        if key in sections:
            _walk(loader, value_node, f"{key}.", path, keys, found)
        elif key not in keys:
            raise ConfigError(f"{where}: {key} is not a setting.", fix=did_you_mean(key, keys))
        elif isinstance(value_node, yaml.MappingNode):
            raise ConfigError(f"{where}: {key} takes a value, not a mapping.")
        else:
            value = loader.construct_object(value_node, deep=True)
            if value is not None:
                found[key] = (value, f"recipe {where}")
