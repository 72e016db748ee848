"""Gemma 3's operators as layers of a TensorRT network, strongly typed, for `tensorrt` and `tensorrt_rtx_bindings`.

Weights are inputs, so a plan is small, builds in seconds and serves any weights of its shapes. Must not know files,
targets or devices. Invariants (I20): residual stream, norms, rotary embedding, GELU and logits are float32; a value is
rounded to the engine's dtype only as an operand of a matrix product, a query, or a cache entry.

TensorRT rounds a product to its operands' dtype, and float16 ends at 65,504. So in float16 and FP8 each row of the
operand is divided by its largest magnitude, and the product multiplied by it in float32. The rounded value is then at
most the sum of magnitudes of one row of the weight, whatever the activations. FP8 (E4M3, defined in
`backends.torch.ops`) quantizes row / max with scale 1 / 448, so the row's largest element reaches 448. Both operands of
an FP8 product have that one constant scale, which FP8 kernels take; the weight's own scales follow in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.api import TRT_TYPES
from wicore_trt.backends.tensorrt.plan_io import PlanRequest, TensorSpec
from wicore_trt.checkpoint.names import activation_scale_name, weight_scale_name
from wicore_trt.errors import ConfigError
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD, forward, layer_weight
from wicore_trt.model.spec import LOCAL, Gemma3Spec
from wicore_trt.runtime.weight_specs import rope_name

Tensor = Any  # trt.ITensor; the module is imported by the caller
E4M3_STEP = 1 / 448
DIRECT_ENTRIES = 22_016
TINY = 1e-30  # stands in for the largest magnitude of a row of zeros


def define_network(network: Any, trt: Any, request: PlanRequest) -> list[TensorSpec]:
    """Define the network of a phase in `network`; returns its inputs and outputs. A linear is FP8 when its
    weight is. With kv_dtype "fp8" keys and values are rounded to E4M3 before they enter a cache of the activations'
    dtype."""
    spec, limits, dtype = request.spec, request.limits, request.dtype
    profile, caches = limits.profile(request.phase), plan_io.cache_tensors(spec, limits, dtype)
    tensors = [*plan_io.step_tensors(spec, limits), *request.weights, *caches]
    inputs = [tensor.fixed(profile) for tensor in tensors]
    graph = Graph(network, trt)
    ops = TensorRTOps(graph, spec, {t.name: graph.input(t) for t in inputs}, dtype, request.kv_dtype)
    graph.output(forward(ops, spec), plan_io.LOGITS)
    for name, tensor in ops.updated.items():
        graph.output(tensor, plan_io.updated(name))
    return [*inputs, *(tensor.fixed(profile) for tensor in plan_io.output_tensors(spec, caches))]


class TensorRTOps:
    """`Ops` of a whole network; T is an ITensor, float32 between operators. N is B * T, slots in order. `updated` maps
    each cache input to its tensor after the step."""

    def __init__(self, graph: Graph, spec: Gemma3Spec, inputs: Mapping[str, Tensor], dtype: str, kv_dtype: str) -> None:
        self._g, self._spec, self._in = graph, spec, inputs
        self._groups = spec.attention_by_layer
        self._dtype, self._kv_dtype = dtype, kv_dtype
        self.updated: dict[str, Tensor] = {}
        graph.scope = "step"
        shape = graph.shape(inputs[plan_io.TOKEN_IDS])
        self._batch = graph.gather(shape, graph.constant([0], np.int32))
        self._chunk = graph.gather(shape, graph.constant([1], np.int32))
        self._rows = graph.binary("PROD", self._batch, self._chunk)
        self._mask = self._window_mask() if spec.layers_of(LOCAL) else None

    def embed(self) -> Tensor:
        g = self._g
        g.scope = "embedding"
        ids, table = g.reshape(self._in[plan_io.TOKEN_IDS], [-1]), self._in[EMBEDDING]
        rows = g.cast(g.gather(table, ids), "float32")
        # As transformers does, the factor is rounded to the embedding's dtype; the product stays float32.
        scale = g.constant(self._spec.embedding_scale, np.float32, 2)
        if table.dtype != g.dtypes["float32"]:
            scale = g.cast(g.cast(scale, self._dtype), "float32")
        return g.binary("PROD", rows, scale)

    def norm(self, residual: Tensor, weight: str) -> Tensor:
        self._enter_scope(weight)
        return self._rms_norm(residual, weight)

    def linear(self, x: Tensor, weight: str) -> Tensor:
        self._enter_scope(weight)
        return self._multiply(x, weight)

    def reduce(self, x: Tensor) -> Tensor:
        return x

    def qk_norm_rope_write(self, qkv: Tensor, layer: int) -> Tensor:
        g, group = self._g, self._groups[layer]
        self._enter_scope(layer_weight(layer, "attention.rope"))
        heads = group.num_heads + 2 * group.num_kv_heads
        shape = g.dims(self._batch, self._chunk, heads, group.head_dim)
        split = g.reshape(qkv, shape, then=(0, 2, 1, 3))  # [B, heads, T, D]
        normed = group.num_heads + group.num_kv_heads
        unit = self._unit_rms(self._slice_heads(split, 0, normed))
        q, k = self._slice_heads(unit, 0, group.num_heads), self._slice_heads(unit, group.num_heads, group.num_kv_heads)
        v = self._slice_heads(split, normed, group.num_kv_heads)
        q = self._rotate_heads(g.binary("PROD", q, self._in[layer_weight(layer, "attention.q_layernorm")]), layer)
        k = self._rotate_heads(g.binary("PROD", k, self._in[layer_weight(layer, "attention.k_layernorm")]), layer)
        first = self._in[plan_io.write_indices(self._spec.layer_groups[layer])]
        for part, values in (("k", k), ("v", v)):
            name = plan_io.cache(part, layer)
            self.updated[name] = g.update_cache(self._in[name], self._round_entry(values, layer), first)
        # TensorRT's attention does not scale, so the queries are.
        return g.cast(g.binary("PROD", q, group.softmax_scale), self._dtype)

    def attention(self, q: Tensor, layer: int) -> Tensor:
        g, group = self._g, self._groups[layer]
        self._enter_scope(layer_weight(layer, "attention.core"))
        k, v = (self.updated[plan_io.cache(part, layer)] for part in ("k", "v"))
        mask, lengths = self._mask if group.window else None, self._in[plan_io.kv_lengths(group.name)]
        if self._in[plan_io.TOKEN_IDS].shape[1] == 1 and k.shape[2] > DIRECT_ENTRIES:
            # Up to here TensorRT-RTX 1.7 has a decode kernel that reads the cache where it is. Beyond, it copies keys
            # and values once per query head, or once if the query heads of a KV head are its rows.
            rows = g.dims(self._batch, group.num_kv_heads, group.num_heads // group.num_kv_heads, group.head_dim)
            attended = g.attention(g.reshape(q, rows), k, v, lengths, mask, causal=False)
            return g.cast(g.reshape(attended, [-1, group.q_size]), "float32")
        attended = g.attention(q, k, v, lengths, mask, causal=mask is None)
        return g.cast(g.transpose(attended, (0, 2, 1, 3), (-1, group.q_size)), "float32")

    def add_norm(self, residual: Tensor, x: Tensor, post_weight: str, next_weight: str) -> tuple[Tensor, Tensor]:
        self._enter_scope(post_weight)
        residual = self._g.binary("SUM", residual, self._rms_norm(x, post_weight))
        self._enter_scope(next_weight)
        return residual, self._rms_norm(residual, next_weight)

    def geglu(self, gate_up: Tensor) -> Tensor:
        g, half = self._g, gate_up.shape[1] // 2
        size = g.dims(self._rows, half)
        gate = g.activation("GELU_TANH", g.slice(gate_up, (0, 0), size))
        return g.binary("PROD", gate, g.slice(gate_up, (0, half), size))

    def sampled_rows(self, x: Tensor) -> Tensor:
        self._g.scope = "head"
        return self._g.gather(x, self._in[plan_io.SAMPLE_ROWS])

    def logits(self, x: Tensor) -> Tensor:
        g = self._g
        y = self._multiply(x, LM_HEAD)
        cap = self._spec.final_logit_softcapping
        if cap is not None:
            y = g.binary("PROD", g.activation("TANH", g.binary("DIV", y, float(cap))), float(cap))
        return y

    def _enter_scope(self, weight: str) -> None:
        self._g.scope = weight.removeprefix("transformer.").removesuffix(".weight")

    def _rms_norm(self, x: Tensor, weight: str) -> Tensor:
        return self._g.binary("PROD", self._unit_rms(x), self._in[weight])

    def _unit_rms(self, x: Tensor) -> Tensor:
        """Compute x / sqrt(mean(x^2) + eps) over the last dimension (arXiv:1910.07467)."""
        g = self._g
        mean = g.reduce_last("AVG", g.binary("PROD", x, x))
        return g.binary("DIV", x, g.unary("SQRT", g.binary("SUM", mean, self._spec.rms_norm_eps)))

    def _multiply(self, x: Tensor, weight: str) -> Tensor:
        """Compute float32 x [N, K] @ W.T, rounded as in the module's docstring."""
        g, w = self._g, self._in[weight]
        quantized = w.dtype == g.dtypes["fp8"]
        if not quantized and self._dtype != "float16":
            return g.cast(g.matmul_transposed(g.cast(x, self._dtype), w), "float32")
        static = self._in.get(activation_scale_name(weight)) if quantized else None
        if static is None:
            if quantized:
                x = g.cast(g.cast(x, self._dtype), "float32")  # the scale is that of the rounded operand
            largest = g.binary("MAX", g.reduce_last("MAX", g.unary("ABS", x)), TINY)
        else:
            largest = g.binary("DIV", g.reshape(static, (1, 1)), E4M3_STEP)
            x = g.cast(g.cast(x, self._dtype), "float32")
        operand = g.binary("DIV", x, largest)
        if quantized:
            step = g.constant(E4M3_STEP, np.float32, 0)
            operand = g.dequantize(g.quantize(operand, step), step, self._dtype)
            w = g.dequantize(w, step, self._dtype)
            largest = g.binary("DIV", largest, E4M3_STEP)
        y = g.binary("PROD", g.cast(g.matmul_transposed(g.cast(operand, self._dtype), w), "float32"), largest)
        return g.binary("PROD", y, self._in[weight_scale_name(weight)]) if quantized else y

    def _slice_heads(self, x: Tensor, first: int, count: int) -> Tensor:
        size = self._g.dims(self._batch, count, self._chunk, x.shape[3])
        return self._g.slice(x, (0, first, 0, 0), size)

    def _rotate_heads(self, x: Tensor, layer: int) -> Tensor:
        group = self._groups[layer]
        cos, sin = (self._in[rope_name(group.name, part)] for part in ("cos", "sin"))
        return self._g.rotate(x, cos, sin, self._in[plan_io.POSITIONS], group.head_dim)

    def _round_entry(self, x: Tensor, layer: int) -> Tensor:
        """Round keys or values as the cache holds them, so that an FP8 page holds exactly what the cache does."""
        g = self._g
        if self._kv_dtype == "fp8":
            name = layer_weight(layer, "attention").removesuffix("weight") + "kv_cache_scaling_factor"
            scale = self._in.get(name)
            factor = g.constant(1.0, np.float32, 4) if scale is None else g.reshape(scale, (1, 1, 1, 1))
            one = g.constant(1.0, np.float32, 0)
            rounded = g.dequantize(g.quantize(g.binary("DIV", x, factor), one), one, "float32")
            x = g.binary("PROD", rounded, factor)
        return g.cast(x, self._dtype)

    def _window_mask(self) -> Tensor:
        """Mask bool [B, 1, T, entries]: entry j is within the window that ends at the token's own entry."""
        g, group = self._g, self._spec.layer_group(LOCAL)
        g.scope = "window"
        positions = self._in[plan_io.POSITIONS]
        offset = g.binary("SUB", positions, g.slice(positions, (0, 0), g.dims(self._batch, 1)))
        own = g.binary("SUM", offset, g.reshape(self._in[plan_io.write_indices(LOCAL)], (-1, 1)))
        own = g.reshape(own, g.dims(self._batch, 1, self._chunk, 1))
        entries = self._in[plan_io.cache("k", group.layers[0])].shape[2]
        j = g.constant(np.arange(entries).reshape(1, 1, 1, -1), np.int32)
        not_after = g.binary("LESS", j, g.binary("SUM", own, 1))
        inside = g.binary("GREATER", j, g.binary("SUB", own, group.window))
        return g.binary("AND", not_after, inside)


class Graph:
    """Builder into `network`: one method per operator, names on every layer, constants kept alive. `trt` is the
    TensorRT module, `scope` the prefix of layer names to come. A layer that TensorRT refuses to add raises at once and
    names itself. Knows nothing of Gemma."""

    def __init__(self, network: Any, trt: Any) -> None:
        self.network, self.trt, self.scope = network, trt, ""
        self._count = 0
        self._dims: dict[tuple[int | str, ...], Tensor] = {}
        self._constants: dict[tuple[Any, ...], tuple[np.ndarray, Tensor]] = {}  # TensorRT reads them when it builds
        self.dtypes = {ours: getattr(trt.DataType, theirs) for ours, theirs in TRT_TYPES.items()}

    def _name_layer(self, what: str, layer: Any) -> Any:
        name = f"{self.scope}.{what}.{self._count}"
        self._count += 1
        if layer is None:
            raise ConfigError(f"TensorRT {self.trt.__version__} cannot add {name}.", fix="Use a newer TensorRT.")
        layer.name = name
        return layer

    def _name_output(self, what: str, layer: Any) -> Tensor:
        return self._name_layer(what, layer).get_output(0)

    def input(self, tensor: TensorSpec) -> Tensor:
        shape = [d if isinstance(d, int) else -1 for d in tensor.shape]
        added = self.network.add_input(tensor.name, self.dtypes[tensor.dtype], shape)
        if added is None:
            raise ConfigError(f"TensorRT {self.trt.__version__} refuses the input {tensor.name} ({tensor.dtype}).")
        for axis, letter in enumerate(tensor.shape):
            if isinstance(letter, str):
                added.set_dimension_name(axis, letter)  # dimensions of one name are equal at run time
        return added

    def output(self, x: Tensor, name: str) -> None:
        x.name = name
        self.network.mark_output(x)

    def constant(self, values: Any, dtype: Any, rank: int | None = None) -> Tensor:
        """Add a constant; `rank` gives a scalar that many dimensions of 1, to broadcast."""
        array = np.ascontiguousarray(np.array(values, dtype))
        if rank is not None:
            array = array.reshape((1,) * rank)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            layer = self.network.add_constant(array.shape, self.trt.Weights(array.reshape(-1)))
            self._constants[key] = array, self._name_output("constant", layer)
        return self._constants[key][1]

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        if x.dtype == self.dtypes[dtype]:
            return x
        return self._name_output("cast", self.network.add_cast(x, self.dtypes[dtype]))

    def binary(self, op: str, a: Tensor, b: Tensor | float) -> Tensor:
        """Add an ElementWiseOperation; a number becomes a constant of a's kind."""
        if isinstance(b, (int, float)):
            integer = a.dtype in (self.trt.DataType.INT32, self.trt.DataType.INT64)
            b = self.constant(b, np.int32 if integer else np.float32, len(a.shape))
        operation = getattr(self.trt.ElementWiseOperation, op)
        return self._name_output(op.lower(), self.network.add_elementwise(a, b, operation))

    def unary(self, op: str, x: Tensor) -> Tensor:
        return self._name_output(op.lower(), self.network.add_unary(x, getattr(self.trt.UnaryOperation, op)))

    def activation(self, op: str, x: Tensor) -> Tensor:
        return self._name_output(op.lower(), self.network.add_activation(x, getattr(self.trt.ActivationType, op)))

    def reduce_last(self, op: str, x: Tensor) -> Tensor:
        operation, axes = getattr(self.trt.ReduceOperation, op), 1 << (len(x.shape) - 1)
        return self._name_output("reduce", self.network.add_reduce(x, operation, axes, True))

    def matmul_transposed(self, x: Tensor, w: Tensor) -> Tensor:
        """Multiply x [N, K] by w [M, K] transposed."""
        plain, transposed = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        return self._name_output("matmul", self.network.add_matrix_multiply(x, plain, w, transposed))

    def gather(self, x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
        return self._name_output("gather", self.network.add_gather(x, indices, axis))

    def reshape(self, x: Tensor, shape: Sequence[int] | Tensor, then: Sequence[int] | None = None) -> Tensor:
        """Reshape to numbers (one may be -1) or an int64 tensor of them; `then` permutes the result's dimensions."""
        layer = self._name_layer("reshape", self.network.add_shuffle(x))
        if isinstance(shape, (list, tuple)):
            layer.reshape_dims = tuple(shape)
        else:
            layer.set_input(1, shape)
        if then is not None:
            layer.second_transpose = tuple(then)
        return layer.get_output(0)

    def transpose(self, x: Tensor, order: Sequence[int], shape: Sequence[int] | None = None) -> Tensor:
        layer = self._name_layer("transpose", self.network.add_shuffle(x))
        layer.first_transpose = tuple(order)
        if shape is not None:
            layer.reshape_dims = tuple(shape)
        return layer.get_output(0)

    def shape(self, x: Tensor) -> Tensor:
        return self._name_output("shape", self.network.add_shape(x))

    def dims(self, *parts: Tensor | int) -> Tensor:
        """Make int64 [n] of shape pieces ([1] tensors) and numbers; equal ones share one tensor."""
        key = tuple(p if isinstance(p, int) else p.name for p in parts)
        if key not in self._dims:
            pieces = [p if not isinstance(p, int) else self.constant([p], np.int64) for p in parts]
            self._dims[key] = self._name_output("dims", self.network.add_concatenation(pieces))
        return self._dims[key]

    def slice(self, x: Tensor, start: Sequence[int], size: Tensor) -> Tensor:
        """Take a contiguous part of x from `start`; `size` is an int64 tensor with a number per dimension."""
        ones = (1,) * len(start)
        layer = self._name_layer("slice", self.network.add_slice(x, tuple(start), ones, ones))
        layer.set_input(2, size)
        return layer.get_output(0)

    def quantize(self, x: Tensor, scale: Tensor) -> Tensor:
        """E4M3 of x / scale, scale a scalar."""
        return self._name_output("quantize", self.network.add_quantize(x, scale, self.dtypes["fp8"]))

    def dequantize(self, x: Tensor, scale: Tensor, dtype: str) -> Tensor:
        """x * scale, scale a scalar or one value per row of x."""
        layer = self._name_layer("dequantize", self.network.add_dequantize(x, scale, self.dtypes[dtype]))
        if len(scale.shape) == 1:
            layer.axis = 0
        return layer.get_output(0)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, size: int) -> Tensor:
        """Apply the rotary embedding by halves to x [B, heads, T, size] at `positions` [B, T]."""
        layer = self._name_layer("rotate", self.network.add_rotary_embedding(x, cos, sin, False, size))
        layer.set_input(3, positions)
        return layer.get_output(0)

    def update_cache(self, cache: Tensor, update: Tensor, first: Tensor) -> Tensor:
        """Write update [B, heads, T, D] into cache [B, heads, S, D] at entries first[b], ... in place."""
        linear = self.trt.KVCacheMode.LINEAR
        return self._name_output("kv_update", self.network.add_kv_cache_update(cache, update, first, linear))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        """Compute softmax(q k^T) v without scaling. Keys beyond lengths[b] are absent; `mask` (bool, true is visible)
        hides others. `causal`: the last query sees all keys, the one before it one less, and so on."""
        kind = self.trt.CausalMaskKind.LOWER_RIGHT if causal else self.trt.CausalMaskKind.NONE
        softmax = self.trt.AttentionNormalizationOp.SOFTMAX
        layer = self._name_layer("attention", self.network.add_attention_v2(q, k, v, softmax, kind))
        layer.key_value_lengths = lengths
        if mask is not None:
            layer.mask = mask
        layer.decomposable = True  # a target without a fused kernel of this shape still gets a plan
        return layer.get_output(0)
