"""Finds and opens libwicore_cpu, the native CPU kernels (plugins/cpu).

Must not know what the functions do. Invariant: a library of another interface version is never used.
"""

from __future__ import annotations

import ctypes
import logging
from hashlib import blake2b
from pathlib import Path

import wicore_trt

ABI = 6
LIBRARY = "libwicore_cpu.so"
NOT_BUILT = "not_built.txt"
"""File in the library's place that has the compiler's first error, as plugins/cpu/build.cmake leaves it."""
FIX = "Install another C++17 compiler (g++ 11 to 14, or clang) and then this package again."

log = logging.getLogger(__name__)


def why_lacking() -> str:
    """Explain why the library is missing, by the compiler's words from the package's installation, if it ran."""
    for root in wicore_trt.__path__:
        if (place := Path(root, "_native", NOT_BUILT)).is_file():
            return f"was not built: {place.read_text(errors='replace').strip()[:300]}"
    return "was not built"


def open_library(path: Path | None = None) -> ctypes.CDLL | None:
    """Open the library of this package (or at `path`); None when it was not built or does not fit. Never raises."""
    for place in [path] if path else [Path(root) / "_native" / LIBRARY for root in wicore_trt.__path__]:
        if not place.is_file():
            continue
        try:
            library = ctypes.CDLL(str(place))
            library.wicore_cpu_abi.restype = ctypes.c_int64
            if (abi := library.wicore_cpu_abi()) == ABI:
                return library
            log.warning("%s has interface version %d, this package needs %d: not used", place, abi, ABI)
        except (OSError, AttributeError) as error:
            log.warning("native CPU kernels not used: %s", error)
    return None


def library_name(library: ctypes.CDLL) -> str:
    """Name the instruction set in use and the file's digest, like "avx2-1f0c93ab": other bytes compute other KV
    values."""
    library.wicore_cpu_isa.restype = ctypes.c_char_p
    digest = blake2b(Path(library._name).read_bytes(), digest_size=4).hexdigest()  # noqa: SLF001 -- ctypes' only name
    return f"{bytes(library.wicore_cpu_isa()).decode()}-{digest}"


if __name__ == "__main__":
    if open_library() is None:
        print(f"WARNING: the native CPU kernels' library {why_lacking()}. {FIX}")
