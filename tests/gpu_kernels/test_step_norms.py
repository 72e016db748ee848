"""Norms, rotation and KV write of a step against float64: in the interpreter, and on a GPU where there is one."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import torch
from kernel_checks import E4M3, EPSILON, TORCH, Runner, noise, same_bits
from step_runners import RUNNERS

from benchmarks.gpu.kernels.linear_cases import order_columns, unorder_columns
from wicore_trt.plugins import step_layout
from wicore_trt.plugins.kernels import step_specs
from wicore_trt.plugins.kernels.step_specs import NormShape
from wicore_trt.plugins.layout import Pool, PoolShape, Tables
from wicore_trt.plugins.step_layout import NormOut, QkNorms, RopeTable, StepTokens

EPS = 1e-6


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@dataclass
class Out:
    """Poisoned output of a norm."""

    run: Runner
    shape: NormShape
    rows: int
    out: torch.Tensor = field(init=False)
    scales: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        dtype = torch.uint8 if self.shape.fp8 else TORCH[self.shape.dtype]
        bits = torch.full((self.rows + 1, self.shape.hidden * dtype.itemsize), 0xFF, dtype=torch.uint8)
        self.out = self.run.put(bits.view(dtype))
        self.scales = self.run.put(torch.full((self.rows + 1,), math.nan))

    def where(self) -> NormOut:
        return NormOut(self.out, self.scales if self.shape.fp8 else 0)

    def check(self, want: torch.Tensor) -> None:
        """Against float64; the guard row behind the last one must be untouched."""
        out, scales = self.out.cpu(), self.scales.cpu()
        out = unorder_columns(out) if self.shape.ordered else out
        assert (out[-1].view(torch.uint8) == 0xFF).all() and scales[-1].isnan()
        step = EPSILON[self.shape.dtype]
        if not self.shape.fp8:
            bound = want.abs() * (step + 1e-5) + (2.0**-25 if self.shape.dtype == "float16" else 0)
            assert ((out[:-1].double() - want).abs() <= bound).all()
            return
        peak = want.abs().amax(-1)
        zero = peak == 0
        assert (scales[:-1][zero] == 1).all() and ((out[:-1][zero] & 0x7F) == 0).all()
        torch.testing.assert_close(scales[:-1].double()[~zero], peak[~zero] / 448, rtol=step + 1e-5, atol=0)
        got = out[:-1].view(E4M3).double() * scales[:-1, None].double()
        # Half a step of E4M3 (2**-4 of the value, 2**-10 of the scale among subnormals) on top of the operand's.
        bound = want.abs() * (2.0**-4 + 2 * step) + scales[:-1, None].double() * 2.0**-10 * 1.01
        assert ((got - want).abs() <= bound).all()
        assert (got[~zero].abs().amax(-1) >= peak[~zero] * (1 - 2 * step)).all(), "the largest value takes code 448"


SHAPES = [
    NormShape(5376, "bfloat16"),
    NormShape(640, "float16", fp8=True, native=True),
    NormShape(72, "bfloat16", fp8=True),
    NormShape(64, "float16"),
    NormShape(96, "bfloat16", ordered=True),
]


def rows_of(n: int, hidden: int) -> torch.Tensor:
    """Rows of very different sizes; the last one is zero."""
    x = torch.randn(n, hidden) * torch.exp2(torch.randint(-6, 7, (n, 1)).float())
    x[-1] = 0
    return x


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=NormShape.name)
def test_embed_norm(run: Runner, shape: NormShape) -> None:
    """Ids at both ends and outside of the vocabulary."""
    ids = [0, 10, 5, -1, 11, 10, -(2**31), 2**31 - 1]
    table = torch.randn(11, shape.hidden).to(TORCH[shape.dtype])
    w = torch.rand(shape.hidden) + 0.5
    residual = torch.full((len(ids) + 1, shape.hidden), math.nan)
    on_residual, to = run.put(residual.clone()), Out(run, shape, len(ids))
    scale = torch.tensor(math.sqrt(shape.hidden)).to(TORCH[shape.dtype]).item()
    call = step_layout.embed_norm_launch(
        run.ints(ids), (run.put(table), 11, scale), run.put(w), on_residual, to.where(), len(ids), EPS
    )
    run.launch(step_specs.embed_norm_spec(shape, 4), call)
    for i, token in enumerate(ids):
        residual[i] = table[token].float() * scale if 0 <= token < 11 else 0
    torch.testing.assert_close(on_residual.cpu(), residual, rtol=0, atol=0, equal_nan=True)
    to.check(rms(residual[:-1], w))


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize(
    ("shape", "x_dtype", "gather"),
    [
        (SHAPES[0], "bfloat16", False),
        (SHAPES[0], "float32", True),
        (SHAPES[1], "float16", True),
        (SHAPES[2], "float32", False),
        (SHAPES[3], "float32", False),
        (SHAPES[4], "float32", False),
    ],
    ids=str,
)
def test_add_norm(run: Runner, shape: NormShape, x_dtype: str, gather: bool) -> None:
    """Rows that are not gathered keep their residual; a row whose sum is zero stays one of zeros."""
    n, hidden = 6, shape.hidden
    residual = torch.cat([rows_of(n, hidden), torch.full((1, hidden), math.nan)])
    x = rows_of(n, hidden).to(TORCH[x_dtype])
    post, following = torch.rand(hidden) * 2 - 0.5, torch.rand(hidden) + 0.2
    taken = [4, 0, 3] if gather else [*range(n)]
    to, on_residual = Out(run, shape, len(taken)), run.put(residual.clone())
    call = step_layout.add_norm_launch(
        on_residual,
        run.put(x),
        (run.put(post), run.put(following)),
        to.where(),
        len(taken),
        EPS,
        gathered=run.ints(taken) if gather else 0,
    )
    run.launch(step_specs.add_norm_spec(shape, 4, x_dtype=x_dtype, gather=gather), call)
    added = rms(x.double(), post)
    want = residual.double()
    want[taken] += added[taken]
    got = on_residual.cpu()
    assert got[-1].isnan().all()
    scale = residual[:-1].abs() + added.abs().amax(-1, keepdim=True)
    assert ((got[:-1].double() - want[:-1]).abs() <= scale * 3e-6).all()
    untouched = [r for r in range(n) if r not in taken]
    assert torch.equal(got[untouched], residual[untouched])
    to.check(rms(got[taken], following))


@pytest.mark.parametrize("run", RUNNERS)
def test_order_rows(run: Runner) -> None:
    x = torch.randn(3, 544).bfloat16()
    out, spec = run.put(torch.full((4, 544), math.nan).bfloat16()), step_specs.order_spec(544, "bfloat16")
    run.launch(spec, step_layout.order_launch(spec.constants, run.put(x), out, 3))
    assert torch.equal(out[:3].cpu(), order_columns(x)) and bool(out[3].isnan().all())
    places = torch.arange(64)
    assert all(order_columns(places[None])[0, 32 * (c // 32) + place(c)] == c for c in range(64))


def place(column: int) -> int:
    t, h, u, i = column // 8 % 4, column // 4 % 2, column // 2 % 2, column % 2
    return 16 * h + 8 * u + 2 * t + i


@dataclass(frozen=True)
class Rope:
    heads: int
    kv_heads: int
    d: int
    qkv: str
    q: str
    pool: str
    block: int
    with_scale: bool = False


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize(
    "case",
    [
        Rope(4, 2, 128, "bfloat16", "bfloat16", "bfloat16", 1),
        Rope(4, 1, 256, "float32", "float16", "float16", 4),
        Rope(2, 2, 128, "float16", "float16", "fp8", 8, with_scale=True),
        Rope(2, 1, 256, "float32", "bfloat16", "fp8", 2),
    ],
    ids=str,
)
def test_qk_norm_rope_write(run: Runner, case: Rope) -> None:
    """Tokens of three sequences, shuffled; first and last position of a page, absent pages, tokens without a place."""
    shape = PoolShape(2, 4, case.kv_heads, case.d, case.pool)
    pool = noise(16, 2, 2, 4, case.kv_heads, case.d, dtype=case.pool)
    tables = torch.randperm(16)[:15].view(3, 5).tolist()
    tables[1][1] = -1
    places = [(0, 0), (0, 3), (0, 4), (0, 19), (1, 3), (1, 5), (1, 8), (2, 7), (2, 18)]
    random.shuffle(places)
    places += [(0, -1), (-1, 6), (2, 20), (2, 21), (1, 24)]  # 20: behind the table; 24: behind the angles
    n, width = len(places), (case.heads + 2 * case.kv_heads) * case.d
    qkv = (rows_of(n * (width // case.d), case.d)).view(n, width).to(TORCH[case.qkv])
    qw, kw = torch.rand(case.d) + 0.5, torch.rand(case.d) * 2
    angles = torch.rand(24, case.d // 2) * 6.3
    q_bits = torch.full((n + 1, case.heads, case.d * 2), 0xFF, dtype=torch.uint8)
    on_q, on_pool = run.put(q_bits.view(TORCH[case.q])), run.put(pool.clone())
    scale = 0.37 if case.with_scale else 1.0
    kv_scale = run.put(torch.tensor([scale])) if case.with_scale else 0
    view = on_pool if case.pool == "fp8" else on_pool.view(TORCH[case.pool])
    spec = step_specs.qk_rope_spec(shape, case.heads, case.qkv, case.q, step_specs.StepConfig(4, case.block))
    call = step_layout.qk_rope_launch(
        spec.constants,
        run.put(qkv),
        on_q,
        QkNorms(run.put(qw), run.put(kw), EPS),
        RopeTable(run.put(angles.cos()), run.put(angles.sin()), 24),
        Pool(view[:, 1:], shape, kv_scale),
        Tables(run.ints(tables), 3, 5),
        StepTokens(run.ints([p for _, p in places]), run.ints([s for s, _ in places]), n),
    )
    run.launch(spec, call)
    heads = qkv.view(n, -1, case.d).double()
    cos, sin = angles.cos().double(), angles.sin().double()
    got_q, got_pool = on_q.cpu(), on_pool.cpu()
    assert (got_q[-1].view(torch.uint8) == 0xFF).all()
    for i, (s, p) in enumerate(places):
        c, t = (cos[p], sin[p]) if 0 <= p < 24 else (torch.ones(()), torch.zeros(()))
        normed = torch.cat([rms(heads[i, : case.heads], qw), rms(heads[i, case.heads : -case.kv_heads], kw)])
        a, b = normed.chunk(2, -1)
        rotated = torch.cat([a * c - b * t, b * c + a * t], -1)
        near(got_q[i].double(), rotated[: case.heads], EPSILON[case.q])
        if s < 0 or not 0 <= p < 20 or tables[s][p // 4] < 0:
            continue
        at = (tables[s][p // 4], 1, slice(None), p % 4)
        entry = torch.stack([rotated[case.heads :], heads[i, -case.kv_heads :]])
        if case.pool == "fp8":
            near(got_pool[at].view(E4M3).double() * scale, entry.clamp(-448 * scale, 448 * scale), 2.0**-4, scale)
        else:
            near(got_pool[at].view(TORCH[case.pool]).double(), entry, EPSILON[case.pool])
        pool[at] = got_pool[at]
    same_bits(got_pool, pool)  # whatever was not checked above is as it was


def near(got: torch.Tensor, want: torch.Tensor, step: float, scale: float = 0.0) -> None:
    """Rounded once from float32 arithmetic, whose error counts against the head's largest value."""
    bound = want.abs() * step + want.abs().amax(-1, keepdim=True) * 1e-5 + scale * 2.0**-10 + 2.0**-25
    assert ((got - want).abs() <= bound).all()
