"""Copies KV pages between a torch device's pools and host buffers: the copy engine of the KV tiers.

It must not know which pages are where or why. Copies here are synchronous, which on the CPU they are anyway; a GPU's
would be queued on a stream. Invariant (`executor.PageCopier`): a copy is done, in both directions, before the next
step can run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch


class TorchPageCopier:
    """`pools[group]` is the pool tensor, the page first; a page's bytes go out in the order of its memory.

    On the CPU numpy copies, because torch would wake its thread pool for each page, which costs more than the copy.
    """

    def __init__(self, pools: Mapping[str, torch.Tensor]) -> None:
        flat = {group: pool.view(pool.shape[0], -1).view(torch.uint8) for group, pool in pools.items()}
        self._pages = {group: pages.numpy() if pages.device.type == "cpu" else pages for group, pages in flat.items()}

    def to_host(self, group: str, slot: int, parts: Sequence[memoryview], done: Callable[[], None]) -> None:
        """Copy a page into `parts`, whose lengths add up to the page's bytes."""
        page, offset = self._pages[group][slot], 0
        for part in parts:
            piece = page[offset : offset + len(part)]
            if isinstance(piece, torch.Tensor):
                torch.frombuffer(part, dtype=torch.uint8).copy_(piece)
            else:
                np.frombuffer(part, np.uint8)[:] = piece
            offset += len(part)
        assert offset == page.shape[0]
        done()

    def to_device(self, group: str, slot: int, parts: Sequence[memoryview], done: Callable[[], None]) -> None:
        """Fill a page from `parts`."""
        page, offset = self._pages[group][slot], 0
        for part in parts:
            piece = page[offset : offset + len(part)]
            if isinstance(piece, torch.Tensor):
                piece.copy_(torch.frombuffer(part, dtype=torch.uint8))
            else:
                piece[:] = np.frombuffer(part, np.uint8)
            offset += len(part)
        assert offset == page.shape[0]
        done()
