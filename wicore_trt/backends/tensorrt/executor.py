"""Executor of the tensorrt backend: plans over linear KV slots, which are a cache of the KV pages.

Owns an engine's weights, page pools, slots and sampler. Must not know requests, queues or which pages hold what.
Invariants: after execute() the pages hold the KV of the whole batch, so that tiers, prefix reuse and preemption work
without slots; a step's results follow from the batch and the pages alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.api import RTX
from wicore_trt.backends.tensorrt.copies import SlotCopier
from wicore_trt.backends.tensorrt.plan_io import DECODE, PREFILL, PlanLimits, plan_file
from wicore_trt.backends.tensorrt.session import (
    PlanSession,
    RuntimeCache,
    activation_bytes,
    load_plans,
    plan_limits,
    rebuild_plans,
)
from wicore_trt.backends.tensorrt.slots import GroupSlots, Part, Row, SlotTable, decode_slots, part_batch, step_inputs
from wicore_trt.checkpoint.demo import cache_directory
from wicore_trt.checkpoint.names import kv_scale_name
from wicore_trt.errors import ConfigError, EnvironmentUnfitError, install_command
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.batch import StepBatch, StepResult
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.device_weights import load_weights, make_rope_tables
from wicore_trt.runtime.dtypes import TORCH_DTYPES
from wicore_trt.runtime.executor import ImageEncoder, KVLayout, PageCopier
from wicore_trt.runtime.kernels_name import kernels_name
from wicore_trt.runtime.options import GPU_SLICE_TOKENS, ExecutorOptions
from wicore_trt.runtime.page_copier import make_copier
from wicore_trt.runtime.pools import make_pools, plan_layout
from wicore_trt.runtime.sampler import Sampler

if TYPE_CHECKING:
    from wicore_trt.engine.directory import EngineDir

log = logging.getLogger(__name__)
WORKSPACE_BYTES = 512 << 20  # left free for the sampler, for copies and for what TensorRT allocates itself


class TensorRTExecutor:
    """Implements `Executor`. `pools[group]` is the device tensor of the group's KV pages, as in KVLayout, the page
    first. `kernels` is like "tensorrt-rtx-1.7.1.116-sm89-" and a digest. Up to `slots` sequences copy only the KV that
    they compute; beyond that each step copies whole sequences."""

    def __init__(self, engine: EngineDir, settings: ExecutorOptions, trt: Any, device: CudaDevice) -> None:
        """Load `engine` with the TensorRT module `trt` of the engine's flavour. Raises EnvironmentUnfitError for
        another version of TensorRT or a GPU without plans, EngineFormatError for files that do not fit, ConfigError for
        too little memory."""
        check_environment(engine, trt, device.target)
        part = engine.local_part()
        self._closed = False
        self.spec, self._device = part.spec, device
        limits = plan_limits(engine)
        self.max_batch_tokens, self.slice_tokens = settings.max_batch_tokens, GPU_SLICE_TOKENS
        plain = f"{engine.manifest.compiled['flavour']}-{trt.__version__}-{device.target}"
        self.kernels = kernels_name(plain, ("backends/tensorrt",), repr(sorted(engine.manifest.files.items())))
        manifest = engine.manifest
        max_context = min(settings.max_context or manifest.max_context, manifest.max_context)
        page_tokens = settings.page_tokens or manifest.page_tokens
        self.layout = plan_layout(manifest.spec, manifest.kv_dtype, page_tokens, max_context, settings)
        with device.active():
            plans = load_plans(trt, engine, device.target)
            wanted = [tensor.weight for tensor in plans[DECODE].tensors.values() if tensor.kind == "weight"]
            constants = load_weights(engine.rank_files[part.rank], wanted, self.spec, device)
            constants |= make_rope_tables(self.spec, limits.max_context, device)
            activations = device.empty((activation_bytes(plans),), torch.uint8)
            memory = SlotMemory(self.spec, limits, engine.manifest.base_dtype)
            slots = memory.slots(device.free_bytes(), self.layout, min(limits.max_batch, settings.max_sequences))
            self.pools = make_pools(self.spec, self.layout, device.empty)
            caches, runtime = memory.allocate(slots, device), f"runtime-{trt.__version__}-{device.target}"
            self._runtime_caches = {
                phase: RuntimeCache(cache_directory() / f"{runtime}-{plan.digest}.cache")
                for phase, plan in plans.items()
            }
            by_layer = memory.by_layer(caches)
            self._session = PlanSession(trt, device, plans, constants, by_layer, activations, self._runtime_caches)
            scales = _kv_scales(self.spec, constants, device)
            self._copies = SlotCopier(self.pools, caches, scales)
            device.synchronize()
        self._page_copies = make_copier(
            self.pools, self.layout.page_tokens, device.stream, overlapping=self.layout.find_overlaps
        )
        self.copier: PageCopier = self._page_copies
        self._table = SlotTable(slots, memory.groups, page_tokens=self.layout.page_tokens, max_chunk=limits.max_chunk)
        self.slots = slots
        self.max_sequences: int | None = slots
        self.images: ImageEncoder | None = None
        self.score_rows = 0
        self.graph_sizes: dict[int, tuple[int, ...]] = {}
        self._sampler = Sampler()
        self._warm_up(limits.max_chunk)
        log.info(
            "engine on %s, %s, %d slots, KV pages %s", device.torch_device, self.kernels, slots, self.layout.num_pages
        )

    def execute(self, batch: StepBatch) -> StepResult:
        """Run one step: fill slots from pages, run plans, store the batch's KV to pages, sample the slices that ask."""
        assert not self._closed, "execute() after close()"
        assert batch.num_tokens <= self.max_batch_tokens, "the scheduler exceeded the step's token budget"
        sampling = [i for i, piece in enumerate(batch.slices) if piece.sample]
        self._page_copies.begin_step(batch)
        with self._device.active(), torch.inference_mode():
            logits = torch.empty((len(sampling), self.spec.vocab_size), device=self._device.torch_device)
            result_row = {index: row for row, index in enumerate(sampling)}
            for part in self._table.plan(batch.slices):
                self._run_part(part)
                done = [row for row in part.rows if row.last and row.index in result_row]
                if done:
                    own = [0 if part.phase == PREFILL else row.slot for row in done]
                    logits[[result_row[row.index] for row in done]] = self._session.logits[own]
            slices = [batch.slices[i] for i in sampling]
            result = self._sampler.sample(logits, slices) if sampling else StepResult([])
            self._session.end_step()
        return result

    def release(self, seq_id: int) -> None:
        self._sampler.release(seq_id)
        self._table.release(seq_id)

    def close(self) -> None:
        """Save what TensorRT-RTX compiled and drop everything on the device; calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._device.synchronize()
        self._page_copies.close()
        for cache in self._runtime_caches.values():
            cache.save()
        self.pools = {}
        del self._session, self._copies, self.copier, self._page_copies

    def _warm_up(self, max_chunk: int) -> None:
        """Run the longest prefill and each size of decode once, in free slots, and save what TensorRT compiled, so that
        no request waits for first runs."""
        entries = dict.fromkeys(self._table.groups, 0)
        parts = [Part(PREFILL, [Row(0, 0, [0] * max_chunk, 0, entries, last=True)])]
        for batch in sorted({decode_slots(slot, self.slots) for slot in range(self.slots)}):
            parts.append(Part(DECODE, [Row(0, batch - 1, [0], 0, entries, last=True)]))
        with self._device.active(), torch.inference_mode():
            for part in parts:
                self._run_part(part)
            self._session.end_step()
        for cache in self._runtime_caches.values():
            cache.save()

    def _run_part(self, part: Part) -> None:
        for slot in part.clears:
            self._copies.clear(slot)
        for group, copies in part.loads.items():
            self._copies.load(group, copies)
        for group, moves in part.slides.items():
            self._copies.slide(group, moves)
        inputs = step_inputs(part, part_batch(part, self._table.slots), self._table.groups)
        if part.phase == PREFILL:
            self._session.prefill(inputs, part.rows[0].slot)
        else:
            self._session.decode(inputs)
        for group, copies in part.stores.items():
            self._copies.store(group, copies)


class SlotMemory:
    """Memory of slots for plans with `limits`, whose caches are of `dtype`. `groups` is their geometry.

    The caches of one group are one allocation [layers, 2 (K, V), slots, kv_heads, entries, head_dim], so that a copy
    moves all layers at once. Each plan input [slots, kv_heads, entries, head_dim] is a contiguous part of it, at an
    address that TensorRT accepts."""

    def __init__(self, spec: Gemma3Spec, limits: PlanLimits, dtype: str) -> None:
        self._spec, self._dtype = spec, TORCH_DTYPES[dtype]
        self.groups = {
            group: GroupSlots(limits.entries(spec, group) - 1, spec.layer_group(group).window or None)
            for group in spec.groups
        }

    def _cache_shape(self, group: str, slots: int) -> tuple[int, ...]:
        shape, entries = self._spec.layer_group(group), self.groups[group].usable + 1
        return (len(shape.layers), 2, slots, shape.num_kv_heads, entries, shape.head_dim)

    @property
    def slot_bytes(self) -> int:
        items = sum(torch.Size(self._cache_shape(group, 1)).numel() for group in self.groups)
        return items * self._dtype.itemsize + 4 * self._spec.vocab_size

    def slots(self, free_bytes: int, layout: KVLayout, most: int) -> int:
        """Count slots that fit beside the page pools, at most `most`. Raises ConfigError when not one does."""
        pools = layout.memory_bytes
        count = min(most, (free_bytes - pools - WORKSPACE_BYTES) // self.slot_bytes)
        if count < 1:
            raise ConfigError(
                f"{free_bytes:,} bytes are free on the GPU beside the weights. KV pages take {pools:,} of them, "
                f"{WORKSPACE_BYTES:,} are kept as work space, and one sequence's slot takes {self.slot_bytes:,}.",
                fix="Lower kv.device_bytes, or build the engine with a smaller --max-context.",
            )
        return int(count)

    def allocate(self, slots: int, device: CudaDevice) -> dict[str, torch.Tensor]:
        """Allocate caches of all groups, zeroed: a hidden value has weight 0, and 0 times NaN would not be 0."""
        return {group: device.empty(self._cache_shape(group, slots), self._dtype).zero_() for group in self.groups}

    def by_layer(self, caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Split `caches` by layer under their names in a plan."""
        return {
            plan_io.cache(part, layer): cache[i, j]
            for group, cache in caches.items()
            for i, layer in enumerate(self._spec.layers_of(group))
            for j, part in enumerate(("k", "v"))
        }


def open_executor(engine: EngineDir, settings: ExecutorOptions) -> TensorRTExecutor:
    """Open an executor on this machine's GPU and TensorRT. Raises what TensorRTExecutor raises, and
    EnvironmentUnfitError without a GPU or the TensorRT that built the engine."""
    try:
        device = CudaDevice(settings.device, "tensorrt")
    except EnvironmentUnfitError as error:
        targets = ", ".join(engine.manifest.targets)
        raise EnvironmentUnfitError(f"{error.message} Engine {engine.path} is for {targets}.", fix=error.fix) from None
    flavour = engine.manifest.compiled.get("flavour")  # a build here might not choose it
    name = "tensorrt_rtx_bindings" if flavour == RTX else "tensorrt"
    try:
        trt = import_module(name)
    except (ImportError, OSError) as error:
        problem = f"engine {engine.path} runs with {flavour}, and {name} cannot be imported ({error})."
        raise EnvironmentUnfitError(problem, fix=install_command("tensorrt")) from None
    return TensorRTExecutor(engine, settings, trt, device)


def check_environment(engine: EngineDir, trt: Any, target: str) -> None:
    """Raises EnvironmentUnfitError where `engine` has no plans for this GPU or this TensorRT."""
    manifest = engine.manifest
    if any(plan_file(target, phase) not in manifest.files for phase in (PREFILL, DECODE)):
        problem = f"engine {engine.path} has plans for {', '.join(manifest.targets)}, and this GPU is {target}."
        raise EnvironmentUnfitError(problem, fix=rebuild_plans(engine, target))
    if trt.__version__ != manifest.compiled.get("version"):
        raise EnvironmentUnfitError(
            f"engine {engine.path} was built by {manifest.compiled.get('flavour')} {manifest.compiled.get('version')}, "
            f"and {trt.__version__} is installed.",
            fix=f"Install that version. Or: {rebuild_plans(engine)}",
        )


def _kv_scales(spec: Gemma3Spec, constants: Mapping[str, torch.Tensor], device: CudaDevice) -> dict[str, torch.Tensor]:
    """Scales of FP8 pages per group, float32 [layers]; 1 where the checkpoint has none."""
    one = torch.ones(1, device=device.torch_device)
    return {
        group: torch.cat([constants.get(kv_scale_name(layer), one) for layer in spec.layers_of(group)])
        for group in spec.groups
    }
