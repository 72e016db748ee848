"""Places in the memory that ranks share, and the launches of the kernels that meet there: plain arithmetic.

Knows sizes and addresses as integers; neither Triton nor CUDA. Invariants: all ranks have the same layout, so that a
place in one block is found in another by its distance from the beginning; a block is zeros before a peer sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from wicore_trt.arithmetic import ITEM_BYTES, div_ceil
from wicore_trt.plugins.layout import Launch

PUSHED_ROWS = 128
"""The most rows of a step that ranks push to each other; of more rows each rank reads its peers' products."""
FLAGS, EPOCH, BROKEN, TURNS = 0, 64, 65, 128
"""int32 items of a block: by rank the meetings to which it has come; the meetings of this rank; 1 when it has waited in
vain; by row how often it was pushed."""
SLOTS_BYTES = 4 * (TURNS + PUSHED_ROWS)
"""Begin of the slots [2, ranks, PUSHED_ROWS, hidden]."""
LOGITS, RESIDUAL, NORMED, NORMED_SCALES = 2, 3, 4, 5
"""Parts of a block behind products 0 and 1."""
GATHERED = 2048
"""Columns of a program of `gather_columns`."""


def pushed_type(dtype: str) -> str:
    """Choose the type in which rows are pushed: a float16 engine's products may exceed float16."""
    return "bfloat16" if dtype == "bfloat16" else "float32"


@dataclass(frozen=True)
class ExchangeLayout:
    """Layout of a rank's block: items above, slots of rows of `pushed` type, two products [`tokens`, `hidden`] of up to
    `item_bytes` each, and the rank's logits float32 [`rows`, `columns`]. Where rows have owners, also the residual
    float32 [`tokens`, `hidden`], norms of up to 16 bits, and their scales float32 [`tokens`]."""

    ranks: int
    hidden: int
    pushed: str
    tokens: int
    item_bytes: int
    rows: int
    columns: int

    @property
    def owns_rows(self) -> bool:
        """Tell whether more rows than PUSHED_ROWS have owners."""
        return self.ranks > 2 and self.tokens > PUSHED_ROWS

    @cached_property
    def part_offsets(self) -> tuple[int, ...]:
        """Bytes from the block's beginning to both products, the parts behind them, and the end."""
        slots = SLOTS_BYTES + 2 * self.ranks * PUSHED_ROWS * self.hidden * ITEM_BYTES[self.pushed]
        product, owned = self.tokens * self.hidden * self.item_bytes, self.tokens if self.owns_rows else 0
        parts = product, product, 4 * self.rows * self.columns, 4 * owned * self.hidden, 2 * owned * self.hidden
        return tuple(accumulate(div_ceil(size, 256) * 256 for size in (slots, *parts, 4 * owned)))

    @property
    def size_bytes(self) -> int:
        return self.part_offsets[-1]


def meet_launch(ranked: Mapping[str, Any]) -> Launch:
    """Launch `kernels.exchange.meet`. `ranked` is what every kernel takes that reaches peers: `peers` int64 [ranks],
    the addresses of all blocks, this `rank`, and `failed` int32 [1] in host memory."""
    return Launch((1, 1, 1), {**ranked})


def gather_launch(
    constants: Mapping[str, Any], columns: Any, logits: Any, rows: int, ranked: Mapping[str, Any]
) -> Launch:
    """Launch `kernels.exchange.gather_columns` of float32 `columns` [rows, COLUMNS] of each rank to `logits`."""
    grid = (div_ceil(constants["COLUMNS"], GATHERED), rows, constants["RANKS"])
    return Launch(grid, {"columns": columns, "logits": logits, **ranked})


def collect_launch(residual: Any, rows: Any, out: Any, count: int, ranked: Mapping[str, Any]) -> Launch:
    """Launch `kernels.exchange.collect_rows` of the residual's `rows` int32 [count] to `out` float32 [count, H]."""
    return Launch((count, 1, 1), {"residual": residual, "rows": rows, "out": out, **ranked})
