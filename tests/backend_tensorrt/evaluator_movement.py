"""TensorRT's layers that move, choose or enumerate elements, on carriers: compute(step, *inputs) -> array.

Same contract as `evaluator_layers`. Invariant: an index outside its tensor is an error, never clamped or wrapped
unless the layer's mode says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from evaluator_layers import integers, require, same_types

Array = Any  # np.ndarray


def shuffle(step: Any, x: Array, dims: Array | None = None) -> Array:
    """Transpose, reshape, transpose. A 0 copies that dimension of the transposed input. Permutations have 8 entries."""
    layer = step.layer
    x = x.transpose(tuple(layer.first_transpose)[: x.ndim])
    wanted = layer.reshape_dims if dims is None else dims
    if wanted is not None:
        assert dims is None or dims.ndim == 1, "dimensions must be a vector"
        sizes = [int(n) for n in wanted]
        if layer.zero_is_placeholder:
            sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
        assert min(sizes, default=0) >= -1 and sizes.count(-1) <= 1, f"reshape to {sizes}"
        x = x.reshape(sizes)
    return x.transpose(tuple(layer.second_transpose)[: x.ndim])


def slice_(
    step: Any,
    x: Array,
    start: Array | None = None,
    size: Array | None = None,
    stride: Array | None = None,
    fill: Array | None = None,
    axes: Array | None = None,
) -> Array:
    """Element i of a dimension is x[start + i * stride]; a stride of 0 repeats. Inputs win over attributes."""
    layer, mode = step.layer, step.layer.mode.name
    start, size, stride = (
        np.array(getattr(layer, name)) if given is None else given
        for name, given in (("start", start), ("shape", size), ("stride", stride))
    )
    if axes is None:
        axes = np.arange(x.ndim) if layer.axes is None else np.array(layer.axes)
    require(mode in ("STRICT_BOUNDS", "CLAMP", "WRAP", "FILL"), f"slice mode {mode}")
    require((fill is not None) == (mode == "FILL"), f"fill value with mode {mode}")
    for axis, first, count, by in zip(axes.tolist(), start.tolist(), size.tolist(), stride.tolist(), strict=True):
        assert count >= 0, f"size {count}"
        limit = x.shape[axis]
        at = first + by * np.arange(count)
        outside = (at < 0) | (at >= limit)
        if mode == "STRICT_BOUNDS" and outside.any():
            raise IndexError(f"elements {at[outside]} of {limit} on axis {axis}")
        if not outside.any() and by == 1:
            x = x[(slice(None),) * axis + (slice(first, first + count),)]
        else:
            x = np.take(x, at % limit if mode == "WRAP" else at.clip(0, limit - 1), axis=axis)
        if mode == "FILL" and outside.any():
            same_types(step, 0, 4)
            assert fill is not None and fill.ndim == 0, "the fill value is a scalar"
            x = np.where(outside.reshape([-1 if i == axis else 1 for i in range(x.ndim)]), fill, x)
    return x


def gather(step: Any, x: Array, indices: Array) -> Array:
    """As ONNX Gather; with one elementwise dimension, row b of the indices reads x[b]."""
    layer = step.layer
    require(layer.mode.name == "DEFAULT" and layer.num_elementwise_dims in (0, 1), f"gather mode {layer.mode.name}")
    if np.any((indices < 0) | (indices >= x.shape[layer.axis])):
        raise IndexError(f"an index is outside 0..{x.shape[layer.axis] - 1}")
    if layer.num_elementwise_dims == 0:
        return np.take(x, indices, axis=layer.axis)
    assert len(x) == len(indices), "elementwise dimensions differ"
    return np.stack([np.take(row, at, axis=layer.axis - 1) for row, at in zip(x, indices, strict=True)])


def concatenation(step: Any, *inputs: Array) -> Array:
    same_types(step, *range(len(inputs)))
    return np.concatenate(inputs, axis=step.layer.axis)


def shape(step: Any, x: Array) -> Array:
    return np.array(x.shape, np.int64)


def fill(step: Any, dims: Array | None = None, alpha: Array | None = None, beta: Array | None = None) -> Array:
    """LINSPACE: element at coordinates c is alpha + sum(beta[i] * c[i])."""
    layer, kind = step.layer, step.output_type
    require(layer.operation.name == "LINSPACE" and kind in ("INT32", "INT64", "FLOAT"), f"fill of {kind}")
    sizes = tuple(int(n) for n in (layer.shape if dims is None else dims))
    first = np.float64(layer.alpha) if alpha is None else alpha.reshape(())
    steps = np.array([layer.beta]) if beta is None else beta.reshape(-1)
    assert len(steps) == len(sizes), f"{len(steps)} deltas for {len(sizes)} dimensions"
    x = sum((by * at for by, at in zip(steps, np.indices(sizes), strict=True)), start=np.full(sizes, first))
    return x.astype(np.float32) if kind == "FLOAT" else integers(x, kind)


def select(step: Any, condition: Array, yes: Array, no: Array) -> Array:
    same_types(step, 1, 2)
    require(step.input_types[0] == "BOOL" and condition.ndim == yes.ndim == no.ndim, "operands of different rank")
    return np.where(condition, yes, no)


def squeeze(step: Any, x: Array, axes: Array) -> Array:
    return np.squeeze(x, axis=tuple(axes.tolist()))


def unsqueeze(step: Any, x: Array, axes: Array) -> Array:
    return np.expand_dims(x, tuple(axes.tolist()))


LAYERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "SHUFFLE": ("IShuffleLayer", shuffle),
    "SLICE": ("ISliceLayer", slice_),
    "GATHER": ("IGatherLayer", gather),
    "CONCATENATION": ("IConcatenationLayer", concatenation),
    "SHAPE": ("IShapeLayer", shape),
    "FILL": ("IFillLayer", fill),
    "SELECT": ("ISelectLayer", select),
    "SQUEEZE": ("ISqueezeLayer", squeeze),
    "UNSQUEEZE": ("IUnsqueezeLayer", unsqueeze),
}
