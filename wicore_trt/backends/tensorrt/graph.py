"""Wrapper of INetworkDefinition: one method per operator, names on every layer, constants kept alive.

Serves `ops`; must not know Gemma. Works with `tensorrt` (10.15 and later) and `tensorrt_rtx_bindings`. Invariant: a
layer that TensorRT refuses to add raises at once and names itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wicore_trt.backends.tensorrt.api import TRT_TYPES
from wicore_trt.backends.tensorrt.plan_io import TensorSpec
from wicore_trt.errors import ConfigError

Tensor = Any  # trt.ITensor; the module is imported by the caller


class Graph:
    """Builder into `network`; `trt` is the TensorRT module, `scope` the prefix of layer names to come."""

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

    def select(self, condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        return self._name_output("select", self.network.add_select(condition, yes, no))

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

    def all_ranks(self, op: str, x: Tensor, ranks: int) -> Tensor:
        """Combine x over tensor-parallel ranks: "sum", or "gather", which stacks all ranks' parts on dim 0."""
        collective = self.trt.CollectiveOperation
        kind = collective.ALL_REDUCE if op == "sum" else collective.ALL_GATHER
        reduce = self.trt.ReduceOperation.SUM if op == "sum" else self.trt.ReduceOperation.NONE
        layer = self._name_layer(op, self.network.add_dist_collective(x, kind, reduce, -1, list(range(ranks))))
        layer.num_ranks = ranks
        return layer.get_output(0)
