"""Copies of KV between pages and slots by the Triton kernels of `plugins`: one launch for all copies of a group.

`choose_copier` takes them on a GPU with Triton and fitting heads, else torch. Must not know sequences or windows.
Invariant: a launch's inputs are on the stream before it and stay until the stream has passed it. Torch ensures that: it
reuses memory freed on a stream for that stream's later work only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from wicore_trt.backends.tensorrt.copies import SlotCopier, TorchSlotCopier
from wicore_trt.backends.tensorrt.slots import PageCopy, Slide
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.plugins.layout import CacheShape, Pool, PoolShape, Tables, copy_pages_launch, slide_launch
from wicore_trt.runtime.cuda_device import Device
from wicore_trt.runtime.dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from wicore_trt.plugins.aot import CompiledKernel, KernelSpec
    from wicore_trt.plugins.launch import Launcher

log = logging.getLogger(__name__)
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Pages and slots of a group, laid out as in `copies`, and the scales of FP8 pages."""

    pool: torch.Tensor
    cache: torch.Tensor
    scales: torch.Tensor

    def pool_shape(self) -> PoolShape:
        _, layers, _, page_tokens, kv_heads, head_dim = self.pool.shape
        return PoolShape(layers, page_tokens, kv_heads, head_dim, _NAMES[self.pool.dtype])

    def cache_shape(self) -> CacheShape:
        layers, _, slots, kv_heads, entries, head_dim = self.cache.shape
        return CacheShape(layers, slots, kv_heads, entries, head_dim, _NAMES[self.cache.dtype])

    def specs(self) -> dict[str, KernelSpec]:
        """Specify the kernels that this memory needs. Raises ConfigError for types that no kernel converts."""
        from wicore_trt.plugins.kernels.specs import copy_pages_spec, slide_spec

        pages, dtype = self.pool_shape(), _NAMES[self.cache.dtype]
        return {
            "load": copy_pages_spec(pages, dtype, to_cache=True),
            "store": copy_pages_spec(pages, dtype, to_cache=False),
            "slide": slide_spec(pages, dtype),
        }


class KernelSlotCopier:
    """Implements `SlotCopier`; `kernels` are compiled from the `specs` of any group, which are all equal."""

    def __init__(
        self, groups: Mapping[str, GroupMemory], kernels: Mapping[str, CompiledKernel], launcher: Launcher, stream: int
    ) -> None:
        self._groups, self._kernels, self._launcher, self._stream = groups, kernels, launcher, stream

    def clear(self, slot: int) -> None:
        for memory in self._groups.values():
            memory.cache[:, :, slot].zero_()

    def load(self, group: str, copies: Sequence[PageCopy]) -> None:
        self._copy_pages("load", group, copies)

    def store(self, group: str, copies: Sequence[PageCopy]) -> None:
        self._copy_pages("store", group, copies)

    def slide(self, group: str, moves: Sequence[Slide]) -> None:
        memory = self._groups[group]
        rows = self._upload_ints([[move.slot, move.first, move.keep] for move in moves])
        call = slide_launch((memory.cache.data_ptr(), memory.cache_shape()), rows.data_ptr(), len(moves))
        self._launcher.launch(self._kernels["slide"], call, self._stream)

    def _copy_pages(self, role: str, group: str, copies: Sequence[PageCopy]) -> None:
        memory, kernel = self._groups[group], self._kernels[role]
        length = max(len(copy.pages) for copy in copies)
        # One upload: the copies, then their page tables, each at a multiple of 16 bytes.
        rows = [value for copy in copies for value in (copy.slot, copy.offset, copy.tokens, copy.entry)]
        tables = [value for copy in copies for value in (*copy.pages, *[-1] * (length - len(copy.pages)))]
        block = self._upload_ints([*rows, *tables])
        pool = Pool(memory.pool.data_ptr(), memory.pool_shape(), memory.scales.data_ptr())
        call = copy_pages_launch(
            kernel.constants,
            pool,
            (memory.cache.data_ptr(), memory.cache_shape()),
            Tables(block[len(rows) :].data_ptr(), len(copies), length),
            block.data_ptr(),
            max(copy.tokens for copy in copies),
        )
        self._launcher.launch(kernel, call, self._stream)

    def _upload_ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        """Upload int32 to the device. Nothing waits: the driver buffers so few bytes of pageable memory."""
        device = next(iter(self._groups.values())).cache.device
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)


def choose_copier(
    pools: Mapping[str, torch.Tensor],
    caches: Mapping[str, torch.Tensor],
    scales: Mapping[str, torch.Tensor],
    device: Device,
) -> SlotCopier:
    groups = {group: GroupMemory(pools[group], caches[group], scales[group]) for group in pools}
    if device.torch_device.type == "cuda":
        reason = _no_kernels(groups)
        if reason is None:
            from wicore_trt.plugins.aot import compile_kernels
            from wicore_trt.plugins.launch import SHARED_LAUNCHER

            try:
                kernels = compile_kernels(next(iter(groups.values())).specs(), device.target)
                return KernelSlotCopier(groups, kernels, SHARED_LAUNCHER, device.stream)
            except (ConfigError, EnvironmentUnfitError) as error:
                reason = str(error)
        log.warning("KV is copied by torch operators, which is slower: %s", reason)
    return TorchSlotCopier(pools, caches, scales)


def _no_kernels(groups: Mapping[str, GroupMemory]) -> str | None:
    """Explain why the kernels cannot copy this memory or be launched here; None if they can."""
    head_dim = next(iter(groups.values())).pool.shape[-1]
    if head_dim < 16 or head_dim & (head_dim - 1):
        return f"head_dim {head_dim} is no power of two of at least 16"
    try:
        import triton  # noqa: F401 -- imported to see that it is here
        from cuda.bindings import driver  # noqa: F401
    except ImportError as error:
        return str(error)
    return None
