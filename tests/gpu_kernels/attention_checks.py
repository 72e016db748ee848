"""Checks of paged attention against a float64 reference, for whatever runs it: Triton's interpreter or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from kernel_checks import E4M3, EPSILON, TORCH, Runner, to_e4m3

from wicore_trt.plugins import layout
from wicore_trt.plugins.kernels import specs
from wicore_trt.plugins.layout import Pool, PoolShape, Slices, Tables


@dataclass(frozen=True)
class Case:
    """Slices are (first position, tokens), images (first row of the step, rows)."""

    slices: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_tokens: int = 8
    dtype: str = "float32"
    kv_dtype: str = "float32"
    window: int = 0
    block_rows: int = 16
    images: tuple[tuple[int, int], ...] = ()


@dataclass
class Problem:
    """A case with data: layer 1 of 2 in the pool holds `keys` and `values` [positions, kv_heads, D] (float64, as
    stored) of each slice; every other slot is NaN, every page outside of the window absent."""

    case: Case
    q: torch.Tensor
    pool: torch.Tensor
    tables: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    kv_scale: float = 1.0

    def low(self, s: int) -> int:
        first = self.case.slices[s][0]
        return max(0, first - self.case.window + 1) if self.case.window else 0

    def key_ends(self) -> torch.Tensor:
        """Of each row: behind its own position, or its image."""
        ends = torch.cat([torch.arange(first, first + n) + 1 for first, n in self.case.slices])
        for row, count in self.case.images:
            ends[row : row + count] = ends[row + count - 1].clone()
        return ends.int()

    def bounds(self) -> list[int]:
        lengths = torch.tensor([0] + [n for _, n in self.case.slices])
        return lengths.cumsum(0).tolist()


def make(case: Case) -> Problem:
    size, d = case.page_tokens, case.head_dim
    ends = [first + n for first, n in case.slices]
    columns = -(-max(ends) // size)
    pages = len(ends) * columns + 3
    pool = torch.full((pages, 2, 2, size, case.kv_heads, d), torch.nan)
    pool = pool.to(E4M3).view(torch.uint8) if case.kv_dtype == "fp8" else pool.to(TORCH[case.kv_dtype])
    tables = torch.randperm(pages)[: len(ends) * columns].view(len(ends), columns).int()
    total = sum(n for _, n in case.slices)
    problem = Problem(case, torch.randn(total, case.heads, d).to(TORCH[case.dtype]), pool, tables)
    problem.kv_scale = 0.3 if case.kv_dtype == "fp8" else 1.0
    for s, end in enumerate(ends):
        low = problem.low(s)
        tables[s, : low // size] = -1
        tables[s, -(-end // size) :] = -1
        kv = torch.randn(end, 2, case.kv_heads, d) * (1 if case.kv_dtype != "fp8" else 0.7)
        stored = to_e4m3(kv / problem.kv_scale) if case.kv_dtype == "fp8" else kv.to(pool.dtype)
        for p in range(low, end):
            pool[tables[s, p // size], 1, :, p % size] = stored[p]
        exact = (stored.view(E4M3).double() * problem.kv_scale) if case.kv_dtype == "fp8" else stored.double()
        problem.keys.append(exact[:, 0])
        problem.values.append(exact[:, 1])
    return problem


def attend(run: Runner, problem: Problem) -> torch.Tensor:
    """The kernel's result, with rows behind the last token that must stay as they are."""
    case = problem.case
    shape = PoolShape(2, case.page_tokens, case.kv_heads, case.head_dim, case.kv_dtype)
    spec = specs.attention_spec(shape, case.heads, block_rows=case.block_rows)
    total = problem.q.shape[0]
    noise = torch.full((total + 7, case.heads, case.head_dim), 77.0, dtype=problem.q.dtype)
    noise[:total] = torch.nan
    out = run.put(noise)
    call = layout.attention_launch(
        spec.constants,
        run.put(problem.q),
        out,
        Pool(run.put(problem.pool)[:, 1:], shape),
        Tables(run.put(problem.tables), *problem.tables.shape),
        Slices(run.ints(problem.bounds()), run.ints([first for first, _ in case.slices]), total),
        case.head_dim**-0.5,
        case.window,
    )
    run.launch(spec, call)
    result = out.cpu()
    assert (result[total:] == 77.0).all(), "rows of nobody were written"
    return result[:total]


def reference(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact result, and the error that the operands' rounding allows: weights are rounded to the queries' type before
    the second product, and so is the result; scores are float32."""
    case, epsilon = problem.case, EPSILON[problem.case.dtype]
    results, errors = [], []
    bounds = problem.bounds()
    for s, (first, n) in enumerate(case.slices):
        q = problem.q[bounds[s] : bounds[s + 1]].double()
        low = problem.low(s)
        k, v = (x[low:].repeat_interleave(case.heads // case.kv_heads, 1) for x in (problem.keys[s], problem.values[s]))
        scores = torch.einsum("thd,phd->htp", q, k) * case.head_dim**-0.5
        key = torch.arange(low, first + n)[None, :]
        behind = torch.arange(first, first + n)[:, None] - key
        hidden = key >= problem.key_ends()[bounds[s] : bounds[s + 1], None]
        hidden |= (behind >= case.window) if case.window else False
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(nan=torch.nan)
        results.append(torch.einsum("htp,phd->thd", weights, v))
        errors.append(torch.einsum("htp,phd->thd", weights, v.abs()) * (2 * epsilon + 4e-6))
    return torch.cat(results), torch.cat(errors)


def check_case(run: Runner, case: Case) -> None:
    problem = make(case)
    got, (want, error) = attend(run, problem).double(), reference(problem)
    assert got.isfinite().all(), "a slot that no query sees was used"
    worst = ((got - want).abs() / error).max().item() if got.numel() else 0.0
    assert worst <= 1, f"{worst:.2f} times the error that rounding allows"


def check_poison(run: Runner, window: int) -> None:
    """A key or value that is NaN or infinite reaches the tokens that see it and no others of their block."""
    case = Case(((3, 40),), head_dim=16, page_tokens=8, window=window, kv_dtype="float16", dtype="float16")
    for kv, value in ((0, torch.nan), (1, torch.nan), (1, torch.inf)):
        problem = make(case)
        clean = attend(run, problem)
        bad = 21
        problem.pool[problem.tables[0, bad // 8], 1, kv, bad % 8, :, 5] = value
        got = attend(run, problem)
        position = torch.arange(3, 43)
        sees = (position >= bad) & ((position < bad + window) if window else True)
        assert not got[sees].isfinite().all(-1).any(), "a poisoned key was hidden"
        assert torch.equal(got[~sees], clean[~sees]), "a key that is not seen changed the result"


def check_missing_page(run: Runner) -> None:
    """An absent page inside the window gives NaN, not a wrong number; so does a table that is too short."""
    case = Case(((30, 2), (0, 9)), window=20, head_dim=16)
    whole = make(case)
    clean = attend(run, whole)
    for cut in (False, True):
        problem = replace(whole, tables=whole.tables.clone())
        if cut:
            problem.tables = problem.tables[:, :3].contiguous()
        else:
            problem.tables[0, 2] = -1
        got = attend(run, problem)
        assert got[:2].isnan().all() and torch.equal(got[2:], clean[2:])


def check_rows_alone(run: Runner, dtype: str) -> None:
    """A token's result has the same bits whether it is computed alone, in a chunk, or beside other sequences."""
    case = Case(((5, 60),), heads=8, kv_heads=2, head_dim=64, page_tokens=16, dtype=dtype, kv_dtype=dtype, window=33)
    case = replace(case, block_rows=32)
    whole = make(replace(case, slices=((5, 60), (0, 7))))
    together = attend(run, whole)
    for cuts in ((0, 60), (0, 1, 2, 31, 60), tuple(range(0, 61, 12))):
        for a, b in zip(cuts, cuts[1:], strict=False):
            part = replace(whole, case=replace(case, slices=((5 + a, b - a),)))
            part.q, part.tables = whole.q[a:b], whole.tables[:1]
            assert torch.equal(attend(run, part), together[a:b])


RAGGED = ((0, 1), (17, 5), (9, 0), (0, 23), (31, 1), (8, 8))
EDGES = tuple((first, 5) for first in (*range(27, 34), 62))  # keys are taken 32 at a time
CASES: dict[str, Case] = {
    **{f"block edges, window {w}": Case(EDGES, 2, 1, 16, window=w) for w in (0, 31, 32, 33, 60)},
    "ragged": Case(RAGGED),
    "ragged, window 8, pages of 8": Case(RAGGED, window=8),
    "ragged, window 1": Case(RAGGED, window=1),
    "ragged, window 9, pages of 5": Case(RAGGED, window=9, page_tokens=5),
    "270M heads, bf16, window": Case(
        ((70, 3), (0, 30)), 4, 1, 256, 16, dtype="bfloat16", kv_dtype="bfloat16", window=40
    ),
    "27B heads, bf16": Case(((100, 1), (63, 2), (0, 66)), 4, 2, 128, 32, dtype="bfloat16", kv_dtype="bfloat16"),
    "27B heads, fp16, blocks of 64": Case(
        ((0, 130),), 4, 2, 128, 32, dtype="float16", kv_dtype="float16", window=64, block_rows=64
    ),
    "three query heads per KV head": Case(((7, 20),), 6, 2, 16, 4, window=5),
    "one token at position 0": Case(((0, 1),)),
    "seventy sequences": Case(tuple((i % 9, i % 3) for i in range(70)), 2, 1, 16),
}
CHECKS: dict[str, Callable[[Runner], None]] = {
    **{f"attention: {name}": partial(check_case, case=case) for name, case in CASES.items()},
    "attention: poison": partial(check_poison, window=0),
    "attention: poison, window": partial(check_poison, window=13),
    "attention: missing page": check_missing_page,
    **{f"attention: rows alone, {dtype}": partial(check_rows_alone, dtype=dtype) for dtype in ("float32", "bfloat16")},
}
