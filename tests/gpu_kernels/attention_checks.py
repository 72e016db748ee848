"""Problems of paged attention with a float64 reference, for the tests of its kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from kernel_checks import E4M3, EPSILON, TORCH, to_e4m3


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
