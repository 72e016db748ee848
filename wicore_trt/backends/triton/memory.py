"""Device memory of a triton step's intermediate values, allocated once, for the largest step.

Knows shapes, types and the kernels' scratch; neither weights nor pages. Invariant: a step within the limits allocates
nothing, so it cannot run out of memory, and a CUDA graph may hold the addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from wicore_trt.arithmetic import div_ceil
from wicore_trt.backends.triton import roles
from wicore_trt.backends.triton.roles import KernelRole
from wicore_trt.backends.triton.table import ANY, KEPT_TOKENS, SPLIT_TOKENS, EngineShape, KernelTable
from wicore_trt.model.spec import GLOBAL, GROUPS
from wicore_trt.plugins.decode_layout import workspace_elements
from wicore_trt.plugins.exchange_layout import PUSHED_ROWS, ExchangeLayout, pushed_type
from wicore_trt.plugins.linear_layout import partials_bytes
from wicore_trt.runtime.dtypes import TORCH_DTYPES

LOGSUMS = 1 << 22
"""float32 elements of `StepMemory.logsums`, unless one sequence needs more or all of them fewer."""


class Allocator(Protocol):
    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True)
class StepLimits:
    """Most tokens of a step, most sequences (and so sampled rows) of a step, positions of a sequence."""

    tokens: int
    rows: int
    positions: int


class StepMemory:
    """Buffers by content; [tokens, ...] unless said otherwise.

    `residual` is empty where peers read it: there it lies in the memory of ranks.
    `wide` holds qkv, gate and up, or the output of o and down in turn: float32, or bfloat16 where products give that.
    `dequantized` holds one layer's weights for cuBLAS where they have 4 bits.
    `largest` holds the largest values of rows of gate * up until they are quantised (`kernels.linear_quantize`).
    `sampled_residual` [rows, H] is the residual of the sampled rows of a large step's last layer. `counting`, int32
    [tokens + 1], is 0, 1, 2, ...: where sequences of one token begin, or all rows. `queries` [global layers,
    KEPT_TOKENS at most, Q] outlive their layer. `masses` float32 [rows * pages of a sequence] are measured from them
    through `logsums`. `split_tokens`: most tokens of a step whose prompts' keys are split over programs. Their results
    are `split_sums` float32 [splits * split_tokens, Q] and `split_lse` [splits * split_tokens, heads]."""

    def __init__(
        self,
        shape: EngineShape,
        table: KernelTable,
        limits: StepLimits,
        empty: Allocator,
        *,
        invariant: bool,
        spare_queries: int = 0,
    ) -> None:
        """Allocate; `spare_queries` are rows of `q` behind the largest step's, for products of a fixed number of
        rows."""
        spec, dtype, tokens = shape.spec, TORCH_DTYPES[shape.dtype], limits.tokens
        q_size = shape.linear_shape("o").k
        self.limits = limits
        owned = make_exchange_layout(shape, table.target, limits, invariant=invariant).owns_rows
        self.residual = empty((0 if owned else tokens, spec.hidden_size), torch.float32)
        self.x = empty((tokens, spec.hidden_size), dtype)
        self.q = empty((tokens + spare_queries, q_size), dtype)
        self.attended = empty((tokens, q_size), dtype)
        self.act = empty((tokens, spec.intermediate_size), dtype)
        self._wide = empty((wide_floats(shape, table.target, tokens, invariant=invariant),), torch.float32)
        widest = max(q_size, spec.hidden_size, spec.intermediate_size)
        scaled = shape.has_scaled_products(table.target)
        self.bytes8 = empty((tokens * widest if scaled else 0,), torch.uint8)
        self.scales = empty((tokens if scaled else 0,), torch.float32)
        dequantized = not invariant and shape.weights.storage == "q4_0"
        dequantized &= tokens > shape.most_kernel_rows(table.target, "qkv")
        linears = [shape.linear_shape(role) for role in roles.LINEARS[:-1]]
        self.dequantized = empty((max(s.weight_rows * s.k for s in linears) if dequantized else 0,), dtype)
        self.largest = empty((tokens if scaled else 0,), torch.int32).zero_()
        self.head_in = empty((limits.rows, spec.hidden_size), dtype)
        self.logits = empty((limits.rows, shape.vocab_size), torch.float32)
        self.results = empty((2, limits.rows), torch.int32)
        self.sampled_residual = empty((limits.rows, spec.hidden_size), torch.float32)
        self.counting = empty((tokens + 1,), torch.int32).copy_(torch.arange(tokens + 1, dtype=torch.int32))
        layers = len(spec.layers_of(GLOBAL))
        each = div_ceil(limits.positions, shape.page_tokens) if layers else 0
        self.queries = empty((layers, max(limits.rows, min(tokens, KEPT_TOKENS)), q_size), dtype)
        self.masses = empty((limits.rows * each,), torch.float32)
        heads = spec.num_heads * each
        self.logsums = empty((max(heads, min(limits.rows * heads, LOGSUMS)),), torch.float32)
        self._allocate_scratch(shape, table, empty, variant=roles.INVARIANT if invariant else "")

    def view_rows(self, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
        """View the beginning of `bytes8` (uint8) or of `wide` (other types)."""
        flat: torch.Tensor = self.bytes8 if dtype == torch.uint8 else self._wide.view(dtype)
        return flat[: rows * columns].view(rows, columns)

    def _allocate_scratch(self, shape: EngineShape, table: KernelTable, empty: Allocator, variant: str) -> None:
        """Allocate the kernels' working memory. Counters are zero before and after every launch."""
        limits, partials, counters = self.limits, 0, 0
        for role in roles.LINEARS:
            most = limits.rows if role == "head" else limits.tokens
            kinds = {roles.WIDE: ANY if variant else shape.most_kernel_rows(table.target, role)}
            if not variant and shape.weights.fp8 and role != "head":
                kinds[roles.NARROW] = shape.most_narrow_rows(table.target)
            for kind, crossover in kinds.items():
                entries = table.role_entries(KernelRole(role, kind, variant=variant))
                linear = shape.linear_shape(role, kind)
                for entry in entries:
                    rows = min(most, crossover, ANY if entry is entries[-1] else entry.bucket)
                    if entry.bucket == 1:
                        rows = min(rows, 1)
                    partials = max(partials, partials_bytes(linear, entry.config, rows))
                    counters = max(counters, entry.config.count_tiles(linear, rows))
        self.partials = empty((max(partials // 4, 4),), torch.float32)
        self.counters = empty((max(counters, 4),), torch.int32).zero_()
        pool, heads = shape.pool_shapes[GROUPS[0]], shape.spec.num_heads
        sizes = [0, 0, 0]
        for entry in table.role_entries(KernelRole("decode", variant=variant)):
            needed = workspace_elements(entry.config, pool, heads, min(entry.bucket, limits.rows))
            sizes = [max(pair) for pair in zip(sizes, needed, strict=True)]
        self.split_partials = empty((max(sizes[0], 4),), torch.float32)
        self.split_stats = empty((max(sizes[1], 4),), torch.float32)
        self.split_tokens, splits = 0, 0
        for entry in () if variant else table.role_entries(roles.PREFILL_SPLITS):
            self.split_tokens, splits = min(SPLIT_TOKENS, limits.tokens), entry.config.splits
        self.split_sums = empty((splits * self.split_tokens, shape.linear_shape("o").k), torch.float32)
        self.split_lse = empty((splits * self.split_tokens, heads), torch.float32)
        self.split_arrived = empty((max(sizes[2], 4),), torch.int32).zero_()
        least = min(int(e.kernel.constants["CHUNK"]) for e in table.role_entries(roles.CHOOSE))
        chunks = div_ceil(shape.vocab_size, least)
        self.chunk_max = empty((limits.rows * chunks,), torch.float32)
        self.chunk_token = empty((limits.rows * chunks,), torch.int32)


def make_exchange_layout(shape: EngineShape, target: str, limits: StepLimits, *, invariant: bool) -> ExchangeLayout:
    """Lay out the memory that a rank shares. Batch-invariant engines pull every number of rows."""
    least = 1 if invariant else PUSHED_ROWS + 1
    floats = invariant or shape.has_float_sums(target, least, limits.tokens)
    pulled = limits.tokens if limits.tokens >= least else 0
    return ExchangeLayout(
        shape.ranks, shape.spec.hidden_size, pushed_type(shape.dtype), pulled, 4 if floats else 2, limits.rows,
        shape.spec.vocab_size,
    )  # fmt: skip


def wide_floats(shape: EngineShape, target: str, tokens: int, *, invariant: bool) -> int:
    """Count float32 elements for the widest results of a layer's product in any step of up to `tokens` rows. Attention
    with divided keys uses them too, in float32 whatever products give."""
    most = 0  # in units of 16 bits
    narrow = max(shape.linear_shape(role).n for role in ("qkv", "o", "down"))
    gate_up = max(narrow, 2 * shape.spec.intermediate_size, 2 * shape.linear_shape("o").k)
    limits = (shape.most_kernel_rows(target, "qkv"), shape.most_narrow_rows(target), ANY)
    for rows in {min(tokens, limit) for limit in limits}:  # the most rows of each kind of product
        product = roles.KERNEL if invariant else shape.choose_product(target, "qkv", rows)
        halves = 1 if product.results == "bfloat16" else 2
        most = max(most, rows * (narrow if product.kernels else gate_up) * halves)
    return div_ceil(most, 2)
