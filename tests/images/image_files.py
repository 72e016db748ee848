"""Image files made from a seed: whole ones of every format, mode, size and orientation, and hostile ones."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

MODES = {
    "PNG": (
        "1",
        "L",
        "LA",
        "P",
        "RGB",
        "RGBA",
        "I;16",
        "P+transparency",
        "P+alphas",
        "RGB+transparency",
        "L+transparency",
    ),
    "JPEG": ("L", "RGB", "CMYK", "RGB+progressive"),
    "WEBP": ("RGB", "RGBA", "RGB+lossless", "RGB+animated"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "GIF": ("L", "P", "P+transparency", "P+animated"),
}
SIZES = [(64, 48), (56, 56), (1, 1), (3, 1), (1, 3), (257, 101), (700, 300), (300, 700), (400, 300), (520, 256)]


def make_picture(width: int, height: int, mode: str, random: np.random.Generator) -> Image.Image:
    """A picture with gradients and noise, so that resizers which differ are seen to."""
    small = random.integers(0, 256, (max(1, height // 8), max(1, width // 8), 4), np.uint8)
    image = Image.fromarray(small, "RGBA").resize((width, height), Image.Resampling.BICUBIC)
    if mode == "I;16":
        values = random.integers(0, 1 << 16, (height, width)).astype(np.uint16)
        return Image.fromarray(values >> int(random.integers(0, 9)))
    return image.convert("RGB").convert(mode) if mode in ("P", "CMYK") else image.convert(mode)


def encode_picture(image: Image.Image, form: str, extra: str, orientation: int | None, seed: int) -> bytes:
    options: dict[str, object] = {}
    if extra == "transparency":
        options["transparency"] = {"P": 3, "L": 7, "RGB": image.getpixel((0, 0))}[image.mode]
    if extra == "alphas":
        options["transparency"] = bytes(range(256))
    if extra in ("progressive", "lossless"):
        options[extra] = True
    if extra == "animated":
        options |= {"save_all": True, "append_images": [image.rotate(180), image.rotate(90)]}
    if orientation is not None and form in ("PNG", "JPEG", "WEBP"):
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif.tobytes()
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def make_files(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """(Name, bytes) of `count` files; the first 200 have each mode with several sizes and orientations."""
    kinds = [(form, mode) for form, modes in MODES.items() for mode in modes]
    for number in range(count):
        random = np.random.default_rng((seed, number))
        form, mode = kinds[number % len(kinds)]
        mode, _, extra = mode.partition("+")
        width, height = SIZES[number // len(kinds) % len(SIZES)] if number % 3 else random.integers(1, 400, 2)
        orientation = [None, *range(1, 10)][int(random.integers(0, 10))]
        image = make_picture(int(width), int(height), mode, random)
        yield (
            f"{number} {form} {mode}+{extra} {width}x{height} turned {orientation}",
            encode_picture(image, form, extra, orientation, number),
        )
