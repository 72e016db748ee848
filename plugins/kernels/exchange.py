"""Exchanges between the ranks of one machine: sums of rows, meetings, and columns side by side.

`peers` int64 [ranks] are the addresses of all ranks' blocks (`plugins.exchange_layout`). Knows neither layers nor what
rows mean. Invariants: sums are in rank order, so that all ranks hold the same bits; all ranks launch the same kernels
with the same grids in the same order; no wait is without bound.

Few rows are pushed, rounded to 16 bits (float32 in a float16 engine), into a slot at each peer. They carry their own
arrival: an item of zero bits is not there yet, so values go negated, and -0 as 0. Program i uses slot i alone, in two
halves in turn. The reader clears what it has read. Why two halves suffice: a peer writes a half again at its program's
next push but one. Before that its program has read this rank's next push, which began when this rank's launch of the
first was over, the clearing included.

Of many rows each rank reads its peers' products, after a meeting: a rank writes its number of meetings to all, and
waits for theirs. A product lies in one of two buffers in turn: whoever writes one again has met its readers since.

Above two ranks, rows of many have an owner: row i that of rank i % RANKS. It alone sums them, keeps their residual, and
writes their norms to all ranks, which then meet again. So 2 (RANKS - 1) / RANKS products come to a rank in place of
RANKS - 1, in the same bits. One buffer holds norms: whoever writes there has met all that multiplied the last ones.

A rank that has waited SPINS times gives up, tells the host by `failed`, and waits no more in later launches; so does
one whose host has written there.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins import exchange_layout as places
from wicore_trt.plugins.kernels.turns import take_turn

FLAGS, EPOCH, BROKEN = (tl.constexpr(item) for item in (places.FLAGS, places.EPOCH, places.BROKEN))
TURNS, SLOTS = tl.constexpr(places.TURNS), tl.constexpr(places.SLOTS_BYTES)
ROOM, GATHERED = tl.constexpr(places.PUSHED_ROWS), tl.constexpr(places.GATHERED)
SPINS, LOOKS = tl.constexpr(7_000_000), tl.constexpr(1024)
"""About two seconds: a look at an H100's memory takes 0.25 microseconds. After LOOKS the host's memory is read, too."""


@triton.jit
def find_blocks(peers, rank, RANKS: tl.constexpr):
    """Addresses of all ranks' blocks: this rank's, then those of the ranks behind it, in a circle. Nobody writes
    `peers`."""
    blocks = (tl.load(peers + rank),)
    for step in tl.static_range(1, RANKS):
        blocks = blocks + (tl.load(peers + (rank + step) % RANKS),)
    return blocks


@triton.jit
def _slot(block, sender, half, row, H: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr):
    """Slot `row` of `sender` in a block: int32 items if WIDE, else int16."""
    item: tl.constexpr = tl.int32 if WIDE else tl.int16
    begin = (block + SLOTS).to(tl.pointer_type(item))
    return tl.multiple_of(begin + ((half * RANKS + sender) * ROOM + row).to(tl.int64) * H, 16)


@triton.jit
def _spin(spins, failed):
    """Count a look, and every LOOKS ask the host whether to go on."""
    spins += 1
    if spins % LOOKS == 0:
        spins += tl.where(tl.load(failed, volatile=True) != 0, SPINS, 0)
    return spins


@triton.jit
def push_row(value, blocks, rank, row, column, inside, H: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr):
    """Push a row, float32 `value`, to all peers; return its bits as they are summed."""
    half = tl.load(blocks[0].to(tl.pointer_type(tl.int32)) + TURNS + row) & 1
    if WIDE:
        bits = (-value).to(tl.int32, bitcast=True)
        bits = tl.where(bits == 0, -2147483648, bits)
    else:
        bits = (-value).to(tl.bfloat16).to(tl.int16, bitcast=True)
        bits = tl.where(bits == 0, -32768, bits).to(tl.int16)
    for step in tl.static_range(1, RANKS):
        to = _slot(blocks[step], rank, half, row, H, RANKS, WIDE)
        tl.store(to + column, bits, mask=inside)
    return bits


@triton.jit
def sum_pushed(own, block, rank, failed, row, column, inside, H: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr):
    """The sum of all ranks' rows in slot `row` of `block`, in rank order; `own` is what `push_row` returned."""
    items = block.to(tl.pointer_type(tl.int32))
    turn = tl.load(items + TURNS + row)
    spins = tl.load(items + BROKEN) * SPINS
    total = tl.zeros(own.shape, tl.float32)
    for sender in tl.static_range(RANKS):
        part = own
        if sender != rank:
            source = _slot(block, sender, turn & 1, row, H, RANKS, WIDE) + column
            part = tl.load(source, mask=inside, other=1, volatile=True)
            while (tl.min((part != 0).to(tl.int32), 0) == 0) & (spins < SPINS):
                part = tl.load(source, mask=inside, other=1, volatile=True)
                spins = _spin(spins, failed)
            tl.store(source, tl.zeros_like(part), mask=inside)
        if WIDE:
            total -= part.to(tl.float32, bitcast=True)
        else:
            total -= part.to(tl.bfloat16, bitcast=True).to(tl.float32)
    tl.store(items + TURNS + row, turn + 1)
    tl.store(items + BROKEN, 1, mask=spins >= SPINS)
    tl.store(failed, 1, mask=spins >= SPINS)
    return tl.where(inside, total, 0.0)


@triton.jit
def find_twin(pointer, peers, rank, peer):
    """The place in the block of `peer` that `pointer` is in this rank's: both are multiples of 16 bytes."""
    distance = pointer.to(tl.int64) - tl.load(peers + rank)
    return tl.multiple_of((tl.load(peers + peer) + distance).to(tl.pointer_type(pointer.dtype.element_ty)), 16)


@triton.jit
def sum_pulled(x, peers, rank, at, inside, RANKS: tl.constexpr):
    """The sum of all ranks' products at items `at`, float32, in rank order; `x` is this rank's product."""
    total = tl.zeros(at.shape, tl.float32)
    for sender in tl.static_range(RANKS):
        source = find_twin(x, peers, rank, sender) + at
        total += tl.load(source, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def collect_rows(residual, rows, out, peers, rank, failed, H: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr):
    """out[i] = row rows[i] (int32) of the residual of its owner, float32 [any, H], behind a meeting. Grid: (rows of
    out,)."""
    column, row = tl.arange(0, BLOCK), tl.load(rows + tl.program_id(0)).to(tl.int64)
    source = find_twin(residual, peers, rank, row % RANKS) + row * H + column
    value = tl.load(source, mask=column < H, cache_modifier=".cg")
    tl.store(out + tl.program_id(0).to(tl.int64) * H + column, value, mask=column < H)


@triton.jit
def meet(peers, rank, failed, RANKS: tl.constexpr, PADDED: tl.constexpr, DEPENDENT: tl.constexpr = 0):
    """Meet all ranks: behind it every rank sees what all wrote before. PADDED: RANKS, rounded up to a power of two.
    Grid: (1), one warp, whose threads so leave together."""
    take_turn(DEPENDENT)
    items = tl.load(peers + rank).to(tl.pointer_type(tl.int32))
    epoch = tl.load(items + EPOCH) + 1
    every = tl.arange(0, PADDED)
    there = every < RANKS
    blocks = tl.load(peers + every, mask=there, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(blocks + FLAGS + rank, epoch, mask=there, sem="release", scope="sys")
    spins = tl.load(items + BROKEN) * SPINS
    came = tl.load(items + FLAGS + every, mask=there, other=0, volatile=True)
    while (tl.min(tl.where(there, came - epoch, 0), 0) < 0) & (spins < SPINS):
        came = tl.load(items + FLAGS + every, mask=there, other=0, volatile=True)
        spins = _spin(spins, failed)
    tl.store(items + EPOCH, epoch)
    tl.store(items + BROKEN, 1, mask=spins >= SPINS)
    tl.store(failed, 1, mask=spins >= SPINS)


@triton.jit
def gather_columns(
    columns, logits, peers, rank, failed, COLUMNS: tl.constexpr, RANKS: tl.constexpr, DEPENDENT: tl.constexpr = 0
):
    """logits float32 [rows, RANKS * COLUMNS] = `columns` float32 [rows, COLUMNS] of all ranks side by side, behind a
    meeting. Grid: (cdiv(COLUMNS, GATHERED), rows, RANKS)."""
    take_turn(DEPENDENT)
    row, sender = tl.program_id(1).to(tl.int64), tl.program_id(2)
    column = tl.program_id(0) * GATHERED + tl.arange(0, GATHERED)
    source = find_twin(columns, peers, rank, sender)
    value = tl.load(source + row * COLUMNS + column, mask=column < COLUMNS, cache_modifier=".cg")
    tl.store(logits + (row * RANKS + sender) * COLUMNS + column, value, mask=column < COLUMNS)
