"""What compiled steps take and give: names, dtypes and shapes of tensors, and which tensors of a weight file each
weight is made of.

Reads headers, no values. It must not know a backend. Invariant: the weights cover exactly what the model definition
asks for, and every rank of a checkpoint gets the same list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wicore_trt.checkpoint.names import Role, activation_scale_name, kv_scale_name, run_weights, weight_scale_name
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, TensorInfo
from wicore_trt.errors import CheckpointError
from wicore_trt.model.gemma3 import EMBEDDING
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.weight_format import PLAIN

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "fp8"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a compiled step.

    `shape` has numbers, or "B" (slots), "T" (tokens of a slot), "R" (sampled rows).

    `kind`: "step" (differs from step to step), "rank" (a constant of the rank), "table" (rope), "cache", "weight" or
    "output". A weight is made of the tensors `parts` of the rank's weight file: `combine` "rows" stacks them on dim
    0, "max" takes the elementwise maximum.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    kind: str
    parts: tuple[str, ...] = ()
    combine: str = "rows"

    def fixed(self, profile: Mapping[str, tuple[int, int, int]]) -> TensorSpec:
        """With numbers for the dimensions that `profile` does not let vary."""
        one_size = {letter: least for letter, (least, _, most) in profile.items() if least == most}
        return replace(self, shape=tuple(one_size.get(d, d) if isinstance(d, str) else d for d in self.shape))

    def bound(self, profile: Mapping[str, tuple[int, int, int]], which: int) -> tuple[int, ...]:
        """The least (0), best (1) or largest (2) shape in `profile`."""
        return tuple(d if isinstance(d, int) else profile[d][which] for d in self.shape)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape), "parts": list(self.parts)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorSpec:
        """Inverse of to_dict. Raises TypeError or KeyError for other data."""
        return cls(**{**data, "shape": tuple(data["shape"]), "parts": tuple(data["parts"])})


def rope_name(group: str, part: str) -> str:
    """float32[max_context, head_dim / 2]: `part` "cos" or "sin" of position times frequency."""
    return f"rope.{group}.{part}"


def weight_tensors(rank_files: Sequence[Path], spec: Gemma3Spec, kv_dtype: str) -> list[TensorSpec]:
    """Weight inputs of the plan over `rank_files`, all of which must hold the same shapes.

    Gate and up are one input, so that one product computes both. A tied head is an input of its own, made of the
    embedding: TensorRT would otherwise transpose the embedding in every step to read it in two ways.
    Raises CheckpointError for files that miss a tensor or differ.
    """
    lists = [weight_inputs(SafetensorsFile(path).tensors, spec, kv_dtype) for path in rank_files]
    if any(other != lists[0] for other in lists[1:]):
        raise CheckpointError("The ranks of the checkpoint hold tensors of different shapes.")
    return lists[0]


def weight_inputs(found: Mapping[str, TensorInfo], spec: Gemma3Spec, kv_dtype: str) -> list[TensorSpec]:
    """Weight inputs over a rank file with these tensors. Raises CheckpointError for one that is missing."""
    tensors: list[TensorSpec] = []
    for name, made_of in run_weights(spec).items():
        parts = tuple(part.name for part in made_of)
        if made_of[0].role is Role.HEAD and spec.tie_word_embeddings:
            parts = (EMBEDDING,)
        tensors += _inputs(found, name, parts, head_norm=name.endswith(("q_layernorm.weight", "k_layernorm.weight")))
    if kv_dtype == "fp8":
        names = [kv_scale_name(layer) for layer in range(spec.num_layers)]
        tensors += [TensorSpec(name, "float32", (1,), "weight", (name,)) for name in names if name in found]
    return tensors


def _inputs(found: Mapping[str, TensorInfo], name: str, parts: tuple[str, ...], *, head_norm: bool) -> list[TensorSpec]:
    """The weight and, for FP8, its scales."""
    missing = [part for part in parts if part not in found]
    if missing:
        raise CheckpointError(f"The checkpoint lacks {', '.join(missing)}.", fix="Convert the source again.")
    infos = [found[part] for part in parts]
    dtype, rows = DTYPES[infos[0].dtype], sum(info.shape[0] for info in infos)
    shape: tuple[int, ...] = (rows, *infos[0].shape[1:])
    if len(shape) == 1:  # a norm: broadcast over rows, or over slots, heads and tokens
        shape = (1, 1, 1, *shape) if head_norm else (1, *shape)
    tensors = [TensorSpec(name, dtype, shape, "weight", parts)]
    if dtype not in PLAIN:
        scales = tuple(weight_scale_name(part) for part in parts)
        tensors.append(TensorSpec(weight_scale_name(name), "float32", (1, rows), "weight", scales))
        static = tuple(activation_scale_name(part) for part in parts)
        if all(part in found for part in static):
            target = activation_scale_name(name)
            tensors.append(TensorSpec(target, "float32", (1,), "weight", static, combine="max"))
    return tensors
