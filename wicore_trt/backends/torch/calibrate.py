"""Static FP8 scales of activations and of the KV cache, measured over a calibration text.

Runs the torch operators and notes the largest magnitude of each linear's input and of each layer's keys and values.
Scales are amax / 448 (E4M3's largest value). Invariant: at most one matrix of the model is in memory, and a checkpoint
is replaced whole or not at all.

The text becomes sequences of up to 512 tokens, each beginning with BOS. Only the head is left out of the pass. The
precision is the model's: float32 for F32 and GGUF weights, dynamic FP8 for an FP8 checkpoint. A static scale is one
number for a whole tensor, so it does not depend on tensor parallelism.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from wicore_trt.backends.torch.ops import TorchModel, TorchOps
from wicore_trt.checkpoint.convert import StaticScales
from wicore_trt.checkpoint.format import (
    CHECKPOINT,
    KV_FP8,
    Checkpoint,
    open_checkpoint,
    write_config,
)
from wicore_trt.checkpoint.names import Role, activation_scale_name, kv_scale_name, run_weights, weight_scale_name
from wicore_trt.checkpoint.quantize import E4M3_MAX
from wicore_trt.checkpoint.records import FileRecord, file_entries
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, SafetensorsWriter
from wicore_trt.checkpoint.source import Source
from wicore_trt.checkpoint.whole import CheckpointTensors, SourceTensors, WholeTensors
from wicore_trt.errors import CheckpointError, ConfigError
from wicore_trt.files import UntrustedFiles, link_or_copy
from wicore_trt.model.gemma3 import EMBEDDING, forward
from wicore_trt.progress import Progress, count_progress, ignore_progress
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.dtypes import E4M3
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.step_inputs import StepInputs
from wicore_trt.scratch import replace_output
from wicore_trt.text.tokenizer import Tokenizer, check_rows

DEFAULT_TOKENS = 2048
PIECE = 512  # tokens of a sequence
STEP_PIECES = 4  # sequences that are computed together: the weights are read once for them
_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TextCalibration:
    """Implements `checkpoint.convert.Calibration` with the first `tokens` tokens of a UTF-8 file."""

    text: Path
    tokens: int = DEFAULT_TOKENS
    kv_scales: bool = True

    def of_source(self, source: Source, tokenizer_files: Path, progress: Progress = ignore_progress) -> StaticScales:
        """Measure `source`. Raises also ConfigError for a text that is short or not UTF-8, EngineFormatError for a bad
        tokenizer."""
        return _measure_scales(SourceTensors(source), Tokenizer.from_dir(tokenizer_files), self, progress)

    def of_checkpoint(
        self, path: str | Path, output: str | Path, *, force: bool = False, progress: Progress = ignore_progress
    ) -> Checkpoint:
        """Write the unified checkpoint `path` with static scales as `output`, which may be the same. An FP8 checkpoint
        gets activation scales; any checkpoint gets KV scales when asked for. Earlier scales are dropped. Raises what
        `of_source` and `scratch.replace_output` raise, and ConfigError when the checkpoint is not FP8 and no KV scales
        are asked for."""
        checkpoint = open_checkpoint(path)
        if not checkpoint.weights.fp8 and not self.kv_scales:
            problem = f"{path} is {checkpoint.dtype}: without KV scales there is nothing to calibrate."
            raise ConfigError(problem, fix="Convert its source with --dtype fp8.")
        same = os.path.realpath(path) == os.path.realpath(output)
        with replace_output(Path(output), CHECKPOINT, force=force, source=None if same else Path(path)) as scratch:
            files = {file.name: checkpoint.read(file.name) for file in checkpoint.tokenizer_files}
            tokenizer = Tokenizer.from_files(files, checkpoint.path)
            found = _measure_scales(CheckpointTensors(checkpoint), tokenizer, self, progress)
            _rewrite_checkpoint(checkpoint, scratch.directory, found, self.kv_scales, progress)
            open_checkpoint(scratch.directory)
            scratch.publish_output()
        return open_checkpoint(output)


def _measure_scales(
    whole: WholeTensors, tokenizer: Tokenizer, calibration: TextCalibration, progress: Progress
) -> StaticScales:
    token_ids = _token_ids(calibration, tokenizer, whole.spec.vocab_size)
    amax = measure_magnitudes(whole, token_ids, tokenizer.bos_id, progress)
    wrong = [name for name, value in amax.items() if not np.isfinite(value)]
    if wrong:
        fix = "Check the model's weights."
        raise CheckpointError(f"On the calibration text the model computes no finite numbers: {wrong[0]}.", fix=fix)
    found = {name: np.float32(value) / np.float32(E4M3_MAX) for name, value in amax.items()}
    scales = {name: np.array([scale or 1.0], np.float32) for name, scale in found.items()}
    digest = hashlib.blake2b(np.array(token_ids, "<i8").tobytes(), digest_size=16).hexdigest()
    origin: dict[str, str | int] = {
        "text": str(calibration.text),
        "tokens": calibration.tokens,
        "token_ids_blake2b": digest,
    }
    return StaticScales(scales, origin)


def _token_ids(calibration: TextCalibration, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    path = calibration.text
    text = UntrustedFiles(error=ConfigError, fix="Give a plain text file.").read_text(path, limit=_TEXT_BYTES)
    token_ids = tokenizer.encode(text, add_bos=False)
    if len(token_ids) < max(1, calibration.tokens):
        fix = "Give a longer text, or lower --calibrate-tokens."
        raise ConfigError(f"{path} has {len(token_ids)} tokens, not {calibration.tokens}.", fix=fix)
    check_rows(token_ids, vocab_size, path)
    return token_ids[: calibration.tokens]


def measure_magnitudes(
    whole: WholeTensors, token_ids: Sequence[int], bos_id: int | None, progress: Progress = ignore_progress
) -> dict[str, float]:
    """Measure largest magnitudes over the text, by the name of the scale that each gives. These are each linear's
    input, and each layer's keys (normed and rotated) and values together."""
    head = [] if bos_id is None else [bos_id]
    room = PIECE - len(head)
    pieces = [[*head, *token_ids[i : i + room]] for i in range(0, len(token_ids), room)]
    steps = [pieces[i : i + STEP_PIECES] for i in range(0, len(pieces), STEP_PIECES)]
    model = _StreamedModel(whole, sorted({*head, *token_ids}))
    layers = whole.spec.num_layers
    with torch.inference_mode():
        for done, step in enumerate(steps):

            def report(layer: int, done: int = done) -> None:
                progress("calibrate", done * layers + layer, len(steps) * layers)

            forward(_RecordingOps(model, model.inputs(step), report), whole.spec)
    return model.amax


class _StreamedModel(TorchModel):
    """Model whose matrices are read when used, and whose layers share one layer's KV pages: a step begins its
    sequences, so no page is read after its layer. `amax` collects the result of `measure_magnitudes`."""

    def __init__(self, whole: WholeTensors, used_ids: list[int]) -> None:
        spec, device = whole.spec, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        groups = [spec.layer_group(name) for name in spec.groups]
        pools = {
            g.name: torch.zeros((STEP_PIECES, 1, 2, PIECE, g.num_kv_heads, g.head_dim), device=device) for g in groups
        }
        rows = [_make_tensor(*whole.embedding_row(i)) for i in used_ids]
        super().__init__(spec, whole.dtype, {EMBEDDING: torch.cat(rows)}, pools, device)
        self.index_in_group = dict.fromkeys(range(spec.num_layers), 0)
        self.weights = _Weights(whole, self.dtype, device, self.weights[EMBEDDING])
        self.made_of = run_weights(spec)
        if whole.fp8:
            self.fp8 = {name for name, parts in self.made_of.items() if parts[0].role is Role.LINEAR}
        self.amax: dict[str, float] = {}
        self._index = {token_id: i for i, token_id in enumerate(used_ids)}

    def inputs(self, pieces: list[list[int]]) -> StepInputs:
        """Make a step over `pieces`; token ids become rows of the embedding that was read."""
        layout = KVLayout(PIECE, "float32", dict.fromkeys(self.pools, STEP_PIECES), {})
        slices = [
            SequenceSlice(i, [self._index[t] for t in piece], 0, dict.fromkeys(self.pools, [i]))
            for i, piece in enumerate(pieces)
        ]
        return StepInputs.from_batch(StepBatch(slices), layout, tuple(self.pools))


class _Weights(dict[str, torch.Tensor]):
    """Reader of a tensor on each access, placed as TorchModel places it. Keeps only the rows of the embedding."""

    def __init__(self, whole: WholeTensors, dtype: torch.dtype, device: torch.device, embedding: torch.Tensor) -> None:
        super().__init__({EMBEDDING: embedding})
        self._whole, self._dtype, self._device = whole, dtype, device
        self._parts = run_weights(whole.spec)
        self._scales = {weight_scale_name(name): parts for name, parts in self._parts.items()}

    def __missing__(self, name: str) -> torch.Tensor:
        if name in self._scales:
            scales = [self._whole.weight_scale(t) for t in self._scales[name]]
            return torch.from_numpy(np.concatenate(scales)).to(self._device)
        blocks = [self._whole.read_whole(t) for t in self._parts[name]]
        tensor = _make_tensor(np.concatenate([block for block, _ in blocks]), blocks[0][1])
        if self._device.type != "cuda" or tensor.dim() == 1:
            return tensor.to(self._device, torch.float32)
        return tensor.to(self._device, E4M3 if tensor.dtype == E4M3 else self._dtype)


class _RecordingOps(TorchOps):
    """Torch operators that record magnitudes of their inputs."""

    def __init__(self, model: _StreamedModel, inputs: StepInputs, report: Callable[[int], None]) -> None:
        super().__init__(model, inputs)
        self._recorded, self._report = model, report

    def linear(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        for part in self._recorded.made_of[weight]:
            self._note_magnitude(activation_scale_name(part.name), x)
        return super().linear(x, weight)

    def qk_norm_rope_write(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        self._report(layer)
        pool = self._recorded.pools[self._spec.layer_groups[layer]]
        pool.zero_()  # the slots of this step hold another layer's values, the other slots an earlier step's
        q = super().qk_norm_rope_write(qkv, layer)
        self._note_magnitude(kv_scale_name(layer), pool)
        return q

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x  # the head is not quantized, and its matrix is the largest

    def _note_magnitude(self, name: str, x: torch.Tensor) -> None:
        found = max(abs(bound.item()) for bound in torch.aminmax(x)) if bool(x.isfinite().all()) else float("inf")
        self._recorded.amax[name] = max(found, self._recorded.amax.get(name, 0.0))


def _make_tensor(block: np.ndarray, tag: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(block))
    if tag == "BF16":
        return tensor.view(torch.bfloat16)
    return tensor.view(E4M3) if tag == "F8_E4M3" else tensor


def _rewrite_checkpoint(
    checkpoint: Checkpoint, directory: Path, found: StaticScales, kv_scales: bool, progress: Progress
) -> None:
    """Fill `directory` with the files of `checkpoint` and the scales, config.json last; a block at a time. Raises
    CheckpointError for a tensor that differs from the checkpoint's record."""
    weights = checkpoint.weights.calibrated
    form = replace(checkpoint, weights=weights, kv_scales=kv_scales)
    files = dict(checkpoint.files)
    moved = count_progress(progress, "write", sum(checkpoint.files[path.name].bytes for path in checkpoint.rank_files))
    for rank, path in enumerate(checkpoint.rank_files):
        old = SafetensorsFile(path)
        entries = form.list_entries(rank)
        with SafetensorsWriter(directory / path.name, entries) as writer:
            for name, *_ in entries:
                if name in found.scales:
                    writer.write(name, found.scales[name])
                    continue
                for piece in old.read_blocks(name):
                    moved(writer.write(name, piece))
                if writer.digests[name] != files[path.name].parts[name]:
                    raise checkpoint.make_damage_error(path.name, name)
        files[path.name] = FileRecord(writer.size, writer.digest, writer.digests)
    for name in set(files) - {path.name for path in checkpoint.rank_files}:
        link_or_copy(checkpoint.path / name, directory / name)
        if part := files[name].describe_change(directory / name):
            raise checkpoint.make_damage_error(name, part)
    quantization = {**checkpoint.config["quantization"], "quant_algo": weights.algo}
    quantization["kv_cache_quant_algo"] = KV_FP8 if kv_scales else None
    block = {**checkpoint.config["wicore"], "calibration": found.origin, "files": file_entries(files)}
    write_config(directory, {**checkpoint.config, "quantization": quantization, "wicore": block})
