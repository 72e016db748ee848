"""Attention of made-up steps through `TritonOps`, whichever way it goes, beside its definition in float64.

A `Bench` has an engine's kernels for random small shapes and block sizes, interpreted; `Bench.step` puts a step of
slices on it as the executor does, padded or not, with all memory poisoned that the step is not to read: pages of
nobody, slots behind a slice's last token, rows of nobody, what earlier steps left. The reference is the definition of
attention, over keys as they were made, not as they lie in pages.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from runtime.triton_cpu import CpuDevice, InterpretingLauncher, specs_of

from wicore_trt.backends.triton import memory as triton_memory
from wicore_trt.backends.triton import products
from wicore_trt.backends.triton.inputs import StepBlock
from wicore_trt.backends.triton.memory import StepLimits, StepMemory
from wicore_trt.backends.triton.ops import StepArrays, TritonModel, TritonOps, Value
from wicore_trt.backends.triton.rows import RowPlan, decode_plan, make_plan
from wicore_trt.backends.triton.segments import make_segment_attention
from wicore_trt.backends.triton.table import EngineShape
from wicore_trt.checkpoint.names import kv_scale_name
from wicore_trt.kv.sequence_pages import STAMPS
from wicore_trt.model.spec import GLOBAL, GROUPS, LOCAL, Gemma3Spec
from wicore_trt.plugins.decode_layout import MEASURED_PREFILL, MEASURED_SEGMENTS, SPLIT_PREFILL, PrefillConfig, Segments
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.dtypes import E4M3, TORCH_DTYPES
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.step_inputs import StepInputs
from wicore_trt.weight_format import PLAIN

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Largest relative error of rounding to a type."""
LAYERS = (LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL)
ROWS = 12


@dataclass(frozen=True)
class Shape:
    """Sizes of an engine and of its kernels' blocks. `few`: the most tokens whose keys are split."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_tokens: int = 8
    dtype: str = "float16"
    kv_dtype: str = "float16"
    window: int = 20
    scalar: float = 16.0
    block: PrefillConfig = PrefillConfig(16, 16)
    split: PrefillConfig = PrefillConfig(16, 16, splits=3, least=32)
    segments: Segments = Segments(32, 48, 32, 2)
    few: int = 40
    context: int = 400
    tokens: int = 200
    invariant: bool = False

    @classmethod
    def random(cls, rng: random.Random, **given: Any) -> Shape:
        kv_heads, dtype = rng.choice((1, 1, 2, 3)), rng.choice(("float16", "float16", "bfloat16"))
        block_m, block_k, page = rng.choice((16, 16, 32)), rng.choice((16, 16, 32)), rng.choice((1, 4, 8, 16, 32, 64))
        unit = max(block_k, page)
        least = block_m * rng.randint(1, 2)
        few = PrefillConfig(
            rng.choice((16, 32)), rng.choice((16, 32)), splits=rng.choice((2, 3, 8)), least=rng.choice((1, 16, 50, 96))
        )
        values: dict[str, Any] = {
            **{"heads": kv_heads * rng.choice((1, 2, 3)), "kv_heads": kv_heads, "page_tokens": page, "dtype": dtype},
            **{"head_dim": rng.choice((16, 16, 16, 32)), "kv_dtype": rng.choice((dtype, "fp8"))},
            **{"window": rng.choice((1, 2, block_k - 1, block_k, block_k + 1, page, 50, 300))},
            **{"scalar": rng.choice((16.0, 24.0, 1.0, 1e4)), "block": PrefillConfig(block_m, block_k), "split": few},
            "segments": Segments(
                unit * rng.randint(1, 3), least + block_m * rng.randint(0, 2), least, rng.choice((1, 2, 3))
            ),
            **{"few": rng.choice((0, 24, 40)), "context": rng.choice((150, 400))},
        }
        return cls(**values | given)

    def spec(self) -> Gemma3Spec:
        sizes = {"vocab_size": 48, "hidden_size": 32, "num_layers": len(LAYERS), "intermediate_size": 2 * self.tokens}
        sizes |= {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}
        rest = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_theta": 1e4, "rope_scaling_factor": 1.0}
        return Gemma3Spec(
            **sizes,
            **rest,
            query_pre_attn_scalar=self.scalar,
            sliding_window=self.window,
            layer_groups=LAYERS,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )


@dataclass
class Piece:
    """`tokens` of a sequence from position `start` on. `reserved`: pages that it has beyond those."""

    seq_id: int
    start: int
    tokens: int
    reserved: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict, repr=False)
    stamp: int = field(default_factory=STAMPS.__next__, repr=False)

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass
class Made:
    """What a step was made of: keys and values [positions, kv_heads, D] of each piece, exactly as stored, its queries
    [tokens, heads, D], what came out, and the way that its tokens went."""

    piece: Piece
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    found: torch.Tensor
    way: str


class Bench:
    """An engine's attention for one shape. `ways` counts what was launched for which pieces."""

    def __init__(self, shape: Shape, rng: random.Random, target: str = "sm90") -> None:
        self.shape, self.rng, self.device = shape, rng, CpuDevice(target)
        self.ways: Counter[str] = Counter()
        engine = EngineShape(shape.spec(), shape.dtype, PLAIN[shape.dtype], shape.kv_dtype, shape.page_tokens)
        limits = StepLimits(shape.tokens, ROWS, shape.context)
        with self._sizes():
            specs_of.cache_clear()
            table, specs = specs_of(engine, target)
            specs_of.cache_clear()
            invariant = shape.invariant
            segments = None if invariant else make_segment_attention(engine, table, limits, self.device.empty)
            spare = segments.segments.rows if segments else 0
            memory = StepMemory(engine, table, limits, self.device.empty, invariant=invariant, spare_queries=spare)
        pages = 4 + ROWS * (-(-shape.context // shape.page_tokens) + 3)
        self.layout = KVLayout(
            shape.page_tokens, shape.kv_dtype, dict.fromkeys(GROUPS, pages), dict.fromkeys(GROUPS, 1)
        )
        kept = torch.uint8 if shape.kv_dtype == "fp8" else TORCH_DTYPES[shape.dtype]
        pools = {
            g: self.device.empty((pages, LAYERS.count(g), 2, shape.page_tokens, shape.kv_heads, shape.head_dim), kept)
            for g in GROUPS
        }
        self.scales = self.device.empty((len(LAYERS), 4), torch.float32).copy_(
            torch.tensor([[rng.choice((0.013, 0.3, 1.0, 7.0))] * 4 for _ in LAYERS])
        )
        weights = {kv_scale_name(i): self.scales[i] for i in range(len(LAYERS))} if shape.kv_dtype == "fp8" else {}
        self.launcher = InterpretingLauncher(self.device, specs)
        self.model = TritonModel(engine, table, weights, {}, pools, memory, self.launcher, 0, {}, invariant, segments)
        if segments is not None:
            segments.wanted = True
        self.block = StepBlock(limits, GROUPS, shape.page_tokens, ROWS, self.device)
        self.tokens = 0
        """Of the last step, with its padding."""

    @contextmanager
    def _sizes(self) -> Iterator[None]:
        shape = self.shape
        key = ("sm90", shape.head_dim)
        with (
            mock.patch.dict(MEASURED_SEGMENTS, {key: shape.segments}),
            mock.patch.dict(SPLIT_PREFILL, {key: shape.split}),
            mock.patch.dict(MEASURED_PREFILL, {(*key, n): ((1 << 31, shape.block),) for n in (1, 2)}),
            mock.patch.object(triton_memory, "KEPT_TOKENS", shape.few),
            mock.patch.object(triton_memory, "SPLIT_TOKENS", shape.few),
        ):
            yield

    def place(self, pieces: Sequence[Piece]) -> None:
        """Pages for the pieces: at random, those before the window of the first token are gone."""
        size = self.shape.page_tokens
        for group in GROUPS:
            free = self.rng.sample(range(self.layout.num_pages[group]), self.layout.num_pages[group])
            for piece in pieces:
                count = min(-(-piece.end // size) + piece.reserved, -(-self.shape.context // size))
                table = [free.pop() for _ in range(count)]
                if group == LOCAL:
                    gone = max(0, piece.start - self.shape.window + 1) // size
                    table[:gone] = [-1] * gone
                piece.pages[group] = table

    def fill(self, layer: int, pieces: Sequence[Piece], lively: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Random keys and values of the pieces at a layer in their pages, and nothing else but poison."""
        shape, group = self.shape, LAYERS[layer]
        pool, index = self.model.pools[group], [i for i, g in enumerate(LAYERS) if g == group].index(layer)
        self._poison_pool(pool)
        found = []
        for piece in pieces:
            kv = torch.randn(piece.end, 2, shape.kv_heads, shape.head_dim)
            kv[:, 0] *= lively
            if self.rng.random() < 0.3:  # a few keys that outweigh all others
                kv[[self.rng.randrange(piece.end) for _ in range(3)], 0] *= 4
            if shape.kv_dtype == "fp8":
                scale = float(self.scales[layer, 0])
                stored = kv.clamp(-448, 448).to(E4M3)
                exact, stored = stored.double() * scale, stored.view(torch.uint8)
            else:
                stored = kv.to(pool.dtype)
                exact = stored.double()
            position = torch.arange(piece.end)
            pages = torch.tensor(piece.pages[group], dtype=torch.int64)[position // shape.page_tokens]
            there = pages >= 0
            slots = (position % shape.page_tokens)[there]
            for half in (0, 1):
                pool[pages[there], index, half, slots] = stored[there, half]
            found.append((exact[:, 0], exact[:, 1]))
        return found

    def _poison_pool(self, pool: torch.Tensor) -> None:
        if pool.dtype == torch.uint8:
            pool.fill_(self.rng.choice((0x7F, 0xFF, 0x7E, 0xFE)))
        else:
            pool.fill_(self.rng.choice((torch.nan, torch.inf, -torch.inf, 6e4)))

    def _poison(self) -> None:
        memory, segments = self.model.memory, self.model.segments
        given = [memory.q, memory.attended, memory._wide, memory.queries, memory.split_sums, memory.split_lse]
        given += [memory.split_partials, memory.split_stats]
        given += [segments._dense, segments.lse] if segments is not None else []
        for tensor in given:
            if tensor.dtype == torch.float32 and self.rng.random() < 0.5:
                tensor.fill_(self.rng.choice((-torch.inf, torch.inf, 1e30, 0.0)))
            else:
                tensor.view(torch.uint8).fill_(self.rng.choice((0xFF, 0x7F)))
        for block in (self.block._block, *self.block._hosts):
            block.fill_(1 << 20)

    def padding(self, pieces: Sequence[Piece]) -> RowPlan:
        """The plan of a graph that could hold the step."""
        rng, singles = self.rng, [p.tokens for p in pieces].count(1)
        chunks, count = len(pieces) - singles, sum(p.tokens for p in pieces)
        room = ROWS - singles - chunks
        if not chunks:
            return decode_plan(singles + rng.randint(0, min(3, room)))
        alone = rng.randint(0, min(2, room))
        several = rng.randint(0, min(2, room - alone))
        more = rng.randint(0, min(20, self.shape.tokens - count - alone))
        first, others = singles + alone, chunks + several
        return make_plan(count + alone + more, first, others, first + others)

    def step(
        self, pieces: Sequence[Piece], layer: int, *, padded: bool, queries: Sequence[torch.Tensor], poison: bool = True
    ) -> list[torch.Tensor]:
        """What attention gives for the tokens of each piece, [tokens, heads, D]; keys lie in their pages already."""
        slices = [SequenceSlice(p.seq_id, [7] * p.tokens, p.start, p.pages, sample=True, stamp=p.stamp) for p in pieces]
        if poison:
            self._poison()
        ordered, plan = self.block.arrange_slices(slices)
        order = [next(i for i, s in enumerate(slices) if s is piece) for piece in ordered]
        if padded:
            size = self.padding(pieces)
            self.block.upload_padded(ordered, plan, size, self.layout.num_pages)
            arrays, begin = self.block.padded_arrays(size), size.decode.rows
        else:
            inputs = StepInputs.from_batch(StepBatch(ordered), self.layout, GROUPS)
            arrays, begin = self.block.upload_step(inputs, plan), plan.decode.rows
        self.tokens = arrays.plan.tokens
        rows: dict[int, slice] = {}
        at = begin
        for number, i in enumerate(order):
            count = pieces[i].tokens
            rows[i] = slice(number, number + 1) if count == 1 else slice(at, at + count)
            at += count if count > 1 else 0
        return self._attend(arrays, layer, rows, queries)

    def _attend(
        self, arrays: StepArrays, layer: int, rows: dict[int, slice], queries: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        ops, full = TritonOps(self.model, arrays), products.full_attention
        self.launcher.more = []
        q = ops._query_rows(layer)
        for i, place in rows.items():
            q[place] = queries[i].flatten(1)

        def found(*args: Any) -> Any:
            out, lse = full(*args)
            turned = self.rng.random() < 0.5  # heads may lie side by side, or rows
            kept = [(out.transpose(0, 1) if turned else out).contiguous(), lse.contiguous()]
            self.launcher.more += kept
            return kept[0].transpose(0, 1) if turned else kept[0], kept[1]

        with mock.patch.object(products, "full_attention", found):
            out = ops.attention(Value(q), layer).rows
        return [out[rows[i]].view(-1, self.shape.heads, self.shape.head_dim).clone() for i in range(len(rows))]

    def way(self, pieces: Sequence[Piece], layer: int, piece: Piece) -> str:
        """How a piece's attention is computed in a step of these, by what this bench was told."""
        shape, tokens = self.shape, sum(p.tokens for p in pieces)
        if piece.tokens == 1 and not shape.invariant:
            return "decode"
        if LAYERS[layer] == LOCAL:
            return "window"
        if shape.invariant:
            return "whole"
        return "large" if tokens > self.model.memory.queries.shape[1] else "few"


def exact(made: Made, shape: Shape, window: int, *, dense: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64, and how far from it the roundings of operands, results and float32 scores may lead.
    `dense`: keys and values may have been rounded to the queries' type."""
    piece, repeat, scale = made.piece, shape.heads // shape.kv_heads, shape.scalar**-0.5
    q, k, v = made.queries.double(), *(x.repeat_interleave(repeat, 1) for x in (made.keys, made.values))
    behind = torch.arange(piece.start, piece.end)[:, None] - torch.arange(piece.end)[None, :]
    hidden = (behind < 0) | ((behind >= window) if window else False)
    scores = (torch.einsum("thd,phd->htp", q, k) * scale).masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1)
    result = torch.einsum("htp,phd->thd", weights, v)
    size = torch.einsum("htp,phd->thd", weights, v.abs())
    weight_type = "float16" if shape.kv_dtype == "fp8" else shape.dtype
    most = torch.einsum("thd,phd->htp", q.abs(), k.abs()).masked_fill(hidden, 0).amax(-1) * scale
    off = most * (16 * UNIT["float32"])
    units = 1.05 * (UNIT[weight_type] + UNIT[shape.dtype])
    if dense:
        units += 2 * UNIT[shape.dtype]
        if shape.kv_dtype == "fp8":
            off = off + most * UNIT[shape.dtype]
    error = size * (units + 2e-6 + 2 * off.T[:, :, None].expm1()) + 2.0**-24
    if weight_type == "float16":  # small weights lose their last bits
        error = error + 2.0**-25 * torch.einsum("htp,phd->thd", (~hidden).double().expand(weights.shape), v.abs())
    return result, error


def worst(made: Made, shape: Shape, layer: int, way: str) -> float:
    """The largest error of a piece in units of what may be; infinite where something is not finite."""
    if not made.found.isfinite().all():
        return float("inf")
    window = shape.window if LAYERS[layer] == LOCAL else 0
    want, error = exact(made, shape, window, dense=way == "large")
    return float(((made.found.double() - want).abs() / error).max())
