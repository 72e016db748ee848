"""Networks with our attention plugin, evaluated on a CPU.

TensorRT-RTX's networks take no plugins, so `PluginNetwork` gives one the method that full TensorRT's has: what a plugin
puts out are further inputs of the network as RTX sees it. `PluginEvaluator` computes them by the plugin's own
`enqueue`, with its kernels in Triton's interpreter, on memory that is laid out as the executor's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import plan_driver
import pytest
import torch
from network_evaluator import TORCH_TYPES, Evaluator, Step

from wicore_trt.backends.tensorrt import plan_build
from wicore_trt.plugins.tensorrt.cache_attention import OUTPUT_SOURCES

sys.path.append(str(Path(__file__).parents[1] / "gpu_kernels"))  # the product's package has the same name
from interpreted import AddressLauncher, uncompiled

trt: Any = pytest.importorskip("tensorrt_rtx_bindings")
KIND = "PLUGIN_V3"


class PluginLayer:
    """What `add_plugin_v3` returns."""

    def __init__(self, plugin: Any, inputs: list[Any], outputs: list[Any]) -> None:
        self.name, self.plugin, self.inputs, self.outputs = "", plugin, inputs, outputs

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class PluginNetwork:
    """RTX's network and `add_plugin_v3`, which asks the plugin what TensorRT's builder would."""

    def __init__(self, network: Any) -> None:
        self.raw, self.layers = network, []
        self.marked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def mark_output(self, tensor: Any) -> None:
        if any(tensor is output for layer in self.layers for output in layer.outputs):
            self.marked.append(tensor)  # an input, as RTX sees it
        else:
            self.raw.mark_output(tensor)

    def add_plugin_v3(self, inputs: list[Any], shape_inputs: list[Any], plugin: Any) -> PluginLayer:
        assert isinstance(plugin, trt.IPluginV3) and shape_inputs == []
        sources = plugin.get_output_shapes(list(range(len(inputs))), [], None)
        types = plugin.get_output_data_types([tensor.dtype for tensor in inputs])
        assert len(sources) == len(types) == plugin.num_outputs
        outputs = []
        for index, (source, dtype) in enumerate(zip(sources, types, strict=True)):
            name = f"plugin {len(self.layers)}.{index}"
            outputs.append(self.raw.add_input(name, dtype, tuple(inputs[source].shape)))
        described = [describe(tensor) for tensor in (*inputs, *outputs)]
        for position in range(len(described)):
            assert plugin.supports_format_combination(position, described, len(inputs)), (position, inputs)
        plugin.configure_plugin(described[: len(inputs)], described[len(inputs) :])
        for index in range(plugin.num_outputs):
            assert plugin.get_aliased_input(index) in (-1, sources[index])
        self.layers.append(PluginLayer(plugin, inputs, outputs))
        return self.layers[-1]


def describe(tensor: Any) -> Any:
    desc = trt.PluginTensorDesc()
    desc.dims, desc.type, desc.format = trt.Dims(tuple(tensor.shape)), tensor.dtype, trt.TensorFormat.LINEAR
    dynamic = trt.DynamicPluginTensorDesc()
    dynamic.desc = desc
    return dynamic


class PluginEvaluator(Evaluator):
    """`Evaluator` of a PluginNetwork."""

    def __init__(self, network: PluginNetwork, *args: Any, **more: Any) -> None:
        super().__init__(network.raw, *args, **more)
        self._outputs |= {tensor.name: tensor.dtype.name for tensor in network.marked}
        for layer in network.layers:
            names = [tensor.name for tensor in layer.outputs]
            first = min(i for i, step in enumerate(self._steps) if {*step.inputs} & {*names})
            inputs, types = [t.name for t in layer.inputs], [t.dtype.name for t in layer.inputs]
            step = Step(layer.name, KIND, layer, None, inputs, types, names[0], types[0], ())
            self._steps.insert(first, step)
            for name in names:
                del self._inputs[name]

    def _run(self, step: Step, values: list[dict[str, np.ndarray]]) -> None:
        if step.kind != KIND:
            return super()._run(step, values)
        for rank in values:
            given = [torch.from_numpy(np.array(rank[name], order="C")) for name in step.inputs]
            tensors = [x.to(TORCH_TYPES[kind]) for x, kind in zip(given, step.input_types, strict=True)]
            results = enqueue(step.layer.plugin, tensors)
            for tensor, result in zip(step.layer.outputs, results, strict=True):
                rank[tensor.name] = (result.float() if result.is_floating_point() else result).numpy()
        return None


def enqueue(plugin: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """One run of the plugin. Both caches are in one allocation, as the executor has them."""
    keys, values = OUTPUT_SOURCES[1:]
    inputs[keys], inputs[values] = torch.stack((inputs[keys], inputs[values]))
    outputs = []
    for index, source in enumerate(OUTPUT_SOURCES):
        inside = plugin.get_aliased_input(index) >= 0
        outputs.append(inputs[source] if inside else torch.full_like(inputs[source], torch.nan))
    plugin.launcher = AddressLauncher([*inputs, *outputs])
    descs = [[SimpleNamespace(dims=tuple(t.shape)) for t in tensors] for tensors in (inputs, outputs)]
    plugin.on_shape_change(*descs)
    plugin.enqueue(*descs, [t.data_ptr() for t in inputs], [t.data_ptr() for t in outputs], 0, 0)
    return outputs


class PluginBuilder:
    """A builder whose networks take plugins."""

    def __init__(self, logger: Any) -> None:
        self._builder = trt.Builder(logger)

    def create_network(self, flags: int) -> PluginNetwork:
        return PluginNetwork(self._builder.create_network(flags))


def evaluate_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `plan_driver` build and evaluate networks with plugins, whose kernels are not compiled."""
    module = ModuleType(trt.__name__)
    module.__dict__.update(vars(trt) | {"Builder": PluginBuilder})
    monkeypatch.setattr(plan_driver, "trt", module)
    monkeypatch.setattr(plan_driver, "Evaluator", PluginEvaluator)
    monkeypatch.setattr(plan_build, "compile_kernel", lambda spec, target: uncompiled(spec))
