"""A network of a few layers for tests of the evaluator: inputs with their values, outputs with their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from network_evaluator import TORCH_TYPES, evaluate

trt: Any = pytest.importorskip("tensorrt_rtx_bindings")
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
TYPES = {dtype: getattr(trt.DataType, name) for name, dtype in TORCH_TYPES.items()}


class SmallNetwork:
    """`input` declares a tensor of the value's shape and remembers the value; `evaluate` uses all of them."""

    def __init__(self) -> None:
        self.builder = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR))
        self.network = self.builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self.feeds: dict[str, torch.Tensor] = {}

    def dynamic_input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Any:
        return self.network.add_input(name, TYPES[dtype], tuple(shape))

    def input(self, name: str, value: torch.Tensor) -> Any:
        self.feeds[name] = value
        return self.dynamic_input(name, value.shape, value.dtype)

    def unary(self, op: str, x: Any) -> Any:
        return self.network.add_unary(x, getattr(trt.UnaryOperation, op)).get_output(0)

    def output(self, name: str, layer: Any) -> None:
        """Mark the layer's (or attention's) first output."""
        tensor = layer.get_output(0)
        tensor.name = name
        self.network.mark_output(tensor)

    def evaluate(self) -> dict[str, torch.Tensor]:
        return evaluate(self.network, self.feeds)
