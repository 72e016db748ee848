"""Arithmetic on tokens, pages, blocks and bytes that many modules need: plain integers, no imports."""

from __future__ import annotations

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
