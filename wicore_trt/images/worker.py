"""Decode, turn, crop and resize image files in a process of its own, which `images.prepare` owns.

Must not know requests. Invariants: pixels equal those of transformers' `load_image` and `Gemma3ImageProcessorPil`
before they are scaled, with Pillow as the resizer. A file whose header announces more than MAX_PIXELS is refused before
it is decoded; a job takes at most LIMITS, or the process ends.
"""

from __future__ import annotations

import binascii
import io
import math
import os
import struct
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from wicore_trt.worker_process import JobFailure, WorkerLimits, serve_jobs

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MAX_PIXELS = 1 << 26
MIN_CROP, MAX_CROPS, MIN_RATIO = 256, 4, 1.2
"""Pan and scan: least side of a crop, most crops of an image, least ratio of its sides (processing_gemma3.py)."""
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # orientation of EXIF to PIL.Image.Transpose
THREADS = min(8, len(os.sched_getaffinity(0)))
_POOL = ThreadPoolExecutor(THREADS)
MAX_SIZE = 1024
"""Largest side of what an encoder reads."""
LIMITS = WorkerLimits(cpu_seconds=8.0, memory=3 << 29, answer=(1 + MAX_CROPS) * MAX_SIZE**2 * 3)


def main() -> None:
    """Answer jobs until stdin ends: a side and whether to crop (`pack_job`), then a file or a `data:` URL. An answer is
    the pixels of all images."""
    from PIL import Image, WebPImagePlugin  # noqa: F401 -- other formats' plugins are loaded with a file that needs them

    Image.preinit()
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow warns above it, and raises above twice as many
    warnings.simplefilter("ignore")
    serve_jobs(_answer_job, LIMITS)


def pack_job(size: int, crops: bool) -> bytes:
    return struct.pack("<I?", size, crops)


def _answer_job(job: bytes) -> bytes:
    size, crops = struct.unpack_from("<I?", job)
    data = job[5:]
    return _prepare_file(size, crops, _decode_url(data) if data[:5].lower() == b"data:" else data)


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


def _prepare_file(size: int, crops: bool, data: bytes) -> bytes:
    """Return uint8 [images, size, size, 3]: the whole image, then its crops where asked for. Raises JobFailure."""
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
    parts = [image, *(image.crop(box) for box in (_plan_crops(*image.size) if crops else ()))]
    return b"".join(_resize_image(part, size).tobytes() for part in parts)


def _resize_image(image: Image.Image, size: int) -> Image.Image:
    """Resize to a square as `Image.resize` does with BILINEAR, to the last bit: rows, then columns, each in bands on
    threads. Of images that are higher than wide Pillow may take the columns first."""
    from PIL import Image

    (width, height), how = image.size, Image.Resampling.BILINEAR
    if width < height or THREADS == 1:
        return image.resize((size, size), how)
    wide, square = Image.new("RGB", (size, height)), Image.new("RGB", (size, size))
    tops = _split_range(height)
    bands = _POOL.map(lambda a, b: image.crop((0, a, width, b)).resize((size, b - a), how), *zip(*tops, strict=True))
    for (top, _), band in zip(tops, bands, strict=True):
        wide.paste(band, (0, top))
    lefts = _split_range(size)
    bands = _POOL.map(lambda a, b: wide.crop((a, 0, b, height)).resize((b - a, size), how), *zip(*lefts, strict=True))
    for (left, _), band in zip(lefts, bands, strict=True):
        square.paste(band, (left, 0))
    return square


def _split_range(count: int) -> list[tuple[int, int]]:
    step = -(-count // THREADS)
    return [(at, min(at + step, count)) for at in range(0, count, step)]


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
