"""Arithmetic on tokens, pages, blocks and bytes that many modules need: plain integers."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one value, by the dtypes of weights, activations and KV caches as manifests and settings name them."""


def div_ceil(a: int, b: int) -> int:
    """Divide a by b > 0, rounded up."""
    return -(-a // b)


def first_visible(position: int, window: int) -> int:
    """Return the first position that a query at `position` sees through a sliding `window`, its own included."""
    return max(0, position - window + 1)


def first_visible_page(position: int, window: int, page_tokens: int) -> int:
    """Return the index of the first page that a query at `position` sees through a sliding `window`."""
    return max(0, position - window + 1) // page_tokens


def pages_per_slab(page_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the pages of each layer group in a slab: the least memory that whole pages of any group fill."""
    slab_bytes = lcm(*page_bytes.values())
    return {group: slab_bytes // size for group, size in page_bytes.items()}


def least_slabs(whole: tuple[int, int], local: tuple[int, int], window: int) -> int:
    """Return the slabs that always suffice for one sequence. `whole`, `local`: (pages, pages per slab) of its global
    pages and of the most local ones it has. `window`: pages of a window; each may lie in its own slab, and so may the
    page that is being written. Global pages lie together, at least after the sequence has started again."""
    return div_ceil(*whole) + max(div_ceil(*local), window + 2)


def count_lone_pages(tokens: int, window: int, batch: int, page_tokens: int, *, loads: bool) -> tuple[int, int, int]:
    """Count the pages of one sequence of `tokens` tokens, computed `batch` at a time: its global ones, the most local
    ones it has at once, and those of a window. With `loads` it may have the window of a prefix being loaded, too."""
    whole, pages = div_ceil(tokens, page_tokens), div_ceil(window, page_tokens) + 1
    local = min(div_ceil(window + batch, page_tokens) + 1, whole) + min(pages, whole) * loads
    return whole, local, pages
