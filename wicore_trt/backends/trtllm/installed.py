"""Finds TensorRT-LLM in a version that this package works with.

Reads package metadata, because importing tensorrt_llm starts MPI and CUDA. Invariant: nobody imports tensorrt_llm
before this module has found the right version.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from wicore_trt.errors import EnvironmentUnfitError

ENGINE_DIR = "trtllm"
"""Subdirectory of our engine directory with TensorRT-LLM's config.json and rank{N}.engine."""
_WANTED = re.compile(r"1\.2(\.\d+)*(\.post\d+)?(\+.*)?")
_FIX = (
    'On a machine with an NVIDIA driver: pip install "tensorrt-llm>=1.2,<1.3" (the wheel comes from NVIDIA\'s index), '
    "or use --backend torch."
)


def require_tensorrt_llm() -> str:
    """Return TensorRT-LLM's version. Raises EnvironmentUnfitError when it is missing or not 1.2.x: earlier versions
    name fields differently, later ones no longer build engines."""
    try:
        found = version("tensorrt-llm")
    except PackageNotFoundError:
        raise EnvironmentUnfitError("TensorRT-LLM is not installed.", fix=_FIX) from None
    if not _WANTED.fullmatch(found):
        raise EnvironmentUnfitError(f"TensorRT-LLM {found} is installed; engines need 1.2.x.", fix=_FIX)
    return found


def find_trtllm_build() -> str:
    """Find `trtllm-build` in this Python's environment, else in PATH. Raises EnvironmentUnfitError without one."""
    beside = Path(sys.executable).parent / "trtllm-build"
    found = str(beside) if beside.is_file() else shutil.which("trtllm-build")
    if found is None:
        raise EnvironmentUnfitError("The command trtllm-build of TensorRT-LLM is not found.", fix=_FIX)
    return found
