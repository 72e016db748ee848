"""Number of KV slots that fit into a device's memory, and their tensors.

Knows sizes and layouts; neither plans nor sequences. Invariant: the caches of one group are one allocation [layers, 2
(K, V), slots, kv_heads, entries, head_dim], so that a copy moves all layers at once. Each plan input [slots, kv_heads,
entries, head_dim] is a contiguous part of it, at an address that TensorRT accepts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.plan_io import PlanLimits
from wicore_trt.backends.tensorrt.slots import GroupSlots
from wicore_trt.errors import ConfigError
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.cuda_device import Device
from wicore_trt.runtime.dtypes import TORCH_DTYPES
from wicore_trt.runtime.executor import KVLayout

WORKSPACE_BYTES = 512 << 20  # left free for the sampler, for copies and for what TensorRT allocates itself


class SlotMemory:
    """Memory of slots for plans with `limits`, whose caches are of `dtype`. `groups` is their geometry."""

    def __init__(self, spec: Gemma3Spec, limits: PlanLimits, dtype: str) -> None:
        self._spec, self._dtype = spec, TORCH_DTYPES[dtype]
        self.groups = {
            group: GroupSlots(limits.entries(spec, group) - 1, spec.layer_group(group).window or None)
            for group in spec.groups
        }

    def _cache_shape(self, group: str, slots: int) -> tuple[int, ...]:
        shape, entries = self._spec.layer_group(group), self.groups[group].usable + 1
        return (len(shape.layers), 2, slots, shape.num_kv_heads, entries, shape.head_dim)

    @property
    def slot_bytes(self) -> int:
        items = sum(torch.Size(self._cache_shape(group, 1)).numel() for group in self.groups)
        return items * self._dtype.itemsize + 4 * self._spec.vocab_size

    def slots(self, free_bytes: int, layout: KVLayout, most: int) -> int:
        """Count slots that fit beside the page pools, at most `most`. Raises ConfigError when not one does."""
        pools = layout.memory_bytes
        count = min(most, (free_bytes - pools - WORKSPACE_BYTES) // self.slot_bytes)
        if count < 1:
            raise ConfigError(
                f"{free_bytes:,} bytes are free on the GPU beside the weights. KV pages take {pools:,} of them, "
                f"{WORKSPACE_BYTES:,} are kept as work space, and one sequence's slot takes {self.slot_bytes:,}.",
                fix="Lower kv.device_bytes, or build the engine with a smaller --max-context.",
            )
        return int(count)

    def allocate(self, slots: int, device: Device) -> dict[str, torch.Tensor]:
        """Allocate caches of all groups, zeroed: a hidden value has weight 0, and 0 times NaN would not be 0."""
        return {group: device.empty(self._cache_shape(group, slots), self._dtype).zero_() for group in self.groups}

    def by_layer(self, caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Split `caches` by layer under their names in a plan."""
        return {
            plan_io.cache(part, layer): cache[i, j]
            for group, cache in caches.items()
            for i, layer in enumerate(self._spec.layers_of(group))
            for j, part in enumerate(("k", "v"))
        }
