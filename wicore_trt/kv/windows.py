"""Which local pages of a chain a later request can want: those in the window before a point where it may start.

Arithmetic on page indices; it must not know pools or sequences. A point is a number of pages. Invariant: whatever it
says of a page follows from its index and the points alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from wicore_trt.arithmetic import div_ceil


class Windows:
    """`first_visible(n)` is the first page that a request looks at which starts behind `n` pages; a long prompt keeps a
    window every `checkpoint` pages."""

    def __init__(self, first_visible: Callable[[int], int], checkpoint: int) -> None:
        self._first_visible, self._checkpoint = first_visible, checkpoint

    def before(self, points: Iterable[int], start: int = 0, stop: int | None = None) -> set[int]:
        """Pages in the windows before these points, of [start, stop) where that is given."""
        ends = [(n, n if stop is None else min(n, stop)) for n in points if n > start]
        return {i for n, end in ends for i in range(max(start, self._first_visible(n)), end)}

    def at_checkpoints(self, start: int, stop: int) -> set[int]:
        """Of the pages [start, stop) those in the window before their next checkpoint."""
        size = self._checkpoint
        found: set[int] = set()
        for end in range(div_ceil(start + 1, size) * size, stop + size, size):
            found.update(range(max(self._first_visible(end), end - size, start), min(end, stop)))
        return found

    def passing(self, start: int, count: int, points: Iterable[int]) -> set[int]:
        """Of the pages from `start` on, those that nobody wants once there are `count` pages."""
        stop = self._first_visible(count)
        if stop <= start:
            return set()
        return set(range(start, stop)) - self.before(points, start, stop) - self.at_checkpoints(start, stop)
