"""TensorRT's general layers on carriers, one function per layer type: compute(step, *inputs) -> array.

Functions return float32 for float types, unrounded (`network_evaluator.round_to` follows). They read only the layer's
own attributes and inputs. Invariant: what a function does not model raises NotImplementedError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # np.ndarray
E4M3_MAX = 448.0
FLOATS = ("FLOAT", "HALF", "BF16", "FP8")
INTEGERS: dict[str, Any] = {"INT8": np.int8, "INT32": np.int32, "INT64": np.int64}


def require(condition: bool, message: str) -> None:
    if not condition:
        raise NotImplementedError(message)


def same_types(step: Any, *which: int) -> None:
    """A strongly typed network converts nothing by itself."""
    types = {step.input_types[i] for i in which}
    require(len(types) == 1, f"operands of types {sorted(map(str, types))}")


def integers(x: Array, kind: str) -> Array:
    """Exact integers as the type; a value that does not fit is an error, since TensorRT does not define it."""
    limits = np.iinfo(INTEGERS[kind])
    if not np.all((x >= limits.min) & (x <= limits.max)):
        raise OverflowError(f"a value does not fit {kind}")
    return np.asarray(x).astype(INTEGERS[kind])


def constant(step: Any) -> Array:
    weights = step.layer.weights
    require(isinstance(weights, np.ndarray), f"constants of {step.output_type}: the bindings do not show their data")
    x = np.array(weights).reshape(step.shape)  # a copy: TensorRT only refers to the caller's memory
    return x.astype(np.float32) if step.output_type in FLOATS else x


def identity(step: Any, x: Array) -> Array:
    require(step.input_types[0] == step.output_type, "IDENTITY that converts")
    return x


def cast(step: Any, x: Array) -> Array:
    source, target = step.input_types[0], step.output_type
    require(target == step.layer.to_type.name and "FP8" not in (source, target), f"a cast from {source} to {target}")
    if target in FLOATS:
        return x.astype(np.float32)  # from int64: to nearest, once (float32), then to the type
    if target == "BOOL":
        return x != 0
    return integers(np.trunc(x) if source in FLOATS else x.astype(np.int64), target)  # towards zero


COMPARE = {"EQUAL": np.equal, "GREATER": np.greater, "LESS": np.less}
LOGIC = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "SUB": np.subtract,
    "DIV": np.divide,
    "POW": np.power,
    "FLOOR_DIV": np.floor_divide,
}


def elementwise(step: Any, a: Array, b: Array) -> Array:
    """Ranks are equal; a dimension of 1 is repeated."""
    same_types(step, 0, 1)
    op, kind = step.layer.op.name, step.input_types[0]
    require(a.ndim == b.ndim, "operands of different rank")
    if op in COMPARE:
        return COMPARE[op](a, b)
    if op in LOGIC:
        require(kind == "BOOL", f"{op} of {kind}")
        return LOGIC[op](a, b)
    require(kind != "BOOL" and op in BINARY, f"{op} of {kind}")
    if kind in FLOATS:
        return np.floor(a / b) if op == "FLOOR_DIV" else BINARY[op](a, b)
    require(op != "POW", f"{op} of {kind}")
    if op in ("DIV", "FLOOR_DIV") and np.any(b == 0):
        raise ZeroDivisionError
    wide, by = a.astype(np.int64), b.astype(np.int64)
    if op == "DIV":  # as in C, towards zero
        return integers(np.sign(wide) * np.sign(by) * (np.abs(wide) // np.abs(by)), kind)
    exact = kind != "INT64" or op in ("MAX", "MIN", "FLOOR_DIV") or np.all((abs(wide) < 2**31) & (abs(by) < 2**31))
    require(bool(exact), "64-bit arithmetic of large numbers")
    return integers(BINARY[op](wide, by), kind)


UNARY: dict[str, Callable[[Array], Array]] = {
    "EXP": np.exp,
    "LOG": np.log,
    "SQRT": np.sqrt,
    "RECIP": lambda x: np.float32(1) / x,
    "ABS": np.abs,
    "NEG": np.negative,
    "SIN": np.sin,
    "COS": np.cos,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "ROUND": np.rint,
    "SIGN": np.sign,
    "ISNAN": np.isnan,
    "ISINF": np.isinf,
}


def unary(step: Any, x: Array) -> Array:
    op, kind = step.layer.op.name, step.input_types[0]
    if op == "NOT":
        require(kind == "BOOL", f"NOT of {kind}")
        return ~x
    require(op in UNARY and (kind in FLOATS or op in ("ABS", "NEG", "SIGN")) and kind != "BOOL", f"{op} of {kind}")
    return UNARY[op](x) if kind in FLOATS else integers(UNARY[op](x.astype(np.int64)), kind)


def activation(step: Any, x: Array) -> Array:
    layer, kind = step.layer, step.input_types[0]
    require(kind in FLOATS, f"an activation of {kind}")
    op, one, half = layer.type.name, np.float32(1), np.float32(0.5)
    alpha, beta = np.float32(layer.alpha), np.float32(layer.beta)
    functions: dict[str, Callable[[], Array]] = {
        "RELU": lambda: np.maximum(x, 0),
        "SIGMOID": lambda: one / (one + np.exp(-x)),
        "TANH": lambda: np.tanh(x),
        "CLIP": lambda: np.maximum(alpha, np.minimum(beta, x)),
        "SCALED_TANH": lambda: alpha * np.tanh(beta * x),
        "GELU_TANH": lambda: (
            half * x * (one + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (np.float32(0.044715) * x * x * x + x)))
        ),
    }
    require(op in functions, f"activation {op}")
    return functions[op]()


def axes_of(mask: int, rank: int) -> tuple[int, ...]:
    assert 0 < mask < 1 << rank, f"axes {mask:#b} of {rank} dimensions"
    return tuple(i for i in range(rank) if mask >> i & 1)


def reduce(step: Any, x: Array) -> Array:
    """Sums run in float64, so the only rounding is that of the result."""
    op, kind = step.layer.op.name, step.input_types[0]
    options: dict[str, Any] = {"axis": axes_of(step.layer.axes, x.ndim), "keepdims": step.layer.keep_dims}
    require(op in ("SUM", "PROD", "MAX", "MIN", "AVG") and kind != "BOOL", f"{op} of {kind}")
    if op in ("MAX", "MIN"):
        return np.asarray((np.max if op == "MAX" else np.min)(x, **options))
    if kind not in FLOATS:
        require(op == "SUM", f"{op} of {kind}")
        return integers(np.sum(x, dtype=np.int64, **options), kind)
    function: Callable[..., Any] = {"SUM": np.sum, "PROD": np.prod, "AVG": np.mean}[op]  # type: ignore[assignment]
    return np.asarray(function(x, dtype=np.float64, **options)).astype(np.float32)


def softmax(step: Any, x: Array) -> Array:
    axes = axes_of(step.layer.axes, x.ndim)
    require(len(axes) == 1, "softmax over several axes")
    return softmax_along(x, axes[0])


def softmax_along(x: Array, axis: int) -> Array:
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def matrix_multiply(step: Any, a: Array, b: Array) -> Array:
    """Products in float32 whatever the type. Leading dimensions are equal, or 1 and repeated."""
    same_types(step, 0, 1)
    require(step.input_types[0] in ("FLOAT", "HALF", "BF16"), f"a product of {step.input_types[0]}")
    op0, op1 = step.layer.op0.name, step.layer.op1.name
    if op0 != "NONE":
        a = a[..., None, :] if op0 == "VECTOR" else a.swapaxes(-1, -2)
    if op1 != "NONE":
        b = b[..., :, None] if op1 == "VECTOR" else b.swapaxes(-1, -2)
    require(a.ndim == b.ndim and a.ndim >= 2, "collections of different rank")
    if all(n == 1 for n in b.shape[:-2]) and a.ndim > 2:  # one matrix for all rows: one product
        y = (a.reshape(-1, a.shape[-1]) @ b.reshape(b.shape[-2:])).reshape(*a.shape[:-1], b.shape[-1])
    else:
        y = a @ b
    if op1 == "VECTOR":
        y = y[..., 0]
    if op0 == "VECTOR":
        y = y[..., 0] if op1 == "VECTOR" else y[..., 0, :]
    return np.asarray(y)


def normalization(step: Any, x: Array, scale: Array, bias: Array) -> Array:
    same_types(step, 0, 1, 2)
    require(step.layer.num_groups == 1, "group normalization")
    axes = axes_of(step.layer.axes, x.ndim)
    centred = x - np.mean(x, axis=axes, keepdims=True, dtype=np.float64)
    variance = np.mean(centred**2, axis=axes, keepdims=True)
    return (centred / np.sqrt(variance + step.layer.epsilon) * scale + bias).astype(np.float32)


def per_axis(step: Any, x: Array, scale: Array) -> Array:
    require(step.input_types[1] in FLOATS, f"a scale of {step.input_types[1]}")
    if scale.size == 1 and scale.ndim <= 1:
        return scale.reshape(())
    require(scale.ndim == 1, "block quantization")
    axis = step.layer.axis
    assert 0 <= axis < x.ndim and x.shape[axis] == scale.size, f"{scale.size} scales on axis {axis} of {x.shape}"
    return scale.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


def quantize(step: Any, x: Array, scale: Array, zero_point: Array | None = None) -> Array:
    """clamp(round(x / scale)); rounding to E4M3 is left to the caller."""
    require(zero_point is None, "a zero point")
    q = x / per_axis(step, x, scale)
    if step.output_type == "INT8":
        return integers(np.clip(np.rint(q), -128, 127), "INT8")
    require(step.output_type == "FP8", f"quantization to {step.output_type}")
    return np.clip(q, -E4M3_MAX, E4M3_MAX)


def dequantize(step: Any, q: Array, scale: Array, zero_point: Array | None = None) -> Array:
    require(zero_point is None and step.input_types[0] in ("FP8", "INT8"), f"dequantize {step.input_types[0]}")
    return q.astype(np.float32) * per_axis(step, q, scale)


LAYERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "CONSTANT": ("IConstantLayer", constant),
    "IDENTITY": ("IIdentityLayer", identity),
    "CAST": ("ICastLayer", cast),
    "ELEMENTWISE": ("IElementWiseLayer", elementwise),
    "UNARY": ("IUnaryLayer", unary),
    "ACTIVATION": ("IActivationLayer", activation),
    "REDUCE": ("IReduceLayer", reduce),
    "SOFTMAX": ("ISoftMaxLayer", softmax),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", matrix_multiply),
    "NORMALIZATION": ("INormalizationLayer", normalization),
    "QUANTIZE": ("IQuantizeLayer", quantize),
    "DEQUANTIZE": ("IDequantizeLayer", dequantize),
}
