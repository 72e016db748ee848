"""Files that would break, fill or stall a decoder, made from a seed.

Truncated and mutated files of every format, wrong types, announced and real decompression bombs, malformed and deep
chunks, EXIF and ICC profiles, animations, progressive scans without end.
"""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache

from image_files import make_files
from PIL import Image


def chunk(kind: bytes, data: bytes, *, crc: bool = True) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) ^ (not crc))


def png(width: int, height: int, data: bytes, *before: bytes, depth: int = 8, colour: int = 2) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(before) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def png_bomb(dice: random.Random) -> bytes:
    """Few bytes that are as many pixels as are taken, or more."""
    side = dice.choice([8000, 8192, 8193, 20000, 65535, 0x7FFFFFFF])
    packer, rows = zlib.compressobj(9), min(side, 8193)
    row = b"\0" * (1 + min(side, 8193) * 3)
    data = b"".join(packer.compress(row) for _ in range(rows)) + packer.flush() if side < 9000 else b""
    return png(side, dice.choice([side, 1]), data or zlib.compress(b"\0" * 100))


@cache
def compress_zeros() -> bytes:
    return zlib.compress(b"\0" * (64 << 20))


def png_chunks(dice: random.Random) -> bytes:
    big = compress_zeros()
    extra = dice.choice(
        [
            chunk(b"zTXt", b"k\0\0" + big), chunk(b"iCCP", b"k\0\0" + big), chunk(b"iTXt", b"k\0\1\0\0\0" + big),
            chunk(b"tEXt", b"k\0" + b"x" * (1 << 20)) * 15, chunk(b"eXIf", dice.randbytes(100)),
            chunk(b"PLTE", dice.randbytes(dice.choice([0, 1, 769, 3000]))), chunk(b"tRNS", dice.randbytes(5)),
            chunk(b"gAMA", b""), chunk(b"acTL", struct.pack(">II", 1 << 31, 0)), chunk(b"IHDR", dice.randbytes(13)),
            chunk(b"fcTL", dice.randbytes(26)), chunk(b"abcd", b"", crc=False), struct.pack(">I", 1 << 31) + b"IDAT",
        ]
    )  # fmt: skip
    data = zlib.compress(b"".join(b"\5" + dice.randbytes(30) for _ in range(10)))
    return png(10, 10, data, extra, depth=dice.choice([8, 16, 3]), colour=dice.choice([0, 2, 3, 4, 6, 9]))


def jpeg_parts(dice: random.Random) -> bytes:
    whole = whole_file(dice, "JPEG")
    exif = dice.choice(
        [
            b"Exif\0\0" + dice.randbytes(40),
            b"Exif\0\0II*\0" + struct.pack("<I", 8) + struct.pack("<H", 65535) + dice.randbytes(200),
            b"Exif\0\0MM\0*" + struct.pack(">I", 8) + struct.pack(">HHHI", 1, 0x8769, 4, 1) + struct.pack(">I", 8),
            b"Exif\0\0II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x112, 3, 1, 0xFFFF, 0, 0),
            b"Exif\0\0II*\0" + struct.pack("<IHHHII", 8, 1, 0x112, 2, 1 << 31, 8),
        ]
    )
    icc = b"ICC_PROFILE\0" + bytes([dice.randrange(256), dice.randrange(256)]) + dice.randbytes(dice.choice([0, 65000]))
    marker = dice.choice([(0xE1, exif), (0xE2, icc), (0xE2, b"MPF\0" + dice.randbytes(60)), (0xDB, dice.randbytes(66))])
    extra = b"\xff" + bytes([marker[0]]) + struct.pack(">H", len(marker[1]) + 2) + marker[1]
    return whole[:2] + extra * dice.choice([1, 1, 300]) + whole[2:]


def jpeg_scans(dice: random.Random) -> bytes:
    """A progressive file whose last scan comes again and again, each time over all pixels."""
    out = io.BytesIO()
    Image.new("RGB", (1000, 1000), (dice.randrange(256), 5, 9)).save(out, "JPEG", progressive=True)
    whole = out.getvalue()
    at = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[at:-2] * dice.choice([100, 150_000]) + whole[-2:]


def jpeg_large(dice: random.Random) -> bytes:
    return jpeg_huge(dice, (8000, 8000))


def jpeg_huge(dice: random.Random, sides: tuple[int, int] | None = None) -> bytes:
    whole = bytearray(whole_file(dice, "JPEG"))
    for marker in (b"\xff\xc0", b"\xff\xc2"):
        at = whole.find(marker)
        if at > 0:
            whole[at + 5 : at + 9] = struct.pack(
                ">HH", *dice.choice([(65535, 65535), (8000, 8000), (0, 100), (65535, 1)])
            )
    return bytes(whole)


def gif_file(dice: random.Random) -> bytes:
    width, height = dice.choice([(65535, 65535), (10, 10), (0, 0), (8000, 8000)])
    frame = struct.pack(
        "<BHHHHB", 0x2C, *dice.choice([(0, 0, 10, 10), (60000, 60000, 5000, 5000), (0, 0, 65535, 65535)]), 0
    )
    data = b"".join(bytes([min(255, n)]) + dice.randbytes(min(255, n)) for n in (255, 40))
    body = frame + bytes([dice.choice([2, 8, 11, 12, 255])]) + data + b"\0"
    return (
        b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF7, 0, 0) + bytes(768) + body * dice.choice([1, 500]) + b";"
    )


def bmp_file(dice: random.Random) -> bytes:
    size = dice.choice([40, 12, 108, 124, 7, 1 << 30])
    width, height = dice.choice([(10, 10), (8000, 8000), (1 << 30, 1 << 30), (-5, 5), (5, -(1 << 31)), (8191, 8191)])
    bits, packed = dice.choice([1, 4, 8, 16, 24, 32, 7]), dice.choice([0, 1, 2, 3, 4, 5, 99])
    info = struct.pack("<IiiHHIIiiII", size, width, height, 1, bits, packed, 0, 0, 0, dice.choice([0, 1 << 31]), 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, dice.choice([54, 1 << 31, 0])) + info + dice.randbytes(3000)


def webp_file(dice: random.Random) -> bytes:
    whole = bytearray(whole_file(dice, "WEBP"))
    if dice.random() < 0.5:  # a canvas as large as the format allows
        body = b"VP8X" + struct.pack("<I", 10) + bytes([dice.choice([0, 2, 0x3E]), 0, 0, 0]) + b"\xff\xff\xff" * 2
        return b"RIFF" + struct.pack("<I", len(body) + len(whole) - 8) + b"WEBP" + body + bytes(whole[12:])
    for _ in range(3):
        whole[dice.randrange(12, min(60, len(whole)))] = dice.randrange(256)
    return bytes(whole)


def wrong_type(dice: random.Random) -> bytes:
    heads = [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"II*\0",
        b"%PDF-1.7\n", b"\0\0\1\0\1\0", b"P6 9999999 9999999 255\n", b"8BPS\0\1", b"\x7fELF", b"PK\3\4", b"",
        b"\xff\xd8", b"RIFF\0\0\0\0WEBP", b"GIF89a", b"BM", b"\x89PNG\r\n\x1a\n", b"\0\0\0\x20ftypavif",
        b"#define x_width 9\n", b"id=ImageMagick", b"SIMPLE  =", b"\x1f\x8b\x08",
    ]  # fmt: skip
    return dice.choice(heads) + dice.randbytes(dice.choice([0, 1, 100, 5000]))


@cache
def list_whole_files() -> dict[str, list[bytes]]:
    """Small whole files by format."""
    found: dict[str, list[bytes]] = {}
    for name, data in make_files(75, seed=5):
        if len(data) < 200_000:
            found.setdefault(name.split()[1], []).append(data)
    return found


def whole_file(dice: random.Random, form: str) -> bytes:
    return dice.choice(list_whole_files()[form])


def truncated(dice: random.Random) -> bytes:
    data = whole_file(dice, dice.choice(["PNG", "JPEG", "WEBP", "BMP", "GIF"]))
    return data[: int(len(data) * dice.random())]


def mutated(dice: random.Random) -> bytes:
    data = bytearray(whole_file(dice, dice.choice(["PNG", "JPEG", "WEBP", "BMP", "GIF"])))
    for _ in range(dice.choice([1, 5, 50])):
        at = dice.randrange(min(len(data), dice.choice([64, 1 << 20])))
        match dice.randrange(3):
            case 0:
                data[at] = dice.randrange(256)
            case 1:
                data[at:at] = dice.randbytes(dice.choice([1, 4, 1000]))
            case _:
                del data[at : at + dice.choice([1, 4, 200])]
                data = data or bytearray(b"x")
    return bytes(data)


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    truncated, mutated, mutated, wrong_type, png_chunks, jpeg_parts, jpeg_huge, gif_file, bmp_file, webp_file,
)  # fmt: skip
SLOW: tuple[Callable[[random.Random], bytes], ...] = (png_bomb, jpeg_large, jpeg_scans)


def make_hostile_files(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """(Name, bytes); one in fifty takes a decoder seconds."""
    for number in range(count):
        dice = random.Random(f"{seed}/{number}")
        kind = SLOW[number // 50 % 3] if number % 50 == 49 else KINDS[number % len(KINDS)]
        yield f"{number} {kind.__name__}", kind(dice) or b"\0"
