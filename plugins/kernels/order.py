"""Order of the columns of x for `kernels.linear_q4_groups`, which explains it.

Knows pointers and sizes. Invariant: columns move within 32 alone, and no value changes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.turns import take_turn


@triton.jit
def order_columns(column):
    """Place of a column: 32 b + 8 t + 4 h + 2 u + i at 32 b + 16 h + 8 u + 2 t + i. Pairs (i) stay together."""
    place = column // 4 % 2 * 16 + column // 2 % 2 * 8 + column // 8 % 4 * 2 + column % 2
    return column // 32 * 32 + place


@triton.jit
def order_rows(x, out, K: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = 0):
    """out [rows, K] of x [rows, K], both 16 bit. Grid: (rows, cdiv(K, BLOCK))."""
    take_turn(DEPENDENT)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * K
    value = tl.load(x + at + column, mask=column < K)
    tl.store(out + at + order_columns(column), value, mask=column < K)
