"""Copies of KV between pages and slots, in order with the runs of the executor's stream.

`choose_copier` takes the Triton kernels of `plugins` on a GPU with Triton and fitting heads, one launch for all copies
of a group; else torch's operators. Layouts: pool [pages, layers, 2 (K, V), page_tokens, kv_heads, head_dim], cache
[layers, 2, slots, kv_heads, entries, head_dim]. Must not know sequences or windows. Invariants: only the tokens asked
for are written; pages and slots of one dtype exchange bits; FP8 pages hold E4M3 of value / scale, saturated, so that a
value read from a page goes back to the same byte. A launch's inputs are on the stream before it and stay until the
stream has passed it. Torch ensures that: it reuses memory freed on a stream for that stream's later work only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from wicore_trt.backends.tensorrt.slots import PageCopy, Slide
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.plugins.layout import CacheShape, Pool, PoolShape, Tables, copy_pages_launch, slide_launch
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.dtypes import E4M3, E4M3_MAX, TORCH_DTYPES

if TYPE_CHECKING:
    from wicore_trt.plugins.aot import CompiledKernel, KernelSpec
    from wicore_trt.plugins.launch import Launcher

log = logging.getLogger(__name__)
TOKENS_AT_ONCE = 1024  # bounds the memory that a copy by torch needs beside pages and slots
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
Tensors = Mapping[str, torch.Tensor]


class SlotCopier:
    """Copier on any torch device between `pools` and `caches` of the groups. `scales[group]` float32 [layers] are the
    scales of FP8 pages."""

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
        for page, token, slot, entry in self._list_indices(copies, pool):
            if pool.dtype == E4M3:  # E4M3 has no indexing everywhere
                values = pool.view(torch.uint8)[page, :, :, token].view(E4M3).float() * self._scales[group]
            else:
                values = pool[page, :, :, token]
            cache[:, :, slot, :, entry] = values.to(cache.dtype)  # values [n, layers, 2, kv_heads, head_dim]

    def store(self, group: str, copies: Sequence[PageCopy]) -> None:
        """Copy slots to pages."""
        pool, cache = self._pools[group], self._caches[group]
        for page, token, slot, entry in self._list_indices(copies, pool):
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


class KernelSlotCopier(SlotCopier):
    """`SlotCopier` by kernels that are compiled from the `copy_specs` of any group, which are all equal."""

    def __init__(
        self,
        pools: Tensors,
        caches: Tensors,
        scales: Tensors,
        kernels: Mapping[str, CompiledKernel],
        launcher: Launcher,
        stream: int,
    ) -> None:
        super().__init__(pools, caches, scales)
        self._kernels, self._launcher, self._stream = kernels, launcher, stream

    def load(self, group: str, copies: Sequence[PageCopy]) -> None:
        self._copy_pages("load", group, copies)

    def store(self, group: str, copies: Sequence[PageCopy]) -> None:
        self._copy_pages("store", group, copies)

    def slide(self, group: str, moves: Sequence[Slide]) -> None:
        cache = self._caches[group]
        rows = self._upload_ints([value for move in moves for value in (move.slot, move.first, move.keep)])
        call = slide_launch((cache.data_ptr(), _cache_shape(cache)), rows.data_ptr(), len(moves))
        self._launcher.launch(self._kernels["slide"], call, self._stream)

    def _copy_pages(self, role: str, group: str, copies: Sequence[PageCopy]) -> None:
        pool, cache, kernel = self._pools[group], self._caches[group], self._kernels[role]
        length = max(len(copy.pages) for copy in copies)
        # One upload: the copies, then their page tables, each at a multiple of 16 bytes.
        rows = [value for copy in copies for value in (copy.slot, copy.offset, copy.tokens, copy.entry)]
        tables = [value for copy in copies for value in (*copy.pages, *[-1] * (length - len(copy.pages)))]
        block = self._upload_ints([*rows, *tables])
        call = copy_pages_launch(
            kernel.constants,
            Pool(pool.data_ptr(), _pool_shape(pool), self._scales[group].data_ptr()),
            (cache.data_ptr(), _cache_shape(cache)),
            Tables(block[len(rows) :].data_ptr(), len(copies), length),
            block.data_ptr(),
            max(copy.tokens for copy in copies),
        )
        self._launcher.launch(kernel, call, self._stream)

    def _upload_ints(self, values: Sequence[int]) -> torch.Tensor:
        """Upload int32 to the device. Nothing waits: the driver buffers so few bytes of pageable memory."""
        device = next(iter(self._caches.values())).device
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)


def _pool_shape(pool: torch.Tensor) -> PoolShape:
    _, layers, _, page_tokens, kv_heads, head_dim = pool.shape
    return PoolShape(layers, page_tokens, kv_heads, head_dim, _NAMES[pool.dtype])


def _cache_shape(cache: torch.Tensor) -> CacheShape:
    layers, _, slots, kv_heads, entries, head_dim = cache.shape
    return CacheShape(layers, slots, kv_heads, entries, head_dim, _NAMES[cache.dtype])


def copy_specs(pool: torch.Tensor, cache: torch.Tensor) -> dict[str, KernelSpec]:
    """Specify the kernels that a group's memory needs. Raises ConfigError for types that no kernel converts."""
    from wicore_trt.plugins.kernels.specs import copy_pages_spec, slide_spec

    pages, dtype = _pool_shape(pool), _NAMES[cache.dtype]
    return {
        "load": copy_pages_spec(pages, dtype, to_cache=True),
        "store": copy_pages_spec(pages, dtype, to_cache=False),
        "slide": slide_spec(pages, dtype),
    }


def choose_copier(pools: Tensors, caches: Tensors, scales: Tensors, device: CudaDevice) -> SlotCopier:
    if device.torch_device.type == "cuda":
        reason = _no_kernels(next(iter(pools.values())))
        if reason is None:
            from wicore_trt.plugins.aot import compile_kernel
            from wicore_trt.plugins.launch import SHARED_LAUNCHER

            try:
                specs = copy_specs(next(iter(pools.values())), caches[next(iter(pools))])
                kernels = {role: compile_kernel(spec, device.target) for role, spec in specs.items()}
                return KernelSlotCopier(pools, caches, scales, kernels, SHARED_LAUNCHER, device.stream)
            except (ConfigError, EnvironmentUnfitError) as error:
                reason = str(error)
        log.warning("KV is copied by torch operators, which is slower: %s", reason)
    return SlotCopier(pools, caches, scales)


def _no_kernels(pool: torch.Tensor) -> str | None:
    """Explain why the kernels cannot copy these pages or be launched here; None if they can."""
    head_dim = pool.shape[-1]
    if head_dim < 16 or head_dim & (head_dim - 1):
        return f"head_dim {head_dim} is no power of two of at least 16"
    try:
        import triton  # noqa: F401 -- imported to see that it is here
        from cuda.bindings import driver  # noqa: F401
    except ImportError as error:
        return str(error)
    return None
