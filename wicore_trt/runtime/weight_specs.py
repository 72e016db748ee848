"""Weights, norms and scales as kernels take them, and the tensors of a weight file that make up each.

Reads headers, no values; must not know torch or a backend. Invariant: the weights cover exactly what the model
definition asks for, and every rank of a checkpoint gets the same list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wicore_trt.checkpoint.names import (
    Role,
    activation_scale_name,
    kv_scale_name,
    run_weights,
    weight_minimum_name,
    weight_scale_name,
)
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, TensorInfo
from wicore_trt.errors import CheckpointError
from wicore_trt.model.gemma3 import EMBEDDING
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.weight_format import PLAIN

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "fp8", "U8": "q4_0"}


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Weight, norm or scale as kernels take it, made of the tensors `parts` of the rank's file. `combine` "rows" stacks
    them on dim 0, "max" takes the elementwise maximum. A block weight's `shape` is of its bytes
    (`weight_format.LAYOUTS`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    combine: str = "rows"


def rope_name(group: str, part: str) -> str:
    """Name a table float32 [positions, head_dim / 2]: `part` "cos" or "sin" of position times frequency."""
    return f"rope.{group}.{part}"


def list_weights(rank_files: Sequence[Path], spec: Gemma3Spec, kv_dtype: str) -> list[WeightSpec]:
    """List the weights over `rank_files`, all of which must hold the same shapes. Gate and up are one weight, so that
    one product computes both. A tied head is a weight made of the embedding. Raises CheckpointError for files that miss
    a tensor or differ."""
    lists = [find_weights(SafetensorsFile(path).tensors, spec, kv_dtype) for path in rank_files]
    if any(other != lists[0] for other in lists[1:]):
        raise CheckpointError("The ranks of the checkpoint hold tensors of different shapes.")
    return lists[0]


def find_weights(found: Mapping[str, TensorInfo], spec: Gemma3Spec, kv_dtype: str) -> list[WeightSpec]:
    """List the weights over a rank file with the tensors `found`. Raises CheckpointError for a missing one."""
    tensors: list[WeightSpec] = []
    for name, made_of in run_weights(spec).items():
        parts = tuple(part.name for part in made_of)
        if made_of[0].role is Role.HEAD and spec.tie_word_embeddings:
            parts = (EMBEDDING,)
        tensors += _weight_and_scales(
            found, name, parts, head_norm=name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        )
    if kv_dtype == "fp8":
        names = [kv_scale_name(layer) for layer in range(spec.num_layers)]
        tensors += [WeightSpec(name, "float32", (1,), (name,)) for name in names if name in found]
    return tensors


def _weight_and_scales(
    found: Mapping[str, TensorInfo], name: str, parts: tuple[str, ...], *, head_norm: bool
) -> list[WeightSpec]:
    missing = [part for part in parts if part not in found]
    if missing:
        raise CheckpointError(f"The checkpoint lacks {', '.join(missing)}.", fix="Convert the source again.")
    infos = [found[part] for part in parts]
    tag, rows = infos[0].dtype, sum(info.shape[0] for info in infos)
    scales, minimums = ([name_of(part) for part in parts] for name_of in (weight_scale_name, weight_minimum_name))
    scaled = found.get(scales[0])
    dtype = ("q8_0" if scaled and scaled.dtype == "F16" else "q6_k") if tag == "I8" else DTYPES[tag]
    shape: tuple[int, ...] = (rows, *infos[0].shape[1:])
    if len(shape) == 1:  # a norm: broadcast over rows, or over slots, heads and tokens
        shape = (1, 1, 1, *shape) if head_norm else (1, *shape)
    tensors = [WeightSpec(name, dtype, shape, parts)]
    if dtype not in PLAIN:
        for target, held in ((weight_scale_name(name), scales), (weight_minimum_name(name), minimums)):
            if held is scales or held[0] in found:
                info = found.get(held[0])
                if info is None or any(part not in found for part in held):
                    raise CheckpointError(f"The checkpoint lacks {held[0]}.", fix="Convert the source again.")
                size = (rows, info.shape[1]) if len(info.shape) > 1 else (1, rows)
                tensors.append(WeightSpec(target, DTYPES[info.dtype], size, tuple(held)))
        static = tuple(activation_scale_name(part) for part in parts)
        if all(part in found for part in static):
            target = activation_scale_name(name)
            tensors.append(WeightSpec(target, "float32", (1,), static, combine="max"))
    return tensors
