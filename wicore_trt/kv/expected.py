"""Which pages sequences wait for, to be loaded or because they are parked: their time does not end meanwhile.

Plain counts by name; it must not know where pages are. Invariant: a key is in it as often as it was added and not yet
taken out.
"""

from __future__ import annotations

from collections.abc import Iterable


class Expected:
    """`key in expected`: somebody waits for that page."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def add(self, keys: Iterable[bytes]) -> None:
        """A sequence waits for these pages, until `take` of the same keys."""
        counts = self._counts
        for key in keys:
            counts[key] = counts.get(key, 0) + 1

    def take(self, keys: Iterable[bytes]) -> None:
        """It does not any more."""
        counts = self._counts
        for key in keys:
            left = counts.pop(key, 0) - 1
            if left:
                counts[key] = left

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    def check_integrity(self) -> None:
        """Assert that nothing was taken that had not been added."""
        assert all(count > 0 for count in self._counts.values()), "pages are waited for less than not at all"
