"""Constants of an engine's kernels on the device: weights from a rank's safetensors file, and rope tables.

Knows the format; neither backends nor steps. Invariants: every tensor of the file is used or known to be idle; a weight
is read from the mapped file straight to its place on the device; weights of the same parts are one memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from wicore_trt.checkpoint.names import kv_scale_name
from wicore_trt.errors import EngineFormatError
from wicore_trt.model.gemma3 import LM_HEAD
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.dtypes import TORCH_DTYPES
from wicore_trt.runtime.weight_specs import WeightSpec, rope_name

MAX_LISTED = 6


def load_weights(
    path: Path, wanted: Sequence[WeightSpec], spec: Gemma3Spec, device: CudaDevice
) -> dict[str, torch.Tensor]:
    """Load the weights `wanted`, by name, in their shapes and dtypes. Raises EngineFormatError for a file that cannot
    be read, lacks a part or holds an extra tensor, and for a part of another dtype or size."""
    try:
        with safe_open(path, framework="pt") as file:
            names = {*file.keys()}
            _refuse_names(path, "lacks", {part for t in wanted for part in t.parts} - names)
            unused = {n for n in names - {part for t in wanted for part in t.parts} if not _is_idle(n, spec)}
            _refuse_names(path, "holds tensors that the compiled engine does not take:", unused)
            made: dict[tuple[object, ...], torch.Tensor] = {}
            weights = {}
            for tensor in wanted:
                key = (tensor.parts, tensor.dtype, tensor.combine)
                if key not in made:
                    made[key] = _assemble_weight(tensor, [file.get_tensor(part) for part in tensor.parts], path, device)
                _check_size(tensor, made[key].numel(), path)
                weights[tensor.name] = made[key].view(tensor.shape)
    except (OSError, SafetensorError) as error:
        raise EngineFormatError(f"{path} cannot be read: {error}.", fix="Build the engine again.") from error
    return weights


def join_rows(paths: Sequence[Path], name: str, device: CudaDevice) -> torch.Tensor:
    """Load a tensor of all ranks' files on top of each other. Raises EngineFormatError for a file without it."""
    try:
        parts = []
        for path in paths:
            with safe_open(path, framework="pt") as file:
                parts.append(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise EngineFormatError(f"{path} cannot be read: {error}.", fix="Build the engine again.") from error
    joined = device.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for part, rows in zip(parts, torch.split(joined, [*map(len, parts)]), strict=True):
        rows.copy_(part)
    return joined


def make_rope_tables(spec: Gemma3Spec, positions: int, device: CudaDevice) -> dict[str, torch.Tensor]:
    """Make rope tables float32 [positions, head_dim / 2] of each layer group by `rope_name`: cos and sin of position /
    factor * theta ** (-2 i / head_dim), computed in float64 and rounded. The factor stretches global layers only."""
    tables = {}
    for group in spec.groups:
        shape = spec.layer_group(group)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] / shape.rope_factor * frequencies
        for part, values in (("cos", angles.cos()), ("sin", angles.sin())):
            table = tables[rope_name(group, part)] = device.empty(tuple(values.shape), torch.float32)
            table.copy_(values)
    return tables


def _assemble_weight(tensor: WeightSpec, parts: Sequence[torch.Tensor], path: Path, device: CudaDevice) -> torch.Tensor:
    dtype, shape = TORCH_DTYPES[tensor.dtype], tensor.shape
    for name, part in zip(tensor.parts, parts, strict=True):
        if part.dtype != dtype:
            raise _make_misfit(path, f"{name} is {part.dtype}, and {tensor.name} takes {tensor.dtype}")
    if tensor.combine == "max":
        parts = [torch.stack([part.flatten() for part in parts]).amax(0)]
    elif all(part.numel() == 1 for part in parts):  # a scale for all rows of its part; parts are of one height
        parts = [part.flatten().expand(torch.Size(shape).numel() // len(parts)) for part in parts]
    _check_size(tensor, sum(part.numel() for part in parts), path)
    memory = device.empty((sum(part.numel() for part in parts),), dtype)
    at = 0
    for part in parts:
        _view_bytes(memory[at : at + part.numel()]).copy_(_view_bytes(part.flatten()))
        at += part.numel()
    return memory


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View E4M3 as its bits, which every device copies."""
    bits: torch.Tensor = tensor.view(torch.uint8) if tensor.dtype == TORCH_DTYPES["fp8"] else tensor
    return bits


def _check_size(tensor: WeightSpec, items: int, path: Path) -> None:
    shape = tensor.shape
    if torch.Size(shape).numel() != items:
        raise _make_misfit(path, f"{', '.join(tensor.parts)}: {items} values, and {tensor.name} takes {list(shape)}")


def _is_idle(name: str, spec: Gemma3Spec) -> bool:
    """Tell whether kernels may ignore a tensor: a tied head, or scales of a KV cache or activations not quantized."""
    kv_scales = {kv_scale_name(layer) for layer in range(spec.num_layers)}
    return (
        name in kv_scales
        or name.endswith("activation_scaling_factor")
        or (name == LM_HEAD and spec.tie_word_embeddings)
    )


def _refuse_names(path: Path, what: str, names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names)[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "")
        raise _make_misfit(path, f"it {what} {listed}")


def _make_misfit(path: Path, what: str) -> EngineFormatError:
    return EngineFormatError(f"{path} does not fit the compiled engine: {what}.", fix="Build the engine again.")
