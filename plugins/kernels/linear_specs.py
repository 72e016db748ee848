"""Specialisations of the linear kernels by a layer's shape and configuration.

Loads Triton, because a spec holds the kernel's function. Invariant: a spec depends only on shape, configuration and on
whether the target has an E4M3 type.
"""

from __future__ import annotations

from typing import Any

from wicore_trt.errors import ConfigError
from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.kernels.linear import linear_matrix, linear_vector
from wicore_trt.plugins.kernels.linear_q4 import dequantize_q4, linear_q4
from wicore_trt.plugins.kernels.linear_q4_groups import STEP, linear_q4_groups
from wicore_trt.plugins.kernels.linear_quantize import quantize_parts, quantize_rows
from wicore_trt.plugins.layout import FLOAT_TYPES
from wicore_trt.plugins.linear_layout import GROUPS, TILES, VECTOR, LinearConfig, LinearShape, check_config

EXACT_EVERY = 128
"""Products of E4M3 that sm90 may sum in its matrix unit before a float32 addition; cuBLAS's choice as well."""
QUANTIZED_PART = 2048
"""Columns of a program of `quantize_parts`."""
DEQUANTIZED_WARPS, DEQUANTIZED_TILES = 4, 2
"""Warps of a program of `dequantize_q4`, and tiles of each."""
GROUPS_REGISTERS = {8: 128, 16: 128, 32: 168}
"""Registers of a thread of `linear_q4_groups` by columns: a multiprocessor has 16 warps of 128, or 12 of 168."""
POINTERS = {"w_scale": "*fp32", "x_scale": "*fp32", "partials": "*fp32", "counters": "*i32", "largest": "*i32"}


def linear_spec(shape: LinearShape, config: LinearConfig, target: str) -> KernelSpec:
    """Specify the kernel of `shape` by `config` for `target` ("sm80", ...). Raises ConfigError for E4M3 inputs on a
    target whose matrix units do not take them."""
    check_config(shape, config)
    if config.kind in (TILES, GROUPS):
        return _tiles_spec(shape, config) if config.kind == TILES else _groups_spec(shape, config)
    native = int(target.removeprefix("sm")) >= 89
    if shape.fp8_input and not native:
        raise ConfigError(f"{target} has no FP8 matrix products.", fix="Keep the activations in 16 bits.")
    e4m3 = "fp8e4nv" if native else "u8"
    x, fp8 = FLOAT_TYPES[shape.dtype], shape.weights.fp8
    w = e4m3 if fp8 else FLOAT_TYPES[shape.weights.storage]
    types = {"x": "*" + (e4m3 if shape.fp8_input else x), "w": "*" + w, "out": "*" + FLOAT_TYPES[shape.out]}
    types |= {"alpha": "fp32", "tokens": "i32", **POINTERS}
    constants: dict[str, Any] = {
        "N": shape.n, "K": shape.k, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "EVICT_FIRST": config.evict_first, "W8": fp8, "GEGLU": shape.geglu,
    }  # fmt: skip
    function = linear_vector if config.kind == VECTOR else linear_matrix
    if config.kind == VECTOR:
        constants |= {"STAGES": config.num_stages, "UNROLL": config.unroll}
    else:
        constants |= {"COLUMNS": config.columns, "SPLITS": config.splits, "X8": shape.fp8_input}
        constants |= {"LARGEST": shape.largest}
        constants |= {"EXACT_EVERY": min(EXACT_EVERY, config.block_k) if shape.fp8_input else 0}
    signature = {argument: types[argument] for argument in function.arg_names if argument in types}
    aligned = frozenset(signature) & {"x", "w", "out", "w_scale", "partials"}
    name = _name(shape, config, native)
    return KernelSpec(name, function, signature, constants, aligned, config.num_warps, config.num_stages)


def _tiles_spec(shape: LinearShape, config: LinearConfig) -> KernelSpec:
    x = "*" + FLOAT_TYPES[shape.dtype]
    signature = {
        "x": x, "w": "*u8", "out": "*" + FLOAT_TYPES[shape.out], "w_scale": "*fp16", "w_minimum": "*fp16",
        "alpha": "fp32", "partials": "*fp32", "counters": "*i32", "tokens": "i32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "N": shape.n, "K": shape.k, "T": config.block_n // (32 * config.warps_n), "WN": config.warps_n,
        "WK": config.warps_k, "COLUMNS": config.columns, "SPLITS": config.splits, "UNROLL": config.unroll,
        "X_AHEAD": config.num_stages, "EVICT_FIRST": config.evict_first, "MINIMUMS": bool(shape.weights.minimums),
        "GEGLU": shape.geglu,
    }  # fmt: skip
    aligned = frozenset({"x", "w", "out", "w_scale", "w_minimum", "partials"})
    return KernelSpec(_name(shape, config, native=True), linear_q4, signature, constants, aligned, config.num_warps, 1)


def _groups_spec(shape: LinearShape, config: LinearConfig) -> KernelSpec:
    """Boxes are those of `linear_layout.linear_launch`'s arrays."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    def box(item: str, *sizes: int, swizzle: int = 0) -> str:
        layout = NVMMASharedLayout(swizzle, 32 if item == "i32" else 16, len(sizes))
        return f"tensordesc<{item}{[*sizes]},{layout!r}>"

    halves, step = 2 if shape.geglu else 1, STEP.value
    strips = config.num_warps // halves
    signature = {
        "x": box(FLOAT_TYPES[shape.dtype], step // 2, config.columns, 64, swizzle=128),
        "w": box("i32", halves, strips, step, 128), "out": "*" + FLOAT_TYPES[shape.out],
        "w_scale": box("fp16", halves, strips, step * 32), "alpha": "fp32", "partials": "*fp32", "counters": "*i32",
        "tokens": "i32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "N": shape.n, "K": shape.k, "W": config.num_warps, "COLUMNS": config.columns, "SPLITS": config.splits,
        "STAGES": config.num_stages, "GEGLU": shape.geglu,
    }  # fmt: skip
    return KernelSpec(
        _name(shape, config, native=True), linear_q4_groups, signature, constants, frozenset({"out", "partials"}),
        config.num_warps, 1, registers=GROUPS_REGISTERS[config.columns],
    )  # fmt: skip


def dequantize_spec(shape: LinearShape) -> KernelSpec:
    """Specify `dequantize_q4` of the weights of `shape` into its dtype."""
    to, minimums = FLOAT_TYPES[shape.dtype], bool(shape.weights.minimums)
    signature = {"w": "*u8", "out": "*" + to, "w_scale": "*fp16", "w_minimum": "*fp16"}
    name = f"dequantize_q4_{to}_{shape.weight_rows}x{shape.k}{'_minimums' if minimums else ''}"
    constants = {"N": shape.weight_rows, "K": shape.k, "W": DEQUANTIZED_WARPS, "T": DEQUANTIZED_TILES}
    constants |= {"MINIMUMS": minimums}
    return KernelSpec(name, dequantize_q4, signature, constants, frozenset(signature), DEQUANTIZED_WARPS, 1)


def quantize_rows_spec(k: int, dtype: str, *, native: bool) -> KernelSpec:
    """Specify `quantize_rows` of `k` values of `dtype`; `native`: for targets that `e4m3.has_conversions`."""
    block = 1 << (k - 1).bit_length()
    return _quantize_spec(quantize_rows, k, dtype, block, max(1, min(16, block // 256)), native)


def quantize_parts_spec(k: int, dtype: str, *, native: bool) -> KernelSpec:
    """Specify `quantize_parts`, QUANTIZED_PART columns to a program."""
    return _quantize_spec(quantize_parts, k, dtype, QUANTIZED_PART, QUANTIZED_PART // 256, native)


def _quantize_spec(function: Any, k: int, dtype: str, block: int, warps: int, native: bool) -> KernelSpec:
    signature = {"x": "*" + FLOAT_TYPES[dtype], "out": "*u8", "x_scale": "*fp32", "largest": "*i32"}
    name = f"{function.__name__}_{FLOAT_TYPES[dtype]}_{k}{'_native' if native else ''}"
    constants: dict[str, Any] = {"K": k, "BLOCK": block, "NATIVE": native}
    return KernelSpec(name, function, signature, constants, frozenset({"x", "out"}), warps, 1)


def _name(shape: LinearShape, config: LinearConfig, native: bool) -> str:
    fp8 = shape.weights.fp8
    kind = FLOAT_TYPES[shape.dtype] + ("_x8" if shape.fp8_input else "") + ("_w8" if fp8 else "")
    kind += "" if shape.weights.quantized or shape.weights.storage == shape.dtype else "_w16"
    kind += ("_q4" if shape.four_bit else "") + ("_minimums" if shape.weights.minimums else "")
    kind += ("_geglu" if shape.geglu else "") + ("_largest" if shape.largest else "")
    bits = "" if native or not fp8 else "_bits"
    return f"linear_{kind}_{FLOAT_TYPES[shape.out]}{bits}_{shape.n}x{shape.k}_{config.short_name()}"
