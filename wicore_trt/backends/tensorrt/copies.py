"""Copies of KV between pages and slots: the executor's protocol, and its implementation in torch.

Layouts: pool [pages, layers, 2 (K, V), page_tokens, kv_heads, head_dim], cache [layers, 2, slots, kv_heads, entries,
head_dim]. Must not know sequences or windows. Invariants: only the tokens asked for are written; pages and slots of one
dtype exchange bits; FP8 pages hold E4M3 of value / scale, saturated, so that a value read from a page goes back to the
same byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from wicore_trt.backends.tensorrt.slots import PageCopy, Slide
from wicore_trt.runtime.dtypes import E4M3, E4M3_MAX

TOKENS_AT_ONCE = 1024  # bounds the memory that a copy needs beside pages and slots


class SlotCopier(Protocol):
    """Copier whose work is in order with the runs of the executor's stream."""

    def clear(self, slot: int) -> None:
        """Zero all caches of a slot: a hidden value has weight 0, and 0 times old contents must be 0."""

    def load(self, group: str, copies: Sequence[PageCopy]) -> None:
        """Copy pages to slots."""

    def store(self, group: str, copies: Sequence[PageCopy]) -> None:
        """Copy slots to pages."""

    def slide(self, group: str, moves: Sequence[Slide]) -> None:
        """Move entries to the front of their slots; source and target may overlap."""


class TorchSlotCopier:
    """Implements `SlotCopier` on any torch device. `scales[group]` float32 [layers] are the scales of FP8 pages."""

    def __init__(
        self, pools: Mapping[str, torch.Tensor], caches: Mapping[str, torch.Tensor], scales: Mapping[str, torch.Tensor]
    ) -> None:
        self._pools, self._caches = pools, caches
        self._scales = {group: scale.view(1, -1, 1, 1, 1) for group, scale in scales.items()}

    def clear(self, slot: int) -> None:
        for cache in self._caches.values():
            cache[:, :, slot].zero_()

    def load(self, group: str, copies: Sequence[PageCopy]) -> None:
        pool, cache = self._pools[group], self._caches[group]
        for page, token, slot, entry in self._list_indices(copies, pool):
            if pool.dtype == E4M3:  # E4M3 has no indexing everywhere
                values = pool.view(torch.uint8)[page, :, :, token].view(E4M3).float() * self._scales[group]
            else:
                values = pool[page, :, :, token]
            cache[:, :, slot, :, entry] = values.to(cache.dtype)  # values [n, layers, 2, kv_heads, head_dim]

    def store(self, group: str, copies: Sequence[PageCopy]) -> None:
        pool, cache = self._pools[group], self._caches[group]
        for page, token, slot, entry in self._list_indices(copies, pool):
            values = cache[:, :, slot, :, entry]
            if pool.dtype == E4M3:
                scaled = (values.float() / self._scales[group]).clamp(-E4M3_MAX, E4M3_MAX)
                pool.view(torch.uint8)[page, :, :, token] = scaled.to(E4M3).view(torch.uint8)
            else:
                pool[page, :, :, token] = values

    def slide(self, group: str, moves: Sequence[Slide]) -> None:
        cache = self._caches[group]
        for move in moves:
            kept = cache[:, :, move.slot, :, move.first : move.first + move.keep].clone()
            cache[:, :, move.slot, :, : move.keep] = kept

    def _list_indices(self, copies: Sequence[PageCopy], pool: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """List (page, token of the page, slot, entry) of each token, in pieces."""
        columns: list[list[torch.Tensor]] = [[], [], [], []]
        for copy in copies:
            at = torch.arange(copy.offset, copy.offset + copy.tokens)
            columns[0].append(torch.tensor(list(copy.pages))[at // pool.shape[3]])
            columns[1].append(at % pool.shape[3])
            columns[2].append(torch.full_like(at, copy.slot))
            columns[3].append(torch.arange(copy.entry, copy.entry + copy.tokens))
        joined = torch.stack([torch.cat(column) for column in columns]).to(pool.device, non_blocking=True)
        return [tuple(piece) for piece in torch.split(joined, TOKENS_AT_ONCE, dim=1)]
