"""Shapes of the KV memory that the kernels work on, and their launches: plain arithmetic.

Knows pointers as integers only; neither Triton nor CUDA. Invariant: strides are in elements, of contiguous
arrays: pool [pages, layers, 2, page_tokens, kv_heads, D] and cache [layers, 2, slots, kv_heads, S, D].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from wicore_trt.arithmetic import ITEM_BYTES, div_ceil

FLOAT_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
BITS_TYPES = {4: "i32", 2: "i16", 1: "u8"}


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
            "pool_page": self.layers * 2 * kv,
            "pool_layer": 2 * kv,
            "pool_kv": kv,
            "pool_token": token,
            "pool_head": self.head_dim,
        }


@dataclass(frozen=True)
class CacheShape:
    """Linear caches of one layer group in one allocation; `tokens` is S, the entries of a slot."""

    layers: int
    slots: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: str

    def strides(self) -> dict[str, int]:
        head = self.tokens * self.head_dim
        slot = self.kv_heads * head
        return {
            "cache_layer": 2 * self.slots * slot,
            "cache_kv": self.slots * slot,
            "cache_slot": slot,
            "cache_head": head,
            "cache_token": self.head_dim,
        }


class Tables(NamedTuple):
    """Page tables on the device, int32 [rows, length], contiguous. `pointer` is an address, or a stand-in where a
    kernel is not launched by addresses."""

    pointer: Any
    rows: int
    length: int

    def table_arguments(self) -> dict[str, Any]:
        return {"tables": self.pointer, "table_length": self.length, "table_stride": self.length}


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


class Launch(NamedTuple):
    """Grid and arguments by name. A grid with a 0 has nothing to do and must not be launched."""

    grid: tuple[int, int, int]
    arguments: dict[str, Any]


def copy_pages_launch(
    constants: Mapping[str, Any],
    pool: Pool,
    cache: tuple[Any, CacheShape],
    tables: Tables,
    copies: Any,
    max_tokens: int,
) -> Launch:
    """Launch `kernels.pages.copy_pages` for `tables.rows` copies (int32[rows, 4] at `copies`). `max_tokens` only sizes
    the grid: fewer programs complete a longer copy."""
    shape, pages = cache[1], pool.shape
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (pages.layers, pages.kv_heads, pages.head_dim)
    grid = (div_ceil(max_tokens, constants["BLOCK"]), shape.kv_heads, tables.rows * shape.layers * 2)
    return Launch(
        grid,
        {
            "pool": pool.pointer, "cache": cache[0], "copies": copies, "scales": pool.scales,
            "cache_tokens": shape.tokens, "layers": shape.layers, **tables.table_arguments(), **pages.strides(),
            **shape.strides(),
        },
    )  # fmt: skip


def slide_launch(cache: tuple[Any, CacheShape], moves: Any, n_moves: int) -> Launch:
    """Launch `kernels.pages.slide` for int32[n_moves, 3] at `moves`."""
    shape = cache[1]
    arguments = {"cache": cache[0], "moves": moves, **shape.strides()}
    return Launch((shape.kv_heads, shape.layers * 2, n_moves), arguments)
