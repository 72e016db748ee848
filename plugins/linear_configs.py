"""Block sizes of linear layers by GPU: measured ones, and a rule for the rest.

Knows shapes and targets only. Invariant: a configuration depends on the bucket of the number of rows, never on the
number itself, so rows of one bucket are summed alike. `python -m benchmarks.gpu.kernels.linear` prints the lines of
`MEASURED`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from wicore_trt.arithmetic import ITEM_BYTES, div_ceil
from wicore_trt.plugins.linear_layout import GROUPS, LinearConfig, LinearShape

BUCKETS = (1, 8, 16, 32, 64, 128)
"""Rows of a launch, rounded up; more than the last are blocks of the last."""
PROGRAMS = 264
"""Programs that fill a large GPU: two for each of 132 SMs."""

Key = tuple[str, int, int, str, bool, int]
"""(target, n, k, kind, geglu, bucket); kind is "w16", "w8", "w8x8" or "w4"."""
# (n, k, kind, geglu): (bucket, block_n, block_k, columns, splits, num_warps, num_stages, unroll). "w4" is "tiles", of
# the rest bucket 1 "vector", the others "matrix". 27B on an H100, 2026-11-21.
_SM90: dict[tuple[int, int, str, bool], tuple[tuple[int, ...], ...]] = {
    (5376, 21504, "w16", False): (
        (1, 4, 1024, 1, 1, 4, 1, 1), (8, 32, 128, 8, 2, 4, 4, 1), (16, 32, 128, 16, 2, 4, 4, 1),
        (32, 64, 128, 32, 3, 4, 3, 1), (64, 64, 128, 64, 3, 8, 3, 1),
    ),
    (21504, 5376, "w16", True): (
        (1, 1, 1024, 1, 1, 4, 1, 2), (8, 32, 128, 8, 1, 4, 4, 1), (16, 32, 128, 16, 1, 4, 4, 1),
        (32, 64, 128, 32, 1, 4, 4, 1), (64, 64, 128, 64, 1, 4, 4, 1),
    ),
    (262208, 5376, "w16", False): (
        (1, 2, 1024, 1, 1, 4, 1, 2), (8, 64, 128, 8, 1, 4, 4, 1), (16, 64, 128, 16, 1, 4, 4, 1),
        (32, 64, 128, 32, 1, 4, 4, 1), (64, 64, 128, 64, 1, 4, 4, 1),
    ),
    (5376, 4096, "w16", False): (
        (1, 2, 1024, 1, 1, 4, 1, 2), (8, 64, 128, 8, 1, 4, 4, 1), (16, 64, 128, 16, 1, 4, 4, 1),
        (32, 64, 128, 32, 1, 4, 4, 1), (64, 64, 128, 64, 3, 8, 3, 1),
    ),
    (8192, 5376, "w16", False): (
        (1, 2, 1024, 1, 1, 4, 1, 2), (8, 32, 128, 8, 1, 4, 4, 1), (16, 64, 128, 16, 1, 4, 4, 1),
        (32, 64, 128, 32, 1, 4, 6, 1), (64, 64, 128, 64, 1, 4, 6, 1),
    ),
    (5376, 21504, "w8", False): (
        (1, 2, 2048, 1, 1, 4, 1, 2), (8, 64, 256, 8, 3, 4, 3, 1), (16, 32, 256, 16, 2, 4, 4, 1),
        (32, 32, 256, 32, 2, 4, 4, 1), (64, 64, 256, 64, 1, 4, 4, 1),
    ),
    (21504, 5376, "w8", True): (
        (1, 1, 2048, 1, 1, 4, 1, 2), (8, 64, 256, 8, 1, 4, 2, 1), (16, 32, 128, 16, 1, 2, 4, 1),
        (32, 32, 128, 32, 1, 2, 4, 1), (64, 64, 128, 64, 1, 4, 4, 1),
    ),
    (5376, 4096, "w8", False): (
        (1, 2, 2048, 1, 1, 4, 1, 2), (8, 32, 256, 8, 1, 2, 4, 1), (16, 32, 256, 16, 2, 4, 4, 1),
        (32, 64, 128, 32, 4, 4, 4, 1), (64, 64, 256, 64, 1, 4, 4, 1),
    ),
    (8192, 5376, "w8", False): (
        (1, 2, 2048, 1, 1, 4, 1, 2), (8, 32, 256, 8, 1, 2, 5, 1), (16, 32, 256, 16, 1, 4, 4, 1),
        (32, 64, 128, 32, 1, 4, 4, 1), (64, 64, 256, 64, 1, 4, 4, 1),
    ),
    (5376, 21504, "w8x8", False): (
        (16, 64, 256, 16, 4, 4, 3, 1), (32, 64, 256, 32, 3, 4, 3, 1), (64, 64, 256, 64, 3, 8, 3, 1),
        (128, 64, 128, 128, 3, 8, 4, 1),
    ),
    (21504, 5376, "w8x8", True): (
        (16, 64, 256, 16, 1, 4, 3, 1), (32, 64, 128, 32, 1, 4, 3, 1), (64, 64, 128, 64, 1, 4, 3, 1),
        (128, 64, 256, 128, 1, 8, 3, 1),
    ),
    (5376, 4096, "w8x8", False): (
        (16, 64, 128, 16, 4, 4, 4, 1), (32, 64, 512, 32, 1, 8, 4, 1), (64, 64, 128, 64, 3, 8, 4, 1),
        (128, 64, 128, 128, 3, 8, 4, 1),
    ),
    (8192, 5376, "w8x8", False): (
        (16, 64, 256, 16, 3, 4, 3, 1), (32, 64, 128, 32, 1, 4, 8, 1), (64, 64, 128, 64, 1, 4, 8, 1),
        (128, 64, 128, 128, 1, 4, 8, 1),
    ),
    (5376, 21504, "w4", False): (
        (1, 32, 64, 8, 6, 2, 2, 4), (8, 32, 64, 8, 6, 2, 2, 4), (16, 64, 64, 16, 6, 4, 1, 3),
        (32, 64, 128, 32, 3, 4, 1, 2), (64, 128, 64, 64, 3, 8, 1, 2), (128, 128, 64, 64, 3, 8, 1, 2),
    ),
    (21504, 5376, "w4", True): (
        (1, 32, 128, 8, 1, 4, 2, 2), (8, 32, 128, 8, 1, 4, 2, 2), (16, 64, 64, 16, 1, 4, 1, 3),
        (32, 64, 128, 32, 1, 8, 1, 2), (64, 128, 64, 32, 1, 8, 1, 2), (128, 128, 64, 32, 1, 8, 1, 2),
    ),
    (5376, 4096, "w4", False): (
        (1, 32, 64, 8, 6, 2, 2, 4), (8, 32, 64, 8, 6, 2, 2, 4), (16, 64, 64, 16, 6, 4, 1, 3),
        (32, 64, 128, 32, 3, 4, 1, 2), (64, 64, 64, 64, 3, 4, 1, 2), (128, 64, 64, 64, 3, 4, 1, 2),
    ),
    (8192, 5376, "w4", False): (
        (1, 32, 256, 8, 1, 8, 3, 3), (8, 32, 256, 8, 1, 8, 3, 3), (16, 64, 64, 16, 4, 4, 1, 3),
        (32, 64, 128, 32, 2, 4, 1, 2), (64, 64, 128, 64, 1, 8, 1, 2), (128, 64, 128, 64, 1, 8, 1, 2),
    ),
    # halves of layers, of two ranks, 2026-11-27; what is not here is as the whole layer's
    (5376, 10752, "w16", False): ((1, 1, 2048, 1, 1, 4, 1, 2),),
    (10752, 5376, "w16", True): (
        (1, 2, 512, 1, 1, 4, 1, 2), (16, 64, 64, 16, 1, 4, 4, 1), (32, 64, 64, 32, 1, 4, 4, 1),
        (64, 64, 64, 64, 1, 4, 4, 1),
    ),
    (5376, 2048, "w16", False): ((1, 1, 2048, 1, 1, 4, 1, 2), (64, 64, 128, 64, 1, 4, 4, 1)),
    (4096, 5376, "w16", False): (
        (8, 16, 256, 8, 1, 4, 4, 1), (16, 16, 256, 16, 1, 4, 4, 1), (32, 16, 256, 32, 1, 4, 4, 1),
        (64, 64, 128, 64, 1, 4, 4, 1),
    ),
    (10752, 5376, "w4", True): (
        (1, 32, 64, 8, 3, 2, 2, 4), (8, 32, 64, 8, 3, 2, 2, 4), (16, 32, 128, 16, 1, 4, 1, 3),
        (32, 64, 64, 32, 3, 4, 1, 2), (64, 64, 128, 32, 1, 8, 1, 2),
    ),
    (5376, 2048, "w4", False): (
        (1, 32, 64, 8, 4, 2, 2, 4), (8, 32, 64, 8, 4, 2, 2, 4),
    ),
    (4096, 5376, "w4", False): (
        (1, 64, 128, 8, 4, 8, 2, 4), (8, 64, 128, 8, 4, 8, 2, 4), (16, 64, 64, 16, 6, 4, 1, 3),
        (32, 64, 64, 32, 6, 4, 1, 2),
    ),
    (5376, 10752, "w8", False): ((1, 4, 1024, 1, 1, 4, 1, 2),),
    (10752, 5376, "w8", True): ((8, 32, 128, 8, 1, 2, 4, 1), (64, 128, 128, 64, 1, 8, 4, 1)),
    (5376, 2048, "w8", False): ((8, 32, 128, 8, 1, 2, 6, 1),),
    (4096, 5376, "w8", False): ((8, 64, 128, 8, 5, 4, 4, 1),),
    (10752, 5376, "w8x8", True): (
        (32, 64, 128, 32, 1, 4, 4, 1), (64, 64, 128, 64, 1, 4, 4, 1), (128, 128, 128, 128, 1, 8, 4, 1),
    ),
    (5376, 2048, "w8x8", False): (
        (16, 64, 128, 16, 2, 4, 4, 1), (64, 64, 128, 64, 1, 4, 4, 1), (128, 64, 128, 128, 1, 4, 4, 1),
    ),
    (4096, 5376, "w8x8", False): ((16, 64, 256, 16, 5, 4, 3, 1),),
}  # fmt: skip


def _read_measured() -> dict[Key, LinearConfig]:
    found: dict[Key, LinearConfig] = {}
    for key, rows in _SM90.items():
        for bucket, block_n, block_k, columns, splits, warps, stages, unroll in rows:
            kind: Literal["vector", "matrix", "tiles"] = "vector" if bucket == 1 else "matrix"
            kind = "tiles" if key[2] == "w4" else kind
            sizes = (block_n, block_k, columns, splits, warps, stages, unroll)
            found["sm90", *key, bucket] = LinearConfig(kind, *sizes, bucket <= columns)
    return found


MEASURED = _read_measured()
# (n, k, geglu): parts of sums of "groups" by columns. 27B on an H100, 2026-11-27: in all 1.49 times as fast as "tiles"
# at 32 rows, and 1.1 times at 16.
MEASURED_GROUPS = {
    (5376, 21504, False): {16: 6, 32: 3}, (21504, 5376, True): {16: 1, 32: 1},
    (5376, 4096, False): {16: 3, 32: 3}, (8192, 5376, False): {16: 4, 32: 2},
}  # fmt: skip


def find_bucket(tokens: int) -> int:
    """Find the smallest bucket that holds `tokens` rows, or the largest one."""
    return next((b for b in BUCKETS if tokens <= b), BUCKETS[-1])


def config_key(target: str, shape: LinearShape, tokens: int) -> Key:
    bits = 4 if shape.four_bit else 8 * ITEM_BYTES[shape.weights.storage]
    kind = f"w{bits}{'x8' if shape.fp8_input else ''}"
    return (target, shape.n, shape.k, kind, shape.geglu, find_bucket(tokens))


def linear_config(target: str, shape: LinearShape, tokens: int) -> LinearConfig:
    """Choose what was measured for the layer, else what fits it of the whole layer of which it is a rank's part, else
    by rule."""
    key = target, n, k, kind, geglu, bucket = config_key(target, shape, tokens)
    if key in MEASURED:
        return MEASURED[key]
    keys = ((target, *s, kind, geglu, bucket) for r in (2, 4, 8) for s in ((n * r, k), (n, k * r)))
    found = next((MEASURED[whole] for whole in keys if whole in MEASURED), None)
    return _fill_gpu(shape, found) if found else choose_by_rule(shape, find_bucket(tokens))


def groups_config(target: str, shape: LinearShape, tokens: int) -> LinearConfig | None:
    """Choose a configuration by warp groups where one was measured. It takes ordered x, so a step that has it for some
    of its layers alone cannot use it."""
    bucket, none = find_bucket(tokens), dict[int, int]()
    splits = MEASURED_GROUPS.get((shape.n, shape.k, shape.geglu), none) if target == "sm90" else none
    if bucket not in splits or not shape.four_bit or shape.weights.minimums:
        return None
    return LinearConfig(GROUPS, 64 if shape.geglu else 128, 128, bucket, splits[bucket], 4, 3)


def _fill_gpu(shape: LinearShape, config: LinearConfig) -> LinearConfig:
    """Split sums so that a rank's part keeps most of a GPU busy, but into no more parts than there are. Gate and up
    take smaller blocks; of widened E4M3 weights, bound by widening, also where a third of a GPU idled at the end."""
    parts, splits = div_ceil(shape.k, config.block_k), config.splits
    while splits > 1 and div_ceil(parts, splits) * (splits - 1) >= parts:
        splits -= 1
    halves = config.kind == "matrix" and shape.geglu and not shape.fp8_input and config.block_n == 64
    if halves and config.count_blocks(shape) < (PROGRAMS if shape.weights.fp8 else PROGRAMS // 2):
        config = replace(config, block_n=32)
    splits_more = config.kind != "vector" and not shape.geglu
    while splits_more and config.count_blocks(shape) * splits < PROGRAMS // 4 and parts >= 16 * splits:
        splits *= 2
    return replace(config, splits=splits)


def choose_by_rule(shape: LinearShape, bucket: int) -> LinearConfig:
    """Choose blocks that keep 16 KiB or more of weights on their way per SM, and enough programs for every SM. One row
    needs no matrix unit. E4M3 weights are widened in registers. From 64 weight rows and 4 warps on, sm90 would use
    warp-group products, whose operand Triton 3.6 fetches from shared memory 2 bytes at a time; so few rows use blocks
    of 32. From 64 rows on, activations are the larger traffic, and larger blocks read them less often."""
    if shape.four_bit:
        return _choose_tiles(shape, bucket)
    if bucket == 1 and not shape.fp8_input:
        block_k = 1024 if shape.k >= 4096 else 512
        return LinearConfig("vector", 2 if shape.geglu else 4, block_k, unroll=2)
    columns = max(16, bucket) if shape.fp8_input else bucket if bucket > 1 else 8
    wide = columns >= 64
    block_n = 128 if wide and not shape.geglu else 64 if wide or not shape.weights.quantized or shape.fp8_input else 32
    block_k = 128 if shape.weights.quantized else 64
    splits = 1
    parts = div_ceil(shape.k, block_k)
    if not shape.geglu and bucket < BUCKETS[-1]:
        for candidate in (2, 4, 8):
            full = div_ceil(parts, candidate) * (candidate - 1) < parts
            if div_ceil(shape.n, block_n) * splits < PROGRAMS and parts // candidate >= 4 and full:
                splits = candidate
    stages = 3 if wide else 4
    return LinearConfig("matrix", block_n, block_k, columns, splits, 8 if wide else 4, stages, evict_first=not wide)


def _choose_tiles(shape: LinearShape, bucket: int) -> LinearConfig:
    """Choose for 4-bit weights: 2 KiB of them on their way to each warp. From 32 rows of x on, two warps share what L1
    gets of those. Sums are split until every SM has 16 warps."""
    columns = min(max(8, bucket), 32 if shape.geglu else 64)
    wide = columns >= 32
    warps = 8 if wide or (shape.k >= 4096 and not shape.geglu) else 4
    warps_n = 2 if wide else 1
    rows, block_k = 32 * warps_n, 32 * warps // warps_n
    splits, parts = 1, div_ceil(shape.k, block_k)
    while not shape.geglu and splits < 4 and shape.n // rows * splits * warps < 8 * PROGRAMS:
        if parts // (2 * splits) < 4 or div_ceil(parts, 2 * splits) * (2 * splits - 1) >= parts:
            break
        splits *= 2
    unroll = 2 if shape.geglu or wide else 4
    return LinearConfig("tiles", rows, block_k, columns, splits, warps, 1, unroll, evict_first=not wide)
