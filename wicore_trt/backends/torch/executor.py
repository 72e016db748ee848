"""Executor of the torch backend: any GPU, or the CPU with the native kernels where they were built.

Owns an engine's weights, KV pools and sampler. Must not know requests, queues or which pages hold what. Invariant:
execute() touches only the KV slots of the batch's own pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from wicore_trt.backends.torch import native
from wicore_trt.backends.torch.native import NativeLibrary
from wicore_trt.backends.torch.native_ops import NativeOps, NativeWeights, explain_unsupported
from wicore_trt.backends.torch.ops import TorchModel, TorchOps
from wicore_trt.backends.torch.vision import VisionWeights, open_encoder
from wicore_trt.backends.torch.weights import BLOCK_DTYPES, EngineTensors, fuse_weights, load_engine_tensors
from wicore_trt.cores import count_cores
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.memory import check_room
from wicore_trt.model.gemma3 import forward
from wicore_trt.model.spec import GLOBAL, Gemma3Spec
from wicore_trt.plugins.cpu_library import FIX, why_lacking
from wicore_trt.runtime.attention_mass import AttentionProbe
from wicore_trt.runtime.batch import StepBatch, StepResult
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.dtypes import TORCH_DTYPES
from wicore_trt.runtime.exchange import RankExchange
from wicore_trt.runtime.executor import KVLayout, PageCopier
from wicore_trt.runtime.image_encoder import FeatureEncoder
from wicore_trt.runtime.kernels_name import kernels_name
from wicore_trt.runtime.options import CPU_SLICE_TOKENS, GPU_SLICE_TOKENS, ExecutorOptions
from wicore_trt.runtime.page_copier import make_copier
from wicore_trt.runtime.pools import check_pool_room, make_pools, plan_layout
from wicore_trt.runtime.sampler import Sampler
from wicore_trt.runtime.step_inputs import StepInputs

if TYPE_CHECKING:
    from wicore_trt.engine.directory import EngineDir

log = logging.getLogger(__name__)
SOURCES = ("backends/torch",)
SCORE_ROWS = 128  # of a 262,144-token vocabulary: 134 MB
ComputeLogits = Callable[[StepInputs, AttentionProbe | None, torch.Tensor | None], torch.Tensor]


class TorchExecutor:
    """Implements `Executor`. `pools[group]` is the device tensor of the group's KV pages, as in KVLayout, the page
    first. `kernels` is "native-" and the instruction set, or "torch-" and torch's device, and a digest
    (`runtime/kernels_name.py`)."""

    def __init__(
        self, engine: EngineDir | EngineTensors, settings: ExecutorOptions, ranks: RankExchange | None = None
    ) -> None:
        """Load `engine` from disk, or run the tensors of one that is in memory. `ranks`: run the part of its rank,
        and sample on rank 0 alone. Raises EngineFormatError for weights that do not fit, and for tp > 1 without
        `ranks`, EnvironmentUnfitError for a missing device or missing kernels, ConfigError for too little KV memory."""
        self._ranks, rank = ranks, None if ranks is None else ranks.rank
        if ranks is not None:
            ranks.compares = settings.compare_ranks
        loaded = engine if isinstance(engine, EngineTensors) else load_engine_tensors(engine, rank)
        self.spec, self._samples = loaded.spec, not rank
        self.max_batch_tokens = settings.max_batch_tokens
        self.device = _find_device(settings.device)
        self.max_sequences: int | None = None
        self.score_rows = SCORE_ROWS
        self.graph_sizes: dict[int, tuple[int, ...]] = {}
        self.slice_tokens = CPU_SLICE_TOKENS if self.device.type == "cpu" else GPU_SLICE_TOKENS
        torch.set_num_threads(settings.threads or min(torch.get_num_threads(), count_cores()))
        stream = _find_stream(self.device) if loaded.vision is not None else None
        self._active = nullcontext if stream is None else stream.active  # steps, images and copies share one stream
        self.images: FeatureEncoder | None = None  # before pools take what memory is left
        if loaded.vision is not None:
            self.images = open_encoder(loaded.vision, loaded.dtype, settings.image_slots, stream or self.device)
        context = settings.max_context or loaded.max_context or self.spec.max_position_embeddings
        page_tokens = settings.page_tokens or loaded.page_tokens
        self.layout = plan_layout(self.spec, loaded.kv_dtype, page_tokens, context, settings)
        if self.device.type == "cpu":
            check_room(self.layout.memory_bytes, "kv.device_bytes", "Lower it (--kv-bytes) to {room} at most.")
        else:
            check_pool_room(self.layout, torch.cuda.mem_get_info(self.device)[0])
        self.pools = make_pools(self.spec, self.layout, lambda s, d: torch.empty(s, dtype=d, device=self.device))
        handle, shared = 0 if stream is None else stream.stream, self.layout.find_overlaps
        self._page_copies = make_copier(self.pools, self.layout.page_tokens, handle, overlapping=shared)
        self.copier: PageCopier = self._page_copies
        self.kernels, self._compute = _make_operators(loaded, settings, self.layout, self.pools, self.device, ranks)
        self._sampler = Sampler()
        self._probed_layers = cycle(self.spec.layers_of(GLOBAL))
        log.info("engine on %s, %s kernels, KV pages %s", self.device, self.kernels, self.layout.num_pages)

    @classmethod
    def from_tensors(
        cls,
        spec: Gemma3Spec,
        dtype: str,
        tensors: Mapping[str, torch.Tensor],
        settings: ExecutorOptions,
        *,
        kv_dtype: str | None = None,
        vision: VisionWeights | None = None,
    ) -> TorchExecutor:
        """Make an executor from a unified checkpoint's tensors in memory. `dtype` is of the activations."""
        return cls(EngineTensors(spec, dtype, kv_dtype or dtype, fuse_weights(tensors, spec), vision=vision), settings)

    def execute(self, batch: StepBatch) -> StepResult:
        """Run one step: write the batch's KV, sample the slices that ask for it, measure attention if asked to."""
        assert self.pools, "execute() after close()"
        assert batch.num_tokens <= self.max_batch_tokens, "the scheduler exceeded the step's token budget"
        inputs = StepInputs.from_batch(batch, self.layout, tuple(self.layout.num_pages))
        layer = next(self._probed_layers, None) if batch.measure_attention else None
        probe = None if layer is None else AttentionProbe(layer, inputs.cu_seqlens[1:].long() - 1)
        self._page_copies.begin_step(batch)
        with self._active(), torch.inference_mode():
            logits = self._run_model(inputs, probe)
            if not self._samples:
                return StepResult([])
            result = self._sampler.step(logits, batch.slices)
            if probe is None:
                return result
            group = self.spec.layer_group(GLOBAL)
            pool = self.pools[GLOBAL][:, group.layers.index(probe.layer)]
            return replace(result, attention=probe.compute_masses(pool, inputs, batch, group.softmax_scale))

    def logits(self, batch: StepBatch, rows: torch.Tensor) -> torch.Tensor:
        """Run one step like execute(), but return logits [R, vocab] float32 of `rows` (int64[R], ascending) of its
        tokens. For evaluation; valid until the next step."""
        inputs = StepInputs.from_batch(batch, self.layout, tuple(self.layout.num_pages))
        with self._active(), torch.inference_mode():
            return self._run_model(replace(inputs, sample_rows=rows))

    def _run_model(self, inputs: StepInputs, probe: AttentionProbe | None = None) -> torch.Tensor:
        if self._ranks is not None:  # sums would hide that a rank has other tokens
            tables = inputs.page_tables.values()
            self._ranks.compare_rows(inputs.token_ids, inputs.positions, inputs.cu_seqlens, *tables)
        features = None if self.images is None else self.images.features
        return self._compute(inputs, probe, features)

    def release(self, seq_id: int) -> None:
        self._sampler.release(seq_id)

    def close(self) -> None:
        """Drop weights and pages; calling it twice is harmless."""
        if self.pools:
            self._page_copies.close()
            if self.images is not None:
                self.images.close()
            del self._compute  # and with it the weights
        self.pools = {}


def _make_operators(
    engine: EngineTensors,
    settings: ExecutorOptions,
    layout: KVLayout,
    pools: dict[str, torch.Tensor],
    device: torch.device,
    ranks: RankExchange | None,
) -> tuple[str, ComputeLogits]:
    """Return the kernels' name and the function that computes a step, which holds the weights."""
    library = None if settings.kernels == "torch" else _native_library(engine, settings.kernels, device)
    if library is None:
        if settings.batch_invariant:
            raise ConfigError("executor.batch_invariant: the torch operators lack it.", fix="Leave it out.")
        model = TorchModel(engine.spec, engine.dtype, engine.tensors, pools, device)
        spec, make_ops = engine.spec, partial(TorchOps, model, ranks=ranks)
        return kernels_name(torch_kernels(device), SOURCES), lambda *step: forward(make_ops(*step), spec)
    if settings.threads:
        library.set_threads(settings.threads)
    least = dict.fromkeys(BLOCK_DTYPES, 1)  # E4M3 becomes bfloat16
    packed = sum(t.numel() * max(least.get(t.dtype, 2), t.itemsize) for t in engine.tensors.values())
    check_room(packed, "weights", "Use a machine, or a limit of the container, that has as much.")
    weights = NativeWeights.from_tensors(library, engine.tensors, engine.spec, engine.dtype)
    ops = NativeOps(library, weights, engine.spec, engine.dtype, layout, pools, ranks)
    return kernels_name(f"native-{library.isa}", SOURCES, library.name), ops.compute_logits


def torch_kernels(device: torch.device) -> str:
    """Name the torch operators on a device, like "torch-2.9.1-cpu-avx2" or "torch-2.9.1+cu130-cuda-NVIDIA H200". Its
    libraries choose their order of summation by version and processor, so KV values differ."""
    if device.type == "cpu":
        return f"torch-{torch.__version__}-cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return f"torch-{torch.__version__}-{device.type}-{name}".rstrip("-")


def _native_library(engine: EngineTensors, kernels: str, device: torch.device) -> NativeLibrary | None:
    """Find the library if it can run `engine` on `device`. Raises EnvironmentUnfitError if it cannot and must."""
    library, reason, level = None, None, logging.INFO
    if device.type != "cpu":
        reason = f"they run on the CPU, and the engine on {device}"
    elif any(t.dtype == TORCH_DTYPES["fp8"] for t in engine.tensors.values()) and engine.dtype != "bfloat16":
        reason = f"FP8 weights with {engine.dtype} activations"
    else:
        reason = explain_unsupported(engine.spec, engine.kv_dtype, engine.tensors)
    if reason is None:
        library = native.load_library()
        if library is None:
            reason, level = f"the library {why_lacking()}", logging.WARNING
    if reason and kernels == "native":
        fix = f"Set executor.kernels to auto. {FIX}"
        raise EnvironmentUnfitError(f"The native CPU kernels cannot be used: {reason}.", fix=fix)
    if reason and device.type == "cpu":
        log.log(level, "slower torch operators in place of the native CPU kernels: %s", reason)
    return library


def _find_stream(device: torch.device) -> CudaDevice | None:
    return CudaDevice(str(device), "torch") if device.type == "cuda" else None


def _find_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        fix = "Set executor.device to cpu, or install a CUDA build of torch and its driver."
        raise EnvironmentUnfitError(f"Device {name!r} was asked for, and PyTorch finds no GPU.", fix=fix)
    return device
