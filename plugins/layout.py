"""Shapes of the KV memory that the kernels work on, and what a launch takes: plain arithmetic.

Knows pointers as integers only; neither Triton nor CUDA. Invariant: strides are in elements, of contiguous
arrays: pool [pages, layers, 2, page_tokens, kv_heads, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from wicore_trt.arithmetic import ITEM_BYTES

FLOAT_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class PoolShape:
    """Pages of one layer group. `dtype` is "float32", "bfloat16", "float16" or "fp8"; `head_dim` is a power of two of
    at least 16, so that every stride is a multiple of 16."""

    layers: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        d = self.head_dim
        assert d >= 16 and d & (d - 1) == 0, f"head_dim {d} is no power of two of at least 16"
        assert self.dtype in ITEM_BYTES and min(self.layers, self.page_tokens, self.kv_heads) > 0

    def layer_offset(self, layer: int) -> int:
        """Compute bytes from the pool's start to layer `layer` (index in the group) of page 0."""
        assert 0 <= layer < self.layers
        return layer * self.strides()["pool_layer"] * ITEM_BYTES[self.dtype]

    def strides(self) -> dict[str, int]:
        token = self.kv_heads * self.head_dim
        kv = self.page_tokens * token
        return {
            "pool_page": self.layers * 2 * kv, "pool_layer": 2 * kv, "pool_kv": kv, "pool_token": token,
            "pool_head": self.head_dim,
        }  # fmt: skip


class Tables(NamedTuple):
    """Page tables on the device, int32 [rows, length], contiguous. `pointer` is an address, or a stand-in where a
    kernel is not launched by addresses."""

    pointer: Any
    rows: int
    length: int


class Pool(NamedTuple):
    """Pages in memory. For kernels of one layer `pointer` is that layer's part of page 0 and `scales` the layer's KV
    scale; otherwise both belong to layer 0. `scales` is float32 and 0 (null) where there are none."""

    pointer: Any
    shape: PoolShape
    scales: Any = 0


class Slices(NamedTuple):
    """Rows of a step: `cu_seqlens` int32[S + 1] and `first_positions` int32[S] on the device, `tokens` in all, and
    `key_ends` int32[tokens] for a kernel that takes them."""

    cu_seqlens: Any
    first_positions: Any
    tokens: int
    key_ends: Any = None


class TensorMap(NamedTuple):
    """Array of which a kernel copies boxes by the tensor memory unit: `extents` in elements, outermost first, and bytes
    from one element to the next along all dimensions but the last, whose elements are neighbours."""

    address: Any
    extents: tuple[int, ...]
    strides: tuple[int, ...]


class Launch(NamedTuple):
    """Grid and arguments by name. A grid with a 0 has nothing to do and must not be launched."""

    grid: tuple[int, int, int]
    arguments: dict[str, Any]
