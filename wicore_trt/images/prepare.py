"""Prepare the images of requests in processes that may die: files become pixels.

Must not know texts or transports. Invariant: whatever a file holds, the caller gets its pixels, or an
InvalidRequestError with the image's field; a file takes no more of this process than its bytes and its pixels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.util import find_spec

from wicore_trt.errors import InvalidRequestError, missing_package
from wicore_trt.images.files import check_size
from wicore_trt.images.worker import LIMITS, pack_job
from wicore_trt.types import ImageFile, ImageInfo
from wicore_trt.worker_process import JobFailure, WorkerProcess

_WORKERS = [WorkerProcess("wicore_trt.images.worker", LIMITS) for _ in range(2)]


def start_workers() -> None:
    """Start the processes now, not with the first image. Raises EnvironmentUnfitError where Pillow is missing."""
    _check_pillow()
    for worker in _WORKERS:
        worker.start_worker()


def prepare_image(image: ImageFile, info: ImageInfo) -> ImageFile:
    """Decode, turn and resize a file or a `data:` URL: return the image with `pixels` alone, the whole first, then its
    crops. Takes some 10 ms for a photo and at most LIMITS. Raises InvalidRequestError."""
    if image.pixels:
        return image
    _check_pillow()
    data = image.data or image.url.encode("ascii", "replace")
    check_size(len(image.data) or len(data) * 3 // 4, image.field)
    worker = next((worker for worker in _WORKERS if not worker.lock.locked()), _WORKERS[0])
    try:
        pixels = worker.run_job(pack_job(info.size, image.crops), data)
    except JobFailure as failure:
        raise InvalidRequestError(f"The image cannot be read: {failure}.", field=image.field) from None
    step = info.size * info.size * 3
    if not pixels or len(pixels) % step:
        raise InvalidRequestError("The image cannot be read: its pixels are incomplete.", field=image.field)
    parts = tuple(pixels[at : at + step] for at in range(0, len(pixels), step))
    return replace(image, data=b"", url="", pixels=parts, digests=tuple(sha256(part).digest() for part in parts))


@cache
def _check_pillow() -> None:
    if find_spec("PIL") is None and (lacking := missing_package("PIL")):
        raise lacking
