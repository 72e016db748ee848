"""Query and key norms, rotary embedding and the write of keys and values into pages, in one launch for all heads.

Knows nothing of attention. Invariants: norms and rotation are float32 and every value is rounded once; a head of a
token depends on that head and token alone, so on nothing else in the batch; no byte of the pages is written but those
of the step's tokens, and a token without a sequence, a position or a page (-1) is left out.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.e4m3 import quantize
from wicore_trt.plugins.kernels.turns import take_turn


@triton.jit
def qk_norm_rope_write(
    qkv,
    q,
    q_weight,
    k_weight,
    cos,
    sin,
    pool,
    tables,
    positions,
    sequences,
    kv_scale,
    tokens,
    max_positions,
    table_length,
    table_stride,
    pool_page,
    pool_kv,
    pool_token,
    pool_head,
    eps,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
):
    """qkv [tokens, (HEADS + 2 KV_HEADS) * D] of any float type is split into q, k and v.

    Each head of q and k becomes norm(head) * weight (float32 [D], stored as 1 + w) and is rotated by halves: pair i is
    (x[i], x[i + D / 2]), its angle row positions[token] of cos, sin (float32 [max_positions, D / 2]). q goes to
    q [tokens, HEADS, D] in its type; attention scales it. k and v go to pages as in `kv_write`: `pool` is the layer's
    K part of page 0, tables int32 [sequences, table_length], positions and sequences int32[tokens]; FP8: E4M3 bytes of
    the float32 value / kv_scale[0] (a null pointer means 1). A position outside of [0, max_positions) is none: its
    q is rotated by nothing, and its k and v are left out.
    Grid: (cdiv(tokens, BLOCK), HEADS + 2 * KV_HEADS).
    """
    take_turn(DEPENDENT)
    head = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = i < tokens
    half = tl.arange(0, D // 2)[None, :]
    row = i.to(tl.int64)[:, None]
    source = qkv + row * ((HEADS + 2 * KV_HEADS) * D) + head * D + half
    low = tl.load(source, mask=present[:, None], other=0.0).to(tl.float32)
    high = tl.load(source + D // 2, mask=present[:, None], other=0.0).to(tl.float32)
    position = tl.load(positions + i, mask=present, other=-1)
    placed = (position >= 0) & (position < max_positions)
    if head < HEADS + KV_HEADS:
        weight = q_weight
        if head >= HEADS:
            weight = k_weight
        angle = position.to(tl.int64)[:, None] * (D // 2) + half
        c = tl.load(cos + angle, mask=placed[:, None], other=1.0)
        s = tl.load(sin + angle, mask=placed[:, None], other=0.0)
        factor = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
        a = low * factor * tl.load(weight + half)
        b = high * factor * tl.load(weight + D // 2 + half)
        low = a * c - b * s
        high = b * c + a * s
    if head < HEADS:
        q_target = q + row * (HEADS * D) + head * D + half
        tl.store(q_target, low.to(q.dtype.element_ty), mask=present[:, None])
        tl.store(q_target + D // 2, high.to(q.dtype.element_ty), mask=present[:, None])
    else:
        sequence = tl.load(sequences + i, mask=present, other=-1).to(tl.int64)
        page_index = position // PAGE_TOKENS
        wanted = placed & (sequence >= 0) & (page_index < table_length)
        page = tl.load(tables + sequence * table_stride + page_index, mask=wanted, other=-1).to(tl.int64)
        mask = (wanted & (page >= 0))[:, None]
        kv_head = head - HEADS
        part = pool
        if kv_head >= KV_HEADS:
            kv_head -= KV_HEADS
            part += pool_kv
        entry = page * pool_page + (position % PAGE_TOKENS) * pool_token + kv_head.to(tl.int64) * pool_head
        target = part + entry[:, None] + half
        if FP8:
            scale = tl.load(kv_scale, mask=kv_scale.to(tl.int64) != 0, other=1.0)
            tl.store(target, quantize(low, scale), mask=mask)
            tl.store(target + D // 2, quantize(high, scale), mask=mask)
        else:
            tl.store(target, low.to(pool.dtype.element_ty), mask=mask)
            tl.store(target + D // 2, high.to(pool.dtype.element_ty), mask=mask)
