"""TensorRT-RTX's runtime cache on disk: the kernels that it compiled for one plan on one kind of GPU.

It must not know devices or contexts. Invariant: without the file, or with a damaged one, everything works and starts
slower; a file is either whole or not there.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class RuntimeCache:
    """The cache of one plan, shared by its contexts. Loaded when the first context asks for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cache: Any = None

    def attach(self, config: Any) -> None:
        """Let contexts of `config` (IRuntimeConfig) use the cache."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            try:
                data = self._path.read_bytes()
            except OSError:
                data = b""
            if data and not self._cache.deserialize(data):
                log.info("TensorRT did not take the runtime cache %s", self._path)
        if not config.set_runtime_cache(self._cache):
            log.info("TensorRT refused a runtime cache; it compiles again at each start")

    def save(self) -> None:
        """Keep what was compiled. A directory that cannot be written costs time at the next start and no more."""
        if self._cache is None:
            return
        try:
            data = bytes(self._cache.serialize())
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(data)
            partial.replace(self._path)
        except OSError as error:
            log.info("the runtime cache %s was not kept: %s", self._path, error)


def runtime_cache_path(version: str, target: str, digest: str) -> Path:
    """File of the plan with this content, in the user's cache directory."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "wicore" / f"runtime-{version}-{target}-{digest}.cache"
