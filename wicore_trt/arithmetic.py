"""Arithmetic on tokens, pages, blocks and bytes that many modules need: plain integers."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one value, by the dtypes of weights, activations and KV caches as manifests and settings name them."""


def div_ceil(a: int, b: int) -> int:
    """a / b rounded up, for b > 0: how many parts of b hold a."""
    return -(-a // b)


def first_visible(position: int, window: int) -> int:
    """The first position that a query at `position` sees through a sliding `window`, which holds the query's own."""
    return max(0, position - window + 1)


def first_visible_page(position: int, window: int, page_tokens: int) -> int:
    """Index of the first page of `page_tokens` tokens that a query at `position` sees through a sliding `window`."""
    return first_visible(position, window) // page_tokens


def pages_per_slab(page_bytes: Mapping[str, int]) -> dict[str, int]:
    """Pages of each layer group in a slab, the least memory that a whole number of pages of any group fills."""
    slab_bytes = lcm(*page_bytes.values())
    return {group: slab_bytes // size for group, size in page_bytes.items()}


def least_slabs(whole: tuple[int, int], local: tuple[int, int], window: int) -> int:
    """Slabs in which one sequence finds room whatever happens: `whole` and `local` are (pages, pages per slab) of its
    global pages and of its local ones at most. Those of a `window`, so many pages, may lie in a slab each, with a
    page more that is being written; the global ones are together, at least after it has started afresh."""
    return div_ceil(*whole) + max(div_ceil(*local), window + 2)
