"""Encodes and decodes KV pages on a CPU, bit for bit, as `plugins.code_layout` describes them.

The oracle of `plugins/kernels/page_code.py`: both make the same bytes. It must not know tiers. Invariant: decoding what
was encoded gives the page; decoding anything else raises ValueError or gives some page.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wicore_trt.plugins.code_layout import ESCAPE, HEADER_BYTES, MAGIC, PageCode

Bytes = NDArray[np.uint8]
Values = NDArray[np.uint16]
Buffer = bytes | bytearray | memoryview


def encode_page(code: PageCode, page: Buffer) -> bytes | None:
    """Encode a page of `raw_bytes`; None for one that is to be kept raw."""
    coded, escapes = encode_pages(code, np.frombuffer(page, "<u2")[None])
    return bytes(coded[0]) if escapes[0] <= code.room else None


def decode_page(code: PageCode, coded: Buffer) -> bytes:
    """Decode to `raw_bytes`. Raises ValueError for bytes that are no code of such pages."""
    found = np.frombuffer(coded, np.uint8)
    shape = np.array([code.rows, code.channels], "<u4").tobytes()
    if len(found) != code.coded_bytes or found[:12].tobytes() != MAGIC + shape:
        raise ValueError("these bytes are no coded page of this shape")
    return bytes(decode_pages(code, found[None])[0])


def encode_pages(code: PageCode, pages: Values) -> tuple[Bytes, NDArray[np.int64]]:
    """Encode uint16 [n, values]: uint8 [n, coded_bytes], and how many escapes each page has. Where these exceed `room`
    the coded bytes are zeros behind the header. Nothing is sealed."""
    n, values = len(pages), pages.astype("<u2", copy=False).reshape(-1, code.blocks, code.rows, code.channels)
    exponents = (values >> 7 & 255).astype(np.uint8)
    tops = exponents.max(axis=2, initial=0)
    distances = np.minimum(tops[:, :, None] - exponents, ESCAPE)
    bits = [np.packbits(distances >> k & 1, axis=2, bitorder="little") for k in range(3)]  # [n, blocks, rows / 8, C]
    escaped = distances.swapaxes(2, 3) == ESCAPE  # [n, blocks, channels, rows]: the order of escapes
    counts = escaped.reshape(n, code.tiles, -1).sum(axis=2)
    escapes = counts.sum(axis=1)
    coded = np.zeros((n, code.coded_bytes), np.uint8)
    coded[:, :4] = np.frombuffer(MAGIC, np.uint8)
    coded[:, 4:HEADER_BYTES] = _bytes_of(np.stack([escapes * 0 + code.rows, escapes * 0 + code.channels, escapes], 1))
    coded[:, HEADER_BYTES:][:, : 4 * code.tiles] = _bytes_of(counts.cumsum(axis=1) - counts)
    coded[:, code.tops : code.bits] = tops.reshape(n, -1)
    coded[:, code.bits : code.signs] = np.stack(bits, 2).swapaxes(3, 4).reshape(n, -1)
    coded[:, code.signs : code.escapes] = (values >> 8 & 128 | values & 127).astype(np.uint8).reshape(n, -1)
    fits = escapes <= code.room
    room = np.arange(code.room) < np.where(fits, escapes, 0)[:, None]
    coded[:, code.escapes :][:, : code.room][room] = exponents.swapaxes(2, 3)[escaped & fits[:, None, None, None]]
    coded[~fits, HEADER_BYTES:] = 0
    return coded, escapes


def decode_pages(code: PageCode, coded: Bytes) -> Values:
    """Decode uint8 [n, coded_bytes] to uint16 [n, values], whatever it holds. An escape that lies outside of the coded
    page is 0."""
    n, shape = len(coded), (len(coded), code.blocks, code.rows, code.channels)
    bits = coded[:, code.bits : code.signs].reshape(n, code.blocks, 3, code.channels, -1)
    planes = np.unpackbits(bits, axis=4, bitorder="little").astype(np.uint8)  # [n, blocks, 3, channels, rows]
    distances = planes[:, :, 0] | planes[:, :, 1] << 1 | planes[:, :, 2] << 2
    exponents = coded[:, code.tops : code.bits].reshape(n, code.blocks, -1, 1) - distances
    escaped = (distances == ESCAPE).reshape(n, code.tiles, -1)
    first = np.ascontiguousarray(coded[:, HEADER_BYTES:][:, : 4 * code.tiles]).view("<i4")
    at = (first[:, :, None] + (escaped.cumsum(axis=2) - escaped).astype(np.int32))[escaped]
    inside = (at >= 0) & (at < code.room)
    page = np.repeat(np.arange(n), escaped.reshape(n, -1).sum(axis=1))
    exponents.reshape(escaped.shape)[escaped] = np.where(inside, coded[page, code.escapes + np.where(inside, at, 0)], 0)
    signs = coded[:, code.signs : code.escapes].reshape(shape).astype("<u2")
    values: Any = (signs & 128) << 8 | exponents.swapaxes(2, 3).astype("<u2") << 7 | signs & 127
    return np.asarray(values).reshape(n, -1)


def _bytes_of(numbers: NDArray[np.int64]) -> Bytes:
    return np.ascontiguousarray(numbers.astype("<u4")).view(np.uint8)
