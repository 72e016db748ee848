"""Specialisations of a step's small kernels: norms, query and key rotation, sampling; and their launch shapes.

Loads Triton, because a spec holds the kernel's function. Invariant: a spec depends on shapes, types and a `StepConfig`
only. DEFAULTS is the only place that knows which launch shape is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wicore_trt.arithmetic import ITEM_BYTES, div_ceil
from wicore_trt.errors import ConfigError
from wicore_trt.plugins.aot import Constant, KernelSpec
from wicore_trt.plugins.exchange_layout import pushed_type
from wicore_trt.plugins.kernels import exchange, norm, order, qk_rope, sample, sample_wide
from wicore_trt.plugins.layout import FLOAT_TYPES, PoolShape


@dataclass(frozen=True)
class StepConfig:
    """Launch shape of one kernel. `block`: tokens per program for `qk_norm_rope_write`, logits per program for `scan`
    and `collect`, unused by others, whose program takes a row."""

    num_warps: int
    block: int = 1


# Per kernel: (largest number of rows, StepConfig) in rising order; the last one holds for any number. A norm's warps
# change the order of its sums, so two entries may round differently.
Table = tuple[tuple[int, StepConfig], ...]
DEFAULTS: dict[str, Table] = {
    "norm": ((132, StepConfig(16)), (1 << 31, StepConfig(8))),
    "norm_narrow": ((132, StepConfig(4)), (1 << 31, StepConfig(2))),  # up to 1,024 columns
    "qk_rope": ((16, StepConfig(1, 1)), (128, StepConfig(4, 4)), (1 << 31, StepConfig(4, 8))),
    "scan": ((1 << 31, StepConfig(4, 2048)),),
    "choose": ((1 << 31, StepConfig(8)),),
    "draw": ((1 << 31, StepConfig(16)),),
}


def config(kernel: str, rows: int) -> StepConfig:
    """Choose the launch shape of one of DEFAULTS' kernels for `rows` tokens (sampling: sampled rows)."""
    return next(entry for most, entry in DEFAULTS[kernel] if rows <= most)


def norm_config(rows: int, hidden: int) -> StepConfig:
    return config("norm" if hidden > 1024 else "norm_narrow", rows)


@dataclass(frozen=True)
class NormShape:
    """Shape of norms: `hidden` columns (a multiple of 8, so that rows are aligned for wide loads), operands of `dtype`
    ("bfloat16" or "float16"), with `fp8` as E4M3 with a scale per row. `native`: for targets that
    `e4m3.has_conversions`. `ordered`: 16-bit operands in the order of `kernels.order`."""

    hidden: int
    dtype: str
    fp8: bool = False
    native: bool = False
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.hidden % 8 or self.dtype not in ("bfloat16", "float16"):
            raise ConfigError(f"No norm kernel for {self.hidden} columns of {self.dtype}.", fix="Check the model.")

    def constants(self) -> dict[str, Constant]:
        block = 1 << (self.hidden - 1).bit_length()
        half, ordered = self.dtype == "float16", {"ORDERED": True} if self.ordered else {}
        return {"H": self.hidden, "BLOCK": block, "FP8": self.fp8, "HALF": half, "NATIVE": self.native, **ordered}

    def out_type(self) -> str:
        return "u8" if self.fp8 else FLOAT_TYPES[self.dtype]

    def name(self) -> str:
        form = ("_fp8" if self.fp8 else "") + ("_native" if self.native else "") + ("_ordered" if self.ordered else "")
        return f"{self.dtype}{form}_h{self.hidden}"


def _spec(
    name: str,
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Constant],
    num_warps: int,
    more_aligned: frozenset[str] = frozenset(),
) -> KernelSpec:
    """Make a spec with its signature in the kernel's order. Pointers are multiples of 16 bytes, except those of arrays
    with one element per row, which a caller may slice."""
    signature = {n: types[n] for n in function.arg_names if n in types}
    aligned = frozenset(n for n in signature if n in ALIGNED or n in more_aligned)
    return KernelSpec(f"{name}_w{num_warps}", function, signature, constants, aligned, num_warps, 1)


ALIGNED = {
    *("residual", "x", "weight", "post_weight", "next_weight", "out", "embedding", "features"),
    *("qkv", "q", "q_weight", "k_weight", "cos", "sin", "pool", "pool_page", "pool_kv", "pool_token", "pool_head"),
}


RANKED = {"peers": "*i64", "rank": "i32", "failed": "*i32"}


def embed_norm_spec(shape: NormShape, num_warps: int, *, table: str = "", images: bool = False) -> KernelSpec:
    """Specify `kernels.norm.embed_norm`; embedding and features of `images` have the operands' type, the embedding
    that of `table`, if it is given."""
    types = {
        **({"features": f"*{FLOAT_TYPES[shape.dtype]}"} if images else {}),
        **{"token_ids": "*i32", "embedding": f"*{FLOAT_TYPES[table or shape.dtype]}"},
        **{"weight": "*fp32", "residual": "*fp32"},
        **{"out": f"*{shape.out_type()}", "scales": "*fp32", "vocab": "i32", "embedding_scale": "fp32", "eps": "fp32"},
    }
    name = f"embed_{'images' if images else 'norm'}_{shape.name()}{table}"
    return _spec(name, norm.embed_norm, types, shape.constants(), num_warps)


def add_norm_spec(
    shape: NormShape, num_warps: int, *, x_dtype: str, gather: bool = False, ranks: int = 1, way: str = "pull"
) -> KernelSpec:
    """Specify `kernels.norm.add_norm` of x of `x_dtype`; `gather`: of the rows in `rows`. With several `ranks` x is
    summed over them; `way`: rows are "push"ed, "pull"ed, or each its owner's ("own")."""
    types = {
        **{"residual": "*fp32", "x": f"*{FLOAT_TYPES[x_dtype]}", "post_weight": "*fp32", "next_weight": "*fp32"},
        **{"out": f"*{shape.out_type()}", "scales": "*fp32", "rows": "*i32", "eps": "fp32"},
    }
    constants, name = {**shape.constants(), "GATHER": gather}, f"add_norm_{shape.name()}_{x_dtype}"
    if ranks > 1:
        types |= RANKED
        constants |= {"RANKS": ranks, "PUSH": ITEM_BYTES[pushed_type(shape.dtype)] if way == "push" else 0}
        constants |= {"OWNED": True} if way == "own" else {}
        name += f"_{way}{ranks}"
    return _spec(name + ("_rows" if gather else ""), norm.add_norm, types, constants, num_warps)


def order_spec(columns: int, dtype: str) -> KernelSpec:
    """Specify `kernels.order.order_rows`."""
    types = dict.fromkeys(("x", "out"), f"*{FLOAT_TYPES[dtype]}")
    return _spec(f"order_{dtype}_{columns}", order.order_rows, types, {"K": columns, "BLOCK": 512}, 4)


def meet_spec(ranks: int) -> KernelSpec:
    """Specify `kernels.exchange.meet`."""
    constants: dict[str, Constant] = {"RANKS": ranks, "PADDED": 1 << (ranks - 1).bit_length()}
    return _spec(f"meet{ranks}", exchange.meet, RANKED, constants, 1)


def gather_spec(ranks: int, columns: int) -> KernelSpec:
    """Specify `kernels.exchange.gather_columns` of `columns` of each rank."""
    types = {"columns": "*fp32", "logits": "*fp32", **RANKED}
    constants: dict[str, Constant] = {"COLUMNS": columns, "RANKS": ranks}
    name, aligned = f"gather{ranks}_{columns}", frozenset({"columns", "logits"} if columns % 4 == 0 else ())
    return _spec(name, exchange.gather_columns, types, constants, 4, aligned)


def collect_spec(ranks: int, hidden: int) -> KernelSpec:
    """Specify `kernels.exchange.collect_rows` of `hidden` columns."""
    types = {"residual": "*fp32", "rows": "*i32", "out": "*fp32", **RANKED}
    constants: dict[str, Constant] = {"H": hidden, "BLOCK": 1 << (hidden - 1).bit_length(), "RANKS": ranks}
    return _spec(f"collect{ranks}_{hidden}", exchange.collect_rows, types, constants, 4)


def qk_rope_spec(pool: PoolShape, heads: int, qkv_dtype: str, q_dtype: str, chosen: StepConfig) -> KernelSpec:
    """Specify `kernels.qk_rope.qk_norm_rope_write` into `pool`, whose type is "fp8" or any other."""
    fp8 = pool.dtype == "fp8"
    types = {
        **{"qkv": f"*{FLOAT_TYPES[qkv_dtype]}", "q": f"*{FLOAT_TYPES[q_dtype]}"},
        **dict.fromkeys(("q_weight", "k_weight", "cos", "sin", "kv_scale"), "*fp32"),
        **{"pool": "*u8" if fp8 else f"*{FLOAT_TYPES[pool.dtype]}", "eps": "fp32"},
        **dict.fromkeys(("tables", "positions", "sequences"), "*i32"),
        **dict.fromkeys(("tokens", "max_positions", "table_length"), "i32"),
        **dict.fromkeys(("table_stride", "pool_page", "pool_kv", "pool_token", "pool_head"), "i64"),
    }
    constants: dict[str, Constant] = {
        **{"D": pool.head_dim, "HEADS": heads, "KV_HEADS": pool.kv_heads, "PAGE_TOKENS": pool.page_tokens},
        **{"BLOCK": chosen.block, "FP8": fp8},
    }
    name = f"qk_rope_{qkv_dtype}_{q_dtype}_{pool.dtype}_h{heads}_{pool.kv_heads}_d{pool.head_dim}_p{pool.page_tokens}"
    return _spec(f"{name}_b{chosen.block}", qk_rope.qk_norm_rope_write, types, constants, chosen.num_warps)


SAMPLE_TYPES = {
    **dict.fromkeys(("logits", "chunk_max", "group_max", "least", "peaks"), "*fp32"),
    **dict.fromkeys(("temperatures", "top_p", "min_p", "chunk_mass", "masses"), "*fp64"),
    **dict.fromkeys(("top_k", "indices", "chunk_token", "tokens", "status", "counts"), "*i32"),
    **dict.fromkeys(("seeds", "candidates"), "*i64"),
    **{"vocab": "i32", "chunks": "i32", "rows": "i32", "weights": "*fp64"},
}


def sample_specs(
    vocab: int, *, sampled: bool, softcap: float = 0.0, rows: int = 1, candidates: int = sample.CANDIDATES
) -> dict[str, KernelSpec]:
    """Specify `kernels.sample`'s kernels for `vocab` logits, named and ordered as in `step_layout.sample_launches`.
    These are "scan" and "choose", and with `sampled` (otherwise all rows are greedy) "collect" and "draw". `softcap` 0
    is none. Filtered rows that leave up to `candidates` tokens are decided on the device, fewer where the vocabulary is
    short. Where `vocab` is a multiple of 16, so must be the address of the logits, in bytes."""
    chunk = config("scan", rows)
    assert chunk.block % sample.GROUP == 0
    chunks, groups = div_ceil(vocab, chunk.block), div_ceil(vocab, sample.GROUP)
    candidates = min(candidates, groups // 2 if vocab > 2 * candidates else vocab)  # or all of it is a candidate
    # Twice as many find room: where half of the groups reach the bound, 1.4 times as many logits do; ties come on top.
    capacity: dict[str, Constant] = {"CAPACITY": 1 << (2 * candidates - 1).bit_length()}
    common: dict[str, Constant] = {"CHUNK": chunk.block, "SOFTCAP": float(softcap)}
    grouped: dict[str, Constant] = {"GROUP": sample.GROUP, "SAMPLED": sampled}
    sizes: dict[str, Constant] = {
        "CHUNKS": 1 << (chunks - 1).bit_length(),
        "GROUPS": 1 << (chunks * chunk.block // sample.GROUP - 1).bit_length(),
        "CANDIDATES": candidates,
    }
    wide = frozenset({"logits", "vocab"} if vocab % 16 == 0 else ())
    shape = f"v{vocab}_c{chunk.block}{f'_cap{softcap:g}' if softcap else ''}{f'_n{candidates}' if sampled else ''}"
    scan_warps, draw_warps = chunk.num_warps, config("draw", rows).num_warps
    scan = _spec(f"scan_{shape}", sample.scan, SAMPLE_TYPES, common | grouped, scan_warps, wide)
    warps = config("choose", rows).num_warps
    choose = _spec(f"choose_{shape}", sample.choose, SAMPLE_TYPES, common | grouped | sizes, warps, wide)
    if not sampled:
        return {"scan": scan, "choose": choose}
    collect = _spec(f"collect_{shape}", sample.collect, SAMPLE_TYPES, common | capacity, scan_warps, wide)
    draw = _spec(f"draw_{shape}", sample.draw_filtered, SAMPLE_TYPES, capacity, draw_warps)
    return {"scan": scan, "choose": choose, "collect": collect, "draw": draw}


def wide_spec(vocab: int, softcap: float) -> KernelSpec:
    """Specify `kernels.sample_wide.draw_wide` for `vocab` logits. Where that is a multiple of 16, so must be the
    addresses of logits and weights, in bytes."""
    shift = max(1, (vocab - 1).bit_length())
    constants: dict[str, Constant] = {"CHUNK": 2048, "SHIFT": shift, "SOFTCAP": float(softcap)}
    aligned = frozenset({"logits", "weights", "vocab"} if vocab % 16 == 0 else ())
    name = f"draw_wide_v{vocab}{f'_cap{softcap:g}' if softcap else ''}"
    return _spec(name, sample_wide.draw_wide, SAMPLE_TYPES, constants, 16, aligned)
