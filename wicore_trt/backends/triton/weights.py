"""Weights and tables of the triton backend on a device: read from an engine, placed from memory, or made up.

Knows names and types; neither kernels nor steps. Invariants: linears keep the engine's type, norms and scales are
float32, gate and up are one tensor, a tied head is the embedding; every FP8 KV cache has a scale per layer. In float16
the weights prove that no norm overflows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch

from wicore_trt.backends.triton.products import gate_up_bound
from wicore_trt.backends.triton.table import EngineShape
from wicore_trt.backends.triton.tiles import dequantize_blocks, pack_scales, pack_tiles
from wicore_trt.checkpoint.names import Role, kv_scale_name, run_weights, weight_minimum_name, weight_scale_name
from wicore_trt.errors import EngineFormatError
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD, layer_weight
from wicore_trt.plugins.linear_layout import geglu_exponent
from wicore_trt.runtime.device_weights import join_rows, load_weights, make_rope_tables
from wicore_trt.runtime.dtypes import E4M3, TORCH_DTYPES
from wicore_trt.runtime.weight_specs import list_weights, rope_name

if TYPE_CHECKING:
    from wicore_trt.engine.directory import EngineDir

log = logging.getLogger(__name__)
FLOAT16_MAX = 65504.0
SMALL = 0.02  # standard deviation of made-up weights
E4M3_SPREAD = 64.0  # of made-up E4M3 values


@dataclass(frozen=True)
class Constants:
    """Everything that no step changes. `weights` have the fused names of `backends.torch.weights`; `rope[group]` is cos
    and sin float32 [positions, D / 2]; `exponents` as in `TritonModel`."""

    weights: dict[str, torch.Tensor]
    rope: dict[str, tuple[torch.Tensor, torch.Tensor]]
    exponents: dict[str, int]


def engine_shape(engine: EngineDir, page_tokens: int | None = None) -> EngineShape:
    m, tokens = engine.manifest, page_tokens or engine.manifest.page_tokens
    spec, images = engine.local_part(0).spec, m.vision is not None
    return EngineShape(spec, m.base_dtype, m.weights, m.kv_dtype, tokens, images, m.tp_size)


def load_constants(
    engine: EngineDir, shape: EngineShape, positions: int, device: Any, rank: int | None = None
) -> Constants:
    """Load `rank`'s weights onto `device` (`runtime.cuda_device.CudaDevice`), and all rows of the embedding, or make
    them up for an engine without any. Raises EngineFormatError for files that do not fit, and for several ranks and
    none named."""
    rank = engine.local_part(rank).rank
    if engine.manifest.dummy_weights:
        return finish_constants(shape, make_dummy_weights(shape, device.torch_device), positions, device, rank)
    listed = list_weights(engine.rank_files, shape.spec, shape.kv_dtype)
    loaded = load_weights(engine.rank_files[rank], listed, shape.spec, device)
    if shape.ranks > 1:
        for name in {EMBEDDING, weight_scale_name(EMBEDDING)} & loaded.keys():
            loaded[name] = join_rows(engine.rank_files, name, device)
            if shape.spec.tie_word_embeddings:
                loaded[name.replace(EMBEDDING, LM_HEAD)] = loaded[name]
    return finish_constants(shape, loaded, positions, device, rank)


def finish_constants(
    shape: EngineShape, weights: Mapping[str, torch.Tensor], positions: int, device: Any, rank: int = 0
) -> Constants:
    """Complete `weights` by tables, KV scales and exponents of float16. Of a tied head `rank` keeps its rows of the
    embedding. Raises EngineFormatError for other types."""
    spec = shape.spec
    known = {
        n: t.flatten() if t.dtype == torch.float32 else t
        for n, t in _widen_head(weights, TORCH_DTYPES[shape.table_dtype]).items()
    }
    for name, (tensor, *_) in run_weights(spec).items():
        wanted = {Role.NORM: "float32", Role.LINEAR: shape.weights.storage}.get(tensor.role, shape.table_dtype)
        if known[name].dtype != TORCH_DTYPES[wanted]:
            problem = f"The engine's {name} is {known[name].dtype}; backend 'triton' needs {wanted}."
            raise EngineFormatError(problem, fix="Build the engine again.")
    if spec.tie_word_embeddings and shape.ranks > 1:
        known[LM_HEAD] = known[LM_HEAD][rank * spec.vocab_size :][: spec.vocab_size]
    if shape.kv_dtype == "fp8":
        one = torch.ones(1, device=device.torch_device)
        known = {kv_scale_name(layer): one for layer in range(spec.num_layers)} | known
    exponents = {}
    if shape.dtype == "float16":
        _prove_norms(known)
        for layer in range(spec.num_layers):
            name, norm = layer_weight(layer, "mlp.gate_up"), known[layer_weight(layer, "pre_feedforward_layernorm")]
            scale, minimum = known.get(weight_scale_name(name)), known.get(weight_minimum_name(name))
            if shape.weights.storage == "q4_0":
                parts = [torch.split(t, 4096) for t in (known[name], scale, minimum) if t is not None]
                largest = gate_up_bound((dequantize_blocks(*part) for part in zip(*parts, strict=True)), None, norm)
            else:
                largest = gate_up_bound(torch.split(known[name], 4096), scale, norm)
            exponents[name] = geglu_exponent(spec.hidden_size, largest)
    for name in run_weights(spec) if shape.weights.storage == "q4_0" else ():
        if known[name].dtype == torch.uint8:
            pack_tiles(known[name])
            for other in (weight_scale_name(name), weight_minimum_name(name)):
                if other in known:
                    pack_scales(known[other])
    tables = make_rope_tables(spec, positions, device)
    rope = {group: (tables[rope_name(group, "cos")], tables[rope_name(group, "sin")]) for group in spec.groups}
    return Constants(known, rope, exponents)


def _widen_head(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return `weights` with embedding and head rounded to `dtype`, if they are stored in blocks."""
    known, made = dict(weights), dict[int, torch.Tensor]()
    for name in (EMBEDDING, LM_HEAD):
        table, scale = known[name], known.pop(weight_scale_name(name), None)
        known[name] = made.get(table.data_ptr(), table)
        if known[name].dtype == dtype or scale is None:
            continue
        log.info("embedding and head are stored as %s and computed with as %s", table.dtype, dtype)
        wide = known[name] = made[table.data_ptr()] = torch.empty(table.shape, dtype=dtype, device=table.device)
        for start in range(0, len(table), 16384):
            part = slice(start, start + 16384)
            wide[part] = dequantize_blocks(table[part], scale[part])
    return known


def make_dummy_weights(shape: EngineShape, device: torch.device) -> dict[str, torch.Tensor]:
    """Make small normal weights of the right shapes and types on the device, for measurements of speed."""
    spec, dtype = shape.spec, TORCH_DTYPES[shape.dtype]
    generator = torch.Generator(device).manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for name, (tensor, *more) in run_weights(spec).items():
        if tensor.role is Role.HEAD and spec.tie_word_embeddings:
            continue
        rows = tensor.shape[0] * (shape.ranks if tensor.role is Role.EMBEDDING else 1 + len(more))
        if tensor.role is Role.NORM:
            weights[name] = torch.ones(rows, device=device)
            continue
        linear = tensor.role is Role.LINEAR
        if linear and shape.weights.storage == "q4_0":
            size = (rows, tensor.shape[1] // 2)
            weights[name] = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
            scales = weights[weight_scale_name(name)] = torch.empty((rows, tensor.shape[1] // 32), device=device).half()
            scales.fill_(SMALL / 4.6)  # of whole numbers from -8 to 7
            if name.split(".", 3)[-1].removesuffix(".weight") in shape.weights.minimums:
                weights[weight_minimum_name(name)] = scales * -8
            continue
        fp8 = shape.weights.fp8 and linear
        values = torch.empty((rows, *tensor.shape[1:]), dtype=torch.bfloat16 if fp8 else dtype, device=device)
        values.normal_(0, E4M3_SPREAD if fp8 else SMALL, generator=generator)
        weights[name] = values.clamp_(-448, 448).to(E4M3) if fp8 else values
        if fp8:
            weights[weight_scale_name(name)] = torch.full((rows,), SMALL / E4M3_SPREAD, device=device)
    if spec.tie_word_embeddings:
        weights[LM_HEAD] = weights[EMBEDDING]
    return weights


def _prove_norms(weights: Mapping[str, torch.Tensor]) -> None:
    """Prove |norm(x) * w| <= sqrt(n) max|w| to fit float16, for norms whose results become float16."""
    for name, weight in weights.items():
        if not name.endswith(("layernorm.weight", "ln_f.weight")) or ".post_" in name:
            continue
        if sqrt(weight.numel()) * float(weight.abs().max()) > FLOAT16_MAX:
            fix = "Build the engine with --dtype bfloat16 or fp8."
            raise EngineFormatError(f"{name} is too large for float16.", fix=fix)
