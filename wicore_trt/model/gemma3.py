"""Gemma 3, written once against `Ops`: the only place that knows the order of operations.

Imports `ops` and `spec` alone; must not know tensors, devices, pages or batches. Weight names are those of the unified
checkpoint (`checkpoint.names`), but executors fuse gate and up as `mlp.gate_up`. Invariant: lowerings differ by their
operators alone.
"""

from __future__ import annotations

from wicore_trt.model.ops import Ops, T
from wicore_trt.model.spec import Gemma3Spec

EMBEDDING = "transformer.vocab_embedding.weight"
FINAL_NORM = "transformer.ln_f.weight"
LM_HEAD = "lm_head.weight"


def layer_weight(layer: int, name: str) -> str:
    """Name a layer's tensor in full, e.g. layer_weight(3, "attention.qkv")."""
    return f"transformer.layers.{layer}.{name}.weight"


def forward(ops: Ops[T], spec: Gemma3Spec) -> T:
    """Compute a step over the whole decoder: logits [R, vocab] float32 of the sampled rows.

    Gemma 3 (arXiv:2503.19786, section 2): pre- and post-norm around each block, QK-norm, 5 local : 1 global.
    """
    residual = ops.embed()
    x = ops.norm(residual, layer_weight(0, "input_layernorm"))
    for i in range(spec.num_layers):
        last = i + 1 == spec.num_layers
        next_norm = FINAL_NORM if last else layer_weight(i + 1, "input_layernorm")
        q = ops.qk_norm_rope_write(ops.linear(x, layer_weight(i, "attention.qkv")), i)
        attended = ops.reduce(ops.linear(ops.attention(q, i), layer_weight(i, "attention.dense")))
        residual, x = ops.add_norm(
            residual, attended, layer_weight(i, "post_layernorm"), layer_weight(i, "pre_feedforward_layernorm")
        )
        hidden = ops.geglu(ops.linear(x, layer_weight(i, "mlp.gate_up")))
        down = ops.reduce(ops.linear(hidden, layer_weight(i, "mlp.proj")))
        residual, x = ops.add_norm(residual, down, layer_weight(i, "post_feedforward_layernorm"), next_norm)
    return ops.logits(ops.sampled_rows(x))
