"""Registers the plugin with TensorRT and puts it into networks; no network with it was ever built or run.

Takes the TensorRT module as an argument, whichever is installed. Invariant: registering twice is harmless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.tensorrt.base import NAMESPACE, creator_class, plugin_class
from wicore_trt.plugins.tensorrt.cache_attention import CacheAttention, CacheAttentionConfig

_creators: dict[str, Any] = {}  # by TensorRT's name; the registry keeps no reference of its own


def register(trt: Any) -> None:
    """Register the plugin with `trt`, a TensorRT module, before building with it and before deserialising a plan.
    Raises EnvironmentUnfitError where TensorRT refuses."""
    if trt.__name__ in _creators:
        return
    creator = creator_class(trt, CacheAttention)()
    if not trt.get_plugin_registry().register_creator(creator, NAMESPACE):
        raise EnvironmentUnfitError(
            f"TensorRT's registry refused the plugin {CacheAttention.NAME}.", fix="Is another version of it loaded?"
        )
    _creators[trt.__name__] = creator


def check_plugins(trt: Any) -> None:
    """Raise EnvironmentUnfitError for a TensorRT whose networks take no plugins: RTX, or one that is too old."""
    if not hasattr(trt.INetworkDefinition, "add_plugin_v3"):
        raise EnvironmentUnfitError(
            f"{trt.__name__} {trt.__version__} has networks without plugins.",
            fix="Leave --attention plugin out, or build with full TensorRT 10.15 or newer on the GPU host.",
        )
    plugin_class(trt, CacheAttention)


def allow_aliasing(trt: Any, config: Any) -> None:
    """Allow plugins that change an input in place, in a builder's config."""
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)


def add_cache_attention(
    trt: Any, network: Any, config: CacheAttentionConfig, kernels: Mapping[str, CompiledKernel], inputs: Sequence[Any]
) -> Any:
    """Add one layer's attention over its linear caches to `network`, `inputs` as in `CacheAttention`. Returns the
    layer, whose outputs are [N, heads, D] and both caches."""
    plugin = plugin_class(trt, CacheAttention)(config, kernels)
    layer = network.add_plugin_v3(list(inputs), [], plugin)
    if layer is None:
        raise EnvironmentUnfitError(f"TensorRT refused the plugin {CacheAttention.NAME}; its log says why.")
    return layer
