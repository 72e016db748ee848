"""Arithmetic on tokens, pages and blocks that many modules need: plain integers, no imports."""

from __future__ import annotations


def div_ceil(a: int, b: int) -> int:
    """a / b rounded up, for b > 0: how many parts of b hold a."""
    return -(-a // b)


def first_visible(position: int, window: int) -> int:
    """The first position that a query at `position` sees through a sliding `window`, which holds the query's own."""
    return max(0, position - window + 1)
