"""Registers the plugins with TensorRT and puts them into networks; no network with one was ever built or run.

Takes the TensorRT module as an argument, whichever is installed. Invariant: registering twice is harmless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.tensorrt.base import NAMESPACE, creator_class, plugin_class
from wicore_trt.plugins.tensorrt.cache_attention import CacheAttention, CacheAttentionConfig
from wicore_trt.plugins.tensorrt.kv_pages import KvPages, KvPagesConfig
from wicore_trt.plugins.tensorrt.paged_attention import PagedAttention, PagedAttentionConfig

PLUGINS: tuple[Any, ...] = (PagedAttention, CacheAttention, KvPages)
_creators: dict[tuple[str, str], Any] = {}  # the registry keeps no reference of its own


def register(trt: Any) -> None:
    """Make the plugins known to `trt`, a TensorRT module: before building with them and before deserialising a plan.

    Raises EnvironmentUnfitError where TensorRT refuses.
    """
    registry = trt.get_plugin_registry()
    for logic in PLUGINS:
        key = (trt.__name__, logic.NAME)
        if key in _creators:
            continue
        creator = creator_class(trt, logic)()
        if not registry.register_creator(creator, NAMESPACE):
            raise EnvironmentUnfitError(
                f"TensorRT's registry refused the plugin {logic.NAME}.", fix="Is another version of it loaded?"
            )
        _creators[key] = creator


def check_plugins(trt: Any) -> None:
    """Raise EnvironmentUnfitError for a TensorRT whose networks take no plugins: RTX, or one that is too old."""
    if not hasattr(trt.INetworkDefinition, "add_plugin_v3"):
        raise EnvironmentUnfitError(
            f"{trt.__name__} {trt.__version__} has networks without plugins.",
            fix="Leave --attention plugin out, or build with full TensorRT 10.15 or newer on the GPU host.",
        )
    plugin_class(trt, CacheAttention)


def allow_aliasing(trt: Any, config: Any) -> None:
    """Set in a builder's config what plugins need that change an input in place."""
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)


@dataclass(frozen=True)
class StepTensors:
    """Network tensors that all layers of one group share (`PagedAttention`); `kv_scales` with FP8 pages only."""

    page_table: Any
    positions: Any
    sequences: Any
    cu_seqlens: Any
    first_positions: Any
    kv_scales: Any = None


def add_paged_attention(
    trt: Any,
    network: Any,
    config: PagedAttentionConfig,
    kernels: Mapping[str, CompiledKernel],
    qkv: tuple[Any, Any, Any],
    pool: Any,
    step: StepTensors,
) -> tuple[Any, Any]:
    """One layer's attention in `network`: ([N, heads, D], the pool after the layer's write).

    The next layer of the group takes the returned pool; the last one is marked as the network's output. Raises
    ValueError where FP8 pages come without scales, or scales without FP8 pages.
    """
    inputs = [*qkv, pool, step.page_table, step.positions, step.sequences, step.cu_seqlens, step.first_positions]
    if (config.kv_dtype == "fp8") != (step.kv_scales is not None):
        raise ValueError(f"{config.kv_dtype} pages {'need' if config.kv_dtype == 'fp8' else 'have no'} KV scales")
    if step.kv_scales is not None:
        inputs.append(step.kv_scales)
    layer = _add(trt, network, PagedAttention, config, kernels, inputs)
    return layer.get_output(0), layer.get_output(1)


def add_cache_attention(
    trt: Any,
    network: Any,
    config: CacheAttentionConfig,
    kernels: Mapping[str, CompiledKernel],
    inputs: Sequence[Any],
) -> Any:
    """One layer's attention over its linear caches in `network`, `inputs` as in `CacheAttention`: the layer, whose
    outputs are [N, heads, D] and both caches."""
    return _add(trt, network, CacheAttention, config, kernels, list(inputs))


def add_kv_pages(
    trt: Any, network: Any, config: KvPagesConfig, kernels: Mapping[str, CompiledKernel], inputs: list[Any]
) -> Any:
    """A copy between pages and caches in `network`, `inputs` as in `KvPages`: the written side."""
    return _add(trt, network, KvPages, config, kernels, inputs).get_output(0)


def _add(
    trt: Any,
    network: Any,
    logic: Any,
    config: Any,
    kernels: Mapping[str, CompiledKernel],
    inputs: list[Any],
) -> Any:
    plugin = plugin_class(trt, logic)(config, kernels)
    layer = network.add_plugin_v3(inputs, [], plugin)
    if layer is None:
        raise EnvironmentUnfitError(f"TensorRT refused the plugin {logic.NAME}; its log says why.")
    return layer
