"""Finds the installed TensorRT and the GPU architectures that it can build for.

`tensorrt` (10.15 or later, from NVIDIA's index) builds for this machine's GPU. TensorRT-RTX (`tensorrt_rtx_bindings`,
on PyPI) builds for several architectures without a GPU, but not for sm90 and sm100. Must not know networks. Invariant:
neither is imported before a build asks for it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from wicore_trt.errors import ConfigError, EnvironmentUnfitError, install_command

RTX, FULL = "tensorrt-rtx", "tensorrt"
OLDEST = (10, 15)
TRT_TYPES = {"float32": "FLOAT", "bfloat16": "BF16", "float16": "HALF", "fp8": "FP8", "int32": "INT32"}
"""Names of TensorRT's DataType by our names."""


@dataclass(frozen=True, slots=True)
class TensorRT:
    """TensorRT module that was found. `targets` maps names such as "sm89" to the builder's ComputeCapability, or to
    None for a full TensorRT, which builds for its own GPU only."""

    module: ModuleType
    flavour: str
    version: str
    targets: dict[str, Any]

    def check_target(self, target: str) -> None:
        if target in self.targets:
            return
        hint = ""
        if self.flavour == RTX and target in ("sm90", "sm100"):
            hint = " TensorRT-RTX does not run on data-centre Hopper and Blackwell: build there with full TensorRT."
        problem = f"target {target!r}: {self.flavour} {self.version} builds for {', '.join(self.targets)}.{hint}"
        raise ConfigError(problem, fix="Choose --target among them.")


def find_tensorrt() -> TensorRT:
    """Find full TensorRT beside a GPU, else TensorRT-RTX. Raises EnvironmentUnfitError without either."""
    full = _find_full()
    if full is not None:
        return full
    try:
        import tensorrt_rtx_bindings as rtx
    except (ImportError, OSError) as error:
        raise EnvironmentUnfitError(f"TensorRT is not installed ({error}).", fix=install_command("tensorrt")) from None
    names = [name for name in dir(rtx.ComputeCapability) if name.startswith("SM")]
    names.sort(key=lambda name: int(name[2:]))
    try:
        wheel = version("tensorrt-rtx-cu13-bindings")
    except PackageNotFoundError:
        wheel = "unknown"
    return TensorRT(rtx, RTX, wheel, {name.lower(): getattr(rtx.ComputeCapability, name) for name in names})


def _find_full() -> TensorRT | None:
    """Find `tensorrt` if it is whole, new enough and beside a GPU. The package of that name on PyPI alone is a stub."""
    if "tensorrt" not in sys.modules and find_spec("tensorrt") is None:
        return None  # before the question for the GPU, which loads PyTorch, in every plan's process
    capability = _gpu_capability()
    if capability is None:
        return None
    try:
        import tensorrt
    except (ImportError, OSError):
        return None
    found = getattr(tensorrt, "__version__", "0")
    if not hasattr(tensorrt, "Builder") or tuple(int(p) for p in found.split(".")[:2]) < OLDEST:
        return None
    return TensorRT(tensorrt, FULL, found, {f"sm{capability[0]}{capability[1]}": None})


def _gpu_capability() -> tuple[int, int] | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
