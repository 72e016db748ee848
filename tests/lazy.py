"""Modules that take a second or more to import: a process of pytest-xdist that runs none of their tests spares it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """Module `name`, imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):  # pytest looks at whatever a test module holds
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
