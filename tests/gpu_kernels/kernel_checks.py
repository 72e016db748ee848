"""Checks of the kernels against plain references, for whatever runs them: Triton's interpreter or a GPU.

Each check takes a `Runner` and draws fresh inputs. What a kernel must not touch is poisoned: unused pool slots are NaN,
outputs start as noise and are compared whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from wicore_trt.plugins import layout
from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.kernels import specs
from wicore_trt.plugins.layout import CacheShape, Launch, Pool, PoolShape, Tables

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.uint8}
BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Runner:
    """Runs a launch whose pointers are tensors on `device`."""

    device: str
    launch: Callable[[KernelSpec, Launch], None]

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def noise(*shape: int, dtype: str) -> torch.Tensor:
    """Any bits, NaN included, as integers of the type's size."""
    bits = BITS[TORCH[dtype].itemsize]
    low, high = (0, 256) if bits == torch.uint8 else (torch.iinfo(bits).min, torch.iinfo(bits).max)
    return torch.randint(low, high, shape, dtype=bits)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Bytes of float32 values, saturated."""
    return x.clamp(-448, 448).to(E4M3).view(torch.uint8)


def same_numbers(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal, where one NaN equals another."""
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    got = got.cpu()
    assert got.dtype == want.dtype and torch.equal(got, want), f"{int((got != want).sum())} elements differ"


COPIES = [(0, 0, 24, 0), (1, 5, 11, 3), (2, 3, 0, 0), (3, 2, 17, 14), (4, 20, 9, 1), (5, 7, 1, 23), (6, 0, 24, 0)]
"""(slot, first, tokens, index) for pages of 4 tokens, tables of 6 and caches of 24: all, from inside a page, none,
past the cache's end, past the table's end, one token, and a table of absent pages."""


def copy_tables() -> list[list[int]]:
    """Disjoint pages of a pool of 42, some absent."""
    tables: list[list[int]] = torch.randperm(42).view(7, 6).tolist()
    tables[1][2] = tables[0][5] = -1
    tables[6] = [-1] * 6
    return tables


def each_copied(tables: list[list[int]]) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Index into the pool and into the cache of every token that COPIES take."""
    found = []
    for (slot, first, tokens, index), table in zip(COPIES, tables, strict=True):
        for t in range(tokens):
            page, offset = divmod(first + t, 4)
            if page < 6 and table[page] >= 0 and index + t < 24:
                found.append(
                    (
                        (table[page], ..., offset, slice(None), slice(None)),
                        (..., slot, slice(None), index + t, slice(None)),
                    )
                )
    return found


def check_copies_bits(run: Runner, dtype: str, d: int, *, to_cache: bool, max_tokens: int) -> None:
    shape, lines = PoolShape(2, 4, 2, d, dtype), CacheShape(2, 7, 2, 24, d, dtype)
    pool, cache = noise(42, 2, 2, 4, 2, d, dtype=dtype), noise(2, 2, 7, 2, 24, d, dtype=dtype)
    tables = copy_tables()
    spec = specs.copy_pages_spec(shape, dtype, to_cache=to_cache)
    on_pool, on_cache = run.put(pool.clone()), run.put(cache.clone())
    table = Tables(run.ints(tables), 7, 6)
    run.launch(
        spec,
        layout.copy_pages_launch(
            spec.constants, Pool(on_pool, shape), (on_cache, lines), table, run.ints(COPIES), max_tokens
        ),
    )
    for in_pool, in_cache in each_copied(tables):
        if to_cache:
            cache[in_cache] = pool[in_pool]
        else:
            pool[in_pool] = cache[in_cache]
    same_bits(on_pool, pool)
    same_bits(on_cache, cache)


def check_copies_fp8(run: Runner, dtype: str, *, to_cache: bool, with_scales: bool) -> None:
    shape, lines = PoolShape(2, 4, 2, 32, "fp8"), CacheShape(2, 7, 2, 24, 32, dtype)
    scales = torch.rand(2) + 0.05 if with_scales else torch.ones(2)
    pool = torch.randint(0, 256, (42, 2, 2, 4, 2, 32), dtype=torch.uint8)
    cache = (torch.randn(2, 2, 7, 2, 24, 32) * torch.tensor([1e-3, 0.1, 1, 300]).repeat(8)).to(TORCH[dtype])
    tables = copy_tables()
    spec = specs.copy_pages_spec(shape, dtype, to_cache=to_cache)
    on_pool, on_cache = run.put(pool.clone()), run.put(cache.clone())
    table = Tables(run.ints(tables), 7, 6)
    on_scales = run.put(scales) if with_scales else 0
    run.launch(
        spec,
        layout.copy_pages_launch(
            spec.constants, Pool(on_pool, shape, on_scales), (on_cache, lines), table, run.ints(COPIES), 24
        ),
    )
    factors = scales[:, None, None, None]  # [layers, 2, kv_heads, D]
    for in_pool, in_cache in each_copied(tables):
        if to_cache:
            cache[in_cache] = (pool[in_pool].view(E4M3).float() * factors).to(cache.dtype)
        else:
            pool[in_pool] = to_e4m3(cache[in_cache].float() / factors)
    same_bits(on_pool, pool)
    same_numbers(on_cache, cache)


def check_e4m3(run: Runner) -> None:
    """All codes one way; ties, neighbours of ties, limits, infinities and NaN the other way."""
    shape, lines = PoolShape(1, 64, 1, 64, "fp8"), CacheShape(1, 1, 1, 64, 64, "float32")
    codes = torch.arange(256, dtype=torch.uint8).repeat(32).view(1, 1, 2, 64, 1, 64)
    finite = codes.flatten()[:127].view(E4M3).float()
    ties = (finite[1:] + finite[:-1]) / 2
    near = [ties, finite, torch.tensor([448, 464, 1e9, math.inf, math.nan, 0, 1e-30, 2**-10, 2**-11, 2**-9])]
    near += [torch.nextafter(t, torch.tensor(x)) for t in (ties, finite) for x in (-math.inf, math.inf)]
    values = torch.cat([*near, torch.randn(64 * 64) * torch.exp2(torch.randint(-12, 10, (64 * 64,)))])
    values = torch.cat([values, -values])[: 2 * 64 * 64].view(1, 2, 1, 1, 64, 64)
    for to_cache in (True, False):
        spec = specs.copy_pages_spec(shape, "float32", to_cache=to_cache)
        pool, cache = run.put(codes.clone()), run.put(values.clone())
        copy, table = run.ints([[0, 0, 64, 0]]), Tables(run.ints([[0]]), 1, 1)
        run.launch(spec, layout.copy_pages_launch(spec.constants, Pool(pool, shape), (cache, lines), table, copy, 64))
        if to_cache:
            same_numbers(cache.flatten(), codes.flatten().view(E4M3).float())
        else:
            got, want = pool.cpu().flatten(), to_e4m3(values.flatten())
            unsigned_nan = (want & 0x7F) == 0x7F
            assert torch.equal((got & 0x7F) == 0x7F, unsigned_nan)
            same_bits(got[~unsigned_nan], want[~unsigned_nan])


def check_slide(run: Runner, dtype: str) -> None:
    """Overlap of source and target by all but one entry, none, exact, a move of nothing, and from the front."""
    moves = [(0, 1, 99), (1, 50, 50), (2, 7, 0), (3, 0, 100), (4, 99, 1), (6, 13, 80)]
    shape, lines = PoolShape(2, 4, 2, 64, dtype), CacheShape(2, 7, 2, 100, 64, dtype)
    cache = noise(2, 2, 7, 2, 100, 64, dtype=dtype)
    on_cache = run.put(cache.clone())
    run.launch(specs.slide_spec(shape, dtype), layout.slide_launch((on_cache, lines), run.ints(moves), len(moves)))
    for slot, first, keep in moves:
        cache[:, :, slot, :, :keep] = cache[:, :, slot, :, first : first + keep].clone()
    same_bits(on_cache, cache)


CHECKS: dict[str, Callable[[Runner], None]] = {
    "e4m3": check_e4m3,
    **{
        f"copy {dtype} {'to cache' if to_cache else 'to pages'}": partial(
            check_copies_bits, dtype=dtype, d=d, to_cache=to_cache, max_tokens=max_tokens
        )
        # bfloat16: blocks of 16 tokens and a grid for one, which is too small, and all is copied all the same.
        for dtype, d, max_tokens in (("float32", 16, 24), ("bfloat16", 256, 1), ("fp8", 16, 24))
        for to_cache in (True, False)
    },
    **{
        f"copy fp8 {dtype} {'to cache' if to_cache else 'to pages'}, scales {with_scales}": partial(
            check_copies_fp8, dtype=dtype, to_cache=to_cache, with_scales=with_scales
        )
        for dtype, with_scales in (("float32", True), ("bfloat16", True), ("float16", False))
        for to_cache in (True, False)
    },
    **{f"slide {dtype}": partial(check_slide, dtype=dtype) for dtype in ("float32", "bfloat16", "fp8")},
}
