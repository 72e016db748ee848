"""The types of kernels' arguments, which a name has in every kernel, and specs made from them.

Loads no Triton. Invariant: an argument of one name has one type and one alignment, but for the arrays whose element
type a spec chooses (`pointers`); those are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wicore_trt.plugins.aot import Constant, KernelSpec

_STRIDES = (
    *("q_token", "q_head", "q_row", "k_token", "k_head", "v_token", "v_head", "out_token", "out_head", "out_row"),
    *("pool_page", "pool_layer", "pool_kv", "pool_token", "pool_head"),
    *("cache_layer", "cache_kv", "cache_slot", "cache_head", "cache_token"),
)
_INDEX_ARRAYS = (
    *("tables", "copies", "moves", "positions", "sequences", "cu_seqlens", "first_positions", "kv_lengths", "arrived"),
)
_FLOAT_ARRAYS = ("scales", "kv_scale", "partials", "stats", "page_sums", "log_sums", "mass")
_INTEGERS = ("table_length", "cache_tokens", "layers", "tokens", "window", "n_sequences", "n_splits")
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
    """A spec of `function`, whose arguments besides `pointers` (element types by name) and constants are in TYPES."""
    types = {**TYPES, **{n: f"*{t}" for n, t in pointers.items()}}
    signature = {n: types[n] for n in function.arg_names if n in types}
    aligned = frozenset(n for n in signature if n in ALIGNED or n in pointers)
    return KernelSpec(name, function, signature, constants, aligned, num_warps, num_stages)
