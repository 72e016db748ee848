"""The plugins through TensorRT's real registry and classes; the launches they make are recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

trt: Any = pytest.importorskip("tensorrt_rtx_bindings", reason="pip install wicore-trt[tensorrt]")
with suppress(ImportError):
    import tensorrt as trt  # type: ignore[no-redef]  # the full one where it is installed

from wicore_trt.errors import EngineFormatError, EnvironmentUnfitError  # noqa: E402
from wicore_trt.plugins.aot import CompiledKernel  # noqa: E402
from wicore_trt.plugins.layout import Launch  # noqa: E402
from wicore_trt.plugins.tensorrt import base, network  # noqa: E402
from wicore_trt.plugins.tensorrt.cache_attention import CacheAttention, CacheAttentionConfig  # noqa: E402
from wicore_trt.plugins.tensorrt.kv_pages import KvPages, KvPagesConfig  # noqa: E402
from wicore_trt.plugins.tensorrt.paged_attention import PagedAttention, PagedAttentionConfig  # noqa: E402

ATTENTION = PagedAttentionConfig(
    layers=5,
    layer=3,
    page_tokens=16,
    heads=8,
    kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    window=512,
    softmax_scale=0.1,
)
CACHE = CacheAttentionConfig(320, 8, 2, 64, dtype="bfloat16", window=512, softmax_scale=1.0)
PAGES = KvPagesConfig(5, 16, 2, 64, cache_dtype="float16", kv_dtype="fp8", to_cache=True)
TYPES = {"float32": "FLOAT", "bfloat16": "BF16", "float16": "HALF", "fp8": "FP8", "int32": "INT32"}


def kernel(name: str, **constants: Any) -> CompiledKernel:
    cubin = f"\x7fELF {name}".encode() * 50
    return CompiledKernel(name, name, "sm89", (), frozenset(), constants, 4, 2, 0, "3.6.0", cubin)


KERNELS = {
    PagedAttention: {"kv_write": kernel("w", BLOCK=16), "attention": kernel("a", BLOCK_M=64, REPEAT=4)},
    CacheAttention: {"kv_write": kernel("w", BLOCK=16), "attention": kernel("a", BLOCK_M=64, REPEAT=4)},
    KvPages: {"copy": kernel("c", BLOCK=32)},
}


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


def attention_shapes(c: PagedAttentionConfig, tokens: int = 20, sequences: int = 3) -> tuple[list[Any], list[Any]]:
    """(inputs, outputs) as (dtype, shape)."""
    q = (c.dtype, (tokens, c.heads, c.head_dim))
    kv = (c.dtype, (tokens, c.kv_heads, c.head_dim))
    pool = (c.kv_dtype, (100, c.layers, 2, c.page_tokens, c.kv_heads, c.head_dim))
    ints = [("int32", s) for s in ((sequences, 7), (tokens,), (tokens,), (sequences + 1,), (sequences,))]
    scales = [("float32", (c.layers,))] if c.kv_dtype == "fp8" else []
    return [q, kv, kv, pool, *ints, *scales], [q, pool]


def cache_shapes(c: CacheAttentionConfig, tokens: int = 3, slots: int = 3) -> tuple[list[Any], list[Any]]:
    q = (c.dtype, (tokens, c.heads, c.head_dim))
    kv = (c.dtype, (tokens, c.kv_heads, c.head_dim))
    cache = (c.dtype, (slots, c.kv_heads, c.entries, c.head_dim))
    ints = [("int32", s) for s in ((slots, c.entries // 64), (tokens,), (tokens,), (slots + 1,), (slots,))]
    return [q, kv, kv, cache, cache, *ints], [q, cache, cache]


def pages_shapes(c: KvPagesConfig) -> tuple[list[Any], list[Any]]:
    pool = (c.kv_dtype, (100, c.layers, 2, c.page_tokens, c.kv_heads, c.head_dim))
    cache = (c.cache_dtype, (c.layers, 2, 4, c.kv_heads, 300, c.head_dim))
    scales = [("float32", (c.layers,))] if c.converts else []
    return [pool, cache, ("int32", (3, 9)), ("int32", (3, 4)), *scales], [cache if c.to_cache else pool]


BOTH = [
    (CacheAttention, CACHE),
    (PagedAttention, ATTENTION),
    (PagedAttention, replace(ATTENTION, kv_dtype="fp8")),
    (KvPages, PAGES),
]
BOTH += [(KvPages, replace(PAGES, to_cache=False, kv_dtype="float16"))]


def shapes_of(config: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(config, CacheAttentionConfig):
        return cache_shapes(config)
    return pages_shapes(config) if isinstance(config, KvPagesConfig) else attention_shapes(config)


def make(logic: Any, config: Any) -> Any:
    return base.plugin_class(trt, logic)(config, KERNELS[logic], Recorder())


@pytest.fixture
def registry() -> Any:
    network.register(trt)
    network.register(trt)  # twice is harmless
    return trt.get_plugin_registry()


@pytest.mark.parametrize(("logic", "config"), BOTH)
def test_registry_creates_what_was_serialized(registry: Any, logic: Any, config: Any) -> None:
    creator = registry.get_creator(logic.NAME, base.VERSION, base.NAMESPACE)
    assert [f.name for f in creator.field_names] == ["config", "kernels"]
    first = make(logic, config)
    for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
        plugin = creator.create_plugin("layer", first.get_fields_to_serialize(), phase)
        assert isinstance(plugin, trt.IPluginV3) and plugin.config == config and plugin.kernels == KERNELS[logic]
        assert (plugin.plugin_name, plugin.plugin_version, plugin.plugin_namespace) == (logic.NAME, "1", "wicore")
        assert plugin.num_outputs == len(shapes_of(config)[1])
        first = plugin.clone().attach_to_context(None)  # and the copies serialise alike
        assert first is not plugin and type(first) is type(plugin)
        assert first.get_capability_interface(trt.PluginCapabilityType.BUILD) is first


def test_creator_refuses_other_fields(registry: Any) -> None:
    creator = registry.get_creator(PagedAttention.NAME, base.VERSION, base.NAMESPACE)
    arrays = base.field_arrays(ATTENTION, KERNELS[PagedAttention])

    def fields(data: dict[str, np.ndarray]) -> Any:
        return trt.PluginFieldCollection([trt.PluginField(n, a, trt.PluginFieldType.CHAR) for n, a in data.items()])

    with pytest.raises(ValueError, match="made from the fields"):
        creator.create_plugin("x", fields({"config": arrays["config"]}), trt.TensorRTPhase.BUILD)
    cut = {**arrays, "kernels": arrays["kernels"][:-1].copy()}
    with pytest.raises(EngineFormatError):
        creator.create_plugin("x", fields(cut), trt.TensorRTPhase.RUNTIME)
    pages = base.field_arrays(ATTENTION, KERNELS[KvPages])
    with pytest.raises(ValueError, match="kernels"):
        creator.create_plugin("x", fields(pages), trt.TensorRTPhase.RUNTIME)


@pytest.mark.parametrize(("logic", "config"), BOTH)
def test_formats(logic: Any, config: Any) -> None:
    plugin = make(logic, config)
    inputs, outputs = (descriptions(s) for s in shapes_of(config))
    for pos in range(len(inputs) + len(outputs)):
        in_out = dynamic([*inputs, *outputs])
        assert plugin.supports_format_combination(pos, in_out, len(inputs))
        assert not plugin.supports_format_combination(pos, in_out, len(inputs) - 1)
        for change in ({"type": trt.DataType.INT8}, {"format": trt.TensorFormat.CHW32}):
            other = descriptions([*shapes_of(config)[0], *shapes_of(config)[1]])[pos]
            for name, value in change.items():
                setattr(other, name, value)
            assert not plugin.supports_format_combination(
                pos, [*in_out[:pos], *dynamic([other]), *in_out[pos + 1 :]], len(inputs)
            )
    assert plugin.get_output_data_types([d.type for d in inputs]) == [d.type for d in outputs]
    assert plugin.get_workspace_size(inputs, outputs) == 0 and plugin.get_valid_tactics() == []


@pytest.mark.parametrize(("logic", "config"), BOTH)
def test_output_shapes_and_aliases(logic: Any, config: Any) -> None:
    """Only a builder makes extents, so real DimsExprs are told apart by their ranks."""
    plugin = make(logic, config)
    inputs, outputs = shapes_of(config)
    exprs = [trt.DimsExprs(len(shape)) for _, shape in inputs]
    assert [len(e) for e in plugin.get_output_shapes(exprs, [], None)] == [len(shape) for _, shape in outputs]
    assert plugin.get_output_shapes(list(range(10)), [], None) == (
        {PagedAttention: [0, 3], CacheAttention: [0, 3, 4]}.get(logic) or [plugin._target]
    )
    aliases = [plugin.get_aliased_input(i) for i in range(len(outputs))]
    if logic is not KvPages:
        assert aliases == [-1, 3, 4][: len(outputs)]
    else:
        assert aliases == [1 if config.to_cache else 0] and inputs[aliases[0]] == outputs[0]


@pytest.mark.parametrize(("logic", "config"), BOTH)
def test_shapes_are_checked(logic: Any, config: Any) -> None:
    plugin = make(logic, config)
    inputs, outputs = shapes_of(config)
    plugin.on_shape_change(descriptions(inputs), descriptions(outputs))
    unknown = [(dtype, (-1, *shape[1:])) for dtype, shape in inputs]
    plugin.configure_plugin(dynamic(descriptions(unknown)), dynamic(descriptions(outputs)))
    for i, (dtype, shape) in enumerate(inputs):
        wrong = [*inputs[:i], (dtype, (*shape[:-1], shape[-1] + 1)), *inputs[i + 1 :]]
        if (logic, i) not in ((PagedAttention, 4), (KvPages, 2)):  # a page table may be of any width
            with pytest.raises(ValueError, match=r"where|fit"):
                plugin.on_shape_change(descriptions(wrong), descriptions(outputs))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_attention_launches(kv_dtype: str) -> None:
    config = replace(ATTENTION, kv_dtype=kv_dtype)
    plugin, (ins, outs) = make(PagedAttention, config), attention_shapes(config, tokens=20, sequences=3)
    pointers = [0x1000 * (i + 1) for i in range(len(ins))]
    outputs = [0xA0000, pointers[3]]
    plugin.enqueue(descriptions(ins), descriptions(outs), pointers, outputs, 0, 0xCAFE)
    (name, grid, write, stream), (name2, grid2, attend, stream2) = plugin.launcher.launches
    assert (name, grid, stream) == ("w", (2, 2, 1), 0xCAFE)
    assert (name2, grid2, stream2) == ("a", (20 // 16 + 3, 2, 1), 0xCAFE)
    size = 1 if kv_dtype == "fp8" else 2
    layer = 2 * 16 * 2 * 64
    assert write["pool"] == attend["pool"] == pointers[3] + 3 * layer * size
    assert write["kv_scale"] == attend["kv_scale"] == (pointers[9] + 3 * 4 if kv_dtype == "fp8" else 0)
    names = ("k", "v", "tables", "positions", "sequences")
    assert [write[n] for n in names] == [pointers[i] for i in (1, 2, 4, 5, 6)]
    names = ("q", "tables", "cu_seqlens", "first_positions")
    assert [attend[n] for n in names] == [pointers[i] for i in (0, 4, 7, 8)] and attend["out"] == 0xA0000
    strides = {"pool_page": 5 * layer, "pool_kv": layer // 2, "pool_token": 128, "pool_head": 64}
    assert strides.items() <= write.items() and strides.items() <= attend.items()
    assert (write["tokens"], write["k_token"], write["v_head"], write["table_stride"]) == (20, 128, 64, 7)
    assert (attend["n_sequences"], attend["table_length"], attend["q_token"], attend["out_head"]) == (3, 7, 512, 64)
    assert (attend["window"], attend["softmax_scale"]) == (512, 0.1)


def test_cache_attention_launches() -> None:
    """Pages of 64 entries over the caches, and V so far behind K as it lies; before K, too."""
    ins, outs = cache_shapes(CACHE, tokens=20, slots=1)
    for apart in (1 << 20, -(1 << 20)):
        plugin, pointers = make(CacheAttention, CACHE), [0x10000000 * (i + 1) for i in range(len(ins))]
        pointers[4] = pointers[3] + apart
        outputs = [0xA0000, *pointers[3:5]]
        plugin.enqueue(descriptions(ins), descriptions(outs), pointers, outputs, 0, 0xCAFE)
        (name, grid, write, stream), (name2, grid2, attend, stream2) = plugin.launcher.launches
        assert (name, grid, stream) == ("w", (2, 2, 1), 0xCAFE)
        assert (name2, grid2, stream2) == ("a", (20 // 16 + 1, 2, 1), 0xCAFE)
        strides = {"pool_page": 64 * 64, "pool_kv": apart // 2, "pool_token": 64, "pool_head": 320 * 64}
        for arguments in (write, attend):
            assert arguments["pool"] == pointers[3] and arguments["kv_scale"] == 0
            assert strides.items() <= arguments.items()
            assert (arguments["tables"], arguments["table_length"], arguments["table_stride"]) == (pointers[5], 5, 5)
        assert [write[n] for n in ("k", "v", "positions", "sequences")] == [pointers[i] for i in (1, 2, 6, 7)]
        assert [attend[n] for n in ("q", "cu_seqlens", "first_positions")] == [pointers[i] for i in (0, 8, 9)]
        assert attend["out"] == 0xA0000 and (attend["window"], attend["softmax_scale"]) == (512, 1.0)
    pointers[4] = pointers[3] + 6
    with pytest.raises(ValueError, match="bytes apart"):
        plugin.enqueue(descriptions(ins), descriptions(outs), pointers, [0xA0000, *pointers[3:5]], 0, 0)


@pytest.mark.parametrize("config", [PAGES, replace(PAGES, to_cache=False, kv_dtype="float16")])
def test_page_launches(config: KvPagesConfig) -> None:
    plugin, (ins, outs) = make(KvPages, config), pages_shapes(config)
    pointers = [0x1000 * (i + 1) for i in range(len(ins))]
    plugin.enqueue(descriptions(ins), descriptions(outs), pointers, [pointers[1 if config.to_cache else 0]], 0, 7)
    ((name, grid, arguments, stream),) = plugin.launcher.launches
    assert (name, grid, stream) == ("c", (-(-9 * 16 // 32), 2, 3 * 5 * 2), 7)
    assert [arguments[n] for n in ("pool", "cache", "tables", "copies")] == pointers[:4]
    assert arguments["scales"] == (pointers[4] if config.converts else 0)
    assert (arguments["cache_tokens"], arguments["layers"], arguments["table_length"]) == (300, 5, 9)
    assert arguments["cache_slot"] == 2 * 300 * 64 and arguments["cache_layer"] == 2 * 4 * 2 * 300 * 64


@pytest.mark.parametrize(("logic", "config"), BOTH)
def test_memory_that_is_not_aliased_is_an_error(logic: Any, config: Any) -> None:
    plugin, (ins, outs) = make(logic, config), shapes_of(config)
    with pytest.raises(ValueError, match="alias"):
        plugin.enqueue(descriptions(ins), descriptions(outs), list(range(16, 200, 16)), [8] * len(outs), 0, 0)
    assert not plugin.launcher.launches


class FakeLayer:
    def __init__(self, inputs: list[Any], plugin: Any) -> None:
        self.inputs, self.plugin = inputs, plugin

    def get_output(self, i: int) -> str:
        return f"{self.plugin.config.layer if hasattr(self.plugin.config, 'layer') else 'pages'}.{i}"


class FakeNetwork:
    """Records what TensorRT-RTX's network has no method for."""

    def __init__(self) -> None:
        self.layers: list[FakeLayer] = []

    def add_plugin_v3(self, inputs: list[Any], shape_inputs: list[Any], plugin: Any) -> FakeLayer:
        assert shape_inputs == [] and isinstance(plugin, trt.IPluginV3)
        self.layers.append(FakeLayer(inputs, plugin))
        return self.layers[-1]


def test_layers_of_a_network_hand_the_pool_on() -> None:
    net, step = FakeNetwork(), network.StepTensors("table", "positions", "sequences", "cu", "first")
    pool: Any = "pool"
    for layer in range(2):
        config = replace(ATTENTION, layer=layer)
        out, pool = network.add_paged_attention(
            trt, net, config, KERNELS[PagedAttention], (f"q{layer}", "k", "v"), pool, step
        )
        assert out == f"{layer}.0"
    shared = ["table", "positions", "sequences", "cu", "first"]
    assert [n.inputs for n in net.layers] == [["q0", "k", "v", "pool", *shared], ["q1", "k", "v", "0.1", *shared]]
    assert pool == "1.1"
    with pytest.raises(ValueError, match="scales"):
        network.add_paged_attention(
            trt, net, replace(ATTENTION, kv_dtype="fp8"), KERNELS[PagedAttention], ("q", "k", "v"), pool, step
        )
    inputs = ["pool", "cache", "tables", "copies", "scales"]
    assert network.add_kv_pages(trt, net, PAGES, KERNELS[KvPages], inputs) == "pages.0"
    assert net.layers[-1].inputs == inputs


def test_configuration_travels_as_json() -> None:
    data = base.field_arrays(ATTENTION, KERNELS[PagedAttention])["config"].tobytes()
    assert json.loads(data)["window"] == 512


def test_a_tensorrt_without_aliasing_is_refused() -> None:
    class Old:
        __version__ = "9.0"

    with pytest.raises(EnvironmentUnfitError, match="IPluginV3"):
        base.plugin_class(Old(), PagedAttention)
