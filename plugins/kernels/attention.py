"""Attention over paged KV: one kernel for decode, prefill and every mixture of both, and one that writes the KV.

Knows pages, windows and grouped queries; not models. Softmax and sums are float32; operands of the two products have
the queries' type. Invariants: a key that a query does not see never changes the query's result, NaN included; a key
that it sees and that is not there (page -1) or whose value is not finite makes the result NaN, never a wrong number;
and a row's result does not depend on which rows share its block, because key blocks lie at absolute positions and a
block without visible keys changes nothing. `kv_write` writes the entries of the step's tokens and no other byte; a
token without a sequence, a position or a page (-1) is left out.

Online softmax: arXiv:2205.14135. Rows of a block are (token, query head of the group) pairs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _find_sequence(cu_seqlens, n_sequences, block, TOKENS: tl.constexpr):
    """The sequence that row block `block` belongs to: blocks of sequence s begin at cu_seqlens[s] // TOKENS + s.

    That leaves each sequence enough blocks whatever the lengths are, and needs no table made on the host.
    """
    begun = 0
    for base in range(0, n_sequences, 64):
        s = base + tl.arange(0, 64)
        opens = tl.load(cu_seqlens + s, mask=s < n_sequences, other=0) // TOKENS + s
        begun += tl.sum(((s < n_sequences) & (opens <= block)).to(tl.int32), axis=0)
    return begun - 1


@triton.jit
def _key_block(
    acc,
    top,
    total,
    q,
    pool,
    table,
    begin,
    low,
    last,
    position,
    scale,
    window,
    table_length,
    pool_page,
    pool_kv,
    pool_token,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Take keys [begin, begin + BLOCK_K) into a block's online softmax: (acc, top, total) before and after.

    `top` is the largest score so far in units of log2, `total` the sum of weights, `acc` the weighted values. EDGE:
    some row does not see some of the keys; keys outside [low, last] are then not even loaded.
    """
    n = begin + tl.arange(0, BLOCK_K)
    d = tl.arange(0, D)
    page_index = n // PAGE_TOKENS
    wanted = page_index < table_length
    if EDGE:
        wanted &= (n >= low) & (n <= last)
    page = tl.load(table + page_index, mask=wanted, other=-1).to(tl.int64)
    missing = page < 0
    offset = page * pool_page + (n % PAGE_TOKENS) * pool_token
    k = tl.load(pool + offset[None, :] + d[:, None], mask=(page >= 0)[None, :], other=0)
    v = tl.load(pool + pool_kv + offset[:, None] + d[None, :], mask=(page >= 0)[:, None], other=0)
    if EDGE:
        # A weight of 0 does not hide NaN (0 * NaN): such values leave the product and speak through the scores.
        finite = tl.abs(v.to(tl.float32)) < float("inf")
        missing |= tl.sum((~finite).to(tl.int32), axis=1) > 0
        v = tl.where(finite, v, 0.0)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    scores = tl.where(missing[None, :], float("nan"), scores)
    if EDGE:
        seen = (n[None, :] <= position[:, None]) & ((window <= 0) | (n[None, :] > position[:, None] - window))
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet: -inf - -inf is NaN
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def paged_attention(
    q,
    out,
    pool,
    tables,
    cu_seqlens,
    first_positions,
    softmax_scale,
    window,
    n_sequences,
    table_length,
    table_stride,
    q_token,
    q_head,
    out_token,
    out_head,
    pool_page,
    pool_kv,
    pool_token,
    pool_head,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    REPEAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[i, h] = softmax(q[i, h] . K * softmax_scale) V over the keys that token i sees.

    q, out [N, kv_heads * REPEAT, D]; query head h reads KV head h // REPEAT. Rows [cu_seqlens[s], cu_seqlens[s + 1])
    (int32[S + 1]) are sequence s at positions first_positions[s] (int32[S]), + 1, ...; its page j is tables[s, j]
    (int32). A token at p sees positions (p - window, p], or [0, p] when window is 0. pool as in `kv_write`.
    Grid: (N // (BLOCK_M // REPEAT) + S, kv_heads).
    """
    TOKENS: tl.constexpr = BLOCK_M // REPEAT
    head = tl.program_id(1).to(tl.int64)
    s = _find_sequence(cu_seqlens, n_sequences, tl.program_id(0), TOKENS)
    begin = tl.load(cu_seqlens + s)
    length = tl.load(cu_seqlens + s + 1) - begin
    token0 = (tl.program_id(0) - begin // TOKENS - s) * TOKENS
    if token0 >= length:
        return
    rows = tl.arange(0, BLOCK_M)
    token = token0 + rows // REPEAT
    live = ((rows < TOKENS * REPEAT) & (token < length))[:, None]
    first = tl.load(first_positions + s)
    position = first + token
    d = tl.arange(0, D)[None, :]
    row = (begin + token).to(tl.int64)[:, None]
    query_head = (head * REPEAT + rows % REPEAT)[:, None]
    query = tl.load(q + row * q_token + query_head * q_head + d, mask=live, other=0.0)

    scale = softmax_scale * LOG2_E
    pool += head * pool_head
    table = tables + s.to(tl.int64) * table_stride
    # Positions of the first and the last token of the block, and the keys that both of them see: [all_from, all_to).
    front = first + token0
    last = first + tl.minimum(token0 + TOKENS, length) - 1
    low = tl.where(window > 0, tl.maximum(front - window + 1, 0), 0)
    all_from = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    middle = tl.cdiv(all_from, BLOCK_K) * BLOCK_K
    tail = tl.maximum((front + 1) // BLOCK_K * BLOCK_K, middle)

    acc = tl.zeros([BLOCK_M, D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for n in range(low // BLOCK_K * BLOCK_K, tl.minimum(middle, last + 1), BLOCK_K):
        acc, top, total = _key_block(
            acc, top, total, query, pool, table, n, low, last, position, scale, window, table_length, pool_page,
            pool_kv, pool_token, D, PAGE_TOKENS, BLOCK_K, True,
        )  # fmt: skip
    for n in range(middle, tail, BLOCK_K):
        acc, top, total = _key_block(
            acc, top, total, query, pool, table, n, low, last, position, scale, window, table_length, pool_page,
            pool_kv, pool_token, D, PAGE_TOKENS, BLOCK_K, False,
        )  # fmt: skip
    for n in range(tail, last + 1, BLOCK_K):
        acc, top, total = _key_block(
            acc, top, total, query, pool, table, n, low, last, position, scale, window, table_length, pool_page,
            pool_kv, pool_token, D, PAGE_TOKENS, BLOCK_K, True,
        )  # fmt: skip
    result = acc / total[:, None]
    tl.store(out + row * out_token + query_head * out_head + d, result.to(out.dtype.element_ty), mask=live)


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
