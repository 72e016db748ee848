"""The weight inputs of a plan: which tensors of a rank's weight file each is made of.

Reads headers, no values. It must not know TensorRT. Invariant: the inputs cover exactly what the model definition asks
for, in the shapes that the lowering broadcasts, and every rank of a checkpoint gets the same list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from wicore_trt.checkpoint.names import Role, kv_scale_name, unified_tensors
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, TensorInfo
from wicore_trt.errors import CheckpointError
from wicore_trt.model.gemma3 import EMBEDDING
from wicore_trt.model.plan_io import PlanTensor
from wicore_trt.model.spec import Gemma3Spec

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "fp8"}


def weight_tensors(rank_files: Sequence[Path], spec: Gemma3Spec, kv_dtype: str) -> list[PlanTensor]:
    """Weight inputs of the plan over `rank_files`, all of which must hold the same shapes.

    Gate and up are one input, so that one product computes both. A tied head is an input of its own, made of the
    embedding: TensorRT would otherwise transpose the embedding in every step to read it in two ways.
    Raises CheckpointError for files that miss a tensor or differ.
    """
    lists = [weight_inputs(SafetensorsFile(path).tensors, spec, kv_dtype) for path in rank_files]
    if any(other != lists[0] for other in lists[1:]):
        raise CheckpointError("The ranks of the checkpoint hold tensors of different shapes.")
    return lists[0]


def weight_inputs(found: Mapping[str, TensorInfo], spec: Gemma3Spec, kv_dtype: str) -> list[PlanTensor]:
    """Weight inputs over a rank file with these tensors. Raises CheckpointError for one that is missing."""
    tensors: list[PlanTensor] = []
    for unified in unified_tensors(spec):
        name = unified.name
        parts: tuple[str, ...] = (name,)
        if unified.role is Role.HEAD and spec.tie_word_embeddings:
            parts = (EMBEDDING,)
        elif name.endswith(".mlp.gate.weight"):
            continue
        elif name.endswith(".mlp.fc.weight"):
            name, parts = name.replace(".mlp.fc.", ".mlp.gate_up."), (name, name.replace(".mlp.fc.", ".mlp.gate."))
        tensors += _inputs(found, name, parts, head_norm=name.endswith(("q_layernorm.weight", "k_layernorm.weight")))
    if kv_dtype == "fp8":
        names = [kv_scale_name(layer) for layer in range(spec.num_layers)]
        tensors += [PlanTensor(name, "float32", (1,), "weight", (name,)) for name in names if name in found]
    return tensors


def _inputs(found: Mapping[str, TensorInfo], name: str, parts: tuple[str, ...], *, head_norm: bool) -> list[PlanTensor]:
    """The weight and, for FP8, its scales."""
    missing = [part for part in parts if part not in found]
    if missing:
        raise CheckpointError(f"The checkpoint lacks {', '.join(missing)}.", fix="Convert the source again.")
    infos = [found[part] for part in parts]
    dtype, rows = DTYPES[infos[0].dtype], sum(info.shape[0] for info in infos)
    shape: tuple[int, ...] = (rows, *infos[0].shape[1:])
    if len(shape) == 1:  # a norm: broadcast over rows, or over slots, heads and tokens
        shape = (1, 1, 1, *shape) if head_norm else (1, *shape)
    tensors = [PlanTensor(name, dtype, shape, "weight", parts)]
    if dtype == "fp8":
        scales = tuple(part + "s_scaling_factor" for part in parts)
        tensors.append(PlanTensor(name + "s_scaling_factor", "float32", (1, rows), "weight", scales))
        static = tuple(part.removesuffix("weight") + "activation_scaling_factor" for part in parts)
        if all(part in found for part in static):
            target = name.removesuffix("weight") + "activation_scaling_factor"
            tensors.append(PlanTensor(target, "float32", (1,), "weight", static, combine="max"))
    return tensors
