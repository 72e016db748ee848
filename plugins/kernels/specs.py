"""Specialisations of kernels by the shapes of a model, and their block sizes.

Loads Triton, because a spec holds the kernel's function. Invariant: a spec depends on shapes and types only, so two
engines of one model share their cubins. Arguments of one name have one type and one alignment in every kernel, except
arrays whose element type a spec chooses (`pointers`), which are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wicore_trt.arithmetic import ITEM_BYTES
from wicore_trt.errors import ConfigError
from wicore_trt.plugins.aot import Constant, KernelSpec
from wicore_trt.plugins.kernels.pages import copy_pages, slide
from wicore_trt.plugins.layout import BITS_TYPES, FLOAT_TYPES, PoolShape

_STRIDES = (
    *(
        "q_row",
        "out_row",
        "pool_page",
        "pool_layer",
        "pool_kv",
        "pool_token",
        "pool_head",
        "part_row",
        "part_head",
        "values",
    ),
    *("cache_layer", "cache_kv", "cache_slot", "cache_head", "cache_token"),
)
_INDEX_ARRAYS = (
    *("tables", "copies", "moves", "positions", "sequences", "cu_seqlens", "first_positions", "kv_lengths", "arrived"),
)
_FLOAT_ARRAYS = ("scales", "kv_scale", "partials", "stats", "logsums", "masses", "sums", "lse", "part_lse")
_INTEGERS = (
    *("table_length", "cache_tokens", "layers", "tokens", "window", "n_sequences", "n_splits"),
    *("first", "singles", "pages", "segment", "segment_rows", "least_rows", "split_rows", "rows", "part_rows", "last"),
)
TYPES = {
    **dict.fromkeys(_INDEX_ARRAYS, "*i32"),
    **dict.fromkeys(_FLOAT_ARRAYS, "*fp32"),
    **dict.fromkeys(_INTEGERS, "i32"),
    **dict.fromkeys((*_STRIDES, "table_stride"), "i64"),
    "softmax_scale": "fp32",
}
ALIGNED = frozenset((*_STRIDES, "partials"))


def kernel_spec(
    name: str,
    function: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, Constant],
    num_warps: int = 4,
    num_stages: int = 1,
) -> KernelSpec:
    """Specify `function`, whose arguments besides `pointers` (element types by name) and constants are in TYPES."""
    types = {**TYPES, **{n: f"*{t}" for n, t in pointers.items()}}
    signature = {n: types[n] for n in function.arg_names if n in types and n not in constants}
    aligned = frozenset(n for n in signature if n in ALIGNED or n in pointers)
    return KernelSpec(name, function, signature, constants, aligned, num_warps, num_stages)


def _types(pool: PoolShape, other: str) -> tuple[str, str, bool]:
    """Find element types of the pool and the other side of a copy, and whether values are converted between them."""
    if pool.dtype == "fp8" and other != "fp8":
        return "u8", FLOAT_TYPES[other], True
    if ITEM_BYTES[pool.dtype] != ITEM_BYTES[other] or pool.dtype != other:
        raise ConfigError(f"No copy between {pool.dtype} pages and {other} caches.", fix="Use one type, or FP8 pages.")
    bits = BITS_TYPES[ITEM_BYTES[other]]
    return bits, bits, False


def copy_pages_spec(pool: PoolShape, cache_dtype: str, *, to_cache: bool) -> KernelSpec:
    """Specify copies of pages to slots (`to_cache`) or back. Raises ConfigError for types that differ and are not FP8
    pages."""
    pool_type, cache_type, fp8 = _types(pool, cache_dtype)
    constants = {"D": pool.head_dim, "PAGE_TOKENS": pool.page_tokens, "BLOCK": _copy_block(pool)}
    name = f"{'pages_to_slot' if to_cache else 'slot_to_pages'}_{pool.dtype}_{cache_dtype}"
    return kernel_spec(
        _named(name, pool),
        copy_pages,
        {"pool": pool_type, "cache": cache_type},
        {**constants, "TO_CACHE": to_cache, "FP8": fp8},
    )


def slide_spec(pool: PoolShape, cache_dtype: str) -> KernelSpec:
    constants = {"D": pool.head_dim, "BLOCK": _copy_block(pool)}
    return kernel_spec(
        f"slide_{cache_dtype}_d{pool.head_dim}", slide, {"cache": BITS_TYPES[ITEM_BYTES[cache_dtype]]}, constants
    )


def _named(name: str, pool: PoolShape) -> str:
    return f"{name}_d{pool.head_dim}_p{pool.page_tokens}"


def _copy_block(pool: PoolShape) -> int:
    """Choose tokens per block of a copy: about 4,096 elements."""
    block: int = max(8, min(64, 4096 // pool.head_dim))
    return block
