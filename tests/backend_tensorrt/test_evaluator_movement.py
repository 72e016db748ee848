"""Layers that move elements, against torch and numpy; an index outside its tensor must be refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from small_network import SmallNetwork, trt

pytestmark = pytest.mark.long


@pytest.fixture
def net() -> SmallNetwork:
    return SmallNetwork()


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every element differs (up to 256 elements exact in bf16)."""
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


def vector(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize("seed", range(6))
def test_shuffle(net: SmallNetwork, seed: int) -> None:
    rng = random.Random(seed)
    shape = rng.sample([2, 3, 4, 5], 3)
    a = numbered(*shape, dtype=rng.choice([torch.float32, torch.bfloat16, torch.int32]))
    first, second = rng.sample(range(3), 3), rng.sample(range(3), 3)
    turned = a.permute(first)
    x = net.input("a", a)
    whole = net.network.add_shuffle(x)
    whole.first_transpose, whole.reshape_dims, whole.second_transpose = first, (0, -1, 1), second
    net.output("whole", whole)
    given = net.network.add_shuffle(x)
    given.first_transpose, given.second_transpose = first, second
    given.set_input(1, net.input("dims", vector(turned.shape[2], 0, -1)))
    net.output("given", given)
    only = net.network.add_shuffle(x)
    only.first_transpose = first
    net.output("only", only)
    results = net.evaluate()
    assert torch.equal(results["whole"], turned.reshape(turned.shape[0], -1, 1).permute(second))
    expected = turned.reshape(turned.shape[2], turned.shape[1], -1).permute(second)
    assert torch.equal(results["given"], expected)
    assert torch.equal(results["only"], turned) and results["only"].dtype == a.dtype


def test_reshape_zero_as_a_length(net: SmallNetwork) -> None:
    layer = net.network.add_shuffle(net.input("a", torch.empty(0, 4)))
    layer.zero_is_placeholder = False
    layer.reshape_dims = (2, 0)
    net.output("y", layer)
    assert net.evaluate()["y"].shape == (2, 0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_slice(net: SmallNetwork, dynamic: bool) -> None:
    a = numbered(4, 7, dtype=torch.bfloat16)
    start, size, stride = (1, 6), (3, 4), (1, -2)
    if dynamic:
        layer = net.network.add_slice(net.input("a", a), (0, 0), (0, 0), (0, 0))
        for i, (name, dims) in enumerate((("start", start), ("size", size), ("stride", stride))):
            layer.set_input(i + 1, net.input(name, vector(*dims)))
    else:
        layer = net.network.add_slice(net.input("a", a), start, size, stride)
    net.output("y", layer)
    assert torch.equal(net.evaluate()["y"], a[1:4][:, [6, 4, 2, 0]])


def test_slice_on_some_axes_and_stride_zero(net: SmallNetwork) -> None:
    a = numbered(1, 5, 3)
    x = net.input("a", a)
    some = net.network.add_slice(x, (2,), (2,), (1,))
    some.axes = (1,)
    net.output("some", some)
    net.output("repeated", net.network.add_slice(x, (0, 0, 0), (4, 5, 3), (0, 1, 1)))
    results = net.evaluate()
    assert torch.equal(results["some"], a[:, 2:4])
    assert torch.equal(results["repeated"], a.expand(4, 5, 3))


@pytest.mark.parametrize("mode", ["FILL", "CLAMP", "WRAP"])
def test_slice_beyond_the_bounds(net: SmallNetwork, mode: str) -> None:
    a = numbered(5, 2) + 1
    layer = net.network.add_slice(net.input("a", a), (-2, 0), (9, 2), (1, 1))
    layer.mode = getattr(trt.SampleMode, mode)
    if mode == "FILL":
        layer.set_input(4, net.input("fill", torch.tensor(-7.0)))
    net.output("y", layer)
    at = torch.arange(-2, 7)
    expected = a[at % 5] if mode == "WRAP" else a[at.clamp(0, 4)]
    if mode == "FILL":
        expected[(at < 0) | (at > 4)] = -7.0
    assert torch.equal(net.evaluate()["y"], expected)


def test_slice_out_of_bounds_is_refused(net: SmallNetwork) -> None:
    layer = net.network.add_slice(net.input("a", numbered(4)), (0,), (1,), (1,))
    layer.set_input(2, net.input("size", vector(5)))
    net.output("y", layer)
    with pytest.raises(IndexError):
        net.evaluate()


def test_gather(net: SmallNetwork) -> None:
    a, at, rows = numbered(3, 4, 5), torch.randint(0, 4, (2, 6)).int(), torch.randint(0, 5, (3, 7)).int()
    x, by_row = net.input("a", a), net.network.add_gather_v2
    net.output("plain", net.network.add_gather(x, net.input("at", at), 1))
    layer = by_row(x, net.input("rows", rows), trt.GatherMode.DEFAULT)
    layer.axis, layer.num_elementwise_dims = 2, 1
    net.output("by_row", layer)
    results = net.evaluate()
    assert torch.equal(results["plain"], a[:, at.long()])
    assert torch.equal(results["by_row"], torch.stack([a[b][:, rows[b].long()] for b in range(3)]))


@pytest.mark.parametrize("index", [-1, 4])
def test_gather_out_of_bounds_is_refused(net: SmallNetwork, index: int) -> None:
    at = torch.tensor([0, index], dtype=torch.int32)
    net.output("y", net.network.add_gather(net.input("a", numbered(4, 2)), net.input("at", at), 0))
    with pytest.raises(IndexError):
        net.evaluate()


def test_other_gather_modes_are_refused(net: SmallNetwork) -> None:
    at = net.input("at", torch.zeros(1, 2, dtype=torch.int32))
    net.output("y", net.network.add_gather_v2(net.input("a", numbered(4, 2)), at, trt.GatherMode.ELEMENT))
    with pytest.raises(NotImplementedError, match="ELEMENT"):
        net.evaluate()


def test_concatenation_shape_squeeze_unsqueeze(net: SmallNetwork) -> None:
    a, b = numbered(2, 1, 3), numbered(2, 4, 3) + 100
    x, y = net.input("a", a), net.input("b", b)
    joined = net.network.add_concatenation([y, x, y])
    joined.axis = 1
    net.output("joined", joined)
    net.output("shape", net.network.add_shape(y))
    axes = net.network.add_constant((1,), np.array([1], np.int32)).get_output(0)
    pair = net.network.add_constant((2,), np.array([0, 3], np.int32)).get_output(0)
    net.output("squeezed", net.network.add_squeeze(x, axes))
    net.output("unsqueezed", net.network.add_unsqueeze(y, pair))
    results = net.evaluate()
    assert torch.equal(results["joined"], torch.cat([b, a, b], 1))
    assert results["shape"].tolist() == [2, 4, 3] and results["shape"].dtype == torch.int64
    assert torch.equal(results["squeezed"], a[:, 0])
    assert results["unsqueezed"].shape == (1, 2, 4, 1, 3)


def test_fill(net: SmallNetwork) -> None:
    line = net.network.add_fill((6,), trt.FillOperation.LINSPACE, trt.int32)
    line.alpha, line.beta = 3, 2
    net.output("line", line)
    plane = net.network.add_fill((1, 1), trt.FillOperation.LINSPACE, trt.int32)
    given: list[tuple[str, Any]] = [
        ("dims", vector(2, 3)),
        ("alpha", torch.tensor(5, dtype=torch.int32)),
        ("beta", torch.tensor([10, -1], dtype=torch.int32)),
    ]
    for i, (name, value) in enumerate(given):
        plane.set_input(i, net.input(name, value))
    net.output("plane", plane)
    results = net.evaluate()
    assert results["line"].tolist() == [3, 5, 7, 9, 11, 13]
    assert results["plane"].tolist() == [[5, 4, 3], [15, 14, 13]]


def test_constants_are_read_from_the_network(net: SmallNetwork) -> None:
    values: list[Any] = [
        np.array([[1.5, -2.0]], np.float16),
        np.array([2**40, -1], np.int64),
        np.array(2.5, np.float32),
    ]
    for i, value in enumerate(values):
        net.output(str(i), net.network.add_constant(value.shape, trt.Weights(value.reshape(-1))))
    results = net.evaluate()
    for i, value in enumerate(values):
        assert results[str(i)].numpy().dtype == value.dtype
        np.testing.assert_array_equal(results[str(i)].numpy(), value)
