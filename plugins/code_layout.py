"""Code of KV pages that keeps every bit: where its parts lie, and the launches of its kernels.

Plain arithmetic; neither Triton, CUDA nor what a page means. Invariant: all parts of a coded page begin at multiples of
16 bytes, and a coded page takes three quarters of its raw bytes, whatever it holds.

docs/page-code.md describes the format: header, index, tops, bits, signs, escapes, seal, one behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from wicore_trt.arithmetic import div_ceil
from wicore_trt.plugins.layout import Launch, PoolShape

MAGIC = b"WKC\x02"
HEADER_BYTES = 16
SEAL_BYTES = 16
"""The digest of the decoded page, at the end; 0 until somebody seals it."""
SEAL_KEY = bytes(32)
"""Key of that digest: another process must find it again."""
FORMAT = f"lossless-{MAGIC[3]}"
ENCODE, DECODE = ("page_tops", "page_starts", "page_encode"), "page_decode"
"""Kernels of `kernels.page_code`, in the order of their launches."""
TILE = 128
ESCAPE = 7
"""Distance that stands for all larger ones, too."""
BLOCK_ROWS = 32
"""Most tokens that share a table of the largest exponents."""


class PageCode:
    """Code of pages of `blocks` blocks. `rows` is 16 or 32, `channels` a multiple of 16. `tops`, `bits`, `signs` and
    `escapes` are where these parts begin, in bytes. A page with more than `room` escapes is kept raw."""

    def __init__(self, blocks: int, rows: int, channels: int) -> None:
        assert rows in (16, 32) and channels % 16 == 0 and min(blocks, channels) > 0
        self.blocks, self.rows, self.channels, columns = blocks, rows, channels, blocks * channels
        self.tile = gcd(channels, TILE)
        self.tiles, self.values = columns // self.tile, columns * rows
        self.raw_bytes, self.coded_bytes = 2 * self.values, 3 * self.values // 2
        self.tops = HEADER_BYTES + div_ceil(4 * self.tiles, 16) * 16
        self.bits = self.tops + columns
        self.signs = self.bits + 3 * self.values // 8
        self.escapes = self.signs + self.values
        self.room = self.coded_bytes - self.escapes - SEAL_BYTES
        assert self.raw_bytes < 1 << 31, "kernels count bytes of a page in 32 bits"
        assert self.room >= 0, "pages so small have no room for the code's tables"

    def fits(self, head: memoryview) -> bool:
        """Tell by the first HEADER_BYTES of a page that was encoded whether it had room for its escapes."""
        return int.from_bytes(head[12:HEADER_BYTES], "little") <= self.room


def find_code(shape: PoolShape) -> PageCode | None:
    """Find the code of pages of `shape`. There is none where it cannot gain: pages of fewer than 16 tokens or of
    less than 2 KiB, and values that are not bfloat16 (of float16, sign and mantissa alone take 11 bits of 12)."""
    channels = shape.kv_heads * shape.head_dim
    if shape.dtype != "bfloat16" or shape.page_tokens % 16 or shape.layers * shape.page_tokens * channels < 512:
        return None
    rows = BLOCK_ROWS if shape.page_tokens % BLOCK_ROWS == 0 else 16
    return PageCode(shape.layers * 2 * (shape.page_tokens // rows), rows, channels)


def encode_launches(
    constants: Mapping[str, Any], code: PageCode, arrays: Mapping[str, Any], pages: int
) -> list[Launch]:
    """Launch the kernels ENCODE, one behind the other. `arrays`: int64
    `offsets` [pages] of pages from `memory` in values, multiples of 16; `coded` uint8 [pages, coded_bytes]; `found`
    int32 [pages], which becomes the number of escapes. Where that exceeds `room` the page is to be kept raw, and
    `coded` is unspecified."""
    starts = {"coded": arrays["coded"], "found": arrays["found"], "blocks": code.blocks}
    encode = decode_launch(constants, code, arrays, pages)
    tops = {name: value for name, value in encode.arguments.items() if name != "found"}
    return [Launch(encode.grid, tops), Launch((pages, 1, 1), starts), encode]


def decode_launch(constants: Mapping[str, Any], code: PageCode, arrays: Mapping[str, Any], pages: int) -> Launch:
    """Launch the kernel DECODE: arrays as of `encode_launches` without `found`. Whatever `coded`
    holds, only the pages' own bytes are written and only theirs read."""
    grid = (code.blocks * code.channels // constants["WIDTH"], pages, 1)
    return Launch(grid, {**arrays, "blocks": code.blocks})
