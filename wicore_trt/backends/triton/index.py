"""Compiled kernels of an engine as files: `kernels/<target>/<name>.cubin` and `.json`, and `kernels/kernels.json`.

Needs Triton only to compile missing kernels on the machine that runs them. Must not know how kernels are chosen.
Invariants: a table that was read has every role, bucket and cubin that was written for its target. Kernels that run
were compiled for this GPU and for the pools' page size.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wicore_trt.backends.triton.roles import Row, parse_role
from wicore_trt.backends.triton.table import EngineShape, KernelEntry, KernelTable, parse_config
from wicore_trt.engine.manifest import rebuild_engine
from wicore_trt.errors import EngineFormatError, EnvironmentUnfitError
from wicore_trt.files import UntrustedFiles
from wicore_trt.plugins.aot import CompiledKernel, load_kernel, save_kernel

if TYPE_CHECKING:
    from wicore_trt.engine.directory import EngineDir

KERNELS = "kernels"
INDEX = f"{KERNELS}/kernels.json"
FORMAT = 2
log = logging.getLogger(__name__)


def write_kernels(directory: Path, tables: Mapping[str, tuple[Sequence[Row], Mapping[str, CompiledKernel]]]) -> None:
    """Write the kernels of an engine `directory`: per target its rows, and its kernels by name."""
    targets = {}
    (directory / KERNELS).mkdir()
    for target, (rows, kernels) in tables.items():
        folder = directory / KERNELS / target
        for name in sorted({row[2] for row in rows}):
            folder.mkdir(exist_ok=True)  # an empty one would be none of the engine's
            save_kernel(kernels[name], folder)
        targets[target] = [{"role": str(r), "bucket": b, "kernel": name, "config": c} for r, b, name, c in rows]
    index = {"format": FORMAT, "targets": targets}
    (directory / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_table(read: Callable[[str], bytes], directory: Path, target: str) -> KernelTable | None:
    """Read the kernels for `target`; None where there are none. `read` gives the bytes of a file in `directory` by its
    POSIX name. It is `EngineDir.read`, so that only verified bytes reach a GPU. Raises EngineFormatError for files that
    do not fit, and what `read` raises but OSError."""
    try:
        index = UntrustedFiles(error=EngineFormatError, fix="Build the engine again.").parse_json(
            read(INDEX), directory / INDEX
        )
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']}")
        rows = index["targets"].get(target)
        if rows is None:
            return None
        folder = f"{KERNELS}/{target}"
        kernels = {name: load_kernel(read, f"{folder}/{name}") for name in {str(row["kernel"]) for row in rows}}
        found = [(parse_role(row["role"]), row) for row in rows]
        entries = [KernelEntry(r, w["bucket"], kernels[w["kernel"]], parse_config(r, w["config"])) for r, w in found]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fix = "Build the engine again."
        raise EngineFormatError(f"{directory / INDEX} cannot be read: {error!r}.", fix=fix) from error
    wrong = [name for name, kernel in kernels.items() if kernel.target != target]
    if wrong:
        fix = "Build the engine again."
        raise EngineFormatError(f"{wrong[0]} in {directory / folder} is not for {target}.", fix=fix)
    return KernelTable(target, entries)


def load_table(engine: EngineDir, shape: EngineShape, target: str) -> KernelTable:
    """Load the kernels for `target`, or compile them with a warning if Triton is installed, which takes a minute. An
    engine may have none for the target or for `shape`'s page size. Raises EngineFormatError for files that
    do not fit, EnvironmentUnfitError with neither kernels nor Triton."""
    manifest = engine.manifest
    if shape.page_tokens == manifest.page_tokens:
        table = read_table(engine.read, engine.path, target)
        if table is not None:
            return table
    rebuild = rebuild_engine(engine.path, manifest, [target], shape.page_tokens)
    held = f"kernels for {', '.join(manifest.targets)} with pages of {manifest.page_tokens} tokens"
    reason = f"engine {engine.path} has {held}, and {target} with pages of {shape.page_tokens} is needed"
    try:
        import triton  # noqa: F401 -- imported to see that it is here
    except ImportError:
        raise EnvironmentUnfitError(f"{reason}.", fix=rebuild) from None
    log.warning("%s; they are compiled now. Building them once is better. %s", reason, rebuild)
    from wicore_trt.backends.triton.compile import compile_table

    return compile_table(shape, target)
