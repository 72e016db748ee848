"""Shards of random geometries, put back together, are the whole; what does not divide is said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wicore_trt.checkpoint.names import Split, unified_tensors
from wicore_trt.checkpoint.sharding import shard_of
from wicore_trt.errors import CheckpointError
from wicore_trt.model.spec import GLOBAL, LOCAL, Gemma3Spec


def _spec(heads: int, kv_heads: int, mlp: int = 32, vocab: int = 64) -> Gemma3Spec:
    return Gemma3Spec(
        vocab_size=vocab,
        hidden_size=8,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=4,
        intermediate_size=mlp,
        query_pre_attn_scalar=4.0,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_local_theta=1e4,
        rope_scaling_factor=1.0,
        sliding_window=8,
        layer_groups=(LOCAL, GLOBAL),
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_make_up_the_whole(data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from([1, 2, 4, 8]))
    kv_heads = data.draw(st.sampled_from([1, 2, 4, 8]))
    spec = _spec(heads=8, kv_heads=kv_heads)
    spec.shard(0, tp)
    for tensor in unified_tensors(spec):
        whole = np.arange(np.prod(tensor.shape)).reshape(tensor.shape)
        group = spec.layer_group(LOCAL)
        sizes = [group.q_size, group.kv_size, group.kv_size] if tensor.split is Split.QKV else [tensor.shape[0]]
        sources = np.split(whole, np.cumsum(sizes)[:-1])
        parts = []
        for rank in range(tp):
            shard = shard_of(tensor, spec, rank, tp)
            columns = slice(*shard.columns) if shard.columns else slice(None)
            taken = [s[a:b] for s, (a, b) in zip(sources, shard.rows, strict=True)]
            parts.append([t[:, columns] if t.ndim == 2 else t for t in taken])
            assert np.concatenate(parts[-1]).shape == shard.shape
        for i, source in enumerate(sources):
            pieces = [p[i] for p in parts]
            if tensor.split is Split.NONE:
                assert all(np.array_equal(p, source) for p in pieces)
            elif tensor.split is Split.COLUMNS:
                np.testing.assert_array_equal(np.concatenate(pieces, axis=1), source)
            else:
                repeat = max(1, tp // kv_heads) if tensor.split is Split.QKV and i else 1
                np.testing.assert_array_equal(np.concatenate(pieces[::repeat]), source)
                assert all(np.array_equal(pieces[r], pieces[r - r % repeat]) for r in range(tp))


@pytest.mark.parametrize(
    "spec,tp,message",
    [
        (_spec(8, 8), 3, "8 attention heads do not divide by tp 3. Use a tp of 1, 2, 4, 8."),
        (_spec(12, 4), 6, "4 KV heads can be neither split nor repeated over tp 6"),
        (_spec(8, 8, mlp=34), 4, "intermediate_size 34"),
        (_spec(8, 8, vocab=66), 4, "vocab_size 66 does not divide by tp 4"),
        (_spec(8, 8), 0, "at least 1"),
    ],
)
def test_what_does_not_divide_is_said(spec: Gemma3Spec, tp: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec.shard(0, tp)
