"""The evaluator's general layers against torch, on tiny networks that the real bindings define."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from network_evaluator import Evaluator, evaluate
from small_network import FLOATS, SmallNetwork, trt

Tensor = torch.Tensor

pytestmark = pytest.mark.long


@pytest.fixture
def net() -> SmallNetwork:
    return SmallNetwork()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    """`expected` is exact (float64): the result may be one rounding and a few float32 roundings away."""
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=0.51 * eps + 1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_elementwise_arithmetic_is_rounded_once(net: SmallNetwork, dtype: torch.dtype) -> None:
    a, b = random(3, 1, 50, dtype=dtype), random(1, 4, 50, dtype=dtype)
    x, y = net.input("a", a), net.input("b", b)
    operations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SUM": torch.add,
        "PROD": torch.mul,
        "SUB": torch.sub,
        "DIV": torch.div,
        "MAX": torch.maximum,
        "MIN": torch.minimum,
        "FLOOR_DIV": lambda a, b: torch.floor(a.float() / b.float()).to(a.dtype),
    }
    for op in operations:
        net.output(op, net.network.add_elementwise(x, y, getattr(trt.ElementWiseOperation, op)))
    net.output("POW", net.network.add_elementwise(net.unary("ABS", x), y, trt.ElementWiseOperation.POW))
    results = net.evaluate()
    for op, function in operations.items():
        assert torch.equal(results[op], function(a, b)), op
        assert results[op].dtype == dtype
    expected = a.double().abs().pow(b.double()).to(dtype)  # float16's range is easily left
    torch.testing.assert_close(results["POW"], expected, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_float16_overflows_to_infinity(net: SmallNetwork) -> None:
    x = net.input("x", torch.tensor([300.0, -300.0, 2.0]).half())
    net.output("y", net.network.add_elementwise(x, net.unary("ABS", x), trt.ElementWiseOperation.PROD))
    assert net.evaluate()["y"].tolist() == [float("inf"), -float("inf"), 4.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_arithmetic(net: SmallNetwork, dtype: torch.dtype) -> None:
    a, b = torch.tensor([[7, -7, 7, -7, 0]]).to(dtype), torch.tensor([[2], [-2], [3], [-9]]).to(dtype)
    x, y = net.input("a", a), net.input("b", b)
    expected = {
        "SUM": a + b,
        "PROD": a * b,
        "SUB": a - b,
        "DIV": torch.div(a, b, rounding_mode="trunc"),
        "FLOOR_DIV": torch.div(a, b, rounding_mode="floor"),
        "MAX": torch.maximum(a, b),
        "MIN": torch.minimum(a, b),
        "EQUAL": a == b,
        "GREATER": a > b,
        "LESS": a < b,
    }
    for op in expected:
        net.output(op, net.network.add_elementwise(x, y, getattr(trt.ElementWiseOperation, op)))
    results = net.evaluate()
    for op in expected:
        assert torch.equal(results[op], expected[op]), op


def test_integer_overflow_is_an_error(net: SmallNetwork) -> None:
    x = net.input("x", torch.tensor([2**31 - 1], dtype=torch.int32))
    net.output("y", net.network.add_elementwise(x, x, trt.ElementWiseOperation.SUM))
    with pytest.raises(OverflowError):
        net.evaluate()


def test_logic_and_select(net: SmallNetwork) -> None:
    a, b = torch.rand(4, 1) < 0.5, torch.rand(1, 9) < 0.5
    yes, no = random(4, 9, dtype=torch.bfloat16), random(1, 9, dtype=torch.bfloat16)
    x, y = net.input("a", a), net.input("b", b)
    for op in ("AND", "OR", "XOR"):
        net.output(op, net.network.add_elementwise(x, y, getattr(trt.ElementWiseOperation, op)))
    net.output("NOT", net.network.add_unary(x, trt.UnaryOperation.NOT))
    net.output("SELECT", net.network.add_select(x, net.input("yes", yes), net.input("no", no)))
    results = net.evaluate()
    assert torch.equal(results["AND"], a & b) and torch.equal(results["OR"], a | b)
    assert torch.equal(results["XOR"], a ^ b) and torch.equal(results["NOT"], ~a)
    assert torch.equal(results["SELECT"], torch.where(a, yes, no))


@pytest.mark.parametrize("dtype", FLOATS)
def test_unary_and_activations(net: SmallNetwork, dtype: torch.dtype) -> None:
    a = random(6, 40, dtype=dtype)
    x = net.input("a", a)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        name: getattr(torch, function)
        for name, function in {
            "EXP": "exp",
            "SIN": "sin",
            "COS": "cos",
            "NEG": "neg",
            "CEIL": "ceil",
            "FLOOR": "floor",
            "ROUND": "round",
            "RECIP": "reciprocal",
            "SIGN": "sign",
            "ABS": "abs",
        }.items()
    }
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "TANH": torch.tanh,
        "RELU": torch.relu,
        "SIGMOID": torch.sigmoid,
        "GELU_TANH": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "CLIP": lambda t: t.clamp(-0.5, 0.75),
        "SCALED_TANH": lambda t: -0.5 * torch.tanh(0.75 * t),
    }
    for op in functions:
        net.output(op, net.network.add_unary(x, getattr(trt.UnaryOperation, op)))
    positive = net.unary("ABS", x)
    for op in ("SQRT", "LOG"):
        net.output(op, net.network.add_unary(positive, getattr(trt.UnaryOperation, op)))
    for op in activations:
        layer = net.network.add_activation(x, getattr(trt.ActivationType, op))
        layer.alpha, layer.beta = -0.5, 0.75
        net.output(op, layer)
    results = net.evaluate()
    for op, function in (functions | activations).items():
        close(results[op], function(a.double()))
    close(results["SQRT"], a.double().abs().sqrt())
    close(results["LOG"], a.double().abs().log())


@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_and_softmax(net: SmallNetwork, dtype: torch.dtype) -> None:
    a = random(3, 4, 50, dtype=dtype)
    x = net.input("a", a)
    operations: dict[str, Any] = {"SUM": torch.sum, "AVG": torch.mean, "MAX": torch.amax, "MIN": torch.amin}
    for op in operations:
        net.output(op, net.network.add_reduce(x, getattr(trt.ReduceOperation, op), 0b101, False))
    net.output("kept", net.network.add_reduce(x, trt.ReduceOperation.SUM, 0b010, True))
    layer = net.network.add_softmax(x)
    layer.axes = 0b010
    net.output("softmax", layer)
    results = net.evaluate()
    for op, function in operations.items():
        close(results[op], function(a.double(), dim=(0, 2)))
    close(results["kept"], a.double().sum(1, keepdim=True))
    close(results["softmax"], a.double().softmax(1))


def test_casts(net: SmallNetwork) -> None:
    a = torch.tensor([1.75, -1.75, 0.0, 257.0, 3.0e4])
    x = net.input("a", a)
    types = {"INT32": torch.int32, "INT64": torch.int64, "BF16": torch.bfloat16, "HALF": torch.half, "BOOL": torch.bool}
    for kind in types:
        net.output(kind, net.network.add_cast(x, getattr(trt.DataType, kind)))
    flag = net.input("flag", torch.tensor([True, False]))
    net.output("from_bool", net.network.add_cast(flag, trt.DataType.INT32))
    results = net.evaluate()
    for kind, dtype in types.items():
        assert results[kind].dtype == dtype and torch.equal(results[kind], a.to(dtype)), kind
    assert results["from_bool"].tolist() == [1, 0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_matrix_multiply(net: SmallNetwork, dtype: torch.dtype) -> None:
    """Small integers: every product and sum is exact, so only the rounding of the result is left."""

    def whole(*shape: int) -> Tensor:
        return torch.randint(-9, 10, shape).to(dtype)

    a, b = whole(2, 3, 5, 40), whole(2, 3, 40, 7)
    one, wide, row = whole(1, 1, 40, 6), whole(1, 3, 7, 40), whole(2, 3, 40)
    kinds = trt.MatrixOperation
    x, y = net.input("a", a), net.input("b", b)
    plain, turned, vector = kinds.NONE, kinds.TRANSPOSE, kinds.VECTOR
    v = net.input("row", row)
    cases = {
        "plain": (x, plain, y, plain, a.double() @ b.double()),
        "one_matrix": (x, plain, net.input("one", one), plain, a.double() @ one.double()),
        "transposed": (x, plain, net.input("wide", wide), turned, a.double() @ wide.double().mT),
        "both": (y, turned, x, turned, b.double().mT @ a.double().mT),
        "vector_left": (v, vector, y, plain, (row.double()[..., None, :] @ b.double())[..., 0, :]),
        "vector_right": (x, plain, v, vector, (a.double() @ row.double()[..., None])[..., 0]),
        "dot": (v, vector, v, vector, (row.double() ** 2).sum(-1)),
    }
    for name, (left, op0, right, op1, _) in cases.items():
        net.output(name, net.network.add_matrix_multiply(left, op0, right, op1))
    results = net.evaluate()
    for name, case in cases.items():
        assert torch.equal(results[name], case[-1].to(dtype)), name


def test_matrix_multiply_of_plain_matrices(net: SmallNetwork) -> None:
    a, w = random(5, 64), random(33, 64)
    kinds = trt.MatrixOperation
    net.output("y", net.network.add_matrix_multiply(net.input("a", a), kinds.NONE, net.input("w", w), kinds.TRANSPOSE))
    torch.testing.assert_close(net.evaluate()["y"].double(), a.double() @ w.double().T, rtol=1e-5, atol=1e-5)


def test_normalization(net: SmallNetwork) -> None:
    a, scale, bias = random(3, 4, 32) * 5 + 2, random(1, 1, 32), random(1, 1, 32)
    tensors = [net.input(n, t) for n, t in (("a", a), ("scale", scale), ("bias", bias))]
    layer = net.network.add_normalization_v2(*tensors, 0b100)
    layer.epsilon = 0.25
    net.output("y", layer)
    net.output("old", net.network.add_normalization(*tensors, 0b100))
    results = net.evaluate()
    for name, epsilon in (("y", 0.25), ("old", 1e-5)):
        expected = torch.nn.functional.layer_norm(
            a.double(), (32,), scale.double().flatten(), bias.double().flatten(), epsilon
        )
        close(results[name], expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_to_e4m3(net: SmallNetwork, dtype: torch.dtype) -> None:
    """To nearest even, beyond 448 saturated; one scale, or one per index of an axis."""
    a = torch.cat([random(2, 500), torch.tensor([[17.0, 19.0, 448.0, 463.0, 465.0, 1e4]] * 2)], 1).to(dtype)
    rows, columns = torch.tensor([1.0, -0.5]), torch.rand(506) + 0.5
    x = net.input("a", a)
    # a build-time constant where TensorRT's documentation asks for one; types must agree
    scales = {"scalar": (torch.tensor(0.25), 0), "rows": (rows, 0), "columns": (columns, 1)}
    back = {torch.float32: trt.float32, torch.float16: trt.float16, torch.bfloat16: trt.bfloat16}[dtype]
    for name, (scale, axis) in scales.items():
        s = net.input(name + "_scale", scale.to(dtype))
        q = net.network.add_quantize(x, s, trt.fp8)
        d = net.network.add_dequantize(q.get_output(0), s, back)
        if scale.dim():
            q.axis = d.axis = axis
        net.output(name, q)
        net.output(name + "_back", d)
    results = net.evaluate()
    for name, (scale, axis) in scales.items():
        s = scale.to(dtype).float()
        s = s[:, None] if scale.dim() and axis == 0 else s
        q = (a.float() / s).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(results[name].float(), q.float()), name
        assert results[name].dtype == torch.float8_e4m3fn
        assert torch.equal(results[name + "_back"], (q.float() * s).to(dtype)), name
    assert torch.equal(results["scalar"][0, -3:].float(), torch.tensor([448.0] * 3))


def test_block_scales_are_refused(net: SmallNetwork) -> None:
    x = net.input("x", random(4, 32))
    net.output("q", net.network.add_quantize(x, net.input("s", torch.ones(1, 32)), trt.fp8))
    with pytest.raises(NotImplementedError, match="block"):
        net.evaluate()


def ones(net: SmallNetwork) -> None:
    """One output that adds w to x [B, 3] and y [B, 3]."""
    kind = trt.ElementWiseOperation.SUM
    x, y = (net.dynamic_input(n, (-1, 3), torch.float32) for n in ("x", "y"))
    x.set_dimension_name(0, "B")
    y.set_dimension_name(0, "B")
    w = net.dynamic_input("w", (1, 3), torch.bfloat16)
    added = net.network.add_elementwise(x, net.network.add_cast(w, trt.float32).get_output(0), kind).get_output(0)
    net.output("sum", net.network.add_elementwise(added, y, kind))


GOOD = {"x": torch.ones(2, 3), "y": torch.ones(2, 3), "w": torch.ones(1, 3).bfloat16()}


@pytest.mark.parametrize(
    "change",
    [
        {"x": None},
        {"typo": torch.ones(1)},
        {"x": torch.ones(2, 3).half()},
        {"x": torch.ones(2, 4)},
        {"x": torch.ones(3)},
        {"x": torch.ones(3, 3)},
        {"x": np.ones((2, 3))},
    ],
    ids=["missing", "unknown", "dtype", "size", "rank", "dimension_name", "float64"],
)
def test_wrong_feeds_are_refused(net: SmallNetwork, change: dict[str, Any]) -> None:
    ones(net)
    assert evaluate(net.network, GOOD)["sum"].tolist() == [[3.0] * 3] * 2
    feeds = {n: f for n, f in (GOOD | change).items() if f is not None}
    with pytest.raises(ValueError, match=next(iter(change))):
        evaluate(net.network, feeds)


def test_feeds_outside_the_profile_are_refused(net: SmallNetwork) -> None:
    ones(net)
    profile = net.builder.create_optimization_profile()
    for name in ("x", "y"):
        profile.set_shape(name, (1, 3), (2, 3), (2, 3))
    evaluator = Evaluator(net.network, profile=profile)
    evaluator.evaluate(GOOD)
    with pytest.raises(ValueError, match="profile"):
        evaluator.evaluate(GOOD | {"x": torch.ones(3, 3), "y": torch.ones(3, 3)})


def test_weights_are_bound_once(net: SmallNetwork) -> None:
    ones(net)
    evaluator = Evaluator(net.network, {"w": GOOD["w"]})
    for batch in (1, 4):
        x, y = random(batch, 3), random(batch, 3)
        torch.testing.assert_close(evaluator.evaluate({"x": x.numpy(), "y": y})["sum"], x + y + 1)
    with pytest.raises(ValueError, match="already bound"):
        evaluator.evaluate(GOOD)
    with pytest.raises(ValueError, match="no input"):
        Evaluator(net.network, {"v": GOOD["w"]})


def test_what_is_not_modelled_is_refused(net: SmallNetwork) -> None:
    x = net.input("x", random(4, 4))
    net.output("top", net.network.add_topk(x, trt.TopKOperation.MAX, 1, 1 << 1))
    with pytest.raises(NotImplementedError):
        net.evaluate()


def test_constants_that_the_bindings_hide_are_refused(net: SmallNetwork) -> None:
    held = torch.ones(3).bfloat16()
    net.output("c", net.network.add_constant((3,), trt.Weights(trt.bfloat16, held.data_ptr(), 3)))
    with pytest.raises(NotImplementedError, match="BF16"):
        net.evaluate()
