"""Executor of the triton backend: kernels that were compiled ahead of time, decode and small steps in CUDA graphs.

Owns an engine's weights, page pools, working memory and sampler. Must not know requests, queues or which pages hold
what. Invariants: a step allocates nothing on the device that a warm-up did not, and waits for the device once, for its
tokens; it touches only the KV slots of the batch's own pages.

A step of single tokens, or with few prompts and few tokens, runs in the smallest CUDA graph that holds it, padded by
rows of nobody. All others are launched kernel by kernel. Attention is measured behind the graph, from queries that it
leaves, else within the layer; both only read. Tokens are chosen on the device, greedily within the graph, with
temperature and filters right behind it. Rows with penalties, bias or log-probabilities go through the `Sampler`, on
logits that stay on the device.

Nothing waits before `collect`. A step submitted before the last one's tokens are read takes them on the device from
`StepMemory.results`. All work is on one stream, so no step sees another one's half-written memory. Host memory that a
step reads or writes exists twice, used in turn.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import structs

from wicore_trt.arithmetic import div_ceil
from wicore_trt.backends.torch.vision import VisionWeights, load_vision, open_encoder
from wicore_trt.backends.triton.index import load_table
from wicore_trt.backends.triton.inputs import StepBlock, Unread
from wicore_trt.backends.triton.memory import StepLimits, StepMemory, make_exchange_layout
from wicore_trt.backends.triton.ops import StepArrays, TritonModel, TritonOps, Value
from wicore_trt.backends.triton.roles import OWN, PAGE_CODE, PAGE_DIGEST, PAGE_MASSES
from wicore_trt.backends.triton.rows import PROMPT_CHUNKS, RowPlan, decode_plan, plan_rows, prompt_plans, prompt_room
from wicore_trt.backends.triton.sampler import DRAWN, FILTERED, HOST, StepSampler
from wicore_trt.backends.triton.segments import make_segment_attention
from wicore_trt.backends.triton.table import DECODE_BUCKETS, EngineShape, KernelTable
from wicore_trt.backends.triton.weights import Constants, engine_shape, load_constants
from wicore_trt.errors import EnvironmentUnfitError, RankError
from wicore_trt.model.gemma3 import forward
from wicore_trt.model.spec import GLOBAL, GROUPS
from wicore_trt.plugins import exchange_layout
from wicore_trt.plugins.code_layout import find_code
from wicore_trt.plugins.launch import SHARED_LAUNCHER, Launcher
from wicore_trt.request_fields import MAX_LOGPROBS
from wicore_trt.runtime.batch import UNREAD, SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.cuda_coder import CodeKernels
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.exchange import RankExchange, hash_bits
from wicore_trt.runtime.executor import PageCopier
from wicore_trt.runtime.image_encoder import FeatureEncoder
from wicore_trt.runtime.kernels_name import kernels_name
from wicore_trt.runtime.options import GPU_SLICE_TOKENS, ExecutorOptions
from wicore_trt.runtime.page_copier import make_copier, staging_bytes
from wicore_trt.runtime.page_digest import KEY_BYTES
from wicore_trt.runtime.peer_memory import open_peer_memory
from wicore_trt.runtime.pools import check_pool_room, make_layout, make_pools, plan_layout, spare_bytes
from wicore_trt.runtime.step_inputs import StepInputs
from wicore_trt.types import SamplingParams

if TYPE_CHECKING:
    from wicore_trt.engine.directory import EngineDir

log = logging.getLogger(__name__)
SOURCES = ("backends/triton", "plugins", "plugins/kernels")
Graph = tuple[RowPlan, Callable[[], None]]
MOST = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS)
"""Parameters that take the host's sampler the most memory."""


@dataclass(frozen=True)
class Loading:
    """Engine for a `TritonExecutor`: `constants(positions)` is called once the device is ready. `vision`: None for one
    that reads text alone."""

    shape: EngineShape
    table: KernelTable
    max_context: int
    constants: Callable[[int], Constants]
    dummy: bool = False
    vision: VisionWeights | None = None


@dataclass(frozen=True)
class SubmittedStep:
    """Step on the stream: its sampling `slices`, the `rows` of their logits, and indices `left` for the host to choose.
    `results` are valid on the host after `wait()`, and so is `alike` (`_hash_alike`); `measured()` may be called then
    (`_fetch_masses`)."""

    slices: list[SequenceSlice]
    rows: list[int]
    left: list[int]
    results: np.ndarray
    wait: Callable[[], None]
    measured: Callable[[], dict[int, list[float]]] | None
    alike: torch.Tensor | None


class TritonExecutor:
    """Implements `AheadExecutor`. `pools[group]` is the device tensor of the group's KV pages, as in KVLayout, the page
    first. `kernels` names target, kernels and mode, because each moves KV values by rounding. Measurements use `model`,
    `memory`, `block`, `graphs` (of decode steps by rows) and `prompt_graphs`. The results of `collect` are of no use on
    ranks other than 0. `on_step` gets of each collected step what is the same on all ranks: tokens, statuses, and
    hashes of inputs and rows."""

    def __init__(
        self,
        loading: Loading,
        settings: ExecutorOptions,
        device: CudaDevice,
        launcher: Launcher = SHARED_LAUNCHER,
        *,
        graphs: bool = True,
        ranks: RankExchange | None = None,
    ) -> None:
        """`ranks`: run the part of its rank, as all others do at the same time. Raises ConfigError for too little
        memory for `settings.kv_bytes` or one sequence, EnvironmentUnfitError for the engine, and RankError."""
        self.spec, self.device, self._closed = loading.shape.spec, device, False
        self.max_batch_tokens = settings.max_batch_tokens
        self.max_sequences: int | None = settings.max_sequences
        self.images: FeatureEncoder | None = None
        self.score_rows, self.slice_tokens = 0, GPU_SLICE_TOKENS
        self.kernels = _name_kernels(loading, settings)
        self.pools: dict[str, torch.Tensor] = {}
        self.graphs: dict[int, Callable[[], None]] = {}
        self.prompt_graphs: dict[RowPlan, Callable[[], None]] = {}
        """Graphs of steps with prompts, the fewest tokens first."""
        self.on_step: Callable[[bytes], None] | None = None
        limits = self._choose_graphs(loading, settings, graphs)
        self._ranks, self.peers = ranks, None
        if ranks is not None:
            invariant = settings.batch_invariant
            size = make_exchange_layout(loading.shape, loading.table.target, limits, invariant=invariant).size_bytes
            self.peers = open_peer_memory(ranks, device.torch_device, size, peer_access=settings.peer_access)
        cache = (self.spec, loading.shape.kv_dtype, loading.shape.page_tokens)
        sizing = settings.kv_pages is None and settings.kv_bytes is None
        one_page = make_layout(*cache, lambda group: 1)
        self.layout = one_page if sizing else plan_layout(*cache, limits.positions, settings)
        with device.active(), _must_fit():
            self.model = self._load_model(loading, limits, launcher, invariant=settings.batch_invariant)
            if loading.vision is not None:
                slots, norm = settings.image_slots, self.model.find_image_norm(loading.vision.spec.hidden_size)
                self.images = open_encoder(loading.vision, loading.shape.dtype, slots, device, norm)
            self.memory = self.model.memory
            groups, padded = tuple(self.layout.num_pages), limits.rows if graphs else 0
            self.block = StepBlock(limits, groups, self.layout.page_tokens, padded, device, loading.shape.vocab_size)
            # Of each step under way: results, as they come and as they are read, and masses.
            hosts = [(device.staging((2, limits.rows)), device.staging(self.memory.masses.shape)) for _ in range(2)]
            self._hosts = [(results, results.numpy(), masses) for results, masses in hosts]
            self._tokens = self.memory.results[0]
            self.sampler = StepSampler(self.model, device)
        self._measurable = self.spec.layers_of(GLOBAL) if loading.table.role_entries(PAGE_MASSES) else ()
        self._measured_layers = cycle(self._measurable)
        self._steps: deque[SubmittedStep] = deque()
        self._rows: tuple[list[int], list[int]] = ([], [])
        """The last step's seq_ids, and the row of the logits of each."""
        code = _find_code(loading, tuple(self.layout.num_pages)) if settings.code_pages else None
        if sizing:
            room = max(0, self._measure_room(settings.kv_fraction) - staging_bytes(code))
            self.layout = plan_layout(*cache, limits.positions, settings, self._agree_on_room(room))
        check_pool_room(self.layout, device.free_bytes() - staging_bytes(code))
        self._allocate_pools()
        digests, copied = loading.table.role_entries(PAGE_DIGEST), (self.pools, self.layout.page_tokens, device.stream)
        digest = digests[0].kernel if digests else None
        key = secrets.token_bytes(KEY_BYTES)
        self._page_copies = make_copier(
            *copied, overlapping=self.layout.find_overlaps, digest_kernel=digest,
            key=key if ranks is None else ranks.share_bytes(key)[0],
            code=code,
        )  # fmt: skip
        self.copier: PageCopier = self._page_copies
        if graphs:
            self._meet_ranks()
            self._prepare_steps()
        log.info("engine on %s, %s, KV pages %s", device.torch_device, self.kernels, self.layout.num_pages)

    def _choose_graphs(self, loading: Loading, settings: ExecutorOptions, graphs: bool) -> StepLimits:
        """Choose the plans of graphs to be recorded, and the limits of a step, which all of them fit."""
        largest = next((b for b in DECODE_BUCKETS if b >= settings.max_sequences), DECODE_BUCKETS[-1])
        self._buckets = [b for b in DECODE_BUCKETS if b <= largest] if graphs else []
        image = loading.vision.spec.tokens if loading.vision is not None else 0
        scaled = loading.shape.has_scaled_products(self.device.target) and not settings.batch_invariant
        most = settings.max_batch_tokens
        self._prompt_plans = prompt_plans(most, largest, image, scaled=scaled) if graphs else []
        self.graph_sizes = prompt_room(self._prompt_plans)
        positions = min(settings.max_context or loading.max_context, loading.max_context)
        tokens, rows = max(settings.max_batch_tokens, *self._buckets, 1), max(settings.max_sequences, *self._buckets, 1)
        return StepLimits(tokens, rows + PROMPT_CHUNKS, positions)

    def _load_model(self, loading: Loading, limits: StepLimits, launcher: Launcher, *, invariant: bool) -> TritonModel:
        """Load weights, tables and a step's memory; `pools` are filled last."""
        constants, shape, table = loading.constants(limits.positions), loading.shape, loading.table
        segments = None if invariant else make_segment_attention(shape, table, limits, self.device.empty)
        spare = segments.segments.rows if segments else 0
        memory = StepMemory(shape, table, limits, self.device.empty, invariant=invariant, spare_queries=spare)
        return TritonModel(
            shape, table, constants.weights, constants.rope, self.pools, memory,
            launcher, self.device.stream, constants.exponents, invariant, segments, self.peers,
        )  # fmt: skip

    def _allocate_pools(self) -> None:
        """Make the pools of the layout. The model reads their addresses anew in each step, graphs do not."""
        with self.device.active(), _must_fit():
            self.pools.update(make_pools(self.spec, self.layout, self.device.empty))

    def _agree_on_room(self, room: int) -> int:
        """Return the least bytes for pages of all ranks, whose pools are of one size."""
        if self._ranks is None:
            return room
        return min(int.from_bytes(other, "little") for other in self._ranks.share_bytes(room.to_bytes(8, "little")))

    def _meet_ranks(self) -> None:
        """Wait for all ranks before kernels do, which wait for seconds."""
        if self._ranks is not None:
            self._ranks.share_bytes(b"")

    def _measure_room(self, fraction: float) -> int:
        """Measure bytes for pages by preparing everything else once, with pools of one page."""
        self.device.free_bytes()  # what loading kept goes back
        self._allocate_pools()
        self._meet_ranks()
        with _must_fit():
            self._prepare_steps(sizing=True)
            slices = [structs.replace(self._dummy_slice(i, 1), params=MOST) for i in range(self.max_sequences or 1)]
            with self.device.active(), torch.inference_mode():
                self.memory.logits.zero_()[:, 0] = 1e3
                self.sampler.sample_on_host(slices, list(reversed(range(len(slices)))))
        room = spare_bytes(self.device.unclaimed_bytes(), self.device.total_bytes(), fraction)
        self.graphs.clear()
        self.pools.clear()
        for piece in slices:
            self.sampler.host.release(piece.seq_id)
        return room

    def execute(self, batch: StepBatch) -> StepResult:
        self.submit(batch)
        return self.collect()

    def submit(self, batch: StepBatch) -> None:
        assert not self._closed, "a step after close()"
        assert batch.num_tokens <= self.max_batch_tokens, "the scheduler exceeded the step's token budget"
        assert len(self._steps) < 2, "two steps are under way"
        try:
            self._submit_batch(batch)
        except Exception:
            self.device.synchronize()  # what was begun reads the host's memory, which later steps write, and pages
            self.block.held.forget_rows()
            raise

    def _submit_batch(self, batch: StepBatch) -> None:
        slices, plan = self.block.arrange_slices(batch.slices)
        ways = self.sampler.choose_ways(slices)
        layer = next(self._measured_layers, None) if batch.measure_attention else None
        with self.device.active(), torch.inference_mode():
            self._page_copies.begin_step(batch)
            rows, places, ran = self._enqueue_step(slices, plan, ways, layer)
            self._rows = [s.seq_id for s in slices], rows
            results, found, masses = self._hosts[1]  # not those of the last step, which may be under way
            results.copy_(self.memory.results, non_blocking=True)
            measured = None if layer is None else self._fetch_masses(slices, places, masses)
            alike = None if self.on_step is None else self._hash_alike(batch.slices, plan, ran, rows, places)
            sampled = [s for s in batch.slices if s.sample]
            left = {s.seq_id for s, way in zip(slices, ways, strict=True) if way is HOST} if HOST in ways else ()
            hosts = [n for n, s in enumerate(sampled) if s.seq_id in left] if left else []
            rows = rows if sampled == slices else self.rows_of(sampled)
            step = SubmittedStep(sampled, rows, hosts, found, self.device.record(), measured, alike)
            if (large := self.model.segments) and batch.num_tokens >= large.segments.least:
                large.check_library(self.memory.q)  # for this thread, beside its first large step
        # Behind all that may raise: of a step that was not submitted nobody collects anything.
        self._steps.append(step)
        self._hosts.reverse()

    def collect(self) -> StepResult:
        """Wait for the oldest step under way, the only place where the host waits for the device."""
        step = self._steps.popleft()
        step.wait()
        if self.peers is not None and int(self.peers.failed):
            raise RankError("a rank waited for another in vain")
        if self.on_step is not None and step.alike is not None:
            self.on_step(step.results[:, step.rows].tobytes() + step.alike.numpy().tobytes())
        assert not (step.left and self._steps), "a step was started whose tokens the host has yet to choose"
        result = self.sampler.take_tokens(step.slices, step.rows, step.left, step.results)
        return result if step.measured is None else replace(result, attention=step.measured())

    def leads(self, batch: StepBatch) -> bool:
        """Tell whether the device chooses all tokens of the last step."""
        return bool(self._steps) and not self._steps[-1].left

    def rows_of(self, slices: Sequence[SequenceSlice]) -> list[int]:
        """Find the rows of `memory.logits` that hold the last step's logits of these sampling slices."""
        (seq_ids, rows), wanted = self._rows, [s.seq_id for s in slices]
        if wanted == seq_ids:  # nearly always
            return rows
        return [*map(dict(zip(seq_ids, rows, strict=True)).__getitem__, wanted)]

    def release(self, seq_id: int) -> None:
        self.sampler.host.release(seq_id)

    def close(self) -> None:
        """Drop everything on the device; calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self.device.synchronize()
        self._page_copies.close()
        if self.images is not None:
            self.images.close()
        self.graphs.clear()
        self.prompt_graphs.clear()
        self.pools = {}
        del self.model, self.memory, self.block, self.sampler, self.copier, self._page_copies
        if self.peers is not None:
            self.peers.close()

    def _enqueue_step(
        self, slices: list[SequenceSlice], plan: RowPlan, ways: list[str], measured: int | None
    ) -> tuple[list[int], list[int], int]:
        """Put a step whose slices lie as in `plan` on the stream, with attention at layer `measured`. Returns for each
        slice the row of its logits, if it samples, and that of its masses; and how many rows run, padding included."""
        unread, ran = None, plan.tokens
        if waiting := [s.token_ids for s in slices].count([UNREAD]):
            assert waiting == len(slices), "tokens are read, or they are not"
            unread = Unread(self._tokens, self.rows_of(slices))
        padded = self._find_graph(slices, plan, measured)
        if padded is not None:
            (size, graph), first, others = padded, plan.decode.sequences, plan.prefill.sequences
            begin, ran = size.decode.sequences, size.tokens
            count = begin + others if others else first
            rows = places = [*range(first), *range(begin, begin + others)]
            self.block.upload_padded(slices, plan, size, self.layout.num_pages, unread)
            graph()
            if measured is not None:
                TritonOps(self.model, self.block.padded_arrays(size)).measure_masses(
                    measured, count, max(self._count_pages(slices))
                )
        else:
            rows, places, count = [], [*range(len(slices))], 0
            for piece in slices:
                rows.append(count if piece.sample else -1)
                count += piece.sample
            inputs = StepInputs.from_batch(StepBatch(slices), self.layout, tuple(self.layout.num_pages))
            self.run(self.block.upload_step(inputs, plan, unread), measured)
        if DRAWN in ways:
            sampled = zip(rows, slices, ways, strict=True)
            if drawn := {row: piece for row, piece, way in sampled if piece.sample and way is DRAWN}:
                self.sampler.drawing.draw_rows(count, drawn)
        return rows, places, ran

    def _find_graph(self, slices: list[SequenceSlice], plan: RowPlan, measured: int | None) -> Graph | None:
        """Find the graph that runs a step, and the plan to pad it to, or None. One of many tokens neither keeps queries
        nor has segments."""
        first, large = plan.decode.sequences, self.model.segments
        if plan.images and any(s.images for s in slices[:first]):  # an image of one token
            return None
        if not plan.prefill.sequences:
            return next(((decode_plan(n), graph) for n, graph in self.graphs.items() if n >= first), None)
        if any(s.targets for s in slices):
            return None
        found = next((found for found in self.prompt_graphs.items() if found[0].holds(plan)), None)
        if found is None or found[0].tokens <= self.memory.queries.shape[1]:
            return found
        long = large and any(large.segments.dense_rows(s.start, len(s.token_ids)) for s in slices[first:])
        return None if long or measured is not None else found

    def _fetch_masses(
        self, slices: list[SequenceSlice], places: list[int], host: torch.Tensor
    ) -> Callable[[], dict[int, list[float]]]:
        """Begin to copy masses to the host; return a function that collects them by seq_id, without sequences that have
        a NaN or an infinity."""
        counts = self._count_pages(slices)
        count, pages = places[-1] + 1, max(counts)
        found = host.view(torch.float32)[: count * pages]
        found.copy_(self.memory.masses[: count * pages], non_blocking=True)
        seq_ids = [s.seq_id for s in slices]

        def collect_finite() -> dict[int, list[float]]:
            rows = zip(seq_ids, counts, found.view(count, pages).numpy()[places], strict=True)
            return {seq_id: row[:most].tolist() for seq_id, most, row in rows if np.isfinite(row[:most]).all()}

        return collect_finite

    def _hash_alike(
        self, given: Sequence[SequenceSlice], plan: RowPlan, ran: int, rows: list[int], places: list[int]
    ) -> torch.Tensor:
        """Hash tokens and pages `given`, and the bits of what all ranks hold alike behind the step on the stream, of
        `ran` rows: the residual and what the head has read, without rows of nobody; but norms, where rows have owners.
        Returns int64 values on their way to the host."""
        model, first, last = self.model, plan.decode.rows, max(rows) + 1
        if model.choose_way(ran) == OWN:
            parts = [model.view_shared(exchange_layout.NORMED, torch.int16, ran)]
        else:
            begin, head = places[first] if plan.prefill.rows else first, self.memory.head_in.view(torch.int16)
            residual = model.residual.view(torch.int32)
            parts = [residual[:first], residual[begin : begin + plan.prefill.rows], head[: min(first, last)]]
            parts.append(head[begin:last])
        tables = [(s.seq_id, [*s.token_ids], s.start, [[*s.pages[group]] for group in self.pools]) for s in given]
        digest = torch.full((), zlib.crc32(repr(tables).encode()), dtype=torch.int64, device=parts[0].device)
        return torch.stack([digest, *map(hash_bits, parts)]).to("cpu", non_blocking=True)

    def _count_pages(self, slices: list[SequenceSlice]) -> list[int]:
        return [div_ceil(s.start + len(s.token_ids), self.layout.page_tokens) for s in slices]

    def run(self, arrays: StepArrays, measured: int | None = None) -> None:
        """Put all kernels of a step on the stream, greedy tokens included, and attention at layer `measured`."""
        ops = TritonOps(self.model, arrays, measured, None if self.images is None else self.images.features)
        logits: Value = forward(ops, self.spec)
        if arrays.plan.sampled:
            ops.choose_greedy(logits)

    def _prepare_steps(self, *, sizing: bool = False) -> None:
        """Run the largest steps once, so that libraries have workspaces and kernels are loaded, and record the graphs.
        All rows are of nobody and all pages absent, so no page is written."""
        with self.device.active(), torch.inference_mode():
            if self.model.segments:
                self.model.segments.check_library(self.memory.q)
            longest = min(self.max_batch_tokens, self.memory.limits.positions)
            for count in sorted({1, min(longest, self.max_sequences or 1)}):
                tokens = longest - count + 1
                lengths = [1] * (count - 1) + [tokens]
                slices = [self._dummy_slice(i, length) for i, length in enumerate(lengths)]
                self._enqueue_step(
                    slices, plan_rows(lengths), self.sampler.choose_ways(slices), next(iter(self._measurable), None)
                )
                self.device.synchronize()
            if self.images is not None:  # larger steps than graphs take need their kernels, too
                tokens = min(self.images.tokens, longest)
                slices = [structs.replace(self._dummy_slice(0, tokens), images=((0, tokens, 0),))]
                plan = plan_rows([tokens])._replace(images=True)
                self._enqueue_step(slices, plan, self.sampler.choose_ways(slices), None)
            for rows in self._buckets:
                self.graphs[rows] = self._record_graph(decode_plan(rows))
            if not sizing:  # small beside what is left free
                begun, free = time.perf_counter(), self.device.unclaimed_bytes()
                self.prompt_graphs = {plan: self._record_graph(plan) for plan in self._prompt_plans}
                taken = time.perf_counter() - begun, (free - self.device.unclaimed_bytes()) >> 20
                log.info("%d graphs of steps with prompts in %.1f s and %d MiB", len(self.prompt_graphs), *taken)
            self.device.synchronize()

    def _record_graph(self, plan: RowPlan) -> Callable[[], None]:
        arrays, tokens = self.block.padded_arrays(plan), 1 if plan.decode.sequences else 2
        self.block.upload_padded([self._dummy_slice(0, tokens)], plan_rows([tokens]), plan, self.layout.num_pages)
        self.run(arrays)
        self.device.synchronize()
        return self.device.capture(lambda: self.run(arrays))

    def _dummy_slice(self, seq_id: int, tokens: int) -> SequenceSlice:
        """Make a slice of tokens of nobody, whose pages are absent."""
        pages = [-1] * div_ceil(tokens, self.layout.page_tokens)
        return SequenceSlice(seq_id, [0] * tokens, 0, dict.fromkeys(GROUPS, pages), sample=True, params=FILTERED)


def open_executor(engine: EngineDir, settings: ExecutorOptions, ranks: RankExchange | None = None) -> TritonExecutor:
    """Open `engine`, or the part of the rank of `ranks`, on this machine's GPU. Raises EnvironmentUnfitError without a
    GPU or kernels for it, EngineFormatError for files that do not fit, ConfigError for too little memory."""
    manifest = engine.manifest
    vision = load_vision(engine)
    device = CudaDevice(settings.device)
    shape = engine_shape(engine, settings.page_tokens)
    table = load_table(engine, shape, device.target)
    loading = Loading(
        shape, table, manifest.max_context,
        lambda positions: load_constants(engine, shape, positions, device, ranks.rank if ranks else None),
        dummy=manifest.dummy_weights, vision=vision,
    )  # fmt: skip
    return TritonExecutor(loading, settings, device, ranks=ranks)


def open_rank(path: Path, settings: ExecutorOptions, ranks: RankExchange) -> TritonExecutor:
    """Open the part of the engine at `path` that the rank of `ranks` runs; it was verified before ranks started."""
    from wicore_trt.engine.directory import open_engine

    return open_executor(open_engine(path, verify=False), settings, ranks)


def _name_kernels(loading: Loading, settings: ExecutorOptions) -> str:
    parts = list[bytes | str]()
    for entry in loading.table.all_entries():
        launch = json.dumps(entry.kernel.metadata(), sort_keys=True)
        parts += [f"{entry.role} {entry.bucket} {entry.config} {launch}", entry.kernel.cubin]
    sources = (*SOURCES, "backends/torch") if loading.vision is not None else SOURCES
    name = kernels_name(f"triton-{loading.table.target}", sources, *parts)
    mode = "-invariant" if settings.batch_invariant else ""
    return f"{name}{mode}{'-dummy-weights' if loading.dummy else ''}"


def _find_code(loading: Loading, groups: Sequence[str]) -> CodeKernels | None:
    """Find the code of an engine's pages, and its kernels; None where it has none."""
    shapes, found = loading.shape.pool_shapes, [loading.table.role_entries(role) for role in PAGE_CODE]
    codes = {group: code for group in groups if (code := find_code(shapes[group])) is not None}
    if not codes or not all(found):
        return None
    return CodeKernels(codes, {role.operation: each[0].kernel for role, each in zip(PAGE_CODE, found, strict=True)})


@contextmanager
def _must_fit() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        fix = "Build it with --dtype fp8, lower scheduler.max_batch_tokens, or take a larger GPU."
        raise EnvironmentUnfitError(f"The engine does not fit into the GPU's memory: {error}", fix=fix) from error
