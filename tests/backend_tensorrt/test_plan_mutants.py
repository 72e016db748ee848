"""The proof of the TensorRT networks notices wrong wiring: every mutant of the lowering gives wrong logits.

A mutant changes the lowering, so that TensorRT gets a network that is valid and wrong. What must notice is the
comparison of `test_plan_parity`, with its float32 bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parity.tiny import TinyModel, tiny_model
from plan_driver import PlanDriver
from test_plan_parity import BOUNDS, LIMITS, compare

from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.ops import Graph, TensorRTOps
from wicore_trt.model.gemma3 import layer_weight
from wicore_trt.model.spec import GLOBAL, LOCAL

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}
OTHER = {GLOBAL: LOCAL, LOCAL: GLOBAL}


def mutant(patch: Patch) -> Patch:
    MUTANTS[patch.__name__] = patch
    return patch


def wrap(m: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a method by `change(original, self, *args)`."""
    original = getattr(owner, name)
    m.setattr(owner, name, lambda self, *args, **named: change(original, self, *args, **named))


def with_spec(m: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> None:
    """Run one method of the lowering with another spec."""

    def changed(original: Any, self: Any, *args: Any) -> Any:
        right, self._spec = self._spec, change(self._spec)
        try:
            return original(self, *args)
        finally:
            self._spec = right

    wrap(m, TensorRTOps, name, changed)


@mutant
def swapped_rope_tables(m: pytest.MonkeyPatch) -> None:
    with_spec(m, "_rotate_heads", lambda s: replace(s, layer_groups=tuple(OTHER[g] for g in s.layer_groups)))


@mutant
def sine_for_cosine(m: pytest.MonkeyPatch) -> None:
    wrap(m, Graph, "rotate", lambda old, self, x, cos, sin, *rest: old(self, x, sin, cos, *rest))


@mutant
def interleaved_rope(m: pytest.MonkeyPatch) -> None:
    def rotate(_: Any, self: Any, x: Any, cos: Any, sin: Any, positions: Any, size: int) -> Any:
        layer = self.network.add_rotary_embedding(x, cos, sin, True, size)
        layer.set_input(3, positions)
        return layer.get_output(0)

    wrap(m, Graph, "rotate", rotate)


@mutant
def unrotated_keys(m: pytest.MonkeyPatch) -> None:
    count = [0]

    def rotated(old: Any, self: Any, x: Any, layer: int) -> Any:
        count[0] += 1
        return x if count[0] % 2 == 0 else old(self, x, layer)  # queries come first, then keys

    wrap(m, TensorRTOps, "_rotate_heads", rotated)


@mutant
def dropped_query_norm(m: pytest.MonkeyPatch) -> None:
    wrap(
        m,
        TensorRTOps,
        "qk_norm_rope_write",
        lambda old, self, qkv, layer: (
            self._in.update({layer_weight(layer, "attention.q_layernorm"): self._g.constant(1, "float32", 4)}),
            old(self, qkv, layer),
        )[1],
    )


@mutant
def dropped_post_norm(m: pytest.MonkeyPatch) -> None:
    def add_norm(_: Any, self: Any, residual: Any, x: Any, post: str, following: str) -> Any:
        residual = self._g.binary("SUM", residual, x)
        return residual, self._rms_norm(residual, following)

    wrap(m, TensorRTOps, "add_norm", add_norm)


@mutant
def swapped_norms(m: pytest.MonkeyPatch) -> None:
    wrap(m, TensorRTOps, "add_norm", lambda old, self, r, x, post, following: old(self, r, x, following, post))


@mutant
def dropped_residual(m: pytest.MonkeyPatch) -> None:
    wrap(
        m,
        TensorRTOps,
        "add_norm",
        lambda old, self, r, x, post, following: old(self, self._g.binary("PROD", r, 0.0), x, post, following),
    )


@mutant
def norm_without_mean(m: pytest.MonkeyPatch) -> None:
    wrap(m, Graph, "reduce_last", lambda old, self, op, x: old(self, "MAX" if op == "AVG" else op, x))


@mutant
def window_one_longer(m: pytest.MonkeyPatch) -> None:
    with_spec(m, "_window_mask", lambda s: replace(s, sliding_window=s.sliding_window + 1))


@mutant
def window_one_shorter(m: pytest.MonkeyPatch) -> None:
    with_spec(m, "_window_mask", lambda s: replace(s, sliding_window=s.sliding_window - 1))


@mutant
def no_window(m: pytest.MonkeyPatch) -> None:
    with_spec(m, "_window_mask", lambda s: replace(s, sliding_window=10_000))


@mutant
def window_sees_the_next_token(m: pytest.MonkeyPatch) -> None:
    def binary(old: Any, self: Any, op: str, a: Any, b: Any) -> Any:
        late = op == "SUM" and self.scope == "window" and isinstance(b, int)
        return old(self, op, a, b + 1 if late else b)

    wrap(m, Graph, "binary", binary)


@mutant
def wrong_head_order(m: pytest.MonkeyPatch) -> None:
    wrap(
        m,
        Graph,
        "attention",
        lambda old, self, q, k, v, *rest, **named: old(self, self.slice_reversed(q), k, v, *rest, **named),
    )
    m.setattr(Graph, "slice_reversed", reversed_heads, raising=False)


def reversed_heads(self: Any, x: Any) -> Any:
    heads = x.shape[1]
    return self.gather(x, self.constant(list(range(heads))[::-1], "int32"), 1)


@mutant
def keys_for_values(m: pytest.MonkeyPatch) -> None:
    wrap(m, Graph, "attention", lambda old, self, q, k, v, *rest, **named: old(self, q, v, k, *rest, **named))


@mutant
def next_layers_cache(m: pytest.MonkeyPatch) -> None:
    """Keys of one layer are attended in the next one of its shape: the cache is right, its reader is not."""
    seen: dict[Any, Any] = {}

    def attention(old: Any, self: Any, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        shape = tuple(k.shape)
        other = seen.get(shape, k)
        seen[shape] = k
        return old(self, q, other, v, *rest, **named)

    wrap(m, Graph, "attention", attention)


@mutant
def unscaled_queries(m: pytest.MonkeyPatch) -> None:
    with_spec(m, "qk_norm_rope_write", lambda s: replace(s, query_pre_attn_scalar=1.0))


@mutant
def unscaled_embedding(m: pytest.MonkeyPatch) -> None:
    with_spec(m, "embed", lambda s: replace(s, hidden_size=1))


@mutant
def gate_and_up_swapped(m: pytest.MonkeyPatch) -> None:
    def geglu(_: Any, self: Any, gate_up: Any) -> Any:
        g, half = self._g, gate_up.shape[1] // 2
        size = g.dims(self._rows, half)
        gate = g.activation("GELU_TANH", g.slice(gate_up, (0, half), size))
        return g.binary("PROD", gate, g.slice(gate_up, (0, 0), size))

    wrap(m, TensorRTOps, "geglu", geglu)


@mutant
def relu_for_gelu(m: pytest.MonkeyPatch) -> None:
    wrap(m, Graph, "activation", lambda old, self, op, x: old(self, "RELU" if op == "GELU_TANH" else op, x))


@mutant
def lengths_of_the_other_group(m: pytest.MonkeyPatch) -> None:
    def attention(old: Any, self: Any, q: Any, layer: int) -> Any:
        right, names = dict(self._in), [plan_io.kv_lengths(group) for group in (GLOBAL, LOCAL)]
        self._in |= {names[0]: right[names[1]], names[1]: right[names[0]]}
        try:
            return old(self, q, layer)
        finally:
            self._in |= {name: right[name] for name in names}

    wrap(m, TensorRTOps, "attention", attention)


@mutant
def writes_of_the_other_group(m: pytest.MonkeyPatch) -> None:
    with_spec(m, "qk_norm_rope_write", lambda s: replace(s, layer_groups=tuple(OTHER[g] for g in s.layer_groups)))


@mutant
def causal_mask_from_the_first_key(m: pytest.MonkeyPatch) -> None:
    def attention(old: Any, self: Any, q: Any, k: Any, v: Any, lengths: Any, mask: Any, *, causal: bool) -> Any:
        kinds = self.trt.CausalMaskKind
        kind = kinds.UPPER_LEFT if causal else kinds.NONE
        layer = self.network.add_attention_v2(q, k, v, self.trt.AttentionNormalizationOp.SOFTMAX, kind)
        layer.key_value_lengths = lengths
        if mask is not None:
            layer.mask = mask
        return layer.get_output(0)

    wrap(m, Graph, "attention", attention)


@mutant
def missing_softcap(m: pytest.MonkeyPatch) -> None:
    with_spec(m, "logits", lambda s: replace(s, final_logit_softcapping=None))


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model(
        7,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        sliding_window_pattern=2,
        final_logit_softcapping=5.0,
        vocab_size=97,
    )


def run(model: TinyModel, path: Path) -> float:
    return compare(model, PlanDriver(model.spec, model.tensors, path, LIMITS, dtype="float32"), 7)[0]


def test_the_lowering_as_it_is_passes(model: TinyModel, tmp_path: Path) -> None:
    assert run(model, tmp_path) < BOUNDS["float32"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if i % 8 else []) for i, name in enumerate(sorted(MUTANTS))],
)
def test_a_mutant_is_noticed(name: str, model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    try:
        error = run(model, tmp_path)
    except (AssertionError, IndexError):  # the evaluator refuses what the network does with its caches
        return
    assert error > 20 * BOUNDS["float32"]
