"""TensorRT's attention, KV cache update and rotary embedding on carriers.

Same contract as `evaluator_layers`. Invariant: what a token
must not see is not read (entries beyond key_value_lengths), or shows: a query that sees nothing is NaN, and a masked
entry that holds NaN makes the result NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from evaluator_layers import require, same_types, softmax_along

Array = Any  # np.ndarray


def attention_input(
    step: Any,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    normalization_scale: Array | None = None,
    query_lengths: Array | None = None,
    lengths: Array | None = None,
) -> Array:
    """softmax(q k^T) v, not scaled: q [B, heads, T, D]; k, v [B, kv_heads, S, D]; the whole attention is computed here.

    Query head h reads KV head h // (heads / kv_heads). Batch entry b has lengths[b] keys (S without lengths). Query i
    sees key j: LOWER_RIGHT j <= i + keys - T; UPPER_LEFT j <= i; a mask [B or 1, heads or 1, T or 1, S or 1], bool
    (true: sees) or added to the scores.
    """
    attention = step.layer.attention
    same_types(step, 0, 1, 2)
    require(attention.norm_op.name == "SOFTMAX" and attention.num_ranks == 1, "no softmax, or several ranks")
    require(attention.query_form.name == attention.key_value_form.name == "PADDED_BHND", "packed tensors")
    require(normalization_scale is None and query_lengths is None, "quantized softmax, or query lengths")
    kind = attention.causal_kind.name
    require(mask is None or kind == "NONE", "a mask together with a causal kind")
    batch, heads, tokens, _ = q.shape
    entries, kv_heads = k.shape[2], k.shape[1]
    assert len(k) == batch and k.shape[:3] == v.shape[:3] and heads % kv_heads == 0, (q.shape, k.shape, v.shape)
    lengths = np.full(batch, entries) if lengths is None else lengths
    assert lengths.shape == (batch,) and np.all((lengths >= 0) & (lengths <= entries)), f"lengths {lengths}"
    added = np.zeros((1, 1, 1, 1), np.float32)
    if mask is not None:
        require(step.input_types[3] in ("BOOL", step.input_types[0]), f"a mask of {step.input_types[3]}")
        assert mask.ndim == 4, f"mask of {mask.shape}"
        added = mask if step.input_types[3] != "BOOL" else np.where(mask, np.float32(0), np.float32(-np.inf))
    added = np.broadcast_to(added, (batch, heads, tokens, entries))
    out = np.full((*q.shape[:3], v.shape[3]), np.nan, np.float32)
    i, j = np.arange(tokens)[:, None], np.arange(entries)
    for b in range(batch):
        keys = int(lengths[b])
        if keys == 0:
            continue
        grouped = q[b].reshape(kv_heads, -1, q.shape[3])  # query heads of one KV head, one after the other
        scores = (grouped @ k[b, :, :keys].swapaxes(1, 2)).reshape(heads, tokens, keys) + added[b, :, :, :keys]
        if kind != "NONE":
            ahead = keys - tokens if kind == "LOWER_RIGHT" else 0
            scores = np.where(j[:keys] <= i + ahead, scores, np.float32(-np.inf))
        weights = softmax_along(scores, 2).reshape(kv_heads, -1, keys)
        out[b] = (weights @ v[b, :, :keys]).reshape(heads, tokens, -1)
    return out


def attention_output(step: Any, x: Array) -> Array:
    return x


def kv_cache_update(step: Any, cache: Array, update: Array, first: Array) -> Array:
    """cache [B, heads, S, D] with update [B, heads, T, D] at entries first[b] .. first[b] + T."""
    layer = step.layer
    same_types(step, 0, 1)
    require(layer.cache_mode.name == "LINEAR" and layer.update_form.name == "PADDED_BHND", "packed or not linear")
    require(layer.update_lengths is None, "update lengths")
    tokens = update.shape[2]
    assert update.shape == (*cache.shape[:2], tokens, cache.shape[3]), (cache.shape, update.shape)
    assert first.shape == (len(cache),), f"write indices {first.shape}"
    if np.any((first < 0) | (first + tokens > cache.shape[2])):
        raise IndexError(f"{tokens} tokens at {first.tolist()} of a cache of {cache.shape[2]}")
    cache = cache.copy()
    for b, at in enumerate(first.tolist()):
        cache[b, :, at : at + tokens] = update[b]
    return cache


def rotary_embedding(step: Any, x: Array, cos: Array, sin: Array, positions: Array | None = None) -> Array:
    """x [B, heads, T, D]; the first R of D are rotated. cos, sin are [positions, R / 2] with position ids [B, T],
    else [B, T, R / 2]. Pairs are (i, i + R / 2), or (2 i, 2 i + 1) if interleaved."""
    same_types(step, 0, 1, 2)
    size = step.layer.rotary_embedding_dim or x.shape[3]
    half = size // 2
    assert size % 2 == 0 and cos.shape == sin.shape and cos.shape[-1] == half, (x.shape, cos.shape, sin.shape)
    if positions is not None:
        assert cos.ndim == 2, cos.shape
        if np.any((positions < 0) | (positions >= len(cos))):
            raise IndexError(f"a position is outside 0..{len(cos) - 1}")
        cos, sin = cos[positions], sin[positions]
    assert cos.shape == (x.shape[0], x.shape[2], half), (x.shape, cos.shape)
    cos, sin = cos[:, None], sin[:, None]
    interleaved = step.layer.interleaved
    first, second = (slice(0, size, 2), slice(1, size, 2)) if interleaved else (slice(half), slice(half, size))
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


LAYERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "ATTENTION_INPUT": ("IAttentionInputLayer", attention_input),
    "ATTENTION_OUTPUT": ("IAttentionOutputLayer", attention_output),
    "KV_CACHE_UPDATE": ("IKVCacheUpdateLayer", kv_cache_update),
    "ROTARY_EMBEDDING": ("IRotaryEmbeddingLayer", rotary_embedding),
}
