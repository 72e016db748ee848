"""KV page pools of an executor: number of pages, memory they may take, and their tensors.

Shared by all backends' executors. Must not know kernels, batches or the pages' content. Invariant: pools leave free
what was asked to stay free, so a step that a warm-up covered never runs out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch

from wicore_trt.arithmetic import ITEM_BYTES
from wicore_trt.errors import ConfigError
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.dtypes import E4M3, TORCH_DTYPES
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.options import DEFAULT_KV_BYTES, ExecutorOptions
from wicore_trt.runtime.pool_sizes import pool_sizes, shared_pages

RESERVE_BYTES = 512 << 20
"""Of a GPU's memory that stays free of pages at least: kernels that are loaded late, fragmentation, other libraries."""


def plan_layout(
    spec: Gemma3Spec,
    kv_dtype: str,
    page_tokens: int,
    max_context: int,
    settings: ExecutorOptions,
    kv_bytes: int | None = None,
) -> KVLayout:
    """Plan pools of `settings.kv_pages`, else one memory of `kv_bytes` (default `settings.kv_bytes`) for all layer
    groups. Too small memory is split between the groups. Raises ConfigError if no sequence of `max_context` fits."""
    if kv_bytes is None:
        kv_bytes = DEFAULT_KV_BYTES if settings.kv_bytes is None else settings.kv_bytes
    pages, slab_pages = settings.kv_pages, None
    if pages is None:
        budget = (spec, page_tokens, ITEM_BYTES[kv_dtype], kv_bytes, max_context)
        batch, loads = settings.max_batch_tokens, settings.loads
        shared = shared_pages(*budget, max_batch_tokens=batch, loads=loads)
        if shared is not None:
            pages, slab_pages = shared.num_pages, shared.slab_pages
        else:
            pages = pool_sizes(*budget, max_batch_tokens=batch, max_sequences=settings.max_sequences, loads=loads)
    return replace(make_layout(spec, kv_dtype, page_tokens, pages.__getitem__), slab_pages=slab_pages)


def make_layout(spec: Gemma3Spec, kv_dtype: str, page_tokens: int, pages: Callable[[str], int]) -> KVLayout:
    page_bytes = {g: spec.page_bytes(g, page_tokens, ITEM_BYTES[kv_dtype]) for g in spec.groups}
    return KVLayout(page_tokens, kv_dtype, {g: pages(g) for g in spec.groups}, page_bytes)


def make_pools(
    spec: Gemma3Spec, layout: KVLayout, empty: Callable[[Sequence[int], torch.dtype], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Make for each layer group [pages, layers, 2 (K, V), page_tokens, kv_heads, head_dim], filled with NaN. So reading
    an unwritten slot fails the sequence. With `layout.slab_pages` the pools are views of one memory."""
    dtype = TORCH_DTYPES[layout.kv_dtype]
    groups = {name: spec.layer_group(name) for name in layout.num_pages}
    shapes = {
        name: (layout.num_pages[name], len(g.layers), 2, layout.page_tokens, g.num_kv_heads, g.head_dim)
        for name, g in groups.items()
    }
    if layout.slab_pages is None:
        return {group: _of_nan(empty(shape, dtype)) for group, shape in shapes.items()}
    memory = _of_nan(empty((layout.memory_bytes // dtype.itemsize,), dtype))
    return {group: memory[: prod(shape)].view(shape) for group, shape in shapes.items()}


def _of_nan(memory: torch.Tensor) -> torch.Tensor:
    if memory.dtype == E4M3:
        memory.view(torch.uint8).fill_(0x7F)
    else:
        memory.fill_(torch.nan)
    return memory


def spare_bytes(unclaimed: int, total: int, fraction: float) -> int:
    """Count bytes for pages when `unclaimed` of a GPU's `total` are left after all other allocations and the largest
    steps. 1 - `fraction` of the GPU stays free, and at least RESERVE_BYTES."""
    return max(0, unclaimed - max(RESERVE_BYTES, int((1.0 - fraction) * total)))


def check_pool_room(layout: KVLayout, free_bytes: int) -> None:
    """Raises ConfigError where the pools do not fit into `free_bytes` and leave RESERVE_BYTES."""
    needed = layout.memory_bytes
    room = max(free_bytes - RESERVE_BYTES, 0)
    if needed > room:
        raise ConfigError(
            f"KV pages of {needed:,} bytes do not fit: beside the engine the GPU has {room:,} bytes for them.",
            fix="Lower kv.device_bytes, or leave it out: then the pools take what is there.",
        )
