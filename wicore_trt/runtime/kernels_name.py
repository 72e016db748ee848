"""Name of what computes KV values: plain text for people, and a digest of everything that the values depend on.

Page keys and the disk tier's namespace contain it, so pages of a wrong kernel are not found once it is mended.
Must not know which kernels exist. Invariant (I1): equal names mean equal sources, libraries and `parts`.
Paths and times are left out, so equal installations share pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import wicore_trt

COMMON = ("model", "runtime")
# Packages beside torch whose code computes, by either name that a CUDA version gives them.
LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "cuda-bindings")


def kernels_name(plain: str, folders: Sequence[str], *parts: bytes | str) -> str:
    """Join `plain`, "-" and a digest of 8 bytes in hex. The digest covers Python sources in `folders` of the package
    and in COMMON, torch's build and libraries, and `parts`, such as compiled kernels."""
    cudnn: Any = torch.backends.cudnn
    pieces: list[bytes | str] = [torch.__version__, torch.__config__.show(), str(torch.version.cuda)]
    pieces.append(str(cudnn.version()))
    for package in LIBRARIES:
        with suppress(PackageNotFoundError):
            pieces.append(f"{package} {version(package)}")
    root = Path(wicore_trt.__file__).parent
    for path in [path for folder in (*COMMON, *folders) for path in sorted((root / folder).glob("*.py"))]:
        pieces.append(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    digest = blake2b(digest_size=8)
    for piece in (*pieces, *parts):
        data = piece if isinstance(piece, bytes) else piece.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"{plain}-{digest.hexdigest()}"
