"""Arguments and grids of a step's small kernels: plain arithmetic over addresses.

Knows pointers as integers (or stand-ins) and shapes; neither Triton nor CUDA. Invariant: all arrays are contiguous,
except pages, whose strides are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from wicore_trt.arithmetic import div_ceil
from wicore_trt.plugins.layout import Launch, Pool, Tables

LAYER_NORM_COLUMNS = 2048
"""The most columns of `kernels.layer_norm`, whose number is a multiple of 16."""
DIGEST_BLOCK_BYTES = 16384
"""Bytes of a page that a program of `kernels.page_digest` reads."""


class NormOut(NamedTuple):
    """Output of a norm: `out` [rows, H] 16 bit or E4M3 bytes, `scales` float32 [rows] for E4M3, otherwise 0."""

    out: Any
    scales: Any = 0


def embed_norm_launch(
    token_ids: Any, embedding: tuple[Any, int, float], weight: Any, residual: Any, to: NormOut, tokens: int, eps: float,
    *, features: Any = None,
) -> Launch:  # fmt: skip
    """Launch `kernels.norm.embed_norm` of int32 token_ids [tokens]; `embedding` is its rows, their number and the
    factor. `features`: of images, for the kernel that reads them."""
    rows, vocab, scale = embedding
    arguments = {"token_ids": token_ids, "embedding": rows, "weight": weight, "residual": residual, "out": to.out}
    arguments |= {"scales": to.scales, "vocab": vocab, "embedding_scale": scale, "eps": eps}
    arguments |= {} if features is None else {"features": features}
    return Launch((tokens, 1, 1), arguments)


def add_norm_launch(
    residual: Any, x: Any, weights: tuple[Any, Any], to: NormOut, rows: int, eps: float, *, gathered: Any = 0,
    ranked: Mapping[str, Any] | None = None,
) -> Launch:  # fmt: skip
    """Launch `kernels.norm.add_norm` of `rows` rows of `out`. `weights` are the post and the next norm's; `gathered`
    int32[rows] names the rows that are taken. `ranked`: as in `exchange_layout.meet_launch`."""
    arguments = {"residual": residual, "x": x, "post_weight": weights[0], "next_weight": weights[1]}
    arguments |= {"out": to.out, "scales": to.scales, "rows": gathered, "eps": eps, **(ranked or {})}
    return Launch((rows, 1, 1), arguments)


def order_launch(constants: Mapping[str, Any], x: Any, out: Any, rows: int) -> Launch:
    """Launch `kernels.order.order_rows`."""
    return Launch((rows, div_ceil(constants["K"], constants["BLOCK"]), 1), {"x": x, "out": out})


def add_layer_norm_launch(
    residual: Any, added: Any, weights: tuple[Any, Any], out: Any, shape: tuple[int, int], eps: float
) -> Launch:
    """Launch `kernels.layer_norm.add_layer_norm` of [rows, columns]; `weights` are the norm's weight and bias."""
    arguments = {"residual": residual, "added": added, "weight": weights[0], "bias": weights[1], "out": out}
    return Launch((shape[0], 1, 1), {**arguments, "columns": shape[1], "eps": eps})


class QkNorms(NamedTuple):
    """Weights float32 [D] of the query and key norms, stored as 1 + w, and their epsilon."""

    q: Any
    k: Any
    eps: float


class RopeTable(NamedTuple):
    """cos and sin float32 [positions, D / 2] of a layer group."""

    cos: Any
    sin: Any
    positions: int


@dataclass(frozen=True)
class StepTokens:
    """Position and sequence (row of the page table) of each token, int32[count]; -1: none."""

    positions: Any
    sequences: Any
    count: int


def qk_rope_launch(
    constants: Mapping[str, Any],
    qkv: Any,
    q: Any,
    norms: QkNorms,
    rope: RopeTable,
    pool: Pool,
    tables: Tables,
    tokens: StepTokens,
) -> Launch:
    """Launch `kernels.qk_rope.qk_norm_rope_write`; `pool` is the layer's."""
    strides = pool.shape.strides()
    del strides["pool_layer"]
    arguments = {"qkv": qkv, "q": q, "q_weight": norms.q, "k_weight": norms.k, "eps": norms.eps}
    arguments |= {"cos": rope.cos, "sin": rope.sin, "max_positions": rope.positions}
    arguments |= {"pool": pool.pointer, "kv_scale": pool.scales, **strides}
    arguments |= {"tables": tables.pointer, "table_length": tables.length, "table_stride": tables.length}
    arguments |= {"positions": tokens.positions, "sequences": tokens.sequences, "tokens": tokens.count}
    grid = (div_ceil(tokens.count, constants["BLOCK"]), constants["HEADS"] + 2 * constants["KV_HEADS"], 1)
    return Launch(grid, arguments)


@dataclass(frozen=True)
class SampleArrays:
    """Arrays of `kernels.sample` on the device; R is the number of rows. The caller fills the parameters. Parameters (0
    for greedy kernels): `temperatures`, `top_p`, `min_p` float64[R], `top_k` int32[R], `seeds` int64[R], `indices`
    int32[R]. Results: `tokens`, `status` int32[R]. The rest is working memory, sized by `sample_scratch`."""

    tokens: Any
    status: Any
    chunk_max: Any
    chunk_token: Any
    temperatures: Any = 0
    top_k: Any = 0
    top_p: Any = 0
    min_p: Any = 0
    seeds: Any = 0
    indices: Any = 0
    chunk_mass: Any = 0
    group_max: Any = 0
    least: Any = 0
    peaks: Any = 0
    masses: Any = 0
    counts: Any = 0
    candidates: Any = 0


def sample_scratch(vocab: int, chunk: int, group: int, capacity: int) -> dict[str, tuple[str, int]]:
    """Size working memory of SampleArrays: type and elements per row. Greedy kernels need the first two."""
    chunks = div_ceil(vocab, chunk)
    return {
        "chunk_max": ("float32", chunks), "chunk_token": ("int32", chunks), "chunk_mass": ("float64", chunks),
        "group_max": ("float32", chunks * chunk // group), "least": ("float32", 1), "peaks": ("float32", 1),
        "masses": ("float64", 1), "counts": ("int32", 1), "candidates": ("int64", capacity),
    }  # fmt: skip


@dataclass(frozen=True)
class Logits:
    """float32 logits [rows, vocab]."""

    pointer: Any
    rows: int
    vocab: int


def sample_launches(constants: Mapping[str, Any], logits: Logits, arrays: SampleArrays) -> dict[str, Launch]:
    """Make launches of `kernels.sample` by the kernels' names, in order; `constants` are those of `choose`. Greedy
    kernels need "scan" and "choose" alone."""
    chunks = div_ceil(logits.vocab, constants["CHUNK"])
    a = vars(arrays)
    read = {"logits": logits.pointer, "vocab": logits.vocab}
    partial = {n: a[n] for n in ("temperatures", "chunk_max", "chunk_token", "chunk_mass", "group_max")}
    filters = {n: a[n] for n in ("top_k", "top_p", "min_p", "seeds", "indices")}
    found = {n: a[n] for n in ("tokens", "status", "peaks", "masses", "counts")}
    wide, narrow = (chunks, logits.rows, 1), (logits.rows, 1, 1)
    collected = {n: a[n] for n in ("least", "counts", "candidates")}
    drawn = {"candidates": a["candidates"], "temperatures": a["temperatures"], "vocab": logits.vocab}
    return {
        "scan": Launch(wide, {**read, **partial}),
        "choose": Launch(narrow, {**read, **partial, **filters, **found, "least": a["least"], "chunks": chunks}),
        "collect": Launch(wide, {**read, **collected}),
        "draw": Launch(narrow, {**drawn, **filters, **found}),
    }


def wide_launch(logits: Logits, arrays: SampleArrays, weights: Any, programs: int) -> Launch:
    """Launch `kernels.sample_wide.draw_wide`, behind the launches of `sample_launches`. `weights` is float64 [programs,
    vocab]."""
    a = vars(arrays)
    names = ("temperatures", "top_k", "top_p", "min_p", "seeds", "indices", "peaks", "tokens", "status")
    read = {"logits": logits.pointer, "rows": logits.rows, "vocab": logits.vocab}
    return Launch((min(programs, logits.rows), 1, 1), {**read, **{n: a[n] for n in names}, "weights": weights})


def geglu_launch(
    constants: Mapping[str, Any], gate_up: Any, out: Any, scales: Any, tokens: int, alpha: float = 1.0
) -> Launch:
    """Launch `kernels.geglu` of gate_up [tokens, 2 I]: `geglu`, whose `scales` are 0, or `geglu_rows`, by their
    constants. `alpha` is a power of two."""
    arguments = {"gate_up": gate_up, "out": out, "alpha": alpha}
    if "BLOCK" in constants:
        return Launch((tokens, div_ceil(constants["WIDTH"], constants["BLOCK"]), 1), arguments)
    return Launch((tokens, 1, 1), {**arguments, "scales": scales})


def page_digest_launch(arrays: Mapping[str, Any], pages: int, most_bytes: int, second_pairs: int) -> Launch:
    """Launch `kernels.page_digest` of `arrays`: int64 `offsets` from `memory` and `lengths` [pages] in words of 4
    bytes; `key` uint32 as `PageDigest.words`; `sums` int64 [pages, 2], zero before."""
    grid = (div_ceil(most_bytes, DIGEST_BLOCK_BYTES), pages, 1)
    return Launch(grid, {**arrays, "second": second_pairs})
