"""Weights of an engine or a unified checkpoint, read into the tensors of the CPU and torch operators.

Knows the unified names and safetensors; must not know devices or operators. Invariant: results are complete and shaped
as the spec implies, and every FP8 linear has its scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from wicore_trt.backends.torch.vision import VisionWeights, load_vision, read_tensors
from wicore_trt.checkpoint.blocks import dequantize_parts
from wicore_trt.checkpoint.names import (
    Role,
    activation_scale_name,
    kv_scale_name,
    unified_tensors,
    weight_minimum_name,
    weight_scale_name,
)
from wicore_trt.errors import EngineFormatError
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD, layer_weight
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.dtypes import E4M3

if TYPE_CHECKING:
    from wicore_trt.engine.directory import EngineDir

MAX_LISTED = 6
BLOCK_DTYPES = (torch.uint8, torch.int8)
"""Dtypes of weights that are stored in blocks (`weight_format.LAYOUTS`)."""


@dataclass(frozen=True, slots=True)
class EngineTensors:
    """Engine whose weights are in host memory, as `fuse_weights` returns them. `dtype` is of the activations.
    `max_context` None is the model's own limit. `vision`: None for an engine that reads text alone."""

    spec: Gemma3Spec
    dtype: str
    kv_dtype: str
    tensors: dict[str, torch.Tensor]
    page_tokens: int = 32
    max_context: int | None = None
    vision: VisionWeights | None = None


def load_engine_tensors(engine: EngineDir, rank: int | None = None) -> EngineTensors:
    """Read the weights of an engine directory's `rank`; images are encoded on rank 0. Raises what `load_tensors`
    raises, and EngineFormatError for an engine of several ranks without `rank`."""
    manifest, part = engine.manifest, engine.local_part(rank)
    return EngineTensors(
        part.spec, manifest.base_dtype, manifest.kv_dtype, load_tensors(engine.rank_files[part.rank], part.spec),
        manifest.page_tokens, manifest.max_context, load_vision(engine) if part.rank == 0 else None,
    )  # fmt: skip


def load_tensors(file: Path, spec: Gemma3Spec) -> dict[str, torch.Tensor]:
    """Load the tensors of a rank's file, memory-mapped where they are used unchanged. Raises EngineFormatError for an
    unreadable file, or tensors that do not fit `spec`, the rank's."""
    return fuse_weights(read_tensors(file), spec)


def fuse_weights(tensors: Mapping[str, torch.Tensor], spec: Gemma3Spec) -> dict[str, torch.Tensor]:
    """Fuse the unified `tensors` of a whole model for running. Per layer, `mlp.fc` and `mlp.gate` become `mlp.gate_up`
    with rows [gate_proj; up_proj], scales included. FP8 weight scales become float32 [out]; blocks stay as in the file,
    with scales and minimums beside them (see `widen_blocks`). A tied head is the embedding itself. Tensors of the
    vision tower are left out. Raises EngineFormatError that names missing tensors or wrong shapes."""
    _check_tensors(tensors, spec)
    fused: dict[str, torch.Tensor] = {}
    for tensor in unified_tensors(spec):
        if tensor.name in tensors:
            weight = fused[tensor.name] = tensors[tensor.name]
            if weight.dtype == E4M3:
                scale = tensors[tensor.scale_name].float().flatten()
                fused[tensor.scale_name] = scale.expand(tensor.shape[0]).contiguous()
                if (static := activation_scale_name(tensor.name)) in tensors:
                    fused[static] = tensors[static].float().reshape(1)
            elif weight.dtype in BLOCK_DTYPES:
                names = (tensor.scale_name, weight_minimum_name(tensor.name))
                fused |= {name: tensors[name] for name in names if name in tensors}
    for layer in range(spec.num_layers):
        parts = [layer_weight(layer, "mlp.fc"), layer_weight(layer, "mlp.gate")]
        whole = layer_weight(layer, "mlp.gate_up")
        for name_of in (str, weight_scale_name, weight_minimum_name, activation_scale_name):
            values = [fused.pop(name_of(part)) for part in parts if name_of(part) in fused]
            if values:
                dtype = values[0].dtype
                if name_of is activation_scale_name:
                    joined = torch.stack(values).amax(0)
                elif dtype == E4M3:  # through bytes, as torch does not concatenate E4M3 everywhere
                    joined = torch.cat([value.view(torch.uint8) for value in values]).view(dtype)
                else:
                    joined = torch.cat(values)
                fused[name_of(whole)] = joined
        if kv_scale_name(layer) in tensors:
            fused[kv_scale_name(layer)] = tensors[kv_scale_name(layer)]
    if spec.tie_word_embeddings:
        fused[LM_HEAD] = fused[EMBEDDING]
    return fused


def widen_blocks(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors` with each weight that is stored in blocks as its float32 values [rows, in], without its scales
    and minimums. A tied head stays the embedding itself."""
    known, made = dict(tensors), dict[int, torch.Tensor]()
    for name, weight in tensors.items():
        if weight.dtype not in BLOCK_DTYPES:
            continue
        parts = [known.pop(part, None) for part in (weight_scale_name(name), weight_minimum_name(name))]
        if id(weight) not in made:
            held = [part.numpy() for part in (weight, *parts) if part is not None]
            made[id(weight)] = torch.from_numpy(dequantize_parts(held))
        known[name] = made[id(weight)]
    return known


def _check_tensors(tensors: Mapping[str, torch.Tensor], spec: Gemma3Spec) -> None:
    missing, wrong = [], []
    for expected in unified_tensors(spec):
        tensor = tensors.get(expected.name)
        if tensor is None:
            if expected.role is not Role.HEAD or not spec.tie_word_embeddings:
                missing.append(expected.name)
            continue
        packed = 2 if tensor.dtype == torch.uint8 else 1
        if (tensor.shape[0], *(size * packed for size in tensor.shape[1:])) != expected.shape:
            wrong.append(f"{expected.name} is {list(tensor.shape)}, not {list(expected.shape)}")
        if tensor.dtype in BLOCK_DTYPES:
            names = [weight_scale_name(expected.name), weight_minimum_name(expected.name)]
            held = [tensors[name] for name in names if name in tensors]
            missing += [name for name in names[:1] if name not in tensors]
            rows, k = expected.shape
            group = 16 if tensor.dtype == torch.int8 and held and held[0].dtype == torch.float32 else 32
            dtype = torch.float32 if group == 16 else torch.float16
            if any(s.dtype != dtype or s.shape != (rows, k / group) for s in held):
                wrong.append(f"{names[0]} is {held[0].dtype} {list(held[0].shape)}")
        if tensor.dtype == E4M3:
            scale = tensors.get(weight_scale_name(expected.name))
            if scale is None:
                missing.append(weight_scale_name(expected.name))
            elif scale.numel() not in (1, expected.shape[0]):
                wrong.append(f"{weight_scale_name(expected.name)} has {scale.numel()} values")
    for what, names in (("lacks tensors", missing), ("has tensors that do not fit its spec", wrong)):
        if names:
            more = ", ..." if len(names) > MAX_LISTED else ""
            fix = "Build the engine again."
            raise EngineFormatError(f"The engine {what}: {', '.join(names[:MAX_LISTED])}{more}.", fix=fix)
