"""Decode, turn, crop and resize image files in a process of its own, which `images.prepare` owns.

Must not know requests. Invariants: pixels equal those of transformers' `load_image` and `Gemma3ImageProcessorPil`
before they are scaled, with Pillow as the resizer. A file whose header announces more than MAX_PIXELS is refused before
it is decoded; a job takes at most LIMITS, or the process ends.
"""

from __future__ import annotations

import binascii
import ctypes
import io
import math
import mmap
import platform
import struct
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from wicore_trt import worker_process
from wicore_trt.cores import count_cores
from wicore_trt.plugins.cpu_library import open_library
from wicore_trt.worker_process import JobFailure, WorkerLimits, serve_jobs

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MAX_PIXELS = 1 << 26
MIN_CROP, MAX_CROPS, MIN_RATIO = 256, 4, 1.2
"""Pan and scan: least side of a crop, most crops of an image, least ratio of its sides (processing_gemma3.py)."""
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # orientation of EXIF to PIL.Image.Transpose
THREADS = min(8, count_cores())
_POOL = ThreadPoolExecutor(THREADS)
_library: ctypes.CDLL | None = None  # with `resize_rows` and `resize_columns`
_open_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_open_capsule.restype, _open_capsule.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
BAND_BYTES = 8 << 20
"""Bytes of a copy of rows, so that they lie in one of Pillow's blocks (16 MiB)."""
MAX_SIZE = 1024
"""Largest side of what an encoder reads."""
LIMITS = WorkerLimits(cpu_seconds=8.0, memory=3 << 29, answer=(1 + MAX_CROPS) * MAX_SIZE**2 * 3)


def main() -> None:
    """Answer jobs until stdin ends: a side and whether to crop (`pack_job`), then a file or a `data:` URL. An answer is
    the pixels of all images."""
    import numpy  # noqa: F401 -- before memory is bounded
    from PIL import Image, WebPImagePlugin  # noqa: F401 -- other formats' plugins are loaded with a file that needs them

    global _library
    _library = _open_library() if hasattr(Image.Image, "__arrow_c_array__") else None
    answers = mmap.mmap(worker_process.ANSWERS, LIMITS.answer)
    Image.preinit()
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow warns above it, and raises above twice as many
    warnings.simplefilter("ignore")
    serve_jobs(partial(_answer_job, answers), LIMITS)


def _open_library() -> ctypes.CDLL | None:
    """Open the native library, if it resizes: on processors whose float64 arithmetic is that of Pillow's builds."""
    library = open_library() if platform.machine() == "x86_64" else None
    if library is None or not hasattr(library, "wicore_cpu_resize_rows"):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.wicore_cpu_resize_rows.argtypes = [pointer, number, number, number, pointer]
    library.wicore_cpu_resize_columns.argtypes = [pointer, number, number, number, number, pointer]
    return library


def pack_job(size: int, crops: bool) -> bytes:
    return struct.pack("<I?", size, crops)


def _answer_job(answers: mmap.mmap, job: bytes) -> int:
    """Write the pixels of all images, uint8 [images, size, size, 3], and return their bytes."""
    import numpy as np

    size: int
    crops: bool
    size, crops = struct.unpack_from("<I?", job)
    data = job[5:]
    if not 0 < size <= MAX_SIZE:
        raise JobFailure(f"it would become a square of {size} pixels")
    squares = np.frombuffer(answers, np.uint8)[: (1 + MAX_CROPS) * size * size * 3].reshape(-1, size, size, 3)
    parts = _prepare_file(crops, _decode_url(data) if data[:5].lower() == b"data:" else data)
    count = 0
    for count, part in enumerate(parts, 1):
        _resize_image(part, squares[count - 1])
    return count * size * size * 3


def _decode_url(url: bytes) -> bytes:
    """Decode a `data:` URL (RFC 2397), whatever media type it names. Raises JobFailure."""
    head, _, raw = url.partition(b",")
    try:
        raw = unquote_to_bytes(raw) if b"%" in raw else raw
        if head.lower().endswith(b";base64"):
            raw = b"".join(raw.split()).rstrip(b"=")
            raw = binascii.a2b_base64(raw + b"=" * (-len(raw) % 4), strict_mode=True)
    except ValueError as error:
        raise JobFailure(f"the data: URL is not valid ({error})") from None
    if not raw:
        raise JobFailure("the data: URL holds no data; write data:image/png;base64,...")
    return raw


def _prepare_file(crops: bool, data: bytes) -> Iterator[Image.Image]:
    """Yield the whole image, then its crops where asked for. Raises JobFailure."""
    from PIL import Image, UnidentifiedImageError

    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        del data
        image.load()
    except UnidentifiedImageError:
        raise JobFailure("it is no PNG, JPEG, WebP, BMP or GIF file, or its beginning is broken") from None
    except Image.DecompressionBombError:
        raise JobFailure(f"it has more than {MAX_PIXELS} pixels") from None
    except MemoryError:
        raise JobFailure("it takes too much memory") from None
    except Exception as error:  # whatever a decoder finds wrong
        raise JobFailure(f"it is broken ({' '.join(str(error).split())[:200] or type(error).__name__})") from None
    image = _turn_upright(image)
    image = image if image.mode == "RGB" else image.convert("RGB")  # alpha is dropped, as `load_image` does
    if image.info.get("transparency") is not None:  # a colour that is transparent: white, as the processor does
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    yield image
    for box in _plan_crops(*image.size) if crops else ():
        yield image.crop(box)


def _resize_image(image: Image.Image, square: Any) -> None:
    """Resize into `square`, uint8 [size, size, 3], as `Image.resize` does with BILINEAR, to the last bit: rows, then
    columns, each in bands on threads. Of images that are higher than wide Pillow may take the columns first."""
    import numpy as np
    from PIL import Image

    (width, height), size = image.size, len(square)
    if width < height or _library is None:
        square[:] = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
        return
    wide, library, whole = np.empty((height, size, 4), np.uint8), _library, _find_pixels(image)

    def fill_rows(at: int, end: int) -> None:
        band = whole or _find_pixels(image.crop((0, at, width, end)))
        assert band is not None, "rows of a band lie apart"
        first = band[0] + (at * width * 4 if whole else 0)
        library.wicore_cpu_resize_rows(first, width, end - at, size, wide[at:].ctypes.data)

    def fill_columns(at: int, end: int) -> None:
        library.wicore_cpu_resize_columns(wide.ctypes.data, height, size, at, end, square.ctypes.data)

    _fill_bands(fill_rows, height, max(THREADS, width * height * 4 // BAND_BYTES))
    _fill_bands(fill_columns, size, THREADS)


class _ArrowArray(ctypes.Structure):
    """Array of Arrow's C data interface."""


_ArrowArray._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "nulls", "offset", "n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)), ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
]  # fmt: skip


def _find_pixels(image: Image.Image) -> tuple[int, object] | None:
    """Find the pixels of an RGB image, 4 bytes each: their address, and what keeps them there. None where rows lie
    apart, as those of large images do."""
    with suppress(ValueError):
        _, kept = image.__arrow_c_array__()
        array = ctypes.cast(_open_capsule(kept, b"arrow_array"), ctypes.POINTER(_ArrowArray)).contents
        return array.children[0].contents.buffers[1], kept
    return None


def _fill_bands(fill: Callable[[int, int], None], count: int, bands: int) -> None:
    step = -(-count // bands)
    list(_POOL.map(lambda at: fill(at, min(at + step, count)), range(0, count, step)))


def _turn_upright(image: Image.Image) -> Image.Image:
    """Apply the orientation of EXIF or XMP as PIL.ImageOps.exif_transpose does; one that is malformed says nothing."""
    from PIL import ExifTags, Image

    try:
        turn = Image.Transpose(_TURNS[image.getexif()[ExifTags.Base.Orientation]])
    except Exception:
        return image
    return image.transpose(turn)


def _plan_crops(width: int, height: int) -> list[tuple[int, int, int, int]]:
    """List the boxes (left, top, right, bottom) of pan and scan (image_processing_pil_gemma3.py); the last may be
    smaller."""
    long, short = max(width, height), min(width, height)
    if long / short < MIN_RATIO:
        return []
    number = min(MAX_CROPS, max(2, min(long // MIN_CROP, math.floor(long / short + 0.5))))
    step = math.ceil(long / number)
    if min(step, short) < MIN_CROP:
        return []
    ends = [(at, min(at + step, long)) for at in range(0, step * number, step)]
    return [(a, 0, b, height) if width >= height else (0, a, width, b) for a, b in ends]
