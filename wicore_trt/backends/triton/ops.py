"""Gemma 3's operators as launches of compiled kernels over memory that is allocated once.

Must not know files, requests, sampling parameters or CUDA: a `Launcher` starts kernels by addresses. Invariants: the
residual stream, norms and sums are float32 (I20); values are rounded where they become operands, keys, values or
queries; page -1 is neither read nor written, so rows of nobody may pad a step.

The number of rows chooses how a step multiplies (`EngineShape.choose_product`). Few rows use Triton kernels that read
weights once (E4M3 weights with 16-bit activations; from a measured number on with E4M3 ones). Many rows use cuBLAS
(E4M3 weights with E4M3 activations), with bfloat16 results but in float16 engines without FP8. E4M3 rows have one
dynamic scale each; a checkpoint's static scales are not used, because a row's own is never worse.

Behind the last layer's attention, a step of many rows continues with the sampled rows, as one of so few rows. So a
row's logits move when the number of rows, or of sampled ones, crosses such a number: within rounding, and for FP8
within the activations' quantisation. `invariant` (I21) avoids that: one configuration of every kernel, no cuBLAS, one
attention kernel for single tokens and many. Then a row's result depends on its own sequence alone. Large steps are
several times slower, and so is attention of single tokens behind a long context, whose keys are not split.

In float16, gate * up may exceed 65,504. It is scaled by a power of two that the weights prove to suffice
(`linear_layout.geglu_exponent`), and the product after it is scaled back, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch

from wicore_trt.backends.triton import products as triton_products
from wicore_trt.backends.triton import roles
from wicore_trt.backends.triton.memory import StepMemory, make_exchange_layout
from wicore_trt.backends.triton.roles import KernelRole, MatrixProduct
from wicore_trt.backends.triton.rows import RowPlan
from wicore_trt.backends.triton.segments import LongSlice, SegmentAttention
from wicore_trt.backends.triton.table import ANY, EngineShape, KernelEntry, KernelTable
from wicore_trt.checkpoint.names import kv_scale_name, weight_minimum_name, weight_scale_name
from wicore_trt.model.gemma3 import EMBEDDING, FINAL_NORM, LM_HEAD, layer_weight
from wicore_trt.model.spec import GLOBAL, LOCAL, LayerGroup
from wicore_trt.plugins import decode_layout, exchange_layout, linear_layout, step_layout
from wicore_trt.plugins.exchange_layout import LOGITS, NORMED, NORMED_SCALES, RESIDUAL, ExchangeLayout
from wicore_trt.plugins.launch import Launcher
from wicore_trt.plugins.layout import Launch, Pool, Slices, Tables
from wicore_trt.runtime.dtypes import TORCH_DTYPES
from wicore_trt.runtime.image_encoder import AddNorm
from wicore_trt.runtime.peer_memory import PeerMemory

SUMMED = ("o", "down")
"""Linears whose products are summed over ranks; in turn, so that each has a buffer of its own."""


class Value(NamedTuple):
    """Rows of a step; `scales` float32 [rows] where `rows` are E4M3 bytes. The value is rows * scales * 2**exponent;
    for gate and up the exponent is what their product is divided by."""

    rows: torch.Tensor
    scales: torch.Tensor | None = None
    exponent: int = 0


@dataclass(frozen=True)
class StepArrays:
    """Geometry of a step on the device: addresses of int32 arrays, whose rows lie as in `plan`.

    `token_ids`, `positions`, `sequences` (row of the page tables) [tokens]; `sample_rows` [sampled]; `kv_lengths`
    [decode sequences]; `cu_seqlens` [prefill sequences + 1] counted from the first prefill row, `first_positions`
    [prefill sequences]; `key_ends` [tokens], as in `StepInputs`, where there are images. `tables[group]` are address
    and length of page tables [sequences, length]. -1, and a length of 0, mark rows of nobody.
    """

    plan: RowPlan
    token_ids: int
    positions: int
    sequences: int
    sample_rows: int
    kv_lengths: int
    cu_seqlens: int
    first_positions: int
    key_ends: int
    tables: Mapping[str, tuple[int, int]]
    sampled: torch.Tensor | None = None
    """`sample_rows`, where not every row is sampled."""
    slices: tuple[LongSlice, ...] = ()
    """Slices of the prefill rows, where the step is not for a graph."""


@dataclass(frozen=True)
class TritonModel:
    """State that all steps share, on one device. `weights` have the fused names of `backends.torch.weights`; linears
    are E4M3 or of the engine's dtype, norms and scales float32. `rope[group]` is cos and sin float32 [positions, D /
    2]; `pools[group]` the pages. `exponents` has the power of two that gate * up is divided by, by the name of the
    gate_up weight."""

    shape: EngineShape
    table: KernelTable
    weights: Mapping[str, torch.Tensor]
    rope: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    pools: Mapping[str, torch.Tensor]
    memory: StepMemory
    launcher: Launcher
    stream: int
    exponents: Mapping[str, int] = field(default_factory=dict)
    invariant: bool = False
    segments: SegmentAttention | None = None
    peers: PeerMemory | None = None
    """Memory of an engine that is split over ranks, laid out by `make_exchange_layout`."""

    @cached_property
    def shared(self) -> ExchangeLayout:
        return make_exchange_layout(self.shape, self.table.target, self.memory.limits, invariant=self.invariant)

    @cached_property
    def ranked(self) -> dict[str, Any]:
        """Arguments of a kernel that reaches peers."""
        if (peers := self.peers) is None:
            return {}
        return {"peers": peers.addresses.data_ptr(), "rank": peers.rank, "failed": peers.failed.data_ptr()}

    @cached_property
    def residual(self) -> torch.Tensor:
        """float32 [tokens, H]."""
        residual, tokens = self.memory.residual, self.memory.limits.tokens
        return self.view_shared(RESIDUAL, residual.dtype, tokens) if self.owns else residual

    @property
    def owns(self) -> bool:
        """Tell whether rows of large steps have owners."""
        return self.peers is not None and self.shared.owns_rows

    def choose_way(self, rows: int) -> str:
        """Choose how ranks sum so many rows: one of RANKED, "" for one rank."""
        if self.peers is None:
            return ""
        if rows > exchange_layout.PUSHED_ROWS:
            return roles.OWN if self.owns else roles.PULL
        return roles.PULL if self.invariant else roles.PUSH

    def view_shared(self, part: int, dtype: torch.dtype, rows: int, columns: int | None = None) -> torch.Tensor:
        """View the beginning of one of the parts of `ExchangeLayout.part_offsets` of this rank; columns are H, or as
        given."""
        assert self.peers is not None
        begin, columns = self.shared.part_offsets[part], columns or self.shape.spec.hidden_size
        flat = self.peers.own[begin : begin + rows * columns * dtype.itemsize]
        return flat.view(dtype).view(rows, columns)

    @cached_property
    def embedding_scale(self) -> float:
        """Scale rounded to the embedding's type, as transformers does."""
        return float(torch.tensor(self.shape.spec.embedding_scale).to(TORCH_DTYPES[self.shape.dtype]))

    @cached_property
    def groups(self) -> list[LayerGroup]:
        return self.shape.spec.attention_by_layer

    def find_kernel(self, role: KernelRole, rows: int) -> KernelEntry:
        if not self.invariant:
            return self.table.find_entry(role, rows)
        own = self.table.role_entries(roles.linear_role(role.operation, variant=roles.INVARIANT))
        return own[0] if own else self.table.find_entry(role, ANY)

    def choose_product(self, role: str, rows: int) -> MatrixProduct:
        return roles.KERNEL if self.invariant else self.shape.choose_product(self.table.target, role, rows)

    def launch_kernel(self, entry: KernelEntry, call: Launch) -> None:
        self.launcher.launch(entry.kernel, call, self.stream)

    def find_image_norm(self, columns: int) -> AddNorm | None:
        """Return the kernel for an image encoder's norms of so many columns; None for an engine without such."""
        found = self.table.role_entries(roles.IMAGE_NORM)
        if not found or columns % 16 or columns > step_layout.LAYER_NORM_COLUMNS:
            return None

        def add_norm(x: torch.Tensor, added: torch.Tensor, *norm: Any) -> torch.Tensor:
            (weight, bias, eps), out = norm, torch.empty_like(added)
            places = x.data_ptr(), added.data_ptr(), (weight.data_ptr(), bias.data_ptr()), out.data_ptr()
            self.launch_kernel(found[0], step_layout.add_layer_norm_launch(*places, (len(x), columns), eps))
            return out

        return add_norm


class TritonOps:
    """`Ops` of one step; T is a `Value` in the step's memory, valid until the operation that writes there again.
    Attention is measured at layer `measured`, if any. `features` [slots, tokens, H] of images have ids behind the
    vocabulary."""

    def __init__(
        self, model: TritonModel, step: StepArrays, measured: int | None = None, features: torch.Tensor | None = None
    ) -> None:
        self._features = features
        self._model, self._step, self._measured, self._spec = model, step, measured, model.shape.spec
        self._memory, self._plan, self._n = model.memory, step.plan, step.plan.tokens
        self._groups, self._product = model.groups, model.choose_product("qkv", self._n)
        self._residual, self._gather = model.residual, step.sample_rows
        self._index = {i: n for g in model.pools for n, i in enumerate(self._spec.layers_of(g))}
        self._views: dict[tuple[int, int, torch.dtype, int | None], torch.Tensor] = {}
        # Of larger steps than graphs take; those keep their queries elsewhere.
        large = self._n > model.memory.queries.shape[1] and not step.plan.images
        segments = model.segments
        self._segments = segments if large and segments and segments.find_long_slices(step.slices) else None

    def embed(self) -> Value:
        """Return the residual unwritten: the kernel of the norm that follows writes it."""
        return Value(self._residual[: self._n])

    def norm(self, residual: Value, weight: str) -> Value:
        model, out, features = self._model, self._norm_output(), None
        norm = model.weights[weight].data_ptr()
        table = model.weights[EMBEDDING].data_ptr(), model.shape.vocab_size, model.embedding_scale
        role = roles.step_role("embed_norm", self._product)
        if self._plan.images:
            assert self._features is not None and self._features.dtype == TORCH_DTYPES[model.shape.dtype]
            role, features = role._replace(operation="embed_images"), self._features.data_ptr()
        given = self._step.token_ids, table, norm, residual.rows.data_ptr(), _norm_out(out), self._n
        call = step_layout.embed_norm_launch(*given, self._spec.rms_norm_eps, features=features)
        model.launch_kernel(model.find_kernel(role, self._n), call)
        return out

    def linear(self, x: Value, weight: str) -> Value:
        role = _linear_role(weight)
        shape, weights = self._model.shape.linear_shape(role), self._model.weights
        exponent = self._model.exponents.get(weight, 0)
        if self._product.kernels:
            if self._product.rows == roles.NARROW and x.scales is None:
                x = self._quantize_operand(x, role)
            columns = self._memory.act[: self._n] if role == "gate_up" else self._wide_rows(shape.n, role)
            self._launch_linear(role, x, weight, columns, 2.0 ** (x.exponent - exponent))
            return Value(columns, exponent=exponent)
        out = self._wide_rows(shape.weight_rows, role)
        if self._product.rows == roles.NARROW:
            operand = x if x.scales is not None else self._quantize_operand(x, role)
            assert operand.scales is not None
            scale = weights[weight_scale_name(weight)]
            triton_products.scaled_mm(operand.rows, operand.scales, weights[weight], scale.view(-1), out)
            return Value(out, exponent=exponent)
        triton_products.float_mm(x.rows, self._dequantize(role, weight) if shape.four_bit else weights[weight], out)
        if x.exponent:
            out.mul_(2.0**x.exponent)
        return Value(out, exponent=exponent)

    def reduce(self, x: Value) -> Value:
        """Return x: the norm that follows sums it over ranks."""
        return x

    def qk_norm_rope_write(self, qkv: Value, layer: int) -> Value:
        model, step = self._model, self._step
        group = self._spec.layer_groups[layer]
        q, (cos, sin) = self._query_rows(layer), model.rope[group]
        q_norm, k_norm = (model.weights[layer_weight(layer, f"attention.{part}_layernorm")].data_ptr() for part in "qk")
        self._launch(
            roles.step_role("qk_rope", self._product), step_layout.qk_rope_launch, qkv.rows.data_ptr(), q.data_ptr(),
            step_layout.QkNorms(q_norm, k_norm, self._spec.rms_norm_eps),
            step_layout.RopeTable(cos.data_ptr(), sin.data_ptr(), cos.shape[0]),
            self._layer_pool(layer), self._group_tables(group, 0, self._plan.sequences),
            step_layout.StepTokens(step.positions, step.sequences, self._n),
        )  # fmt: skip
        return Value(q)

    def attention(self, q: Value, layer: int) -> Value:
        """Run decode rows by the decode kernel, others by the prefill kernel; if invariant, all by the prefill
        kernel."""
        step, spec, decode, prefill = self._step, self._spec, self._plan.decode, self._plan.prefill
        group = spec.layer_groups[layer]
        out, grouped = self._memory.attended[: self._n], self._grouped
        ordered = grouped and not prefill.sequences and bool(self._model.table.role_entries(roles.DECODE_ORDERED))
        if layer == self._measured:
            self.measure_masses(layer, self._plan.sequences, step.tables[group][1])
        ends = (step.key_ends, step.key_ends + 4 * decode.rows) if step.plan.images else (None, None)
        if decode.sequences and self._model.invariant:
            slices = Slices(self._memory.counting.data_ptr(), step.positions, decode.rows, ends[0])
            self._attend_prefill(q.rows, out, layer, slices, self._group_tables(group, 0, decode.sequences))
        elif decode.sequences:
            self._attend_decode(q.rows, out, layer, roles.DECODE_ORDERED if ordered else roles.DECODE)
        if prefill.sequences:
            slices = Slices(step.cu_seqlens, step.first_positions, prefill.rows, ends[1])
            tables = self._group_tables(group, decode.sequences, prefill.sequences)
            rows = q.rows[decode.rows :], out[decode.rows :]
            if group == GLOBAL and self._segments is not None:
                self._attend_segments(self._segments, rows[1], layer, slices, tables)
            elif group == GLOBAL and not step.plan.images and self._n <= self._memory.split_tokens:
                self._attend_split(*rows, layer, slices, tables)
            else:
                self._attend_prefill(*rows, layer, slices, tables)
        if layer + 1 == spec.num_layers and step.sampled is not None and not self._product.kernels:
            out = self._keep_sampled(out, step.sampled)
        # `_grouped` once more: sampled rows alone may be few enough for warp groups where all rows were not
        return Value(self._order_rows(out) if self._grouped and not ordered else out)

    def measure_masses(self, layer: int, sequences: int, pages: int) -> None:
        """Measure at a global layer what the last query of each of the first `sequences` sequences gives to its pages.
        Masses are as `StepResult.attention`, float32 [sequences, pages], in the memory's `masses`; `pages` is the most
        of a sequence. Queries must still be there: until the next step if the memory keeps those of so many tokens, as
        of graphs, else until the next layer."""
        model, step, memory = self._model, self._step, self._memory
        entries = [model.find_kernel(role, sequences) for role in (roles.PAGE_LOGSUMS, roles.PAGE_MASSES)]
        group, q = self._groups[layer], self._query_rows(layer).data_ptr()
        places = step.positions, step.cu_seqlens, sequences, self._plan.decode.rows
        rows = decode_layout.LastQueries(q, *places, group.num_heads, group.softmax_scale)
        pool, tables = self._layer_pool(layer), self._group_tables(GLOBAL, 0, sequences)
        to = memory.logsums.data_ptr(), memory.masses.data_ptr(), len(memory.logsums)
        launches = decode_layout.page_masses_launches(entries[0].kernel.constants, rows, pool, tables, pages, to)
        for calls in launches:
            for entry, call in zip(entries, calls, strict=True):
                model.launch_kernel(entry, call)

    def add_norm(self, residual: Value, x: Value, post_weight: str, next_weight: str) -> tuple[Value, Value]:
        """Add and norm; behind the last layer only the sampled rows go on. The residual returned is the step's, of
        fewer rows than the caller's where the step went on with its sampled rows."""
        model, last, way = self._model, next_weight == FINAL_NORM, self._way
        if way:  # ranks meet even where nothing is sampled: the next step writes what this one reads
            last = last and self._plan.sampled > 0
        if way in roles.RANKED[1:]:
            self._meet()
        rows = self._plan.sampled if last else self._n
        out = self._norm_output(sampled=last)
        weights = model.weights[post_weight].data_ptr(), model.weights[next_weight].data_ptr()
        given = self._residual.data_ptr(), x.rows.data_ptr(), weights, _norm_out(out), rows, self._spec.rms_norm_eps
        call = step_layout.add_norm_launch(*given, gathered=self._gather if last else 0, ranked=model.ranked)
        role = roles.step_role(way + ("final_norm" if last else "add_norm"), self._product)
        model.launch_kernel(model.find_kernel(role, self._n), call)
        if way == roles.OWN:
            self._meet()
        return residual, out

    def geglu(self, gate_up: Value) -> Value:
        """Run GeGLU unless the kernel that multiplied has applied it."""
        if self._product.kernels:
            return gate_up
        if self._product.rows == roles.NARROW:
            out = self._narrow_value(self._spec.intermediate_size)
        else:
            out = Value(self._memory.act[: self._n], exponent=gate_up.exponent)
        role, arrays = roles.step_role("geglu", self._product), (gate_up.rows.data_ptr(), *_norm_out(out))
        self._launch(role, step_layout.geglu_launch, *arrays, self._n, 2.0**-gate_up.exponent)
        return out

    def sampled_rows(self, x: Value) -> Value:
        """Return x: the last norm computed sampled rows alone."""
        return x

    def logits(self, x: Value) -> Value:
        """Compute logits without soft-capping: the sampler caps the values that it reads."""
        model, rows, logits = self._model, self._plan.sampled, self._memory.logits[: self._plan.sampled]
        out = logits if model.peers is None else model.view_shared(LOGITS, logits.dtype, rows, self._spec.vocab_size)
        if rows and model.choose_product("head", rows) == roles.KERNEL:
            self._launch_linear("head", x, LM_HEAD, out, 1.0)
        elif rows:
            triton_products.float_mm(x.rows, model.weights[LM_HEAD], out)
        if rows and model.peers is not None:
            self._meet()
            arrays = out.data_ptr(), logits.data_ptr(), rows, model.ranked
            self._launch(roles.GATHER_COLUMNS, exchange_layout.gather_launch, *arrays)
        return Value(logits)

    def choose_greedy(self, logits: Value) -> None:
        """Choose tokens and status of each row (`kernels.sample`) into the memory's results."""
        memory, rows = self._memory, self._plan.sampled
        places = *memory.results, memory.chunk_max, memory.chunk_token
        arrays = step_layout.SampleArrays(*(place.data_ptr() for place in places))
        entries = {role.operation: self._model.find_kernel(role, rows) for role in (roles.SCAN, roles.CHOOSE)}
        read = step_layout.Logits(logits.rows.data_ptr(), rows, self._model.shape.vocab_size)
        calls = step_layout.sample_launches(entries["choose"].kernel.constants, read, arrays)
        for role, entry in entries.items():
            self._model.launch_kernel(entry, calls[role])

    @property
    def _way(self) -> str:
        return self._model.choose_way(self._n)

    def _launch(self, role: KernelRole, launch: Callable[..., Launch], *arguments: Any) -> None:
        """Launch the kernel of `role` for the step's rows, by `launch` of its constants and `arguments`."""
        entry = self._model.find_kernel(role, self._n)
        self._model.launch_kernel(entry, launch(entry.kernel.constants, *arguments))

    def _meet(self) -> None:
        model = self._model
        model.launch_kernel(model.find_kernel(roles.MEET, ANY), exchange_layout.meet_launch(model.ranked))

    def _query_rows(self, layer: int) -> torch.Tensor:
        memory, tokens = self._memory, self._plan.tokens
        if tokens > memory.queries.shape[1] or self._spec.layer_groups[layer] == LOCAL:
            return memory.q[:tokens]
        return memory.queries[self._index[layer], :tokens]

    def _keep_sampled(self, attended: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Continue with the sampled rows alone; the rest of the last layer is a step of that many rows."""
        memory, tokens, rows = self._memory, self._n, self._plan.sampled
        if self._way == roles.OWN:
            arrays = self._residual.data_ptr(), self._gather, memory.sampled_residual.data_ptr()
            call = exchange_layout.collect_launch(*arrays, rows, self._model.ranked)
            self._model.launch_kernel(self._model.find_kernel(roles.COLLECT_ROWS, ANY), call)
        else:
            torch.index_select(self._residual[:tokens], 0, sampled, out=memory.sampled_residual[:rows])
        torch.index_select(attended, 0, sampled, out=memory.q[:rows])
        self._residual, self._gather, self._n = memory.sampled_residual, memory.counting.data_ptr(), rows
        self._product = self._model.choose_product("qkv", rows)
        return memory.q[:rows]

    def _attend_prefill(self, q: torch.Tensor, out: torch.Tensor, layer: int, slices: Slices, tables: Tables) -> None:
        role = roles.PREFILL if slices.key_ends is None else roles.PREFILL_IMAGES
        group = self._groups[layer]
        rows, scores = (q.data_ptr(), out.data_ptr()), (group.softmax_scale, group.window)
        self._launch(role, decode_layout.prefill_launch, rows, self._layer_pool(layer), tables, slices, *scores)

    def _attend_split(self, q: torch.Tensor, out: torch.Tensor, layer: int, slices: Slices, tables: Tables) -> None:
        """Run `_attend_prefill` of a global layer for few tokens, whose keys several programs share."""
        model, memory, scale = self._model, self._memory, self._groups[layer].softmax_scale
        prefill = model.find_kernel(roles.PREFILL_SPLITS, self._n)
        sums, rows = (memory.split_sums.data_ptr(), memory.split_lse.data_ptr()), memory.split_tokens
        to, pool = (q.data_ptr(), sums[0]), self._layer_pool(layer)
        constants = prefill.kernel.constants
        call = decode_layout.prefill_launch(constants, to, pool, tables, slices, scale, 0)
        model.launch_kernel(prefill, decode_layout.split_keys(call, constants, sums[1], rows))
        self._launch(roles.ADD_SPLITS, decode_layout.add_splits_launch, sums, rows, out.data_ptr(), len(out))

    def _attend_segments(
        self, segments: SegmentAttention, out: torch.Tensor, layer: int, slices: Slices, tables: Tables
    ) -> None:
        """Run `_attend_prefill` of a global layer, where cuDNN takes keys of long slices."""
        model, step = self._model, self._step
        q, pool = self._memory.q[self._plan.decode.rows :], self._layer_pool(layer)
        sums = self._memory.view_rows(torch.float32, *out.shape)  # nobody needs the queries' product any more
        entry, rows = model.find_kernel(roles.PREFILL_SEGMENTS, self._n), (q.data_ptr(), sums.data_ptr())
        constants, scale = entry.kernel.constants, self._groups[layer].softmax_scale
        call = decode_layout.prefill_launch(constants, rows, pool, tables, slices, scale, 0)
        model.launch_kernel(
            entry, decode_layout.leave_segments(call, constants, segments.segments, segments.lse.data_ptr())
        )
        segments.add_segments((model.launcher, model.stream), q, sums, out, pool, tables, step.slices)

    @property
    def _grouped(self) -> bool:
        """Tell whether so many rows multiply by warp groups, which take ordered columns (`kernels.order`)."""
        config = self._model.find_kernel(roles.linear_role("o"), self._n).config
        return self._product.kernels and bool(config.kind == linear_layout.GROUPS)

    def _order_rows(self, attended: torch.Tensor) -> torch.Tensor:
        """Order the columns of attention's results, in memory that holds neither these nor queries of later use."""
        memory = self._memory
        out = (memory.attended if attended.data_ptr() == memory.q.data_ptr() else memory.q)[: self._n]
        self._launch(roles.ORDER, step_layout.order_launch, attended.data_ptr(), out.data_ptr(), self._n)
        return out

    def _attend_decode(self, q: torch.Tensor, out: torch.Tensor, layer: int, role: KernelRole) -> None:
        model, memory, group, sequences = self._model, self._memory, self._groups[layer], self._plan.decode.sequences
        entry = model.find_kernel(role, sequences)
        sizes = (group.num_heads, group.softmax_scale, group.window)
        rows = decode_layout.DecodeRows(q.data_ptr(), out.data_ptr(), self._step.kv_lengths, *sizes)
        scratch = memory.split_partials, memory.split_stats, memory.split_arrived
        work = decode_layout.Workspace(*(part.data_ptr() for part in scratch))
        pool, tables = self._layer_pool(layer), self._group_tables(group.name, 0, sequences)
        model.launch_kernel(entry, decode_layout.decode_launch(entry.config, rows, pool, tables, work))
        if entry.config.splits > 1 and not entry.config.fused:
            combine = model.find_kernel(roles.COMBINE, sequences)
            model.launch_kernel(combine, decode_layout.combine_launch(entry.config, rows, pool, sequences, work))

    def _launch_linear(self, role: str, x: Value, weight: str, out: torch.Tensor, alpha: float) -> None:
        model, memory, rows = self._model, self._memory, len(x.rows)
        kind = roles.WIDE if x.scales is None else roles.NARROW
        entry, shape = model.find_kernel(roles.linear_role(role, kind), rows), model.shape.linear_shape(role, kind)
        scale, minimum = (model.weights.get(name(weight)) for name in (weight_scale_name, weight_minimum_name))
        arrays = linear_layout.LinearArrays(
            x.rows.data_ptr(), model.weights[weight].data_ptr(), out.data_ptr(),
            w_scale=0 if scale is None else scale.data_ptr(), x_scale=_norm_out(x).scales,
            partials=memory.partials.data_ptr(), counters=memory.counters.data_ptr(),
            largest=memory.largest.data_ptr(), w_minimum=0 if minimum is None else minimum.data_ptr(),
        )  # fmt: skip
        model.launch_kernel(entry, linear_layout.linear_launch(shape, entry.config, arrays, rows, alpha))

    def _dequantize(self, role: str, weight: str) -> torch.Tensor:
        """Write a layer's 4-bit weights in 16 bits into the step's memory."""
        weights, shape, to = self._model.weights, self._model.shape.linear_shape(role), self._memory.dequantized
        names = (weight, weight_scale_name(weight), weight_minimum_name(weight))
        w, *scales = (weights[n].data_ptr() if n in weights else 0 for n in names)
        self._launch(roles.DEQUANTIZE[role], linear_layout.dequantize_launch, w, to.data_ptr(), *scales)
        return to[: shape.weight_rows * shape.k].view(shape.weight_rows, shape.k)

    def _quantize_operand(self, x: Value, role: str) -> Value:
        """Quantize the operand of `role`, o or down, to E4M3. The kernel for o clears the rows' largest values, which
        gate_up then finds and the kernel for down takes."""
        out = self._narrow_value(x.rows.shape[1])._replace(exponent=x.exponent)
        arrays = x.rows.data_ptr(), *_norm_out(out), self._memory.largest.data_ptr()
        quantize = roles.QUANTIZE_ACT if role == "down" else roles.QUANTIZE
        self._launch(quantize, linear_layout.quantize_launch, *arrays, self._n)
        return out

    def _norm_output(self, *, sampled: bool = False) -> Value:
        """View memory for the norm of all rows, or of the sampled ones for the head; owners of rows write into that
        of their peers."""
        memory, hidden, owned = self._memory, self._spec.hidden_size, self._way == roles.OWN
        if sampled:
            rows, shared = self._plan.sampled, self._model.view_shared
            return Value(shared(NORMED, memory.x.dtype, rows) if owned else memory.head_in[:rows])
        if self._product.rows != roles.NARROW:
            return Value(self._cached_view(memory.x.dtype, hidden, NORMED) if owned else memory.x[: self._n])
        if not owned:
            return self._narrow_value(hidden)
        scales = self._cached_view(torch.float32, 1, NORMED_SCALES).view(-1)
        return Value(self._cached_view(torch.uint8, hidden, NORMED), scales)

    def _narrow_value(self, columns: int) -> Value:
        return Value(self._cached_view(torch.uint8, columns), self._memory.scales[: self._n])

    def _wide_rows(self, columns: int, role: str) -> torch.Tensor:
        """View memory for the product of `role`: where peers pull it, their own."""
        part = SUMMED.index(role) if role in SUMMED and self._way in roles.RANKED[1:] else None
        dtype = torch.bfloat16 if self._product.results == "bfloat16" else torch.float32
        return self._cached_view(dtype, columns, part)

    def _cached_view(self, dtype: torch.dtype, columns: int, part: int | None = None) -> torch.Tensor:
        """View part of the step's memory. Layers share views, because making one costs as much as a launch."""
        key = (self._n, columns, dtype, part)
        if key not in self._views:
            view = self._memory.view_rows if part is None else partial(self._model.view_shared, part)
            self._views[key] = view(dtype, self._n, columns)
        return self._views[key]

    def _layer_pool(self, layer: int) -> Pool:
        group = self._spec.layer_groups[layer]
        shape, scale = self._model.shape.pool_shapes[group], self._model.weights.get(kv_scale_name(layer))
        begin = self._model.pools[group].data_ptr() + shape.layer_offset(self._index[layer])
        return Pool(begin, shape, 0 if scale is None else scale.data_ptr())

    def _group_tables(self, group: str, first: int, rows: int) -> Tables:
        address, length = self._step.tables[group]
        return Tables(address + 4 * first * length, rows, length)


@cache
def _linear_role(weight: str) -> str:
    return roles.LINEAR_ROLES[weight.split(".", 3)[3].removesuffix(".weight")]


def _norm_out(value: Value) -> step_layout.NormOut:
    return step_layout.NormOut(value.rows.data_ptr(), 0 if value.scales is None else value.scales.data_ptr())
