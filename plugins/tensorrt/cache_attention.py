"""Plugin `WicoreCacheAttention`: a TensorRT engine's attention. Never run on a GPU, and in no plan that was built.

Writes a step's keys and values into a layer's linear caches and attends over them, with kernels for pages: a slot's
cache is PAGE entries after PAGE entries, so a page table of consecutive numbers makes it pages. One plugin is one
layer. Must not know models or files; takes the TensorRT module as an argument, so either one serves. Invariants: both
caches are changed in place: outputs are their inputs' memory. A plugin's state is its configuration and its cubins;
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

from wicore_trt.arithmetic import ITEM_BYTES
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.plugins.aot import CompiledKernel, KernelSpec, pack_kernels, unpack_kernels
from wicore_trt.plugins.launch import SHARED_LAUNCHER, Launcher
from wicore_trt.plugins.layout import LinearPages, Pool, PoolShape, Slices, Tables, attention_launch, kv_write_launch

NAME, NAMESPACE, VERSION = "WicoreCacheAttention", "wicore", "1"
FIELDS = ("config", "kernels")
ROLES = ("kv_write", "attention")
"""Kernels of the plugin, in the order of their launches."""
OUTPUT_SOURCES = (0, 3, 4)
"""The input whose shape each output has. The caches, all but the first, are that input's memory."""
TRT_TYPES = {"float32": "FLOAT", "bfloat16": "BF16", "float16": "HALF", "fp8": "FP8", "int32": "INT32"}
"""Names of TensorRT's DataType by our names."""
PAGE = 64
"""Cache entries that one place of the page table stands for; caches are multiples of it."""


@dataclass(frozen=True)
class CacheAttentionConfig:
    """Configuration of one layer's attention over caches of `entries`, in `dtype` like the queries; `window` 0: full
    attention."""

    entries: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: int
    softmax_scale: float

    def tensor_rules(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """List name, dtype and shape (-1: any extent) of the inputs, then of the outputs."""
        kv, cached = (-1, self.kv_heads, self.head_dim), (-1, self.kv_heads, self.entries, self.head_dim)
        floats = {"q": (-1, self.heads, self.head_dim), "k": kv, "v": kv, "K cache": cached, "V cache": cached}
        ints: dict[str, tuple[int, ...]] = {"page table": (-1, self.entries // PAGE)}
        ints |= dict.fromkeys(("entries", "slots", "cu_seqlens", "first entries"), (-1,))
        rules = [(name, self.dtype, shape) for name, shape in floats.items()]
        rules += [(name, "int32", shape) for name, shape in ints.items()]
        return rules + [rules[source] for source in OUTPUT_SOURCES]


class CacheAttention:
    """Plugin with inputs q [N, heads, D], k, v [N, kv_heads, D], K cache, V cache [B, kv_heads, entries, D], and int32:

    - page table [B, entries / PAGE]; place p of slot b is b * kv_heads * entries / PAGE + p;
    - entry of each token [N]; slot of each token [N]; cu_seqlens [B + 1]; entry of each slot's first token [B].

    Outputs are [N, heads, D], K cache, V cache. A token sees the entries of its slot up to its own, with a window the
    last `window` of them. `plugin_class` gives it TensorRT's `bases`."""

    trt: ClassVar[Any]
    bases: ClassVar[tuple[type, ...]]

    def __init__(
        self, config: CacheAttentionConfig, kernels: Mapping[str, CompiledKernel], launcher: Launcher = SHARED_LAUNCHER
    ) -> None:
        """Raises ValueError for kernels of other roles than the plugin's."""
        for base in self.bases:
            base.__init__(self)  # type: ignore[misc]  # pybind11 wants each base initialised
        if {*kernels} != {*ROLES}:
            raise ValueError(f"{NAME} needs the kernels {ROLES}, not {tuple(kernels)}")
        self.config, self.kernels, self.launcher = config, dict(kernels), launcher
        self.plugin_name, self.plugin_namespace, self.plugin_version = NAME, NAMESPACE, VERSION
        self.num_outputs, self._rules = len(OUTPUT_SOURCES), config.tensor_rules()
        # TensorRT's fields only point at their data, so the data lives as long as the plugin.
        self._field_data = field_arrays(config, kernels)

    # Core
    def get_capability_interface(self, type: Any) -> Self:
        return self

    def clone(self) -> Self:
        return type(self)(self.config, self.kernels, self.launcher)

    # Build
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        return [input_types[source] for source in OUTPUT_SOURCES]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any) -> list[Any]:
        return [inputs[source] for source in OUTPUT_SOURCES]

    def get_aliased_input(self, output_index: int) -> int:
        """Index of the input that an output overwrites in place, -1 for an output with memory of its own."""
        return OUTPUT_SOURCES[output_index] if output_index else -1

    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        desc, wanted = in_out[pos].desc, getattr(self.trt.DataType, TRT_TYPES[self._rules[pos][1]])
        fits = num_inputs == len(self._rules) - len(OUTPUT_SOURCES) and desc.type == wanted
        return fits and bool(desc.format == self.trt.TensorFormat.LINEAR)

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.on_shape_change([d.desc for d in inputs], [d.desc for d in outputs])

    def get_valid_tactics(self) -> list[int]:
        return []

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return 0

    # Runtime
    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Raises ValueError for shapes that do not fit; extents below 0 are not known yet."""
        for (name, _, shape), desc in zip(self._rules, [*inputs, *outputs], strict=True):
            dims = tuple(desc.dims)
            pairs = zip(shape, dims, strict=True) if len(dims) == len(shape) else ((0, 1),)
            if any(want >= 0 and got >= 0 and want != got for want, got in pairs):
                raise ValueError(f"{name} has the shape {dims} where {shape} is needed")
        first = [d.dims[0] for d in inputs]
        tokens, slots = first[0], first[3]
        if min(first) >= 0 and first != [tokens] * 3 + [slots] * 3 + [tokens, tokens, slots + 1, slots]:
            raise ValueError(f"{NAME}: {tokens} tokens and {slots} slots do not fit the lengths {first}")

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Launch the kernels on `stream`, a CUDA stream's handle, and read nothing on the host; `inputs` and `outputs`
        are addresses. Raises ValueError where a cache is not written in place or not aligned, and what launching
        raises."""
        c: CacheAttentionConfig = self.config
        q, k, v, keys, values, table, entries, slots, cu_seqlens, first = inputs
        if [*outputs[1:]] != [keys, values]:
            raise ValueError(f"{NAME}: a cache is not written in place; the builder must alias plugin I/O")
        apart, rest = divmod(values - keys, ITEM_BYTES[c.dtype])
        if rest or apart % 16:
            raise ValueError(f"{NAME}: the caches lie {values - keys} bytes apart, which is no multiple of 16 values")
        pool = Pool(keys, LinearPages(1, PAGE, c.kv_heads, c.head_dim, c.dtype, entries=c.entries, values=apart))
        tables, tokens = Tables(table, *input_desc[5].dims), input_desc[0].dims[0]
        write, attend = (self.kernels[role] for role in ROLES)
        call = kv_write_launch(write.constants, k, v, pool, tables, entries, slots, tokens)
        self.launcher.launch(write, call, stream)
        slices = Slices(cu_seqlens, first, tokens)
        call = attention_launch(attend.constants, q, outputs[0], pool, tables, slices, c.softmax_scale, c.window)
        self.launcher.launch(attend, call, stream)

    def set_tactic(self, tactic: int) -> None:
        return None

    def attach_to_context(self, resource_context: Any) -> Self:
        return self.clone()

    def get_fields_to_serialize(self) -> Any:
        return _make_fields(self.trt, self._field_data)


def field_arrays(config: CacheAttentionConfig, kernels: Mapping[str, CompiledKernel]) -> dict[str, np.ndarray]:
    """Make a plugin's fields as int8 arrays: the configuration as JSON, the kernels packed."""
    data = {"config": json.dumps(asdict(config), sort_keys=True).encode(), "kernels": pack_kernels(kernels)}
    return {name: np.frombuffer(data[name], np.int8) for name in FIELDS}


def _make_fields(trt: Any, data: Mapping[str, np.ndarray]) -> Any:
    kind = trt.PluginFieldType.CHAR
    return trt.PluginFieldCollection([trt.PluginField(name, array, kind) for name, array in data.items()])


@cache
def plugin_class(trt: Any) -> Any:
    """Derive CacheAttention as a plugin of the TensorRT module `trt`. Raises EnvironmentUnfitError for a TensorRT that
    is too old."""
    names = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime")
    missing = [name for name in names if not hasattr(trt, name)]
    if missing:
        raise EnvironmentUnfitError(
            f"TensorRT {trt.__version__} has no {missing[0]}: plugins that work in place need it.",
            fix="Install TensorRT 10.15 or newer.",
        )
    bases = tuple(getattr(trt, name) for name in names)
    members = {"trt": trt, "bases": bases}
    return types.new_class(NAME, (CacheAttention, *bases), {}, lambda body: body.update(members))


def check_plugins(trt: Any) -> None:
    """Raise EnvironmentUnfitError for a TensorRT whose networks take no plugins: RTX, or one that is too old."""
    if not hasattr(trt.INetworkDefinition, "add_plugin_v3"):
        raise EnvironmentUnfitError(
            f"{trt.__name__} {trt.__version__} has networks without plugins.",
            fix="Leave --attention plugin out, or build with full TensorRT 10.15 or newer on the GPU host.",
        )
    plugin_class(trt)


_creators: dict[str, Any] = {}  # by TensorRT's name; the registry keeps no reference of its own


def register(trt: Any) -> None:
    """Register the plugin with `trt`, a TensorRT module, before building with it and before deserialising a plan. Twice
    is harmless. Raises EnvironmentUnfitError where TensorRT refuses."""
    if trt.__name__ in _creators:
        return

    class Creator(trt.IPluginCreatorV3One):
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_namespace, self.plugin_version = NAME, NAMESPACE, VERSION
            self._no_data = dict.fromkeys(FIELDS, np.zeros(0, np.int8))  # TensorRT's fields only point at it
            self.field_names = _make_fields(trt, self._no_data)

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            """Make a plugin from the data of `field_arrays`. Raises ValueError for other fields, EngineFormatError for
            damaged kernels."""
            data = {field.name: np.asarray(field.data).tobytes() for field in fields}
            if {*data} != {*FIELDS}:
                raise ValueError(f"{NAME} is made from the fields {FIELDS}, not {tuple(data)}")
            config = CacheAttentionConfig(**json.loads(data["config"]))
            return plugin_class(trt)(config, unpack_kernels(data["kernels"]))

    creator = Creator()
    if not trt.get_plugin_registry().register_creator(creator, NAMESPACE):
        raise EnvironmentUnfitError(
            f"TensorRT's registry refused the plugin {NAME}.", fix="Is another version of it loaded?"
        )
    _creators[trt.__name__] = creator


def cache_attention_specs(heads: int, kv_heads: int, head_dim: int, dtype: str) -> dict[str, KernelSpec]:
    """Specify the plugin's kernels by role, for `aot.compile_kernel`; layers of one engine share them. Raises
    EnvironmentUnfitError without Triton, ConfigError for heads that the kernels do not take."""
    try:
        from wicore_trt.plugins.kernels import specs
    except ImportError as error:
        raise EnvironmentUnfitError(
            f"The attention plugin is compiled by Triton, which is not here ({error})."
        ) from None

    pool = PoolShape(1, PAGE, kv_heads, head_dim, dtype)
    return {"kv_write": specs.kv_write_spec(pool), "attention": specs.attention_spec(pool, heads)}
