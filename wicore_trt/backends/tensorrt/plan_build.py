"""Builds a TensorRT plan: defines the network, builds it for a target, reports the result.

Knows the TensorRT API and no files. Invariants: FP32 is FP32 (TF32 is off). A plan needs no memory at run time that its
context did not ask for, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wicore_trt.backends.tensorrt.api import RTX, TensorRT
from wicore_trt.backends.tensorrt.ops import define_network, plugin_config
from wicore_trt.backends.tensorrt.plan_io import PlanRequest, TensorSpec
from wicore_trt.backends.tensorrt.plan_log import BuildLog, make_logger, make_monitor
from wicore_trt.engine.options import PLUGIN
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.model.spec import GLOBAL
from wicore_trt.plugins.aot import CompiledKernel, compile_kernels
from wicore_trt.plugins.tensorrt.cache_attention import PAGE, cache_attention_specs
from wicore_trt.plugins.tensorrt.network import allow_aliasing, check_plugins, register


@dataclass(frozen=True, slots=True)
class Plan:
    """Built plan. `tensors` are its inputs and outputs, dimensions that vary as letters; `facts` are for people; `data`
    its bytes, b"" where a worker wrote them; `timing_cache` makes the next build faster (full TensorRT only)."""

    tensors: list[TensorSpec]
    facts: dict[str, Any]
    data: bytes = b""
    timing_cache: bytes | None = None


def build_plan(
    api: TensorRT,
    request: PlanRequest,
    *,
    timing_cache: bytes | None = None,
    report: Callable[[float], None] = lambda fraction: None,
) -> Plan:
    """Build the plan of `request`. `timing_cache` is an earlier build's (full TensorRT only). Raises
    EnvironmentUnfitError with TensorRT's reason when it cannot."""
    trt, book = api.module, BuildLog()
    if request.attention == PLUGIN:
        check_plugins(trt)
        register(trt)
    builder = trt.Builder(make_logger(trt, book))
    network, tensors = make_network(trt, builder, request)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # kernel names; no effect on what is built
    config.clear_flag(trt.BuilderFlag.TF32)
    if request.attention == PLUGIN:
        allow_aliasing(trt, config)
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if api.targets[request.target] is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(api.targets[request.target], 0)
    config.add_optimization_profile(_make_profile(builder, request, tensors))
    cache = None
    if api.flavour != RTX:  # TensorRT-RTX times nothing when it builds
        cache = config.create_timing_cache(timing_cache or b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    monitor = make_monitor(trt, report)
    config.progress_monitor = monitor
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise EnvironmentUnfitError(
            f"{api.flavour} {api.version} could not build {request.phase} for {request.target}: {book.reason()}"
        )
    facts = {
        "network_hash": hash_network(network),
        "network_layers": network.num_layers,
        "kernels": dict(sorted(book.kernels.items())),
        "precisions": dict(sorted(book.precisions.items())),
        "activation_bytes": book.activation_bytes,
        "rearranged_weights": sorted(book.rearranged),
    }
    return Plan(tensors, facts, bytes(serialized), bytes(cache.serialize()) if cache else None)


def make_network(trt: Any, builder: Any, request: PlanRequest) -> tuple[Any, list[TensorSpec]]:
    strongly_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strongly_typed)
    kernels = _plugin_kernels(request) if request.attention == PLUGIN else None
    return network, define_network(network, trt, request, kernels)


def _plugin_kernels(request: PlanRequest) -> dict[str, CompiledKernel]:
    """Compile the attention plugin's kernels, which all layers share."""
    local = request.spec.shard(0, request.tp_size).spec
    config = plugin_config(local.layer_group(GLOBAL), PAGE, request.dtype)
    return compile_kernels(cache_attention_specs(config), request.target)


def hash_network(network: Any) -> str:
    """Hash every layer's name, kind, inputs and outputs with dtypes and shapes, as hex blake2b. The hash is equal for
    equal builds, whose files are not: TensorRT writes a plan's tables in the order of memory addresses."""
    hasher = hashlib.blake2b(digest_size=16)
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        tensors = [t and (t.name, t.dtype.name, tuple(t.shape)) for t in (*inputs, *outputs)]
        hasher.update(repr((layer.name, type(layer).__name__, tensors)).encode())
    return hasher.hexdigest()


def _make_profile(builder: Any, request: PlanRequest, tensors: Sequence[TensorSpec]) -> Any:
    profile, dims = builder.create_optimization_profile(), request.limits.profile(request.phase)
    for tensor in tensors:
        if tensor.kind != "output" and any(isinstance(d, str) for d in tensor.shape):
            profile.set_shape(tensor.name, *(tensor.bound(dims, which) for which in range(3)))
    return profile
