"""Copies KV pages between a torch device's pools and host buffers: the copy engine of the KV tiers.

It must not know which pages are where or why. Copies here are synchronous, which on the CPU they are anyway; a GPU's
would be queued on a stream. Invariant (`transfers.PageCopier`): a copy is done, in both directions, before the next
step can run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch


class TorchPageCopier:
    """`pools[group]` is the pool tensor, the page first; a page's bytes go out in the order of its memory."""

    def __init__(self, pools: Mapping[str, torch.Tensor]) -> None:
        self._pages = {group: pool.view(pool.shape[0], -1).view(torch.uint8) for group, pool in pools.items()}

    def to_host(self, group: str, slot: int, parts: Sequence[memoryview], done: Callable[[], None]) -> None:
        """Copy a page into `parts`, whose lengths add up to the page's bytes."""
        page, offset = self._pages[group][slot], 0
        for part in parts:
            torch.frombuffer(part, dtype=torch.uint8).copy_(page[offset : offset + len(part)])
            offset += len(part)
        assert offset == page.numel()
        done()

    def to_device(self, group: str, slot: int, parts: Sequence[memoryview], done: Callable[[], None]) -> None:
        """Fill a page from `parts`."""
        page, offset = self._pages[group][slot], 0
        for part in parts:
            page[offset : offset + len(part)].copy_(torch.frombuffer(part, dtype=torch.uint8))
            offset += len(part)
        assert offset == page.numel()
        done()
