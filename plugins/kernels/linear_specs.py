"""Which specialisation of the linear kernels a layer's shape and configuration need.

Loads Triton, because a spec holds the kernel's function. Invariant: a spec depends on shape, configuration and on
whether the target has an E4M3 type, on nothing else.
"""

from __future__ import annotations

from typing import Any

from wicore_trt.errors import ConfigError
from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.kernels.linear import linear_matrix, linear_vector
from wicore_trt.plugins.kernels.linear_quantize import quantize_rows
from wicore_trt.plugins.layout import FLOAT_TYPES
from wicore_trt.plugins.linear_layout import VECTOR, LinearConfig, LinearShape, check_config

EXACT_EVERY = 128
"""Products of E4M3 that sm90 may sum in its matrix unit before a float32 addition; cuBLAS's choice as well."""
POINTERS = {
    "w_scale": "*fp32",
    "x_scale": "*fp32",
    "partials": "*fp32",
    "counters": "*i32",
    "best": "*fp32",
    "best_index": "*i32",
}


def linear_spec(shape: LinearShape, config: LinearConfig, target: str) -> KernelSpec:
    """The kernel of `shape` by `config` for `target` ("sm80", ...).

    Raises ConfigError for E4M3 inputs on a target whose matrix units do not take them, and for `ahead` before sm90.
    """
    check_config(shape, config)
    native = int(target.removeprefix("sm")) >= 89
    if shape.fp8_input and not native:
        raise ConfigError(f"{target} has no FP8 matrix products.", fix="Keep the activations in 16 bits.")
    if config.ahead and int(target.removeprefix("sm")) < 90:
        raise ConfigError(f"{target} has no programmatic dependent launch.", fix="Use a configuration with ahead = 0.")
    e4m3 = "fp8e4nv" if native else "u8"
    x, fp8 = FLOAT_TYPES[shape.dtype], shape.weights == "fp8"
    types = {
        "x": "*" + (e4m3 if shape.fp8_input else x),
        "w": "*" + (e4m3 if fp8 else x),
        "out": "*" + FLOAT_TYPES[shape.out],
        "alpha": "fp32",
        "tokens": "i32",
        **POINTERS,
    }
    constants: dict[str, Any] = {
        "N": shape.n,
        "K": shape.k,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "EVICT_FIRST": config.evict_first,
        "AHEAD": config.ahead,
        "W8": fp8,
        "GEGLU": shape.geglu,
        "ARGMAX": shape.argmax,
    }
    if config.kind == VECTOR:
        function = linear_vector
        constants |= {"STAGES": config.num_stages, "UNROLL": config.unroll}
    else:
        function = linear_matrix
        constants |= {"COLUMNS": config.columns, "SPLITS": config.splits, "X8": shape.fp8_input}
        constants["EXACT_EVERY"] = min(EXACT_EVERY, config.block_k) if shape.fp8_input else 0
    signature = {name: types[name] for name in function.arg_names if name not in constants}
    aligned = frozenset(signature) & {"x", "w", "out", "w_scale", "partials"}
    return KernelSpec(
        _name(shape, config, native), function, signature, constants, aligned, config.num_warps, config.num_stages
    )


def quantize_rows_spec(k: int, dtype: str) -> KernelSpec:
    """Rows of `k` values of `dtype` to E4M3. Arguments: x, out, x_scale; grid (tokens, 1, 1)."""
    block = 1 << (k - 1).bit_length()
    signature = {"x": "*" + FLOAT_TYPES[dtype], "out": "*u8", "x_scale": "*fp32"}
    warps = max(4, min(16, block // 2048))
    name = f"quantize_rows_{FLOAT_TYPES[dtype]}_{k}"
    return KernelSpec(name, quantize_rows, signature, {"K": k, "BLOCK": block}, frozenset(signature), warps, 1)


def _name(shape: LinearShape, config: LinearConfig, native: bool) -> str:
    kind = FLOAT_TYPES[shape.dtype] + ("_x8" if shape.fp8_input else "") + ("_w8" if shape.weights == "fp8" else "")
    kind += ("_geglu" if shape.geglu else "") + ("_argmax" if shape.argmax else "")
    bits = "" if native or shape.weights != "fp8" else "_bits"
    return f"linear_{kind}_{FLOAT_TYPES[shape.out]}{bits}_{shape.n}x{shape.k}_{config.name()}"
