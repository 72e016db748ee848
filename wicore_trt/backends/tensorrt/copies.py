"""Copies of KV between pages and slots, by torch's operators and in order with the runs of the executor's stream.

Layouts: pool [pages, layers, 2 (K, V), page_tokens, kv_heads, head_dim], cache [layers, 2, slots, kv_heads, entries,
head_dim]. Must not know sequences or windows. Invariants: only the tokens asked for are written; pages and slots of one
dtype exchange bits; FP8 pages hold E4M3 of value / scale, saturated, so that a value read from a page goes back to the
same byte. A copy's indices are on the stream before it and stay until the stream has passed it: torch reuses memory
freed on a stream for that stream's later work only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from wicore_trt.backends.tensorrt.slots import PageCopy, Slide
from wicore_trt.runtime.dtypes import E4M3, E4M3_MAX

TOKENS_AT_ONCE = 1024  # bounds the memory that a copy needs beside pages and slots
Tensors = Mapping[str, torch.Tensor]


class SlotCopier:
    """Copier between `pools` and `caches` of the groups. `scales[group]` float32 [layers] are the scales of FP8
    pages."""

    def __init__(self, pools: Tensors, caches: Tensors, scales: Tensors) -> None:
        self._pools, self._caches = pools, caches
        self._scales = {group: scale.view(1, -1, 1, 1, 1) for group, scale in scales.items()}

    def clear(self, slot: int) -> None:
        """Zero all caches of a slot: a hidden value has weight 0, and 0 times old contents must be 0."""
        for cache in self._caches.values():
            cache[:, :, slot].zero_()

    def load(self, group: str, copies: Sequence[PageCopy]) -> None:
        """Copy pages to slots."""
        pool, cache = self._pools[group], self._caches[group]
        for page, token, slot, entry in _list_indices(copies, pool):
            if pool.dtype == E4M3:  # E4M3 has no indexing everywhere
                values = pool.view(torch.uint8)[page, :, :, token].view(E4M3).float() * self._scales[group]
            else:
                values = pool[page, :, :, token]
            cache[:, :, slot, :, entry] = values.to(cache.dtype)  # values [n, layers, 2, kv_heads, head_dim]

    def store(self, group: str, copies: Sequence[PageCopy]) -> None:
        """Copy slots to pages."""
        pool, cache = self._pools[group], self._caches[group]
        for page, token, slot, entry in _list_indices(copies, pool):
            values = cache[:, :, slot, :, entry]
            if pool.dtype == E4M3:
                scaled = (values.float() / self._scales[group]).clamp(-E4M3_MAX, E4M3_MAX)
                pool.view(torch.uint8)[page, :, :, token] = scaled.to(E4M3).view(torch.uint8)
            else:
                pool[page, :, :, token] = values

    def slide(self, group: str, moves: Sequence[Slide]) -> None:
        """Move entries to the front of their slots; source and target may overlap."""
        cache = self._caches[group]
        for move in moves:
            kept = cache[:, :, move.slot, :, move.first : move.first + move.keep].clone()
            cache[:, :, move.slot, :, : move.keep] = kept


def _list_indices(copies: Sequence[PageCopy], pool: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """List (page, token of the page, slot, entry) of each token, in pieces, by few operations for any number of
    copies. Nothing waits for the upload: the driver buffers pageable memory."""
    tokens = np.array([copy.tokens for copy in copies])
    tables = [page for copy in copies for page in copy.pages]
    firsts = np.cumsum([0, *(len(copy.pages) for copy in copies[:-1])])  # of each copy, in `tables`
    index = np.arange(tokens.sum()) - np.repeat(np.cumsum(tokens) - tokens, tokens)  # of each token, in its copy
    facts = np.array([(copy.offset, copy.slot, copy.entry) for copy in copies])
    offset, slot, entry = np.repeat(facts, tokens, axis=0).T
    page, token = np.divmod(offset + index, pool.shape[3])
    rows = np.stack([np.array(tables)[np.repeat(firsts, tokens) + page], token, slot, entry + index])
    joined = torch.from_numpy(rows).to(pool.device, non_blocking=True)
    return [tuple(piece) for piece in torch.split(joined, TOKENS_AT_ONCE, dim=1)]
