"""4-bit weights in 16 bits for cuBLAS: two buffers, the next weight's written while the last one's is multiplied.

Knows names, buffers and two streams; neither kernels nor layers. Invariant: on the main stream a buffer is read after
its weight was written, and written again only behind all that read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class SideStream(Protocol):
    """Stream beside the main one, `stream` its handle: `follow` lets it wait for the main one's present end, `mark`
    marks its own present end, which `join` lets the main one wait for. `follow` does nothing and is False while the
    main one is recorded into a graph: that would hold a fork and a join for each of a small step's products."""

    stream: int

    def follow(self) -> bool: ...

    def mark(self) -> None: ...

    def join(self) -> None: ...


class DequantizedWeights:
    """`write` puts the kernel that writes a weight, by name, on the stream with this handle."""

    def __init__(self, write: Callable[[str, int], None], main: int, side: SideStream | None) -> None:
        self._write, self._main, self._side = write, main, side
        self._started = ""

    def provide(self, weight: str, following: str | None) -> None:
        """Let the main stream wait until `weight` is written, and begin to write `following`, of the other buffer."""
        ready = self._started == weight
        if self._side is not None and self._started:
            self._side.join()
            self._started = ""
        if not ready:
            self._write(weight, self._main)
        if self._side is not None and following is not None and self._side.follow():
            self._started = following
            self._write(following, self._side.stream)
            self._side.mark()
