"""Encodes KV pages into coded ones and back, bit for bit, as `plugins.code_layout` describes them.

It must not know what a page means. Invariants: equal pages give equal code; whatever a coded page holds, decoding reads
its bytes alone and writes the bytes of the page that it is given.

A program has WIDTH channels of one block, of which each thread has VECTOR with all their rows: largest exponents, bits
and the order of escapes within a channel are then a thread's own affair.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.aot import Constant, KernelSpec
from wicore_trt.plugins.code_layout import ESCAPE, HEADER_BYTES, MAGIC, SEAL_BYTES, PageCode

_MAGIC = tl.constexpr(int.from_bytes(MAGIC, "little"))
_HEADER = tl.constexpr(HEADER_BYTES)
_SEAL = tl.constexpr(SEAL_BYTES)
_ESCAPE = tl.constexpr(ESCAPE)
_INDEX_CHUNK = tl.constexpr(1024)


@triton.jit
def _parts(blocks, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    """Find where tops, bits, signs, escapes and the next coded page begin."""
    tops = _HEADER + tl.cdiv(blocks * (CHANNELS // TILE), 4) * 16
    bits = tops + blocks * CHANNELS
    signs = bits + blocks * (CHANNELS // 8 * 3 * ROWS)
    escapes = signs + blocks * (CHANNELS * ROWS)
    return tops, bits, signs, escapes, blocks * (CHANNELS * ROWS // 2 * 3)


@triton.jit
def _place(CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Find this program's block and first channel."""
    return tl.program_id(0) // (CHANNELS // WIDTH), tl.program_id(0) % (CHANNELS // WIDTH) * WIDTH


@triton.jit
def _point(start, first, ROWS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """Make pointers [ROWS, WIDTH] to rows of CHANNELS, VECTOR of them side by side for each thread."""
    to = tl.multiple_of(start + first, 16) + tl.arange(0, ROWS)[:, None] * CHANNELS + tl.arange(0, WIDTH)[None, :]
    return tl.max_contiguous(to, [1, VECTOR])


@triton.jit
def _point_singly(start, at, VECTOR: tl.constexpr):
    """Keep scattered pointers, which are used under a mask, in the layout of `_point`: the hint is not true, but where
    a mask may differ from value to value each is accessed alone."""
    return tl.max_contiguous(tl.multiple_of(start + at, [1, VECTOR]), [1, VECTOR])


@triton.jit
def _count_bits(x):
    """Count the ones of uint32 words."""
    x -= x >> 1 & 0x55555555
    x = (x & 0x33333333) + (x >> 2 & 0x33333333)
    return ((x + (x >> 4) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def page_tops(
    memory, offsets, coded, blocks,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the tops of page p and, in place of its index, the number of escapes of each tile.

    Page p is memory[offsets[p] ...] of 16-bit words, its code coded[p]. Grid: (blocks * CHANNELS / WIDTH, pages).
    """
    tops, _, _, _, size = _parts(blocks, ROWS, CHANNELS, TILE)
    block, first = _place(CHANNELS, WIDTH)
    out = tl.multiple_of(coded + tl.program_id(1).to(tl.int64) * size, 16)
    page = memory + tl.multiple_of(tl.load(offsets + tl.program_id(1)), 16)
    value = tl.load(_point(page + block * (ROWS * CHANNELS), first, ROWS, CHANNELS, WIDTH, VECTOR))
    exponent = (value.to(tl.int32) >> 7) & 255
    top = tl.max(exponent, axis=0, keep_dims=True)
    tl.store(_point(out + tops + block * CHANNELS, first, 1, CHANNELS, WIDTH, VECTOR), top.to(tl.uint8))
    count = tl.sum((top - exponent >= _ESCAPE).to(tl.int32), axis=0)
    count = tl.sum(tl.reshape(count, [WIDTH // TILE, TILE]), axis=1)
    index = (out + _HEADER).to(tl.pointer_type(tl.int32)) + (block * CHANNELS + first) // TILE
    tl.store(index + tl.arange(0, WIDTH // TILE), count)


@triton.jit
def page_starts(coded, found, blocks, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    """Turn page p's numbers of escapes into its index; write its header, and their sum to found[p]. Grid: (pages,)."""
    _, _, _, _, size = _parts(blocks, ROWS, CHANNELS, TILE)
    out = tl.multiple_of(coded + tl.program_id(0).to(tl.int64) * size, 16).to(tl.pointer_type(tl.int32))
    i, tiles = tl.arange(0, _INDEX_CHUNK), blocks * (CHANNELS // TILE)
    total = tl.zeros([], tl.int32)
    for chunk in range(0, tl.cdiv(tiles, 4) * 4, _INDEX_CHUNK):
        index = out + _HEADER // 4 + chunk + i
        count = tl.load(index, chunk + i < tiles, 0)
        start = total + tl.cumsum(count, axis=0) - count
        tl.store(index, tl.where(chunk + i < tiles, start, 0), chunk + i < tl.cdiv(tiles, 4) * 4)
        total += tl.sum(count, axis=0)
    tl.store(found + tl.program_id(0), total)
    head = tl.where(i == 0, _MAGIC, tl.where(i == 1, ROWS, tl.where(i == 2, CHANNELS, total)))
    tl.store(out + i, head, i < 4)


@triton.jit
def page_encode(
    memory, offsets, coded, found, blocks,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write bits, signs and escapes of pages that have room for them, behind `page_tops` and `page_starts`. Same grid
    as `page_tops`; a program writes zeros into its share of the room that is left."""
    tops, bits, signs, escapes, size = _parts(blocks, ROWS, CHANNELS, TILE)
    total = tl.load(found + tl.program_id(1))
    if total > size - _SEAL - escapes:
        return
    block, first = _place(CHANNELS, WIDTH)
    out = tl.multiple_of(coded + tl.program_id(1).to(tl.int64) * size, 16)
    page = memory + tl.multiple_of(tl.load(offsets + tl.program_id(1)), 16)
    value = tl.load(_point(page + block * (ROWS * CHANNELS), first, ROWS, CHANNELS, WIDTH, VECTOR)).to(tl.uint32)
    top = tl.load(_point(out + tops + block * CHANNELS, first, 1, CHANNELS, WIDTH, VECTOR)).to(tl.uint32) << 7
    sign = value >> 8 & 128 | value & 127
    tl.store(_point(out + signs + block * (ROWS * CHANNELS), first, ROWS, CHANNELS, WIDTH, VECTOR), sign.to(tl.uint8))
    distance = tl.minimum(top - (value & 0x7F80), _ESCAPE << 7)
    word = tl.uint32 if ROWS == 32 else tl.uint16
    r = tl.arange(0, ROWS)[:, None]
    to = (out + bits).to(tl.pointer_type(word)) + block * (3 * CHANNELS)
    both = tl.full([1, WIDTH], 0xFFFFFFFF, tl.uint32)
    for k in tl.static_range(3):
        packed = tl.sum((distance >> 7 + k & 1) << r, axis=0, keep_dims=True)
        tl.store(_point(to + k * CHANNELS, first, 1, CHANNELS, WIDTH, VECTOR), packed.to(word))
        both &= packed
    count = _count_bits(both)
    index = (out + _HEADER).to(tl.pointer_type(tl.uint32)) + (block * CHANNELS + first) // TILE
    escaped = both >> r & 1
    at = tl.load(index) + tl.cumsum(count, axis=1) - count + tl.cumsum(escaped, axis=0) - escaped
    tl.store(_point_singly(out + escapes, at, VECTOR), (value >> 7).to(tl.uint8), escaped != 0)
    share = tl.cdiv(size - escapes, tl.num_programs(0))  # the seal, too
    z = tl.program_id(0) * share + tl.arange(0, ROWS * WIDTH // 8)
    left = (z >= total) & (z < (tl.program_id(0) + 1) * share) & (z < size - escapes)
    tl.store(out + escapes + z, tl.zeros([ROWS * WIDTH // 8], tl.uint8), left)


@triton.jit
def page_decode(
    memory, offsets, coded, blocks,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Write page p into memory[offsets[p] ...] from coded[p], STEP rows at once. Same grid as `page_tops`."""
    tops, bits, signs, escapes, size = _parts(blocks, ROWS, CHANNELS, TILE)
    block, first = _place(CHANNELS, WIDTH)
    source = tl.multiple_of(coded + tl.program_id(1).to(tl.int64) * size, 16)
    page = memory + tl.multiple_of(tl.load(offsets + tl.program_id(1)), 16) + block * (ROWS * CHANNELS)
    top = tl.load(_point(source + tops + block * CHANNELS, first, 1, CHANNELS, WIDTH, VECTOR)).to(tl.uint32) << 7
    word = tl.uint32 if ROWS == 32 else tl.uint16
    words = (source + bits).to(tl.pointer_type(word)) + block * (3 * CHANNELS)
    low = tl.load(_point(words, first, 1, CHANNELS, WIDTH, VECTOR)).to(tl.uint32)
    middle = tl.load(_point(words + CHANNELS, first, 1, CHANNELS, WIDTH, VECTOR)).to(tl.uint32)
    high = tl.load(_point(words + 2 * CHANNELS, first, 1, CHANNELS, WIDTH, VECTOR)).to(tl.uint32)
    both = low & middle & high
    count = _count_bits(both)
    index = (source + _HEADER).to(tl.pointer_type(tl.uint32)) + (block * CHANNELS + first) // TILE
    next_escape = tl.load(index) + tl.cumsum(count, axis=1) - count
    for begin in tl.static_range(0, ROWS, STEP):
        place = (block * ROWS + begin) * CHANNELS
        sign = tl.load(_point(source + signs + place, first, STEP, CHANNELS, WIDTH, VECTOR)).to(tl.uint32)
        r = begin + tl.arange(0, STEP)[:, None]
        escaped = both >> r & 1
        at = next_escape + tl.cumsum(escaped, axis=0) - escaped
        next_escape += tl.sum(escaped, axis=0, keep_dims=True)
        inside = (escaped != 0) & (at < (size - _SEAL - escapes).to(tl.uint32))
        raw = tl.load(_point_singly(source + escapes, at, VECTOR), inside, 0).to(tl.uint32)
        distance = (low >> r & 1) << 7 | (middle >> r & 1) << 8 | (high >> r & 1) << 9
        exponent = tl.where(escaped != 0, raw << 7, (top - distance) & 0x7F80)
        value = (sign & 128) << 8 | exponent | sign & 127
        to = _point(page + begin * CHANNELS, first, STEP, CHANNELS, WIDTH, VECTOR)
        tl.store(to, value.to(tl.int16))


def page_code_specs(code: PageCode, warps: int = 2, vector: int = 2, step: int = 8) -> dict[str, KernelSpec]:
    """Specify the four kernels by name. They are the same for any number of blocks. A thread has `vector` channels, a
    power of two, and decodes `step` rows at once."""
    most = code.channels & -code.channels  # the largest power of two that divides it
    values: dict[str, Constant] = {"ROWS": code.rows, "CHANNELS": code.channels, "TILE": code.tile, "VECTOR": vector}
    values |= {"WIDTH": min(most, max(code.tile, 32 * vector * warps)), "STEP": min(step, code.rows)}
    types = {"memory": "*i16", "offsets": "*i64", "coded": "*u8", "found": "*i32", "blocks": "i32"}
    found = {}
    for function in (page_tops, page_starts, page_encode, page_decode):
        names = function.arg_names
        name = f"{function.__name__}_r{code.rows}_c{code.channels}_w{warps}_v{vector}"
        name += f"_s{step}" if "STEP" in names else ""
        signature = {n: types[n] for n in names if n in types}
        constants = {n: values[n] for n in names if n in values}
        aligned = frozenset({"memory", "coded"} & {*signature})
        found[function.__name__] = KernelSpec(name, function, signature, constants, aligned, warps, 1)
    return found
