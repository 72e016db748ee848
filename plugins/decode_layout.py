"""Configurations and launches of the attention kernels made for speed: plain arithmetic.

Knows pointers as integers only; neither Triton nor CUDA. Invariant: a configuration depends on the target and on
shapes, never on what a step holds. So a launch may be captured in a CUDA graph: lengths are read on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from wicore_trt.arithmetic import ITEM_BYTES, div_ceil
from wicore_trt.plugins.layout import Launch, Pool, PoolShape, Slices, Tables

MULTIPROCESSORS = {"sm80": 108, "sm86": 84, "sm89": 128, "sm90": 132, "sm100": 148, "sm120": 170}
"""Multiprocessors of the largest GPU of each target (A100, RTX 3090, RTX 4090, H100, B200, RTX 5090)."""
SMALL_SHARED = ("sm86", "sm89", "sm120")  # 99 KiB a block


@dataclass(frozen=True)
class DecodeConfig:
    """Configuration of split decode. `heads`: KV heads of one program. `splits`: most programs over one sequence's
    keys, each with about `least` blocks of `block_k` keys or more, so that short sequences stay in one. `fused`: no
    second launch adds the splits up."""

    heads: int
    block_k: int
    splits: int
    fused: bool = True
    num_warps: int = 4
    num_stages: int = 3
    least: int = 1


@dataclass(frozen=True)
class PrefillConfig:
    """Configuration of prefill: `block_m` tokens of one query head by `block_k` keys. `splits`: most programs that
    share their keys, each with `least` or more."""

    block_m: int
    block_k: int
    num_warps: int = 8
    num_stages: int = 2
    splits: int = 1
    least: int = 1


MEASURED_DECODE: dict[tuple[str, int, int], tuple[tuple[int, DecodeConfig], ...]] = {
    ("sm90", 128, 2): (
        (1, DecodeConfig(1, 64, 16, fused=False)),  # 10.3 us where 8 splits take 9.9, and twice as good far beyond 1K
        (4, DecodeConfig(1, 64, 8, fused=False)),
        # One split up to 2K keys: 23.2 us at 8 rows of 1K, and two take as long with their sum; 475 at 8 of 32K.
        (8, DecodeConfig(1, 64, 2, fused=False, least=32)),
        (16, DecodeConfig(1, 64, 1)),  # at 16 rows of 8K 239 us, of a window of 1K 35; two stages take 278 and 41
        # Blocks of 32 keys take 65 us of a window where these take 68, but a step 15.3 ms for 14.4: programs with less
        # shared memory let those of the next kernel in among them.
        (32, DecodeConfig(1, 64, 1, num_stages=2)),
        (1 << 31, DecodeConfig(2, 64, 1, num_stages=2)),
    ),
    ("sm90", 128, 1): (  # on an H200: 3.9 to 4.2 TB/s from 4K keys on
        # At 1 row 8.9 us at 1K keys where one head takes 8.2, but 135 for 177 at 128K. One head, blocks of 128 keys and
        # 16 splits take 137 us where these take 142, and a step the same.
        (1, DecodeConfig(2, 64, 33, fused=False)),
        (4, DecodeConfig(2, 64, 12, fused=False)),
        (8, DecodeConfig(1, 64, 6, num_warps=2, num_stages=2)),  # 254 us at 8 rows of 32K, of a window 17
        (16, DecodeConfig(1, 128, 1)),  # 134 us at 16 rows of 8K, of a window 23
        (32, DecodeConfig(1, 64, 1, num_warps=2)),
        (1 << 31, DecodeConfig(2, 32, 1)),
    ),
    ("sm90", 256, 2): (
        (4, DecodeConfig(1, 32, 32, fused=False)),
        (16, DecodeConfig(1, 64, 32, fused=False)),
        (64, DecodeConfig(1, 64, 8, fused=False)),
        (1 << 31, DecodeConfig(1, 64, 2, fused=False)),
    ),
}
"""(target, head_dim, bytes per KV element) to (rows at most, configuration), ascending, from
`benchmarks.gpu.kernels.attention`. The last entry serves all larger batches; what is not here follows the rule of
`decode_config`."""


@dataclass(frozen=True)
class Segments:
    """Keys so far before a prompt's slice that all of its rows see them, for a product without pages and masks. It
    takes whole segments of `tokens` keys from the prompt's start, at most `most` of them at once, by `rows` rows of the
    slice. Rows left over at the slice's end are padded if they are at least `least`, else left to the other kernel."""

    tokens: int
    rows: int
    least: int
    most: int

    def dense_rows(self, first: int, length: int) -> int:
        """Count rows whose segments are taken so, of a slice of `length` tokens from position `first` on."""
        rest = length % self.rows
        return length - (rest if rest < self.least else 0) if first >= self.tokens else 0

    def spans(self, first: int) -> Iterator[tuple[int, int]]:
        """List (first key, keys) of the products for a slice from position `first` on."""
        at, count = 0, first // self.tokens
        while count:
            taken = self.most if count >= self.most else 1
            yield at * self.tokens, taken * self.tokens
            at, count = at + taken, count - taken


MEASURED_SEGMENTS: dict[tuple[str, int], Segments] = {
    ("sm90", 128): Segments(8192, 2048, 1280, 4),
    ("sm90", 256): Segments(8192, 2048, 1280, 4),
}
"""(target, head_dim) to segments for cuDNN's attention. On an H100 it does 680 TFLOP/s with 32 heads of 128, where
`paged_prefill` does 390, and 340 over FP8 pages; 740 with 16 heads of 256 (400 and 290), 380 with the 4 of 270M."""

MEASURED_PREFILL: dict[tuple[str, int, int], tuple[tuple[int, PrefillConfig], ...]] = {
    ("sm90", 128, 2): ((1 << 31, PrefillConfig(128, 64, 8, 3)),),
    # 340 TFLOP/s behind 32K and 128K keys, 250 by the rule below.
    ("sm90", 128, 1): ((1 << 31, PrefillConfig(128, 64, 4, 3)),),
    # 400 TFLOP/s with 8 KV heads, where 64 rows do 230; few heads make too few programs of 128 rows.
    ("sm90", 256, 2): ((2, PrefillConfig(64, 64, 4, 2)), (1 << 31, PrefillConfig(128, 64, 8, 2))),
    ("sm90", 256, 1): ((1 << 31, PrefillConfig(128, 64, 8, 2)),),
}
"""(target, head_dim, bytes per KV element) to (KV heads at most, configuration), ascending."""

SPLIT_PREFILL = {
    ("sm90", 128): PrefillConfig(64, 64, 4, 3, 8, 2048),
    ("sm90", 256): PrefillConfig(64, 64, 4, 2, 8, 2048),
}
"""(target, head_dim) to the configuration for steps of few tokens behind many keys: a program for each head and 128
tokens, 32 of them, would leave most of a GPU idle."""


def decode_config(target: str, pool: PoolShape, rows: int) -> DecodeConfig:
    found = MEASURED_DECODE.get((target, pool.head_dim, ITEM_BYTES[pool.dtype]))
    if found:
        chosen = next((config for most, config in found if rows <= most), found[-1][1])
        return chosen if pool.kv_heads % chosen.heads == 0 else replace(chosen, heads=1)
    # Keys and values of a block in one stage: 32 KiB, so that two programs of three stages fit on a multiprocessor.
    stage = 16384 if target in SMALL_SHARED else 32768
    block_k = stage // (2 * pool.head_dim * ITEM_BYTES[pool.dtype])
    config = DecodeConfig(1, max(pool.page_tokens, 16, min(64, block_k)), 1)
    return replace(config, splits=max(1, min(64, div_ceil(2 * MULTIPROCESSORS[target], pool.kv_heads * rows))))


def prefill_config(target: str, pool: PoolShape) -> PrefillConfig:
    found = MEASURED_PREFILL.get((target, pool.head_dim, ITEM_BYTES[pool.dtype]))
    if found:
        return next(config for most, config in found if pool.kv_heads <= most)
    if pool.head_dim > 128 or target in SMALL_SHARED:
        return PrefillConfig(64, 32 if pool.head_dim > 128 else 64, 4)
    return PrefillConfig(128, 64)


class DecodeRows(NamedTuple):
    """Query rows, one per sequence. `q` and `out` hold [S, heads, D] of the queries' type with `q_row` and `out_row`
    elements from one sequence to the next (multiples of 16; 0: heads * D). `kv_lengths` int32 [S] counts the keys up to
    and with the query's own; 0 marks a row of nobody, which becomes 0. `window` is 0 for full attention."""

    q: Any
    out: Any
    kv_lengths: Any
    heads: int
    softmax_scale: float
    window: int = 0
    q_row: int = 0
    out_row: int = 0


class Workspace(NamedTuple):
    """Device memory of `workspace_elements`. `arrived` is zeroed once, before the first launch; launches that may run
    at the same time need one each."""

    partials: Any
    stats: Any
    arrived: Any


def workspace_elements(config: DecodeConfig, pool: PoolShape, heads: int, rows: int) -> tuple[int, int, int]:
    """Count elements of Workspace's partials (float32), stats (float32) and arrived (int32)."""
    if config.splits == 1:
        return 0, 0, 0
    parts = rows * heads * config.splits
    return parts * pool.head_dim, parts * 2, rows * (pool.kv_heads // config.heads)


def splits_used(config: DecodeConfig, window: int) -> int:
    """Bound the splits that a launch's sequences use: a window has only so many blocks."""
    blocks = div_ceil(window, config.block_k)
    return min(config.splits, div_ceil(blocks, config.least)) if window else config.splits


def decode_launch(config: DecodeConfig, rows: DecodeRows, pool: Pool, tables: Tables, work: Workspace) -> Launch:
    """Launch `kernels.decode_attention.split_decode`; `pool` is the layer's, `tables` has a row per sequence. Unless
    `config.fused` or `config.splits` is 1, `combine_launch` follows."""
    shape = pool.shape
    row = rows.heads * shape.head_dim
    splits = splits_used(config, rows.window)
    return Launch(
        (shape.kv_heads // config.heads, splits, tables.rows),
        {
            "q": rows.q, "out": rows.out, "pool": pool.pointer, "tables": tables.pointer,
            "kv_lengths": rows.kv_lengths, "kv_scale": pool.scales, **work._asdict(),
            "softmax_scale": rows.softmax_scale, "window": rows.window, "table_length": tables.length,
            "n_splits": splits, "q_row": rows.q_row or row, "out_row": rows.out_row or row,
            "pool_page": shape.strides()["pool_page"],
        },
    )  # fmt: skip


def combine_launch(config: DecodeConfig, rows: DecodeRows, pool: Pool, sequences: int, work: Workspace) -> Launch:
    splits = splits_used(config, rows.window)
    return Launch(
        (rows.heads, 0 if config.fused or splits == 1 else sequences, 1),
        {
            "out": rows.out, "kv_lengths": rows.kv_lengths, "partials": work.partials, "stats": work.stats,
            "window": rows.window, "n_splits": splits,
            "out_row": rows.out_row or rows.heads * pool.shape.head_dim,
        },
    )  # fmt: skip


def prefill_launch(
    constants: Mapping[str, Any],
    q_out: tuple[Any, Any],
    pool: Pool,
    tables: Tables,
    slices: Slices,
    softmax_scale: float,
    window: int,
    rows: tuple[int, int] = (0, 0),
) -> Launch:
    """Launch `kernels.prefill_attention.paged_prefill` of (q, out) [tokens, heads, D] whose tokens lie `rows` elements
    apart (multiples of 16; 0: contiguous). `pool` is the layer's, `tables` has a row per sequence."""
    shape = pool.shape
    heads = shape.kv_heads * constants["REPEAT"]
    return Launch(
        (heads, slices.tokens // constants["BLOCK_M"] + tables.rows if slices.tokens else 0, 1),
        {
            "q": q_out[0], "out": q_out[1], "pool": pool.pointer, "tables": tables.pointer,
            "cu_seqlens": slices.cu_seqlens, "first_positions": slices.first_positions, "kv_scale": pool.scales,
            "softmax_scale": softmax_scale, "window": window, "n_sequences": tables.rows,
            "table_length": tables.length, "q_row": rows[0] or heads * shape.head_dim,
            "out_row": rows[1] or heads * shape.head_dim, "pool_page": shape.strides()["pool_page"],
            **({} if slices.key_ends is None else {"key_ends": slices.key_ends}),
        },
    )  # fmt: skip


def leave_segments(whole: Launch, constants: Mapping[str, Any], segments: Segments, lse: Any) -> Launch:
    """Change `prefill_launch` to a kernel that leaves segments out; its `out` is float32, and `lse` is written beside
    it."""
    assert constants["SEGMENTED"] and not whole.arguments["window"] and not segments.tokens % constants["BLOCK_K"]
    assert not (segments.rows % constants["BLOCK_M"] or segments.least % constants["BLOCK_M"])
    sizes = {"segment": segments.tokens, "segment_rows": segments.rows, "least_rows": segments.least}
    return whole._replace(arguments={**whole.arguments, "lse": lse, **sizes})


def split_keys(whole: Launch, constants: Mapping[str, Any], lse: Any, split_rows: int) -> Launch:
    """Change `prefill_launch` to a kernel with splits; its `out` is float32 [splits, split_rows, heads, D], and `lse`
    float32 [splits, split_rows, heads]."""
    assert not whole.arguments["window"]
    arguments = {**whole.arguments, "lse": lse, "split_rows": split_rows}
    return Launch((*whole.grid[:2], constants["SPLITS"]), arguments)


def add_splits_launch(
    constants: Mapping[str, Any], sums: tuple[Any, Any], split_rows: int, out: Any, rows: int
) -> Launch:
    """Launch `kernels.segments.add_splits` of `sums` (values, lse) that `prefill_launch` left; `out` is contiguous."""
    return Launch(
        (div_ceil(rows, constants["BLOCK"]), constants["HEADS"], 1),
        {
            "sums": sums[0], "lse": sums[1], "out": out, "rows": rows, "split_rows": split_rows,
            "out_row": constants["HEADS"] * constants["D"],
        },
    )  # fmt: skip


def gather_launch(
    constants: Mapping[str, Any], pool: Pool, table: tuple[Any, int], span: tuple[int, int], to: tuple[Any, int]
) -> Launch:
    """Launch `kernels.segments.gather_segment`: copy `span` (first key, keys; whole pages) of the sequence with this
    `table` (address, length) into `to`: keys, and that many elements behind them values, [keys, kv_heads, D]."""
    shape = pool.shape
    assert not (span[0] % shape.page_tokens or span[1] % shape.page_tokens)
    return Launch(
        (span[1] // shape.page_tokens, 2 * div_ceil(constants["PAGE"], constants["BLOCK"]), 1),
        {
            "pool": pool.pointer, "tables": table[0], "kv_scale": pool.scales, "dense": to[0],
            "first": span[0] // shape.page_tokens, "table_length": table[1],
            "pool_page": shape.strides()["pool_page"], "values": to[1],
        },
    )  # fmt: skip


def add_segment_launch(
    constants: Mapping[str, Any],
    sums: tuple[Any, Any],
    part: tuple[Any, Any],
    strides: tuple[int, int],
    part_rows: int,
    rows: int,
    out: Any,
    *,
    last: bool,
) -> Launch:
    """Launch `kernels.segments.add_segment` for `rows` rows: `sums` (values, lse) and `out` [rows, heads, D],
    contiguous, and `part` (values [part_rows, heads, D] by its two `strides`, lse [heads, part_rows])."""
    return Launch(
        (div_ceil(rows, constants["BLOCK"]), constants["HEADS"], 1),
        {
            "sums": sums[0], "lse": sums[1], "part": part[0], "part_lse": part[1], "out": out, "rows": rows,
            "part_rows": part_rows, "last": int(last), "part_row": strides[0], "part_head": strides[1],
            "out_row": constants["HEADS"] * constants["D"],
        },
    )  # fmt: skip


@dataclass(frozen=True)
class LastQueries:
    """Last queries of a step's first `sequences` sequences, of which `singles` have one token: `q` [tokens, heads, D],
    contiguous, `positions` int32 [tokens], `cu_seqlens` of the others as in `StepArrays`."""

    q: Any
    positions: Any
    cu_seqlens: Any
    sequences: int
    singles: int
    heads: int
    softmax_scale: float


def page_masses_launches(
    constants: Mapping[str, Any], rows: LastQueries, pool: Pool, tables: Tables, pages: int, to: tuple[Any, Any, int]
) -> Iterator[tuple[Launch, Launch]]:
    """Launch `kernels.page_masses.page_logsums`, whose constants these are, and `page_masses` in turn, for as many
    sequences at once as fit. `to`: logsums (working memory), masses float32 [sequences, pages], and how many float32
    logsums holds, at least heads * `pages`. `pages`: most of a sequence; `tables` may be wider."""
    logsums, masses, room = to
    together = max(1, room // (rows.heads * pages))
    shape = pool.shape
    for first in range(0, rows.sequences, together):
        count = min(together, rows.sequences - first)
        shared = {"positions": rows.positions, "cu_seqlens": rows.cu_seqlens, "logsums": logsums}
        shared |= {"first": first, "singles": rows.singles, "pages": pages}
        read = {"q": rows.q, "q_row": rows.heads * shape.head_dim, "softmax_scale": rows.softmax_scale}
        read |= {"pool": pool.pointer, "kv_scale": pool.scales, "pool_page": shape.strides()["pool_page"]}
        read |= {"tables": tables.pointer, "table_length": tables.length}
        yield (
            Launch((div_ceil(pages, constants["SPAN"]), shape.kv_heads, count), shared | read),
            Launch((count, 1, 1), {**shared, "masses": masses}),
        )
