"""Base of the plugins: TensorRT's three interfaces over one description of tensors; never run in a plan.

Classes derive from TensorRT's only once a TensorRT module is at hand (`plugin_class`), so importing costs nothing and
`tensorrt` and `tensorrt_rtx_bindings` serve alike. Invariant: a plugin's state is its configuration and its cubins;
both are serialised into the plan, which runs without Triton and files.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.plugins.aot import CompiledKernel, pack_kernels, unpack_kernels
from wicore_trt.plugins.launch import SHARED_LAUNCHER, Launcher
from wicore_trt.plugins.layout import Launch

NAMESPACE = "wicore"
VERSION = "1"
FIELDS = ("config", "kernels")
TRT_TYPES = {"float32": "FLOAT", "bfloat16": "BF16", "float16": "HALF", "fp8": "FP8", "int32": "INT32"}


@dataclass(frozen=True)
class TensorRule:
    """Rule of a plugin for one input or output: a type (a key of TRT_TYPES) and a shape, -1 for any extent."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def check(self, dims: Sequence[int]) -> None:
        """Raises ValueError for a shape that does not fit; extents below 0 are not known yet."""
        fits = len(dims) == len(self.shape)
        if not fits or any(want >= 0 and got >= 0 and want != got for want, got in zip(self.shape, dims, strict=True)):
            raise ValueError(f"{self.name} has the shape {tuple(dims)} where {self.shape} is needed")


class PluginLogic:
    """Plugin without its TensorRT bases. Subclasses define the class attributes and methods below."""

    NAME: ClassVar[str]
    CONFIG: ClassVar[type]
    ROLES: ClassVar[tuple[str, ...]]
    trt: ClassVar[Any]
    bases: ClassVar[tuple[type, ...]]

    def __init__(
        self, config: Any, kernels: Mapping[str, CompiledKernel], launcher: Launcher = SHARED_LAUNCHER
    ) -> None:
        """Raises ValueError for kernels of other roles than the plugin's."""
        for base in self.bases:
            base.__init__(self)  # type: ignore[misc]  # pybind11 wants each base initialised
        if {*kernels} != {*self.ROLES}:
            raise ValueError(f"{self.NAME} needs the kernels {self.ROLES}, not {tuple(kernels)}")
        self.config, self.kernels, self.launcher = config, dict(kernels), launcher
        self.plugin_name, self.plugin_namespace, self.plugin_version = self.NAME, NAMESPACE, VERSION
        self.num_outputs = len(self.output_rules())
        # TensorRT's fields only point at their data, so the data lives as long as the plugin.
        self._field_data = field_arrays(config, kernels)

    def input_rules(self) -> list[TensorRule]:
        raise NotImplementedError

    def output_rules(self) -> list[TensorRule]:
        raise NotImplementedError

    def output_sources(self) -> list[int]:
        """List the input whose shape each output has."""
        raise NotImplementedError

    def get_aliased_input(self, output_index: int) -> int:
        """Index of the input that an output overwrites in place, -1 for an output with memory of its own."""
        raise NotImplementedError

    def launches(self, dims: Sequence[Sequence[int]], inputs: Sequence[int], outputs: Sequence[int]) -> list[Launch]:
        """Make a launch per role, in this order, of inputs with the extents `dims`; pointers are device addresses."""
        raise NotImplementedError

    # Core
    def get_capability_interface(self, type: Any) -> Self:
        return self

    def clone(self) -> Self:
        return type(self)(self.config, self.kernels, self.launcher)

    # Build
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        return [self._trt_type(rule) for rule in self.output_rules()]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any) -> list[Any]:
        return [inputs[source] for source in self.output_sources()]

    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        rules = self.input_rules() + self.output_rules()
        desc = in_out[pos].desc
        linear = desc.format == self.trt.TensorFormat.LINEAR
        return num_inputs == len(self.input_rules()) and linear and desc.type == self._trt_type(rules[pos])

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.on_shape_change([d.desc for d in inputs], [d.desc for d in outputs])

    def get_valid_tactics(self) -> list[int]:
        return []

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return 0

    # Runtime
    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        rules = self.input_rules() + self.output_rules()
        for rule, desc in zip(rules, [*inputs, *outputs], strict=True):
            rule.check(tuple(desc.dims))

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Launch the kernels on `stream`, a CUDA stream's handle, and read nothing on the host. Raises ValueError where
        an output that should be its input in place is not, and what launching raises."""
        for index, (rule, pointer) in enumerate(zip(self.output_rules(), outputs, strict=True)):
            source = self.get_aliased_input(index)
            if source >= 0 and pointer != inputs[source]:
                raise ValueError(f"{self.NAME}: {rule.name} is not written in place; the builder must alias plugin I/O")
        calls = self.launches([tuple(d.dims) for d in input_desc], inputs, outputs)
        for role, call in zip(self.ROLES, calls, strict=True):
            self.launcher.launch(self.kernels[role], call, stream)

    def set_tactic(self, tactic: int) -> None:
        return None

    def attach_to_context(self, resource_context: Any) -> Self:
        return self.clone()

    def get_fields_to_serialize(self) -> Any:
        kind = self.trt.PluginFieldType.CHAR
        fields = [self.trt.PluginField(name, self._field_data[name], kind) for name in FIELDS]
        return self.trt.PluginFieldCollection(fields)

    def _trt_type(self, rule: TensorRule) -> Any:
        return getattr(self.trt.DataType, TRT_TYPES[rule.dtype])


class CreatorLogic:
    """Creator of one kind of plugin from its fields, without its TensorRT base."""

    logic: ClassVar[Any]
    trt: ClassVar[Any]
    base: ClassVar[type]

    def __init__(self) -> None:
        self.base.__init__(self)  # type: ignore[misc]
        self.name, self.plugin_namespace, self.plugin_version = self.logic.NAME, NAMESPACE, VERSION
        self._no_data = np.zeros(0, np.int8)
        fields = [self.trt.PluginField(name, self._no_data, self.trt.PluginFieldType.CHAR) for name in FIELDS]
        self.field_names = self.trt.PluginFieldCollection(fields)

    def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
        """Make a plugin from the data of `get_fields_to_serialize` or `field_arrays`. Raises ValueError for other
        fields, EngineFormatError for damaged kernels."""
        data = {field.name: np.asarray(field.data).tobytes() for field in fields}
        if {*data} != {*FIELDS}:
            raise ValueError(f"{self.logic.NAME} is made from the fields {FIELDS}, not {tuple(data)}")
        config = self.logic.CONFIG(**json.loads(data["config"]))
        return plugin_class(self.trt, self.logic)(config, unpack_kernels(data["kernels"]))


def field_arrays(config: Any, kernels: Mapping[str, CompiledKernel]) -> dict[str, np.ndarray]:
    """Make a plugin's fields as int8 arrays: the configuration as JSON, the kernels packed."""
    data = {"config": json.dumps(asdict(config), sort_keys=True).encode(), "kernels": pack_kernels(kernels)}
    return {name: np.frombuffer(data[name], np.int8) for name in FIELDS}


@cache
def plugin_class(trt: Any, logic: Any) -> Any:
    """Derive `logic`, a class of PluginLogic, as a plugin of the TensorRT module `trt`. Raises EnvironmentUnfitError
    for a TensorRT that is too old."""
    names = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime")
    missing = [name for name in names if not hasattr(trt, name)]
    if missing:
        raise EnvironmentUnfitError(
            f"TensorRT {trt.__version__} has no {missing[0]}: plugins that work in place need it.",
            fix="Install TensorRT 10.15 or newer.",
        )
    bases = tuple(getattr(trt, name) for name in names)
    members = {"trt": trt, "bases": bases}
    return types.new_class(f"Wicore{logic.__name__}", (logic, *bases), {}, lambda body: body.update(members))


@cache
def creator_class(trt: Any, logic: Any) -> Any:
    base = trt.IPluginCreatorV3One
    members = {"trt": trt, "base": base, "logic": logic}
    return types.new_class(f"{logic.__name__}Creator", (CreatorLogic, base), {}, lambda body: body.update(members))
