"""Writes the keys and values of a step into KV pages.

Knows nothing of attention. Invariant: it writes the entries of the step's tokens and no other byte; a token without a
sequence, a position or a page (-1) is left out.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kv_write(
    k,
    v,
    pool,
    tables,
    positions,
    sequences,
    tokens,
    table_length,
    table_stride,
    k_token,
    k_head,
    v_token,
    v_head,
    pool_page,
    pool_kv,
    pool_token,
    pool_head,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """k, v [tokens, kv_heads, D] go to the layer whose K part starts at `pool` ([pages, 2, PAGE_TOKENS, kv_heads, D] by
    its strides): token i to position positions[i] (int32) of sequence sequences[i] (int32), whose page is
    tables[sequence, position // PAGE_TOKENS] (int32). Values are rounded to the pool's type.
    Grid: (cdiv(tokens, BLOCK), kv_heads).
    """
    head = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + i, mask=i < tokens, other=-1)
    sequence = tl.load(sequences + i, mask=i < tokens, other=-1).to(tl.int64)
    page_index = position // PAGE_TOKENS
    wanted = (position >= 0) & (sequence >= 0) & (page_index < table_length)
    page = tl.load(tables + sequence * table_stride + page_index, mask=wanted, other=-1).to(tl.int64)
    mask = (wanted & (page >= 0))[:, None]
    d = tl.arange(0, D)[None, :]
    row = i.to(tl.int64)[:, None]
    target = pool + (page * pool_page + (position % PAGE_TOKENS) * pool_token + head * pool_head)[:, None] + d
    key = tl.load(k + row * k_token + head * k_head + d, mask=mask)
    value = tl.load(v + row * v_token + head * v_head + d, mask=mask)
    tl.store(target, key.to(pool.dtype.element_ty), mask=mask)
    tl.store(target + pool_kv, value.to(pool.dtype.element_ty), mask=mask)
