"""Copies of KV between pages of a pool and linear caches, and moves within a linear cache.

Layouts: pool [pages, layers, 2 (K, V), page_tokens, kv_heads, D], cache [layers, 2, slots, kv_heads, S, D]; the caller
gives the strides in elements, that of D is 1. Knows neither models nor windows.
Invariants: nothing outside the tokens asked for is written, an absent page (-1) is neither read nor written, and what
reaches past the page table or the cache is left out.

What to copy is read on the device, so that a launch can be part of a CUDA graph or of a TensorRT engine.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.e4m3 import decode, quantize


@triton.jit
def copy_pages(
    pool,
    cache,
    tables,
    copies,
    scales,
    table_length,
    cache_tokens,
    layers,
    table_stride,
    pool_page,
    pool_layer,
    pool_kv,
    pool_token,
    pool_head,
    cache_layer,
    cache_kv,
    cache_slot,
    cache_head,
    cache_token,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_CACHE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Copy c moves `tokens` tokens from position `first` on, whose pages are tables[c, position // PAGE_TOKENS], to or
    from cache entries `index`, index + 1, ... of `slot`.

    copies int32[C, 4]: (slot, first, tokens, index). tables int32[C, table_length]. FP8: the pool holds E4M3 bytes that
    stand for q * scales[layer] (float32[layers]; a null pointer means 1), the cache a floating-point type. Otherwise
    both are integers of one size and bits are copied. Grid: (any, kv_heads, C * layers * 2).
    """
    head = tl.program_id(1).to(tl.int64)
    kv = (tl.program_id(2) % 2).to(tl.int64)
    layer = ((tl.program_id(2) // 2) % layers).to(tl.int64)
    copy = (tl.program_id(2) // 2 // layers).to(tl.int64)
    slot = tl.load(copies + copy * 4).to(tl.int64)
    first = tl.load(copies + copy * 4 + 1)
    tokens = tl.load(copies + copy * 4 + 2)
    index = tl.load(copies + copy * 4 + 3)
    pool += layer * pool_layer + kv * pool_kv + head * pool_head
    cache += layer * cache_layer + kv * cache_kv + slot * cache_slot + head * cache_head
    if FP8:
        scale = tl.load(scales + layer, mask=scales.to(tl.int64) != 0, other=1.0)
    d = tl.arange(0, D)[None, :]
    for block in range(tl.program_id(0) * BLOCK, tokens, tl.num_programs(0) * BLOCK):
        t = block + tl.arange(0, BLOCK)
        page_index = (first + t) // PAGE_TOKENS
        wanted = (t < tokens) & (first + t >= 0) & (page_index < table_length)
        wanted &= (index + t >= 0) & (index + t < cache_tokens)
        page = tl.load(tables + copy * table_stride + page_index, mask=wanted, other=-1).to(tl.int64)
        mask = (wanted & (page >= 0))[:, None]
        in_pool = pool + (page * pool_page + ((first + t) % PAGE_TOKENS) * pool_token)[:, None] + d
        in_cache = cache + ((index + t) * cache_token)[:, None] + d
        if TO_CACHE:
            value = tl.load(in_pool, mask=mask)
            if FP8:
                value = (decode(value) * scale).to(cache.dtype.element_ty)
            tl.store(in_cache, value, mask=mask)
        else:
            value = tl.load(in_cache, mask=mask)
            if FP8:
                value = quantize(value.to(tl.float32), scale)
            tl.store(in_pool, value, mask=mask)


@triton.jit
def slide(
    cache, moves, cache_layer, cache_kv, cache_slot, cache_head, cache_token, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Move m takes `keep` entries of `slot`, from entry `first` on, to the slot's front, in all layers, K and V.

    moves int32[M, 3]: (slot, first, keep), first + keep <= S. Source and target may overlap: one program moves all
    entries of a head in ascending blocks, and reads a block whole before it writes any of it. As first >= 0, what it
    writes lies before everything that it has still to read. Elements are integers of the cache's item size.
    Grid: (kv_heads, layers * 2, M).
    """
    layer = (tl.program_id(1) // 2).to(tl.int64)
    kv = (tl.program_id(1) % 2).to(tl.int64)
    move = tl.program_id(2) * 3
    slot = tl.load(moves + move).to(tl.int64)
    first = tl.load(moves + move + 1)
    keep = tl.load(moves + move + 2)
    cache += layer * cache_layer + kv * cache_kv + slot * cache_slot + tl.program_id(0).to(tl.int64) * cache_head
    d = tl.arange(0, D)[None, :]
    for block in range(0, keep, BLOCK):
        t = block + tl.arange(0, BLOCK)
        mask = (t < keep)[:, None]
        value = tl.load(cache + ((first + t) * cache_token)[:, None] + d, mask=mask)
        tl.debug_barrier()  # other warps of the program may still be reading what this one writes
        tl.store(cache + (t * cache_token)[:, None] + d, value, mask=mask)
