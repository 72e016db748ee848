"""The contract between page transfers and what moves pages to and from disk.

Plain types; `disk_store.DiskStore` keeps it, and says what each call does. It must not know files. Invariant: all that
transfers ask of a disk is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.pages.page import Page


class PageStore(Protocol):
    """What transfers need of `disk_store.DiskStore`."""

    @property
    def queue_depth(self) -> int: ...

    @property
    def stalled(self) -> bool: ...

    @property
    def existing_slots(self) -> int: ...

    @property
    def ending(self) -> Mapping[bytes, int]: ...

    @property
    def now(self) -> float: ...

    def write(
        self,
        page: Page,
        slots: Sequence[int],
        parts: Sequence[memoryview],
        done: Callable[[Outcome], None],
        *,
        right: Callable[[], bool],
        expires: int,
    ) -> bool: ...

    def read(
        self,
        page: Page,
        slots: Sequence[int],
        parts: Sequence[memoryview],
        done: Callable[[Outcome], None],
        *,
        seen: Callable[[], None],
        wanted: Callable[[], bool],
    ) -> bool: ...

    def erase(self, slots: Sequence[int]) -> None: ...

    def stamp(self, page: Page, slots: Sequence[int], expires: int) -> None: ...

    def expires(self, slots: Sequence[int]) -> int: ...

    def close(self, timeout_s: float) -> None: ...
