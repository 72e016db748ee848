"""Which block sizes run a linear layer on which GPU: measured ones, and a rule for what was not measured.

Knows shapes and targets only. Invariant: a configuration depends on the bucket of the number of rows, never on the
number itself, so rows of one bucket are summed alike.

`MEASURED` is filled from `python -m wicore_trt.bench.gpu_linear`, which prints its lines.
"""

from __future__ import annotations

from wicore_trt.plugins.linear_layout import LinearConfig, LinearShape

BUCKETS = (1, 8, 16, 32, 64, 128)
"""Rows of a launch, rounded up; more than the last are blocks of the last."""
PROGRAMS = 264
"""Programs that fill a large GPU: two for each of 132 SMs."""

Key = tuple[str, int, int, str, bool, int]
"""(target, n, k, kind, geglu, bucket); kind is "w16", "w8" or "w8x8"."""
MEASURED: dict[Key, LinearConfig] = {}


def bucket_of(tokens: int) -> int:
    """The smallest bucket that holds `tokens` rows, or the largest one."""
    return next((b for b in BUCKETS if tokens <= b), BUCKETS[-1])


def key_of(target: str, shape: LinearShape, tokens: int) -> Key:
    kind = "w16" if shape.weights != "fp8" else "w8x8" if shape.fp8_input else "w8"
    return (target, shape.n, shape.k, kind, shape.geglu, bucket_of(tokens))


def linear_config(target: str, shape: LinearShape, tokens: int) -> LinearConfig:
    """The measured configuration, or one by rule."""
    return MEASURED.get(key_of(target, shape, tokens)) or by_rule(shape, bucket_of(tokens))


def by_rule(shape: LinearShape, bucket: int) -> LinearConfig:
    """Blocks that keep 16 KiB or more of weights on their way per SM, and enough programs for every SM.

    One row needs no matrix unit. E4M3 weights are widened in registers: from 64 weight rows and 4 warps on, sm90 would
    take its warp-group products, whose operand Triton 3.6 then fetches from shared memory 2 bytes at a time, so few
    rows use blocks of 32. From 64 rows on, activations are the larger traffic, and larger blocks read them less often.
    """
    if bucket == 1 and not shape.fp8_input:
        block_k = 1024 if shape.k >= 4096 else 512
        return LinearConfig("vector", 2 if shape.geglu else 4, block_k, unroll=2)
    columns = max(16, bucket) if shape.fp8_input else bucket if bucket > 1 else 8
    wide = columns >= 64
    block_n = 128 if wide and not shape.geglu else 64 if wide or shape.weights != "fp8" or shape.fp8_input else 32
    block_k = 128 if shape.weights == "fp8" else 64
    splits = 1
    parts = -(-shape.k // block_k)
    if not shape.geglu and bucket < BUCKETS[-1]:
        for candidate in (2, 4, 8):
            full = -(-parts // candidate) * (candidate - 1) < parts
            if -(-shape.n // block_n) * splits < PROGRAMS and parts // candidate >= 4 and full:
                splits = candidate
    stages = 3 if wide else 4
    return LinearConfig("matrix", block_n, block_k, columns, splits, 8 if wide else 4, stages, evict_first=not wide)
