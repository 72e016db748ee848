"""Specialisations of the attention kernels made for speed: split decode, its sums, prefill, and masses of pages.

Loads Triton, because a spec holds the kernel's function. Invariant: a spec depends on shapes, types, configuration and
on whether the target has E4M3 instructions. Arguments of one name have one type and one alignment in all these kernels,
except arrays whose element type a spec chooses (`pointers`), which are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wicore_trt.arithmetic import ITEM_BYTES
from wicore_trt.errors import ConfigError
from wicore_trt.plugins.aot import Constant, KernelSpec
from wicore_trt.plugins.decode_layout import DecodeConfig, PrefillConfig
from wicore_trt.plugins.kernels.decode_attention import combine_splits, split_decode
from wicore_trt.plugins.kernels.page_masses import page_logsums, page_masses
from wicore_trt.plugins.kernels.prefill_attention import paged_prefill
from wicore_trt.plugins.kernels.segments import add_segment, add_splits, gather_segment
from wicore_trt.plugins.layout import FLOAT_TYPES, PoolShape

E4M3_INSTRUCTIONS = ("sm89", "sm90", "sm100", "sm120")
_SEGMENTED, _SPLIT = ("segment", "segment_rows", "least_rows"), ("split_rows",)
"""Arguments of `paged_prefill` that only segments, or splits, need, and "lse" both; where they are not needed they are
constants, so that a kernel that was compiled before there were any is launched as one of today."""
GATHER_TILE = 8192
SUM_TILE = 2048
"""Elements of a program of `gather_segment` and of `add_segment`."""
MASS_TILE = 4096
"""Elements of keys that `page_logsums` takes at once."""
MASS_SPAN = 256
"""Keys of one of its programs, unless a page has more."""
_STRIDES = (
    *("q_row", "out_row", "pool_page", "pool_layer", "pool_kv", "pool_token", "pool_head", "part_row", "part_head"),
    "values",
)
_INDEX_ARRAYS = ("tables", "positions", "sequences", "cu_seqlens", "first_positions", "kv_lengths", "arrived")
_FLOAT_ARRAYS = ("scales", "kv_scale", "partials", "stats", "logsums", "masses", "sums", "lse", "part_lse")
_INTEGERS = (
    *("table_length", "tokens", "window", "n_sequences", "n_splits", "first", "singles", "pages", "segment"),
    *("segment_rows", "least_rows", "split_rows", "rows", "part_rows", "last"),
)
_TYPES = {
    **dict.fromkeys(_INDEX_ARRAYS, "*i32"),
    **dict.fromkeys(_FLOAT_ARRAYS, "*fp32"),
    **dict.fromkeys(_INTEGERS, "i32"),
    **dict.fromkeys((*_STRIDES, "table_stride"), "i64"),
    "softmax_scale": "fp32",
}
_ALIGNED = frozenset((*_STRIDES, "partials"))


def _kernel_spec(
    name: str,
    function: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, Constant],
    num_warps: int = 4,
    num_stages: int = 1,
) -> KernelSpec:
    """Specify `function`, whose arguments besides `pointers` (element types by name) and constants are in _TYPES."""
    types = {**_TYPES, **{n: f"*{t}" for n, t in pointers.items()}}
    signature = {n: types[n] for n in function.arg_names if n in types and n not in constants}
    aligned = frozenset(n for n in signature if n in _ALIGNED or n in pointers)
    return KernelSpec(name, function, signature, constants, aligned, num_warps, num_stages)


def _checked(pool: PoolShape, dtype: str, heads: int) -> int:
    """Compute query heads per KV head. Raises ConfigError for shapes that the kernels do not take."""
    if heads % pool.kv_heads:
        raise ConfigError(f"{heads} query heads cannot share {pool.kv_heads} KV heads.", fix="Check the model's heads.")
    if ITEM_BYTES[dtype] != 2 or pool.dtype not in ("fp8", dtype):
        fix = "Use bfloat16 or float16 for both, or FP8 keys."
        raise ConfigError(f"{dtype} queries cannot read {pool.dtype} keys here.", fix=fix)
    return heads // pool.kv_heads


def _fp8(pool: PoolShape, target: str) -> int:
    return 0 if pool.dtype != "fp8" else 2 if target in E4M3_INSTRUCTIONS else 1


def _pool_type(pool: PoolShape) -> str:
    return "u8" if pool.dtype == "fp8" else FLOAT_TYPES[pool.dtype]


def decode_spec(
    pool: PoolShape, dtype: str, heads: int, target: str, config: DecodeConfig, *, ordered: bool = False
) -> KernelSpec:
    """Specify `split_decode` of `heads` query heads of `dtype` over `pool`; `ordered`, for one split, as
    `kernels.order`. Raises ConfigError for shapes that do not fit."""
    repeat = _checked(pool, dtype, heads)
    assert not ordered or (config.splits == 1 and pool.head_dim % 32 == 0)
    if pool.kv_heads % config.heads or config.block_k < 16 or config.block_k & (config.block_k - 1):
        raise ConfigError(f"{config} does not fit {pool}.", fix="Take a divisor of the heads and a power of two.")
    rows = 16
    while rows < config.heads * repeat:
        rows *= 2
    constants = {
        "D": pool.head_dim, "PAGE_TOKENS": pool.page_tokens, "KV_HEADS": pool.kv_heads, "REPEAT": repeat,
        "HEADS": config.heads, "ROWS": rows, "BLOCK_K": config.block_k, "LEAST": config.least,
        "FP8": _fp8(pool, target), "FUSED": config.fused and config.splits > 1,
        **({"ORDERED": True} if ordered else {}),
    }  # fmt: skip
    form = f"rows{'_fused' if constants['FUSED'] else ''}{'_ordered' if ordered else ''}"
    name = (
        f"decode_{pool.dtype}_{dtype}_{form}_d{pool.head_dim}_p{pool.page_tokens}_kv{pool.kv_heads}_r{repeat}"
        f"_h{config.heads}_k{config.block_k}_l{config.least}_w{config.num_warps}_s{config.num_stages}"
    )
    pointers = {"q": FLOAT_TYPES[dtype], "out": FLOAT_TYPES[dtype], "pool": _pool_type(pool)}
    return _kernel_spec(name, split_decode, pointers, constants, config.num_warps, config.num_stages)


def combine_spec(pool: PoolShape, dtype: str, config: DecodeConfig) -> KernelSpec:
    constants = {"D": pool.head_dim, "BLOCK_K": config.block_k, "LEAST": config.least}
    name = f"combine_{dtype}_d{pool.head_dim}_k{config.block_k}_l{config.least}"
    return _kernel_spec(name, combine_splits, {"out": FLOAT_TYPES[dtype]}, constants)


def prefill_spec(
    pool: PoolShape, dtype: str, heads: int, target: str, config: PrefillConfig, *, segmented: bool = False,
    ends: bool = False,
) -> KernelSpec:  # fmt: skip
    """Specify `paged_prefill` of `heads` query heads of `dtype` over `pool`; `segmented` or with splits, results are
    float32. `ends`: with key ends of rows. Raises ConfigError for types that differ."""
    repeat, split = _checked(pool, dtype, heads), config.splits > 1
    assert segmented + split + ends <= 1
    unused = (() if segmented else _SEGMENTED) + (() if split else _SPLIT) + (() if segmented or split else ("lse",))
    constants: dict[str, Constant] = {
        **dict.fromkeys(unused, 0), "SEGMENTED": segmented, "SPLITS": config.splits, "LEAST": config.least,
        "D": pool.head_dim, "PAGE_TOKENS": pool.page_tokens, "KV_HEADS": pool.kv_heads, "REPEAT": repeat,
        "BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "FP8": _fp8(pool, target),
    }  # fmt: skip
    name = (
        f"prefill_{pool.dtype}_{dtype}_d{pool.head_dim}_p{pool.page_tokens}_kv{pool.kv_heads}_r{repeat}"
        f"_m{config.block_m}_k{config.block_k}_w{config.num_warps}_s{config.num_stages}{'_seg' if segmented else ''}"
        f"{'_ends' if ends else ''}{f'_i{config.splits}_l{config.least}' if split else ''}"
    )
    out = "fp32" if segmented or split else FLOAT_TYPES[dtype]
    pointers = {"q": FLOAT_TYPES[dtype], "out": out, "pool": _pool_type(pool)}
    spec = _kernel_spec(name, paged_prefill, pointers, constants, config.num_warps, config.num_stages)
    return replace(spec, signature={**spec.signature, "key_ends": "*i32"}) if ends else spec


def add_splits_spec(pool: PoolShape, dtype: str, heads: int, config: PrefillConfig) -> KernelSpec:
    constants = {"D": pool.head_dim, "HEADS": heads, "BLOCK": max(1, SUM_TILE // pool.head_dim // 2)}
    name = f"add_splits_{dtype}_d{pool.head_dim}_h{heads}_i{config.splits}"
    return _kernel_spec(name, add_splits, {"out": FLOAT_TYPES[dtype]}, {**constants, "SPLITS": config.splits})


def gather_spec(pool: PoolShape, dtype: str, target: str) -> KernelSpec:
    page = pool.page_tokens * pool.kv_heads * pool.head_dim
    constants = {"PAGE": page, "BLOCK": min(GATHER_TILE, 1 << (page - 1).bit_length()), "FP8": _fp8(pool, target)}
    name = f"gather_{pool.dtype}_{dtype}_n{page}"
    return _kernel_spec(name, gather_segment, {"pool": _pool_type(pool), "dense": FLOAT_TYPES[dtype]}, constants)


def add_segment_spec(pool: PoolShape, dtype: str, heads: int) -> KernelSpec:
    constants = {"D": pool.head_dim, "HEADS": heads, "BLOCK": max(1, SUM_TILE // pool.head_dim)}
    pointers = dict.fromkeys(("part", "out"), FLOAT_TYPES[dtype])
    return _kernel_spec(f"add_segment_{dtype}_d{pool.head_dim}_h{heads}", add_segment, pointers, constants)


def logsums_spec(pool: PoolShape, dtype: str, heads: int, target: str) -> KernelSpec:
    """Specify `page_logsums` of `heads` query heads of `dtype` over `pool`. Raises ConfigError for types that
    differ."""
    repeat, size = _checked(pool, dtype, heads), pool.page_tokens
    step = min(size, max(16, MASS_TILE // pool.head_dim))
    constants = {
        "D": pool.head_dim, "PAGE_TOKENS": size, "KV_HEADS": pool.kv_heads, "REPEAT": repeat,
        "ROWS": max(16, 1 << (repeat - 1).bit_length()), "STEP": step, "BLOCK_K": max(16, step),
        "SPAN": max(1, MASS_SPAN // size), "FP8": _fp8(pool, target),
    }  # fmt: skip
    name = f"logsums_{pool.dtype}_{dtype}_d{pool.head_dim}_p{size}_kv{pool.kv_heads}_r{repeat}"
    pointers = {"q": FLOAT_TYPES[dtype], "pool": _pool_type(pool)}
    return _kernel_spec(name, page_logsums, pointers, constants, num_stages=3)


def masses_spec(pool: PoolShape, heads: int) -> KernelSpec:
    rows = 1 << (heads - 1).bit_length()
    constants = {"PAGE_TOKENS": pool.page_tokens, "HEADS": heads, "ROWS": rows, "BLOCK": max(16, 4096 // rows)}
    return _kernel_spec(f"masses_p{pool.page_tokens}_h{heads}", page_masses, {}, constants)
