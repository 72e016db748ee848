"""Read whole unified tensors, one at a time, from a source or from the ranks of a checkpoint.

Must not know what a tensor is used for. Invariant: nothing is kept, so a reader's memory is that of the tensors it
has handed out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from wicore_trt.checkpoint.blocks import dequantize_parts
from wicore_trt.checkpoint.format import TAGS, Checkpoint
from wicore_trt.checkpoint.names import HF_EMBEDDING, Role, UnifiedTensor, hf_shapes, unified_tensors
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile
from wicore_trt.checkpoint.sharding import shard_of
from wicore_trt.checkpoint.source import Source
from wicore_trt.model.spec import Gemma3Spec

_DTYPES = {tag: dtype for dtype, tag in TAGS.items()}


class WholeTensors(ABC):
    """Unified tensors of a model of precision `dtype`; `fp8`: its linears are E4M3, other blocks are read as float32.
    Blocks come with their safetensors tag; BF16 and E4M3 as their bits."""

    spec: Gemma3Spec
    dtype: str
    fp8: bool

    @abstractmethod
    def read_whole(self, tensor: UnifiedTensor) -> tuple[np.ndarray, str]:
        """Read the tensor, of shape `tensor.shape`; a norm as 1 + w in float32."""

    def weight_scale(self, tensor: UnifiedTensor) -> np.ndarray:
        """Read the scale per output channel of a linear of an FP8 model, float32 [out]."""
        raise AssertionError(f"{tensor.name} is not E4M3")

    @abstractmethod
    def embedding_row(self, token_id: int) -> tuple[np.ndarray, str]:
        """Read one row of the embedding, [1, hidden]."""


class SourceTensors(WholeTensors):
    """Tensors of a source; F32 and GGUF tensors count as float32."""

    fp8 = False

    def __init__(self, source: Source) -> None:
        self._source, self.spec = source, source.spec
        linear = next(t for t in unified_tensors(self.spec) if t.role is Role.LINEAR)
        self.dtype = _DTYPES.get(source.tensors[linear.sources[0]].dtype, "float32")

    def read_whole(self, tensor: UnifiedTensor) -> tuple[np.ndarray, str]:
        if tensor.role is Role.NORM:
            return self._source.read_norm(tensor.sources[0], 0, tensor.shape[0]), "F32"
        return np.concatenate([self._source.read_tensor(name) for name in tensor.sources]), "F32"

    def embedding_row(self, token_id: int) -> tuple[np.ndarray, str]:
        return self._source.read_rows(HF_EMBEDDING, token_id, token_id + 1)


class CheckpointTensors(WholeTensors):
    """Tensors of a unified checkpoint, its ranks put back together."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.spec, self.dtype, self.fp8 = checkpoint.spec, checkpoint.dtype, checkpoint.weights.fp8
        self._form = checkpoint
        self._files = [SafetensorsFile(path) for path in checkpoint.rank_files]
        self._embedding = next(t for t in unified_tensors(self.spec) if t.role is Role.EMBEDDING)
        self._rows = {name: shape[0] for name, shape in hf_shapes(self.spec).items()}

    def read_whole(self, tensor: UnifiedTensor) -> tuple[np.ndarray, str]:
        parts = self._form.list_parts(tensor)
        read = [self._assemble_shards(tensor, name, shape) for name, _, shape in parts]
        fp8 = self.fp8 and tensor.role is Role.LINEAR
        return read[0] if len(parts) == 1 or fp8 else (dequantize_parts([part for part, _ in read]), "F32")

    def weight_scale(self, tensor: UnifiedTensor) -> np.ndarray:
        return self._assemble_shards(tensor, tensor.scale_name, tensor.shape[:1])[0]

    def embedding_row(self, token_id: int) -> tuple[np.ndarray, str]:
        tensor, per_rank = self._embedding, self.spec.vocab_size // len(self._files)
        file, row = self._files[token_id // per_rank], token_id % per_rank
        names = [name for name, *_ in self._form.list_parts(tensor)]
        parts = [file.read_rows(name, row, row + 1) for name in names]
        return (dequantize_parts(parts), "F32") if names[1:] else (parts[0], file.tensors[names[0]].dtype)

    def _assemble_shards(self, tensor: UnifiedTensor, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, str]:
        """Assemble `tensor`, or the part `name` of it, of this `shape`, from the shards of all ranks."""
        whole: np.ndarray | None = None
        for rank, file in enumerate(self._files):
            shard = shard_of(tensor, self.spec, rank, len(self._files))
            part = file.read_rows(name, 0, shard.shape[0])
            whole = np.empty(shape, part.dtype) if whole is None else whole
            first = taken = 0
            for (low, high), source in zip(shard.rows, tensor.sources, strict=True):
                target = whole[first + low : first + high]
                if shard.columns is not None and len(shape) > 1:
                    lowest, highest = (column * shape[1] // tensor.shape[1] for column in shard.columns)
                    target = target[:, lowest:highest]
                target[...] = part[taken : taken + high - low]
                first, taken = first + self._rows[source], taken + high - low
        assert whole is not None
        return whole, self._files[0].tensors[name].dtype
