"""Evaluate a TensorRT network definition on the CPU, layer by layer, as TensorRT documents its layers.

It reads the finished INetworkDefinition and must not know who built it or why: no wicore_trt import, no names, no
metadata. Invariant: nothing passes silently. A layer type, mode or attribute that is not modelled raises
NotImplementedError; a result whose shape differs from the one that TensorRT inferred raises AssertionError; wrong
feeds raise ValueError. `evaluator_layers` and `evaluator_attention` define the layers.

Arithmetic is float32 (numpy); after each layer values are rounded to the type of the layer's output. Inside, tensors of
float types are float32 arrays that hold only values of their own type ("carriers"); integers and bools are themselves.
Outside, feeds and results are torch tensors of the declared type (numpy arrays will do for feeds: NumPy has no bf16
or E4M3).

What the bindings (1.7.1.116) do, found by experiment:
- get_layer() returns a bare ILayer once the builder's own objects are gone; assigning `__class__` makes it what it is.
- `IActivationLayer.type` hides `ILayer.type`, so the type is read through the base class.
- An attention is two layers, ATTENTION_INPUT and ATTENTION_OUTPUT; both have `.attention`. The first has the inputs
  query, key, value, mask, normalization scale, query_lengths, key_value_lengths (absent ones are None or cut off).
- IConstantLayer.weights is flat numpy, or `Weights` without a way to its data for bf16 and fp8.
- Attributes that an input overrides must not be read (TensorRT logs an error and returns None or -1).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import evaluator_attention
import evaluator_layers
import evaluator_movement
import numpy as np
import torch

Feed = Any  # torch.Tensor or np.ndarray
Feeds = Mapping[str, Feed]

TORCH_TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "FP8": torch.float8_e4m3fn,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}
FLOATS = ("FLOAT", "HALF", "BF16", "FP8")
LAYERS = (
    evaluator_layers.LAYERS | evaluator_movement.LAYERS | evaluator_attention.LAYERS
)  # layer type -> (class in the bindings, function)


@dataclass
class Step:
    """A layer, read once. `types` are names of DataType; `shape` is TensorRT's, -1 where dynamic."""

    name: str
    kind: str
    layer: Any
    compute: Callable[..., Any]
    inputs: list[str | None]
    input_types: list[str | None]
    output: str
    output_type: str
    shape: tuple[int, ...]


def evaluate(network: Any, feeds: Feeds) -> dict[str, torch.Tensor]:
    """All marked outputs of `network` by name, in their declared types, for one set of inputs."""
    return Evaluator(network).evaluate(feeds)


class Evaluator:
    """A network with its weights bound, to be evaluated many times.

    `weights` are feeds that stay: converted to float32 once (tensors over the same memory once for all); they must
    not be changed afterwards. `profile` is an IOptimizationProfile: every feed must lie in it.
    """

    def __init__(self, network: Any, weights: Feeds | None = None, *, profile: Any = None) -> None:
        self._trt = sys.modules[type(network).__module__]
        if not network.get_flag(self._trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED):
            raise NotImplementedError("the network is not strongly typed")
        self._inputs = {t.name: t for t in (network.get_input(i) for i in range(network.num_inputs))}
        self._outputs = {t.name: t.dtype.name for t in (network.get_output(i) for i in range(network.num_outputs))}
        self._profile = profile
        self._steps: list[Step] = []
        self._names = set(self._inputs)
        for i in range(network.num_layers):
            self._read(network.get_layer(i))
        cache: dict[Any, np.ndarray] = {}
        self._weights = {n: tuple(feed.shape) for n, feed in (weights or {}).items()}
        self._fixed = {n: self._carrier(n, feed, cache) for n, feed in (weights or {}).items()}
        self._compute_fixed()

    def evaluate(self, feeds: Feeds) -> dict[str, torch.Tensor]:
        """All marked outputs; `feeds` has exactly the inputs that are not bound as weights."""
        values = self._bind(feeds)
        last_use = {n: i for i, s in enumerate(self._steps) for n in s.inputs if n not in self._outputs}
        for index, step in enumerate(self._steps):
            self._run(step, values)
            for name in step.inputs:
                if name is not None and last_use.get(name) == index:
                    values.pop(name, None)
        return {n: _result(values[n], kind) for n, kind in self._outputs.items()}

    def _read(self, layer: Any) -> None:
        kind = self._trt.ILayer.type.fget(layer).name
        if kind not in LAYERS:
            raise NotImplementedError(f"layer {layer.name!r} is a {kind}")
        if layer.num_outputs != 1:
            raise NotImplementedError(f"layer {layer.name!r} has {layer.num_outputs} outputs")
        class_name, compute = LAYERS[kind]
        if type(layer) is self._trt.ILayer:
            layer.__class__ = getattr(self._trt, class_name)
        inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
        output = layer.get_output(0)
        shape = tuple(output.shape)
        if output.name in self._names:
            raise ValueError(f"two tensors are called {output.name!r}")
        self._names.add(output.name)
        step = Step(
            layer.name,
            kind,
            layer,
            compute,
            [None if t is None else t.name for t in inputs],
            [None if t is None else t.dtype.name for t in inputs],
            output.name,
            output.dtype.name,
            shape,
        )
        self._steps.append(step)

    def _compute_fixed(self) -> None:
        """What depends on constants and weights alone, dequantized weights above all, is computed once."""
        later = []
        for step in self._steps:
            if all(n is None or n in self._fixed for n in step.inputs):
                self._run(step, self._fixed)
            else:
                later.append(step)
        self._steps = later

    def _run(self, step: Step, values: dict[str, np.ndarray]) -> None:
        try:
            with np.errstate(all="ignore"), torch.inference_mode():
                arguments = [None if n is None else values[n] for n in step.inputs]
                result = round_to(step.compute(step, *arguments), step.output_type)
            assert _fits(result.shape, step.shape), f"computed {result.shape}, TensorRT inferred {step.shape}"
            assert result.dtype == carrier_type(step.output_type), (result.dtype, step.output_type)
            values[step.output] = result
        except Exception as error:
            error.add_note(f"in layer {step.name!r} ({step.kind})")
            raise

    def _bind(self, feeds: Feeds) -> dict[str, np.ndarray]:
        bound = self._weights
        given, needed = set(feeds) | set(bound), set(self._inputs)
        if given != needed or set(feeds) & set(bound):
            raise ValueError(
                f"missing {sorted(needed - given)}, unknown {sorted(given - needed)}, "
                f"already bound as weights {sorted(set(feeds) & set(bound))}"
            )
        named: dict[str, tuple[int, str]] = {}
        shapes = bound | {n: tuple(feed.shape) for n, feed in feeds.items()}
        for name, shape in shapes.items():
            for axis, size in enumerate(shape):
                dimension = self._inputs[name].get_dimension_name(axis)
                if dimension and named.setdefault(dimension, (size, name))[0] != size:
                    raise ValueError(f"dimension {dimension!r} is {size} in {name}, but {named[dimension]}")
        return self._fixed | {n: self._carrier(n, feed, {}) for n, feed in feeds.items()}

    def _carrier(self, name: str, feed: Feed, cache: dict[Any, np.ndarray]) -> np.ndarray:
        if name not in self._inputs:
            raise ValueError(f"the network has no input {name!r}; it has {sorted(self._inputs)}")
        declared = self._inputs[name]
        tensor = feed if isinstance(feed, torch.Tensor) else torch.from_numpy(np.asarray(feed))
        kind, shape = declared.dtype.name, tuple(declared.shape)
        if kind not in TORCH_TYPES:
            raise NotImplementedError(f"input {name!r} is {kind}")
        if tensor.dtype != TORCH_TYPES[kind]:
            raise ValueError(f"{name} is {tensor.dtype}; the network wants {TORCH_TYPES[kind]}")
        if not _fits(tuple(tensor.shape), shape):
            raise ValueError(f"{name} is {tuple(tensor.shape)}; the network wants {shape}")
        if self._profile is not None and -1 in shape:
            low, _, high = (tuple(s) for s in self._profile.get_shape(name))
            if any(not a <= n <= b for a, n, b in zip(low, tensor.shape, high, strict=True)):
                raise ValueError(f"{name} is {tuple(tensor.shape)}; the profile allows {low} to {high}")
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in cache:
            cache[key] = (tensor.detach().float() if kind in FLOATS else tensor.detach()).numpy()
        return cache[key]


def carrier_type(kind: str) -> np.dtype[Any]:
    """NumPy type that holds tensors of a DataType inside the evaluator."""
    if kind not in TORCH_TYPES:
        raise NotImplementedError(f"tensors of type {kind}")
    return np.dtype(np.float32 if kind in FLOATS else torch.empty(0, dtype=TORCH_TYPES[kind]).numpy().dtype)


def round_to(x: np.ndarray, kind: str) -> np.ndarray:
    """x rounded to the type (to nearest even); beyond float16 is infinite, beyond E4M3 is a caller's error."""
    if kind not in ("HALF", "BF16", "FP8"):
        return np.asarray(x)
    if not x.flags.writeable:  # torch warns about such memory
        x = x.copy()
    if kind == "FP8":
        assert not (np.abs(x) > evaluator_layers.E4M3_MAX).any(), "beyond E4M3"
    return torch.as_tensor(x, dtype=torch.float32).to(TORCH_TYPES[kind]).float().numpy()


def _result(x: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(np.array(x)).to(TORCH_TYPES[kind])


def _fits(shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    return len(shape) == len(declared) and all(d in (-1, n) for n, d in zip(shape, declared, strict=True))
