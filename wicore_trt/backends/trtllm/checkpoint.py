"""Exports our unified checkpoint to one that `trtllm-build` of TensorRT-LLM 1.2 takes.

Names are equal. It writes what differs: norms in the model's dtype, per-tensor FP8 scales, and a config.json with the
library's fields alone. Tensors pass a few rows at a time. Must not know the build. Invariant: every weight equals ours
(norms: rounded once; FP8: requantized once), or an error is raised.

Field and tensor names: TensorRT-LLM, models/modeling_utils.py, models/gemma/config.py, models/gemma/convert.py.

FP8 becomes `FP8`: one scale per tensor and static activation scales. TensorRT-LLM's FP8_PER_CHANNEL_PER_TOKEN would
avoid requantizing, but its Gemma code names no scales for it, and its GEMM plugin does not exist on Blackwell. `mlp.fc`
and `mlp.gate` share a scale: use_fused_mlp stacks them and requantizes where scales differ. One scale per matrix costs
accuracy: on 270M it raises the perplexity by 3.8 %, scales per channel by 1.3 %.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wicore_trt.checkpoint.format import (
    CONFIG,
    FP8_TAG,
    TAGS,
    Checkpoint,
    window_pattern,
)
from wicore_trt.checkpoint.names import Role, UnifiedTensor, unified_tensors
from wicore_trt.checkpoint.quantize import E4M3_MAX, e4m3_bits, e4m3_values, from_float32
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, SafetensorsWriter, TensorEntry, split_rows
from wicore_trt.checkpoint.sharding import shard_of
from wicore_trt.errors import CheckpointError, ConfigError
from wicore_trt.files import quote_arg
from wicore_trt.model.spec import GLOBAL
from wicore_trt.progress import Progress, ignore_progress

PATTERN_KEY = "_sliding_window_pattern"
"""1.2's spelling, which follows transformers 4.57; earlier versions write it without the underscore."""
DTYPES = ("bfloat16", "float16")
_TWIN = {"fc": "gate", "gate": "fc"}
_log = logging.getLogger(__name__)


def export_checkpoint(
    checkpoint: Checkpoint, directory: Path, *, kv_fp8: bool, progress: Progress = ignore_progress
) -> dict[str, Any]:
    """Write TensorRT-LLM's rank{N}.safetensors and config.json, which it returns, into the existing `directory`.
    `kv_fp8`: an FP8 KV cache with the checkpoint's KV scales, which are left out otherwise. Vision tensors are always
    left out. Raises ConfigError for a float32 checkpoint or missing static scales, CheckpointError for windows without
    a period."""
    _check_export(checkpoint, kv_fp8)
    if checkpoint.dtype == "float16":
        _log.warning(
            "TensorRT-LLM keeps the residual stream of a float16 engine in float16, where Gemma 3 overflows (65,504): "
            "its output may be nonsense. Convert with --dtype bfloat16 or fp8."
        )
    checkpoint = replace(checkpoint, kv_scales=kv_fp8)
    files = [SafetensorsFile(path) for path in checkpoint.rank_files]
    scales = _tensor_scales(checkpoint, files) if checkpoint.weights.fp8 else {}
    for rank, file in enumerate(files):
        progress("checkpoint", rank, len(files))
        _write_rank(checkpoint, rank, file, directory / f"rank{rank}.safetensors", scales)
    config = _make_config(checkpoint)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return config


def _make_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Make config.json of an exported checkpoint. Raises CheckpointError for windows without a period."""
    spec = checkpoint.spec
    pattern = window_pattern(spec)
    if pattern is None:
        raise CheckpointError(
            f"TensorRT-LLM makes every n-th layer global, and no n gives this model's: {list(spec.layers_of(GLOBAL))}.",
            fix="Use another backend: wicore build --backend torch",
        )
    config = replace(checkpoint, weights=checkpoint.weights.calibrated).make_fields()
    config.setdefault("rotary_scaling", None)  # TensorRT-LLM gives it to local layers, too; `trtllm.model` takes it off
    return {**config, PATTERN_KEY: pattern}


def _check_export(checkpoint: Checkpoint, kv_fp8: bool) -> None:
    again = f"wicore convert {quote_arg(checkpoint.source)} OUTPUT"
    if checkpoint.dtype not in DTYPES:
        fix = f"{again} --dtype bfloat16"
        raise ConfigError(f"TensorRT-LLM's attention runs in {' or '.join(DTYPES)}, not {checkpoint.dtype}.", fix=fix)
    if checkpoint.weights.fp8 and not checkpoint.weights.static_activations:
        problem = "TensorRT-LLM's FP8 needs static scales of activations, and this checkpoint has none."
        raise ConfigError(problem, fix=f"Measure them: {again} --dtype fp8 --calibrate TEXT")
    if kv_fp8 and not checkpoint.kv_scales:
        fix = f"Measure them: {again} --calibrate TEXT, or leave --kv-dtype out."
        raise ConfigError("TensorRT-LLM's FP8 KV cache needs scales, and this checkpoint has none.", fix=fix)


def _write_rank(
    checkpoint: Checkpoint, rank: int, file: SafetensorsFile, path: Path, scales: dict[str, np.float32]
) -> None:
    spec = checkpoint.spec
    norm_tag = TAGS[checkpoint.dtype]
    entries: list[TensorEntry] = []
    for tensor in unified_tensors(spec):
        storage = checkpoint.find_storage(tensor.role)
        fp8 = storage == "fp8"
        tag = norm_tag if tensor.role is Role.NORM else FP8_TAG if fp8 else TAGS[storage]
        entries.append((tensor.name, tag, shard_of(tensor, spec, rank, checkpoint.tp_size).shape))
        one = [tensor.scale_name] if fp8 else []
        entries += [(name, "F32", (1,)) for name in (*one, *checkpoint.list_static(tensor))]
    with SafetensorsWriter(path, entries) as writer:
        for tensor in unified_tensors(spec):
            if checkpoint.find_storage(tensor.role) == "fp8":
                for block in _dequantize_blocks(tensor, file):
                    writer.write(tensor.name, e4m3_bits(block / scales[tensor.name]))
                writer.write(tensor.scale_name, np.array([scales[tensor.name]], np.float32))
            else:
                for block in _read_blocks(file, tensor.name):
                    writer.write(tensor.name, from_float32(block, norm_tag) if tensor.role is Role.NORM else block)
            for name in checkpoint.list_static(tensor):
                writer.write(name, file.read_rows(name, 0, 1))


def _read_blocks(file: SafetensorsFile, name: str) -> Iterator[np.ndarray]:
    for rows in split_rows(file.tensors[name].shape):
        yield file.read_rows(name, *rows)


def _dequantize_blocks(tensor: UnifiedTensor, file: SafetensorsFile) -> Iterator[np.ndarray]:
    """Dequantize a linear to float32, e4m3 * its channel's scale, a few rows at a time."""
    values, first = e4m3_values(), 0
    for block in _read_blocks(file, tensor.name):
        scale = file.read_rows(tensor.scale_name, first, first + len(block))
        first += len(block)
        yield values[block] * scale[:, None]


def _tensor_scales(checkpoint: Checkpoint, files: list[SafetensorsFile]) -> dict[str, np.float32]:
    """Compute amax / 448 of every linear over all its ranks, so that ranks' parts share a scale; 1 for zeros."""
    amax: dict[str, float] = {}
    for tensor in unified_tensors(checkpoint.spec):
        if tensor.role is Role.LINEAR:
            parts = [np.abs(block).max(initial=0.0) for file in files for block in _dequantize_blocks(tensor, file)]
            amax[tensor.name] = float(np.max(parts))
            if not np.isfinite(amax[tensor.name]):
                raise CheckpointError(f"{tensor.name} is not finite.")
    for name in amax:
        layer, _, linear = name.removesuffix(".weight").partition(".mlp.")
        if twin := _TWIN.get(linear):
            amax[name] = max(amax[name], amax[f"{layer}.mlp.{twin}.weight"])
    return {name: np.float32(value / E4M3_MAX) if value else np.float32(1.0) for name, value in amax.items()}
