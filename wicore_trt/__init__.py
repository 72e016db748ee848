"""WiCore-TRT: build and serve Gemma 3 engines. Public names load lazily, so importing this costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wicore_trt.checkpoint.convert import convert
    from wicore_trt.client import Client
    from wicore_trt.engine.build import build_engine
    from wicore_trt.errors import (
        CheckpointError,
        ConfigError,
        EngineFormatError,
        EnvironmentUnfitError,
        InvalidRequestError,
        WicoreError,
    )
    from wicore_trt.llm import LLM
    from wicore_trt.types import (
        CacheHints,
        CacheStore,
        Completion,
        Constraint,
        ConstraintKind,
        SamplingParams,
        TextOutput,
    )

    __version__: str

__all__ = [
    "LLM", "CacheHints", "CacheStore", "CheckpointError", "Client", "Completion", "ConfigError", "Constraint",
    "ConstraintKind", "EngineFormatError", "EnvironmentUnfitError", "InvalidRequestError", "SamplingParams",
    "TextOutput", "WicoreError", "__version__", "build_engine", "convert",
]  # fmt: skip

_HOMES = {
    "LLM": "wicore_trt.llm",
    "Client": "wicore_trt.client",
    **dict.fromkeys(
        ("CacheHints", "CacheStore", "Completion", "Constraint", "ConstraintKind", "SamplingParams", "TextOutput"),
        "wicore_trt.types",
    ),
    **dict.fromkeys([name for name in __all__ if name.endswith("Error")], "wicore_trt.errors"),
    "build_engine": "wicore_trt.engine.build",
    "convert": "wicore_trt.checkpoint.convert",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _HOMES:
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            from wicore_trt.errors import missing_package

            raise missing_package(error.name) or error from error
    raise AttributeError(f"module 'wicore_trt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("wicore-trt")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0"
