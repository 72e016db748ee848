"""Native QK-norm, rotation, KV write and paged attention: against float64, and the same bits however the sequences
are cut into steps, batched and laid out in pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from wicore_trt.backends.torch import native_args
from wicore_trt.backends.torch.native import NativeLibrary
from wicore_trt.backends.torch.native_args import OPERANDS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6
UNIT = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@dataclass
class Model:
    """One attention layer (the second of two in its pool) and random weights."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_tokens: int
    window: int | None
    rng: torch.Generator
    weights: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    rope: tuple[torch.Tensor, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = (1 + torch.randn(self.dim, generator=self.rng), 1 + torch.randn(self.dim, generator=self.rng))
        angle = torch.rand(600, self.dim // 2, generator=self.rng) * 7
        self.rope = (angle.cos(), angle.sin())

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randn(count, (self.heads + 2 * self.kv_heads) * self.dim, generator=self.rng)

    def new_pool(self, pages: int) -> torch.Tensor:
        shape = (pages, 2, 2, self.page_tokens, self.kv_heads, self.dim)
        return torch.full(shape, torch.nan, dtype=self.kv_dtype)


@dataclass
class Piece:
    """Consecutive tokens of one sequence: what a step computes of it."""

    qkv: torch.Tensor
    start: int
    pages: list[int]


def step(lib: NativeLibrary, model: Model, pool: torch.Tensor, pieces: list[Piece]) -> list[torch.Tensor]:
    """q and attention output [n, 2, heads, D] of each piece, after one step over all of them."""
    lengths = [len(p.qkv) for p in pieces]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(p.start, p.start + len(p.qkv)) for p in pieces]).int()
    table = torch.full((len(pieces), max(len(p.pages) for p in pieces)), -1, dtype=torch.int32)
    for row, piece in zip(table, pieces, strict=True):
        row[: len(piece.pages)] = torch.tensor(piece.pages)
    geometry = native_args.StepGeometry()
    native_args.set_step(geometry, cu_seqlens, positions, table)
    kv = native_args.layer_kv(pool, 1, model.heads, geometry)
    n, width, operand = sum(lengths), model.heads * model.dim, OPERANDS[model.dtype]
    q = torch.full((n, model.heads, model.dim), torch.nan, dtype=operand)
    out = torch.full((n, width), torch.nan, dtype=operand)
    qkv = torch.cat([p.qkv for p in pieces])
    lib.run(
        [
            native_args.make_qk_norm_rope_write(qkv, model.weights, model.rope, EPS, model.dtype, kv, q),
            native_args.make_attention(q, kv, model.window or 0, model.scale, model.dtype, out),
        ]
    )
    both = torch.stack((q, out.view_as(q)), dim=1).float()
    return list(both.split(lengths))


def pages_for(model: Model, length: int, first: int = 0) -> list[int]:
    return list(range(first, first + -(-length // model.page_tokens)))


def rotate_exactly(model: Model, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k after norm and rotation, and v, of a whole sequence in float64, unrounded: [n, heads, D] each."""
    n, (cos, sin) = len(qkv), (t[: len(qkv), None].double() for t in model.rope)
    q, k, v = qkv.view(n, -1, model.dim).double().split([model.heads, model.kv_heads, model.kv_heads], dim=1)

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return rotated(q, model.weights[0]), rotated(k, model.weights[1]), v


def attend_exactly(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention output [n, heads, D] in float64 of operands as the kernels rounded them."""
    repeat = model.heads // model.kv_heads
    k, v = (t.repeat_interleave(repeat, 1).transpose(0, 1) for t in (k, v))
    behind = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = behind < 0 if model.window is None else (behind < 0) | (behind >= model.window)
    weights = (q.transpose(0, 1) @ k.transpose(1, 2) * model.scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_tokens", "window", "length"),
    [
        (4, 1, 256, 16, None, 100),
        (4, 1, 256, 32, 40, 130),
        (2, 2, 16, 8, None, 33),
        (6, 3, 48, 5, 7, 61),
        (8, 4, 64, 64, 33, 150),
        (34, 1, 32, 16, None, 20),
        (1, 1, 80, 1, 3, 9),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_attention_matches_float64(
    lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype, kv_dtype: torch.dtype,
    heads: int, kv_heads: int, dim: int, page_tokens: int, window: int | None, length: int,
) -> None:  # fmt: skip
    model = Model(heads, kv_heads, dim, dtype, kv_dtype, page_tokens, window, rng)
    qkv = model.tokens(length)
    pages = pages_for(model, length, first=3)
    pool = model.new_pool(len(pages) + 5)
    (both,) = step(lib, model, pool, [Piece(qkv, 0, pages)])
    exact = rotate_exactly(model, qkv)
    k, v = (t.flatten(0, 1)[:length].double() for t in pool[pages, 1].unbind(1))
    for got, true, unit in zip((both[:, 0].double(), k, v), exact, (UNIT[dtype], *[UNIT[kv_dtype]] * 2), strict=True):
        assert torch.allclose(got, true, rtol=unit * 1.01 + 1e-6, atol=1e-5)
    # A value next to a rounding boundary may fall on either side of it: attention is judged by the operands as rounded.
    out = attend_exactly(model, both[:, 0].double(), k, v)
    tolerance = UNIT[dtype] + 2e-5 + 8 * UNIT[dtype] * (dtype != torch.float32)
    assert torch.allclose(both[:, 1].double(), out, rtol=tolerance, atol=tolerance)
    assert (both[:, 1].double() - out).norm() <= (UNIT[dtype] + 1e-5) * out.norm()
    assert torch.equal(both[:, 1], both[:, 1].to(dtype).float())


def test_only_the_written_slots_change(lib: NativeLibrary, rng: torch.Generator) -> None:
    model = Model(2, 1, 32, torch.bfloat16, torch.bfloat16, 8, None, rng)
    pool = model.new_pool(6)
    step(lib, model, pool, [Piece(model.tokens(5), 6, [4, 2])])
    written = ~pool.isnan()
    expected = torch.zeros_like(written)
    expected[4, 1, :, 6:], expected[2, 1, :, :3] = True, True
    assert torch.equal(written, expected)


def chunked(
    lib: NativeLibrary, model: Model, pool: torch.Tensor, qkv: torch.Tensor, pages: list[int], cuts: list[int]
) -> torch.Tensor:
    """The sequence computed alone in steps that end at `cuts`; local pages are dropped once they slid out."""
    outs, start = [], 0
    for end in [*cuts, len(qkv)]:
        table = list(pages[: -(-end // model.page_tokens)])
        if model.window is not None:
            for slid in range(max(0, start - model.window + 1) // model.page_tokens):
                table[slid] = -1
        outs += step(lib, model, pool, [Piece(qkv[start:end], start, table)])
        start = end
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_tokens", "window"),
    [(4, 1, 64, 16, None), (4, 1, 256, 32, 50), (4, 2, 32, 40, 23), (3, 3, 16, 3, 11)],
)
def test_chunks_pages_company_and_threads_do_not_change_bits(
    lib: NativeLibrary, rng: torch.Generator, dtype: torch.dtype,
    heads: int, kv_heads: int, dim: int, page_tokens: int, window: int | None,
) -> None:  # fmt: skip
    model = Model(heads, kv_heads, dim, dtype, dtype, page_tokens, window, rng)
    lengths = [1, 47, 150]
    sequences = [model.tokens(n) for n in lengths]
    sequences[2][:, :] *= torch.logspace(-3, 2, lengths[2])[:, None]  # values of every size, growing maxima
    count = sum(-(-n // page_tokens) for n in lengths)
    alone = []
    for qkv in sequences:
        (whole,) = step(lib, model, model.new_pool(count), [Piece(qkv, 0, pages_for(model, len(qkv)))])
        assert whole.isfinite().all()
        alone.append(whole)
    for threads in (1, 2):
        lib.set_threads(threads)
        for _ in range(3):
            slots = torch.randperm(count, generator=rng).tolist()
            pages = [[slots.pop() for _ in pages_for(model, n)] for n in lengths]
            pool = model.new_pool(count)
            for qkv, own, expected in zip(sequences, pages, alone, strict=True):
                cuts = sorted({int(c) for c in torch.randint(1, len(qkv) + 1, (4,), generator=rng)} - {len(qkv)})
                assert torch.equal(chunked(lib, model, pool, qkv, own, cuts), expected)
            order = torch.randperm(3, generator=rng).tolist()
            together = step(lib, model, model.new_pool(count), [Piece(sequences[i], 0, pages[i]) for i in order])
            for i, out in zip(order, together, strict=True):
                assert torch.equal(out, alone[i])
    lib.set_threads(2)
    one_by_one = chunked(lib, model, model.new_pool(count), sequences[1], pages_for(model, 47), list(range(1, 47)))
    assert torch.equal(one_by_one, alone[1])
