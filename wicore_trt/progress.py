"""Reports of how far a long piece of work is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""progress(phase, done, total): `done` of `total` in the phase's own unit (bytes, or tensors)."""


def ignore_progress(phase: str, done: int, total: int) -> None:
    """Ignore the report."""


def count_progress(progress: Progress, phase: str, total: int) -> Callable[[int], None]:
    """Return a function that adds to `done` and reports the sum."""
    done = 0

    def moved(count: int) -> None:
        nonlocal done
        done += count
        progress(phase, done, total)

    moved(0)
    return moved
