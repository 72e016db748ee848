"""The kernels of an engine on this machine: from the engine's files, or compiled now where there are none.

Knows files and targets; neither weights nor steps. Invariant: what runs was compiled for this GPU and for the page size
that the pools have.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from wicore_trt.backends.triton.index import read_table
from wicore_trt.backends.triton.table import EngineShape, KernelTable
from wicore_trt.engine.manifest import rebuild_engine
from wicore_trt.errors import EnvironmentUnfitError

if TYPE_CHECKING:
    from wicore_trt.engine.directory import EngineDir

log = logging.getLogger(__name__)


def load_table(engine: EngineDir, shape: EngineShape, target: str) -> KernelTable:
    """The kernels for `target`. Where the engine has none for it or for `shape`'s page size, they are compiled if
    Triton is here, which takes a minute, and a warning says so.

    Raises EngineFormatError for files that do not fit, EnvironmentUnfitError where neither kernels nor Triton are here.
    """
    manifest = engine.manifest
    if shape.page_tokens == manifest.page_tokens:
        table = read_table(engine.read, engine.path, target)
        if table is not None:
            return table
    rebuild = rebuild_engine(engine.path, manifest, [target], shape.page_tokens)
    reason = (
        f"engine {engine.path} has kernels for {', '.join(manifest.targets)} with pages of {manifest.page_tokens} "
        f"tokens, and {target} with pages of {shape.page_tokens} is needed"
    )
    try:
        import triton  # noqa: F401 -- imported to see that it is here
    except ImportError:
        raise EnvironmentUnfitError(f"{reason}.", fix=rebuild) from None
    log.warning("%s; they are compiled now. Building them once is better. %s", reason, rebuild)
    from wicore_trt.backends.triton.compile import compiled_table

    return compiled_table(shape, target)
