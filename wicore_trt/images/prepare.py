"""Prepare the images of requests in processes that may die: files become pixels.

Must not know texts or transports. Invariant: whatever a file holds, the caller gets its pixels, or an
InvalidRequestError with the image's field; a file takes no more of this process than its bytes and its pixels.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from importlib.util import find_spec

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import InvalidRequestError, UnavailableError, missing_package
from wicore_trt.images.files import check_size
from wicore_trt.images.worker import LIMITS, pack_job
from wicore_trt.memory_file import make_file
from wicore_trt.types import Bytes, ImageFile, ImageInfo
from wicore_trt.worker_process import JobFailure, WorkerProcess

PIECES = 4
"""Pieces of an image that are copied and digested at once."""
_pool = ThreadPoolExecutor(PIECES, "wicore-pixels")
_WORKERS = [WorkerProcess("wicore_trt.images.worker", LIMITS) for _ in range(2)]


def start_workers() -> None:
    """Start the processes now, not with the first image. Raises EnvironmentUnfitError where Pillow is missing."""
    _check_pillow()
    for worker in _WORKERS:
        worker.start_worker()


def prepare_image(image: ImageFile, info: ImageInfo) -> ImageFile:
    """Decode, turn and resize a file or a `data:` URL: return the image with `pixels` alone, the whole first, then its
    crops. Takes some 10 ms for a photo and at most LIMITS. Raises InvalidRequestError, and UnavailableError without
    memory or processes."""
    if image.pixels:
        return image
    _check_pillow()
    data = image.data or image.url.encode("ascii", "replace")
    check_size(len(image.data) or len(data) * 3 // 4, image.field)
    worker = next((worker for worker in _WORKERS if not worker.lock.locked()), _WORKERS[0])
    job = pack_job(info.size, image.crops), data
    try:
        pixels, digests = worker.copy_answer(job, partial(_copy_pixels, info.size * info.size * 3))
    except JobFailure as failure:
        raise InvalidRequestError(f"The image cannot be read: {failure}.", field=image.field) from None
    except OSError as error:
        raise UnavailableError(f"Images cannot be read now: {error}.", fix="Try again soon.") from None
    return replace(image, data=b"", url="", pixels=pixels, digests=digests)


def _copy_pixels(step: int, file: int, size: int) -> tuple[tuple[Bytes, ...], tuple[bytes, ...]]:
    """Copy images of `step` bytes each out of a worker's file, in pieces on threads. Return them, and digests of their
    pieces' digests. Raises JobFailure, and OSError without memory."""
    if not size or size % step:
        raise JobFailure("its pixels are incomplete")
    whole = memoryview(make_file(size))

    def copy_piece(at: int) -> bytes:
        piece = whole[at : min(at + div_ceil(step, PIECES), (at // step + 1) * step)]
        if os.preadv(file, [piece], at) < len(piece):
            raise JobFailure("its pixels are incomplete")
        return sha256(piece).digest()

    begins = range(0, size, step)
    at = [begin + part for begin in begins for part in range(0, step, div_ceil(step, PIECES))]
    found = list(_pool.map(copy_piece, at))
    each = len(found) // len(begins)
    digests = tuple(sha256(b"".join(found[i : i + each])).digest() for i in range(0, len(found), each))
    return tuple(whole[begin : begin + step].toreadonly() for begin in begins), digests


def _make_pool() -> None:
    global _pool
    _pool = ThreadPoolExecutor(PIECES, "wicore-pixels")


os.register_at_fork(after_in_child=_make_pool)  # threads are not in the child


@cache
def _check_pillow() -> None:
    if find_spec("PIL") is None and (lacking := missing_package("PIL")):
        raise lacking
