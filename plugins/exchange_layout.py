"""Places in the memory that ranks share, and the launches of the kernels that meet there: plain arithmetic.

Knows sizes and addresses as integers; neither Triton nor CUDA. Invariants: all ranks have the same layout, so that a
place in one block is found in another by its distance from the beginning; a block is zeros before a peer sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wicore_trt.arithmetic import ITEM_BYTES, div_ceil
from wicore_trt.plugins.layout import Launch

PUSHED_ROWS = 128
"""The most rows of a step that ranks push to each other; of more rows each rank reads its peers' products."""
FLAGS, EPOCH, BROKEN, TURNS = 0, 64, 65, 128
"""int32 items of a block: by rank the meetings to which it has come; the meetings of this rank; 1 when it has waited in
vain; by row how often it was pushed."""
SLOTS_BYTES = 4 * (TURNS + PUSHED_ROWS)
"""Where the slots begin: [2, ranks, PUSHED_ROWS, hidden]."""
GATHERED = 2048
"""Columns of a program of `gather_columns`."""


def pushed_type(dtype: str) -> str:
    """Choose the type in which rows are pushed: a float16 engine's products may exceed float16."""
    return "bfloat16" if dtype == "bfloat16" else "float32"


@dataclass(frozen=True)
class ExchangeLayout:
    """Layout of a rank's block: items above, slots of rows of `pushed` type, two products [`tokens`, `hidden`] of up to
    `item_bytes` each, and the rank's logits float32 [`rows`, `columns`]."""

    ranks: int
    hidden: int
    pushed: str
    tokens: int
    item_bytes: int
    rows: int
    columns: int

    @property
    def product_offsets(self) -> tuple[int, int, int]:
        """Bytes from the block's beginning to both products, and to the logits behind them."""
        slots = 2 * self.ranks * PUSHED_ROWS * self.hidden * ITEM_BYTES[self.pushed]
        first = _align(SLOTS_BYTES + slots)
        each = _align(self.tokens * self.hidden * self.item_bytes)
        return first, first + each, first + 2 * each

    @property
    def size_bytes(self) -> int:
        return _align(self.product_offsets[2] + 4 * self.rows * self.columns)


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


def _align(size: int) -> int:
    return div_ceil(size, 256) * 256
