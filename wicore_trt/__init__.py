"""WiCore-TRT: build and serve Gemma 3 engines. Public names load lazily, so importing this costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wicore_trt.llm import LLM
    from wicore_trt.types import SamplingParams

    __version__: str

__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "wicore_trt.llm", "SamplingParams": "wicore_trt.types"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'wicore_trt' has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("wicore-trt")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0"
