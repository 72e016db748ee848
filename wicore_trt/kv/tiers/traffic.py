"""What a tier moved, and how copies that end on another thread are told to the engine's.

It must not know pages. Invariant: seconds are those in which at least one copy of the direction was under way, so
that bytes / seconds is a rate however many copies overlap.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

Clocked = Callable[[float], None]
"""An event that is told when it happened (time.perf_counter)."""


class Traffic:
    """Bytes and seconds towards the device (`read_*`) and into a tier (`write_*`), and failures by cause."""

    def __init__(self) -> None:
        self.read_bytes = self.write_bytes = 0
        self.read_seconds = self.write_seconds = 0.0
        self.failures: Counter[str] = Counter()
        self._read_until = self._written_until = 0.0

    def read(self, count: int, begun: float, ended: float) -> None:
        """A copy towards the device; copies end in the order in which they begin."""
        self.read_bytes += count
        self.read_seconds += max(0.0, ended - max(begun, self._read_until))
        self._read_until = max(ended, self._read_until)

    def wrote(self, count: int, begun: float, ended: float) -> None:
        """A copy into the tier."""
        self.write_bytes += count
        self.write_seconds += max(0.0, ended - max(begun, self._written_until))
        self._written_until = max(ended, self._written_until)


def at_home(event: Clocked, post: Callable[[Callable[[], None]], None]) -> Callable[[], None]:
    """What any thread may call when a copy ended: runs `event` at once on the thread that is here now, and from any
    other thread posts it."""
    home = threading.get_ident()

    def done() -> None:
        now = time.perf_counter()
        if threading.get_ident() == home:
            event(now)
        else:
            post(lambda: event(now))

    return done
