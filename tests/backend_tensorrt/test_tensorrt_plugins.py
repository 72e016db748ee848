"""The plugin through TensorRT's real registry and classes; the launches it makes are recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

trt: Any = pytest.importorskip("tensorrt_rtx_bindings", reason="pip install -e .[tensorrt]")
with suppress(ImportError):
    import tensorrt as trt  # type: ignore[no-redef]  # the full one where it is installed

from wicore_trt.errors import EngineFormatError, EnvironmentUnfitError  # noqa: E402
from wicore_trt.plugins.aot import CompiledKernel  # noqa: E402
from wicore_trt.plugins.layout import Launch  # noqa: E402
from wicore_trt.plugins.tensorrt import cache_attention  # noqa: E402
from wicore_trt.plugins.tensorrt.cache_attention import CacheAttentionConfig  # noqa: E402

CACHE = CacheAttentionConfig(320, 8, 2, 64, dtype="bfloat16", window=512, softmax_scale=1.0)
TYPES = {"float32": "FLOAT", "bfloat16": "BF16", "float16": "HALF", "fp8": "FP8", "int32": "INT32"}


def kernel(name: str, **constants: Any) -> CompiledKernel:
    cubin = f"\x7fELF {name}".encode() * 50
    return CompiledKernel(name, name, "sm89", (), frozenset(), constants, 4, 2, 0, "3.6.0", cubin)


KERNELS = {"kv_write": kernel("w", BLOCK=16), "attention": kernel("a", BLOCK_M=64, REPEAT=4)}


class Recorder:
    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int, int], dict[str, Any], int]] = []

    def launch(self, kernel: CompiledKernel, call: Launch, stream: int) -> None:
        self.launches.append((kernel.name, call.grid, call.arguments, stream))


def descriptions(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> list[Any]:
    found = []
    for dtype, shape in shapes:
        desc = trt.PluginTensorDesc()
        desc.dims, desc.type, desc.format = (
            trt.Dims(shape),
            getattr(trt.DataType, TYPES[dtype]),
            trt.TensorFormat.LINEAR,
        )
        found.append(desc)
    return found


def dynamic(descs: list[Any]) -> list[Any]:
    found = []
    for desc in descs:
        one = trt.DynamicPluginTensorDesc()
        one.desc = desc
        found.append(one)
    return found


def shapes(c: CacheAttentionConfig = CACHE, tokens: int = 3, slots: int = 3) -> tuple[list[Any], list[Any]]:
    """(inputs, outputs) as (dtype, shape)."""
    q = (c.dtype, (tokens, c.heads, c.head_dim))
    kv = (c.dtype, (tokens, c.kv_heads, c.head_dim))
    cache = (c.dtype, (slots, c.kv_heads, c.entries, c.head_dim))
    ints = [("int32", s) for s in ((slots, c.entries // 64), (tokens,), (tokens,), (slots + 1,), (slots,))]
    return [q, kv, kv, cache, cache, *ints], [q, cache, cache]


def make() -> Any:
    return cache_attention.plugin_class(trt)(CACHE, KERNELS, Recorder())


@pytest.fixture
def registry() -> Any:
    cache_attention.register(trt)
    cache_attention.register(trt)  # twice is harmless
    return trt.get_plugin_registry()


def test_registry_creates_what_was_serialized(registry: Any) -> None:
    creator = registry.get_creator(cache_attention.NAME, cache_attention.VERSION, cache_attention.NAMESPACE)
    assert [f.name for f in creator.field_names] == ["config", "kernels"]
    first = make()
    for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
        plugin = creator.create_plugin("layer", first.get_fields_to_serialize(), phase)
        assert isinstance(plugin, trt.IPluginV3) and plugin.config == CACHE and plugin.kernels == KERNELS
        assert (plugin.plugin_name, plugin.plugin_version, plugin.plugin_namespace) == (
            cache_attention.NAME,
            "1",
            "wicore",
        )
        assert plugin.num_outputs == len(shapes()[1])
        first = plugin.clone().attach_to_context(None)  # and the copies serialise alike
        assert first is not plugin and type(first) is type(plugin)
        assert first.get_capability_interface(trt.PluginCapabilityType.BUILD) is first


def test_creator_refuses_other_fields(registry: Any) -> None:
    creator = registry.get_creator(cache_attention.NAME, cache_attention.VERSION, cache_attention.NAMESPACE)
    arrays = cache_attention.field_arrays(CACHE, KERNELS)

    def fields(data: dict[str, np.ndarray]) -> Any:
        return trt.PluginFieldCollection([trt.PluginField(n, a, trt.PluginFieldType.CHAR) for n, a in data.items()])

    with pytest.raises(ValueError, match="made from the fields"):
        creator.create_plugin("x", fields({"config": arrays["config"]}), trt.TensorRTPhase.BUILD)
    cut = {**arrays, "kernels": arrays["kernels"][:-1].copy()}
    with pytest.raises(EngineFormatError):
        creator.create_plugin("x", fields(cut), trt.TensorRTPhase.RUNTIME)
    pages = cache_attention.field_arrays(CACHE, {"copy": KERNELS["kv_write"]})
    with pytest.raises(ValueError, match="kernels"):
        creator.create_plugin("x", fields(pages), trt.TensorRTPhase.RUNTIME)


def test_formats() -> None:
    plugin = make()
    inputs, outputs = (descriptions(s) for s in shapes())
    for pos in range(len(inputs) + len(outputs)):
        in_out = dynamic([*inputs, *outputs])
        assert plugin.supports_format_combination(pos, in_out, len(inputs))
        assert not plugin.supports_format_combination(pos, in_out, len(inputs) - 1)
        for change in ({"type": trt.DataType.INT8}, {"format": trt.TensorFormat.CHW32}):
            other = descriptions([*shapes()[0], *shapes()[1]])[pos]
            for name, value in change.items():
                setattr(other, name, value)
            assert not plugin.supports_format_combination(
                pos, [*in_out[:pos], *dynamic([other]), *in_out[pos + 1 :]], len(inputs)
            )
    assert plugin.get_output_data_types([d.type for d in inputs]) == [d.type for d in outputs]
    assert plugin.get_workspace_size(inputs, outputs) == 0 and plugin.get_valid_tactics() == []


def test_output_shapes_and_aliases() -> None:
    """Only a builder makes extents, so real DimsExprs are told apart by their ranks."""
    plugin = make()
    inputs, outputs = shapes()
    exprs = [trt.DimsExprs(len(shape)) for _, shape in inputs]
    assert [len(e) for e in plugin.get_output_shapes(exprs, [], None)] == [len(shape) for _, shape in outputs]
    assert plugin.get_output_shapes(list(range(10)), [], None) == [0, 3, 4]
    assert [plugin.get_aliased_input(i) for i in range(len(outputs))] == [-1, 3, 4]


def test_shapes_are_checked() -> None:
    plugin = make()
    inputs, outputs = shapes()
    plugin.on_shape_change(descriptions(inputs), descriptions(outputs))
    unknown = [(dtype, (-1, *shape[1:])) for dtype, shape in inputs]
    plugin.configure_plugin(dynamic(descriptions(unknown)), dynamic(descriptions(outputs)))
    for i, (dtype, shape) in enumerate(inputs):
        wrong = [*inputs[:i], (dtype, (*shape[:-1], shape[-1] + 1)), *inputs[i + 1 :]]
        with pytest.raises(ValueError, match=r"where|fit"):
            plugin.on_shape_change(descriptions(wrong), descriptions(outputs))


def test_cache_attention_launches() -> None:
    """Pages of 64 entries over the caches, and V so far behind K as it lies; before K, too."""
    ins, outs = shapes(tokens=20, slots=1)
    for apart in (1 << 20, -(1 << 20)):
        plugin, pointers = make(), [0x10000000 * (i + 1) for i in range(len(ins))]
        pointers[4] = pointers[3] + apart
        outputs = [0xA0000, *pointers[3:5]]
        plugin.enqueue(descriptions(ins), descriptions(outs), pointers, outputs, 0, 0xCAFE)
        (name, grid, write, stream), (name2, grid2, attend, stream2) = plugin.launcher.launches
        assert (name, grid, stream) == ("w", (2, 2, 1), 0xCAFE)
        assert (name2, grid2, stream2) == ("a", (20 // 16 + 1, 2, 1), 0xCAFE)
        strides = {"pool_page": 64 * 64, "pool_kv": apart // 2, "pool_token": 64, "pool_head": 320 * 64}
        for arguments in (write, attend):
            assert arguments["pool"] == pointers[3]
            assert strides.items() <= arguments.items()
            assert (arguments["tables"], arguments["table_length"], arguments["table_stride"]) == (pointers[5], 5, 5)
        assert [write[n] for n in ("k", "v", "positions", "sequences")] == [pointers[i] for i in (1, 2, 6, 7)]
        assert [attend[n] for n in ("q", "cu_seqlens", "first_positions")] == [pointers[i] for i in (0, 8, 9)]
        assert attend["out"] == 0xA0000 and (attend["window"], attend["softmax_scale"]) == (512, 1.0)
    pointers[4] = pointers[3] + 6
    with pytest.raises(ValueError, match="bytes apart"):
        plugin.enqueue(descriptions(ins), descriptions(outs), pointers, [0xA0000, *pointers[3:5]], 0, 0)


def test_memory_that_is_not_aliased_is_an_error() -> None:
    plugin, (ins, outs) = make(), shapes()
    with pytest.raises(ValueError, match="alias"):
        plugin.enqueue(descriptions(ins), descriptions(outs), list(range(16, 176, 16)), [8] * len(outs), 0, 0)
    assert not plugin.launcher.launches


def test_configuration_travels_as_json() -> None:
    data = cache_attention.field_arrays(CACHE, KERNELS)["config"].tobytes()
    assert json.loads(data)["window"] == 512


def test_a_tensorrt_without_aliasing_is_refused() -> None:
    class Old:
        __version__ = "9.0"

    with pytest.raises(EnvironmentUnfitError, match="IPluginV3"):
        cache_attention.plugin_class(Old())
