"""Attention masses of pages: the kernels against the torch operators, in Triton's interpreter or on a GPU.

Slots that no query sees are NaN, results and working memory start as noise, and so do queries of rows that are not
last.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import torch
from gpu_kernels.targets import targets
from kernel_checks import E4M3, TORCH, Runner, to_e4m3
from step_runners import RUNNERS

from wicore_trt.errors import ConfigError
from wicore_trt.model.spec import GLOBAL
from wicore_trt.plugins import aot
from wicore_trt.plugins.decode_layout import LastQueries, page_masses_launches
from wicore_trt.plugins.kernels.fast_attention_specs import logsums_spec, masses_spec
from wicore_trt.plugins.launch import ParameterBlock
from wicore_trt.plugins.layout import Pool, PoolShape, Tables
from wicore_trt.runtime.attention_mass import AttentionProbe
from wicore_trt.runtime.batch import SequenceSlice, StepBatch

UNWRITTEN = 77.0


@dataclass(frozen=True)
class Case:
    """`ends` of sequences of one token, in positions, 0 for a row of nobody; `slices` (first position, tokens) behind
    them. `wider`: pages of the tables beyond the longest sequence's. `together`: sequences for which there is room."""

    ends: tuple[int, ...]
    slices: tuple[tuple[int, int], ...] = ()
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_tokens: int = 8
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    wider: int = 0
    together: int = 3
    target: str = "sm90"

    @property
    def shape(self) -> PoolShape:
        return PoolShape(2, self.page_tokens, self.kv_heads, self.head_dim, self.kv_dtype)

    @property
    def lengths(self) -> list[int]:
        return [*self.ends, *(first + tokens for first, tokens in self.slices)]

    @property
    def counts(self) -> list[int]:
        return [-(-n // self.page_tokens) for n in self.lengths]


@dataclass
class Problem:
    case: Case
    q: torch.Tensor
    rows: list[int]
    pool: torch.Tensor
    tables: torch.Tensor
    kv_scale: float


def make(case: Case) -> Problem:
    """Sequences that are long enough begin with the same page as the longest one."""
    size, fp8 = case.page_tokens, case.kv_dtype == "fp8"
    columns = max(case.counts) + case.wider
    pool = torch.full((sum(case.counts) + 2, 2, 2, size, case.kv_heads, case.head_dim), torch.nan)
    pool = pool.to(E4M3).view(torch.uint8) if fp8 else pool.to(TORCH[case.kv_dtype])
    kv_scale, free = 0.3 if fp8 else 1.0, torch.randperm(len(pool)).tolist()
    tables = torch.full((len(case.lengths), columns), -1, dtype=torch.int32)
    longest = max(range(len(case.lengths)), key=case.lengths.__getitem__)
    for s in sorted(range(len(case.lengths)), key=lambda s: s != longest):
        tables[s, case.counts[s] : max(case.counts)] = random.choice((-1, free[-1]))  # a page of NaN behind the end
        for j in range(case.counts[s]):
            if j == 0 and s != longest and case.lengths[s] >= size and case.lengths[longest] >= size:
                tables[s, 0] = tables[longest, 0]
                continue
            tables[s, j] = free.pop(0)
            used = min(size, case.lengths[s] - j * size)
            keys = torch.randn(used, case.kv_heads, case.head_dim) * 2
            pool[tables[s, j], 1, 0, :used] = to_e4m3(keys / kv_scale) if fp8 else keys.to(pool.dtype)
    rows = list(range(len(case.ends)))
    for _, tokens in case.slices:
        rows.append((rows[-1] if rows else -1) + tokens)
    q = torch.full((rows[-1] + 1, case.heads, case.head_dim), torch.nan, dtype=TORCH[case.dtype])
    q[rows] = torch.randn(len(rows), case.heads, case.head_dim).to(q.dtype)
    return Problem(case, q, rows, pool, tables, kv_scale)


def measure(run: Runner, problem: Problem) -> torch.Tensor:
    """float32 [sequences, pages]."""
    case, singles = problem.case, len(problem.case.ends)
    pages = max(case.counts)
    positions = torch.full((len(problem.q),), 10**6)
    positions[problem.rows] = torch.tensor(case.lengths) - 1
    bounds = [0, *(row + 1 - singles for row in problem.rows[singles:])]
    room = case.together * case.heads * pages
    logsums, masses = (run.put(torch.full((n,), UNWRITTEN)) for n in (room, len(case.lengths) * pages))
    scale: Any = run.put(torch.tensor([problem.kv_scale])) if case.kv_dtype == "fp8" else 0
    rows = LastQueries(
        run.put(problem.q), run.ints(positions.tolist()), run.ints(bounds), len(case.lengths), singles, case.heads, 0.3
    )
    tables = Tables(run.put(problem.tables), *problem.tables.shape)
    found, counted = logsums_spec(case.shape, case.dtype, case.heads, case.target), masses_spec(case.shape, case.heads)
    pool, to = Pool(run.put(problem.pool)[:, 1:], case.shape, scale), (logsums, masses, room)
    launched = 0
    for reading, adding in page_masses_launches(found.constants, rows, pool, tables, pages, to):
        logsums.fill_(torch.nan)
        run.launch(found, reading)
        run.launch(counted, adding)
        launched += 1
    assert launched == -(-len(case.lengths) // case.together)
    return masses.cpu().view(-1, pages)


def expected(problem: Problem) -> list[list[float]]:
    """By `AttentionProbe`, for each sequence but rows of nobody."""
    case, live = problem.case, [s for s, n in enumerate(problem.case.lengths) if n]
    inputs: Any = SimpleNamespace(
        cu_seqlens=torch.arange(len(live) + 1),
        positions=torch.tensor([case.lengths[s] - 1 for s in live]),
        page_tables={GLOBAL: problem.tables[live]},
    )
    probe = AttentionProbe(0, inputs.cu_seqlens[1:].long() - 1)
    probe.queries, probe.key_scale = problem.q[[problem.rows[s] for s in live]], problem.kv_scale
    keys = problem.pool[:, 1].view(E4M3) if case.kv_dtype == "fp8" else problem.pool[:, 1]
    batch = StepBatch([SequenceSlice(s, [0], case.lengths[s] - 1, {}) for s in live])
    found = probe.compute_masses(keys, inputs, batch, 0.3)
    return [found.get(s, []) for s in range(len(case.lengths))]


def check(run: Runner, problem: Problem) -> torch.Tensor:
    got = measure(run, problem)
    for s, (row, want) in enumerate(zip(got, expected(problem), strict=True)):
        count = problem.case.counts[s]
        torch.testing.assert_close(row[:count], torch.tensor(want), rtol=1e-3, atol=1e-4)
        assert (row[count:] == UNWRITTEN).all(), f"sequence {s}: a page behind the end was written"
    return got


EDGES = (1, 7, 8, 9, 0, 15, 16, 17, 31, 33)
CASES = {
    "ends anywhere in a page": Case(EDGES),
    "rows of nobody, tables of a graph": Case((5, 0, 40, 0, 0), wider=9),
    "slices": Case((), ((0, 1), (3, 7), (8, 8), (0, 33), (32, 2))),
    "singles and slices": Case((12, 0, 3), ((9, 4), (0, 25)), together=2),
    "several spans of pages": Case((300, 17), page_tokens=16, together=9),
    "a page of several blocks": Case((70, 33, 64, 65, 1), page_tokens=64, head_dim=256, kv_heads=1),
    "pages of one token": Case((5, 1), page_tokens=1),
    "float16, one KV head": Case(EDGES, dtype="float16", kv_dtype="float16", kv_heads=1),
    "27B heads": Case((70, 1, 33), heads=32, kv_heads=16, head_dim=128, page_tokens=32),
    "E4M3": Case(EDGES, ((3, 9),), kv_dtype="fp8", together=99),
    "E4M3, float16, integers": Case(EDGES, dtype="float16", kv_dtype="fp8", target="sm80", page_tokens=32),
    "three heads, many pages": Case((600, 5), heads=3, kv_heads=1, page_tokens=2),
}


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("name", CASES)
def test_masses_are_those_of_torch(run: Runner, name: str) -> None:
    case = CASES[name]
    if run.device == "cuda" and case.target == "sm80":
        pytest.skip("the conversion of targets without E4M3 instructions; the interpreter runs it")
    check(run, make(case))


@pytest.mark.parametrize("run", RUNNERS)
def test_random_steps(run: Runner) -> None:
    for _ in range(4):
        size, kv_heads = random.choice((4, 16, 32)), random.choice((1, 2))
        ends = tuple(random.choice((0, random.randint(1, 5 * size))) for _ in range(random.randint(0, 5)))
        slices = tuple((random.randint(0, 3 * size), random.randint(2, 9)) for _ in range(random.randint(1, 3)))
        dtype = random.choice(("float16", "bfloat16"))
        check(
            run,
            make(
                Case(
                    ends, slices, kv_heads * random.choice((1, 2, 5)), kv_heads, random.choice((16, 32)), size, dtype,
                    random.choice((dtype, "fp8")), random.choice((0, 2)), random.randint(1, 4),
                )
            ),
        )  # fmt: skip


@pytest.mark.parametrize("run", RUNNERS)
def test_what_is_absent_or_not_finite_spoils_its_own_sequence_alone(run: Runner) -> None:
    whole = make(replace(CASES["singles and slices"], wider=1))
    clean = check(run, whole)
    s = random.choice((0, 2, 3, 4))
    at = random.randrange(whole.case.lengths[s])
    absent = replace(whole, tables=whole.tables.clone())
    absent.tables[s, at // 8] = -1
    page = int(whole.tables[s, at // 8])
    readers = [r for r, n in enumerate(whole.case.lengths) if page in whole.tables[r, : -(-n // 8)]]
    poisoned = replace(whole, pool=whole.pool.clone())
    poisoned.pool[page, 1, 0, at % 8, random.randrange(2), 3] = torch.nan
    for problem, lost in ((absent, [s]), (poisoned, readers)):
        got = measure(run, problem)
        for r, count in enumerate(whole.case.counts):
            assert not count or bool(got[r, :count].isnan().all()) == (r in lost)
            assert r in lost or torch.equal(got[r], clean[r])


LARGE, SMALL = PoolShape(10, 32, 16, 128, "bfloat16"), PoolShape(3, 16, 1, 256, "fp8")


@pytest.mark.parametrize("target", targets())  # `make test-targets`
@pytest.mark.parametrize(("pool", "heads"), [(LARGE, 32), (SMALL, 4)])
def test_the_kernels_compile(pool: PoolShape, heads: int, target: str) -> None:
    specs = logsums_spec(pool, "bfloat16", heads, target), masses_spec(pool, heads)
    rows = LastQueries(16, 4, 4, 9, 9, heads, 0.1)
    (calls,) = page_masses_launches(specs[0].constants, rows, Pool(16, pool, 4), Tables(4, 9, 70), 65, (4, 4, 1 << 20))
    assert [call.grid for call in calls] == [(9 if pool is LARGE else 5, pool.kv_heads, 9), (9, 1, 1)]
    for spec, call in zip(specs, calls, strict=True):
        kernel = aot.compile_kernel(spec, target)
        ParameterBlock(kernel).fill_parameters(call.arguments)
        assert kernel.shared_bytes <= 48 * 1024 and not kernel.dependent


def test_types_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match="float16"):
        logsums_spec(LARGE, "float16", 32, "sm90")
