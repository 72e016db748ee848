"""Split decode attention in Triton's interpreter against float64, and compiled for every target.

Slots that no query sees are NaN, pages outside of the window are absent, outputs and scratch start as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import interpreted
import torch
from gpu_kernels.targets import targets
from kernel_checks import E4M3, EPSILON, TORCH, to_e4m3

from benchmarks.gpu.kernels.linear_cases import unorder_columns
from wicore_trt.errors import ConfigError
from wicore_trt.plugins import aot, decode_layout
from wicore_trt.plugins.decode_layout import DecodeConfig, DecodeRows, Workspace
from wicore_trt.plugins.kernels import fast_attention_specs as specs
from wicore_trt.plugins.layout import Pool, PoolShape, Tables


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    config: DecodeConfig
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_tokens: int = 16
    dtype: str = "float16"
    kv_dtype: str = "float16"
    window: int = 0
    target: str = "sm90"
    ordered: bool = False

    @property
    def shape(self) -> PoolShape:
        return PoolShape(2, self.page_tokens, self.kv_heads, self.head_dim, self.kv_dtype)


@dataclass
class Problem:
    """`keys`, `values` float64 [length, kv_heads, D] as stored, of layer 1 of 2."""

    case: Case
    q: torch.Tensor
    pool: torch.Tensor
    tables: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    kv_scale: float = 1.0


def make(case: Case) -> Problem:
    size, count = case.page_tokens, len(case.lengths)
    columns = max(-(-max(case.lengths) // size), 1) + 1
    pool = torch.full((count * columns + 1, 2, 2, size, case.kv_heads, case.head_dim), torch.nan)
    fp8 = case.kv_dtype == "fp8"
    pool = pool.to(E4M3).view(torch.uint8) if fp8 else pool.to(TORCH[case.kv_dtype])
    pages = torch.randperm(pool.shape[0])[: count * columns].view(count, columns).int()
    tables = torch.full_like(pages, -1)
    q = torch.randn(count, case.heads, case.head_dim).to(TORCH[case.dtype])
    problem = Problem(case, q, pool, tables, kv_scale=0.3 if fp8 else 1.0)
    for s, length in enumerate(case.lengths):
        low = max(length - case.window, 0) if case.window else 0
        tables[s, low // size : -(-length // size)] = pages[s, low // size : -(-length // size)]
        kv = torch.randn(length, 2, case.kv_heads, case.head_dim)
        stored = to_e4m3(kv / problem.kv_scale) if fp8 else kv.to(pool.dtype)
        for p in range(low, length):
            pool[tables[s, p // size], 1, :, p % size] = stored[p]
        exact = stored.view(E4M3).double() * problem.kv_scale if fp8 else stored.double()
        problem.keys.append(exact[low:, 0])
        problem.values.append(exact[low:, 1])
    return problem


def attend(problem: Problem) -> torch.Tensor:
    """Queries lie in rows that hold more, so do results; the rest must stay as it is."""
    case, config, d = problem.case, problem.case.config, problem.case.head_dim
    n, wide = len(case.lengths), case.heads * d + 32
    q = torch.full((n, wide), torch.nan, dtype=problem.q.dtype)
    q[:, : case.heads * d] = problem.q.view(n, -1)
    out = torch.full((n, wide), 77.0, dtype=q.dtype)
    out[:, : case.heads * d] = torch.nan
    sizes = decode_layout.workspace_elements(config, case.shape, case.heads, n)
    work = Workspace(*(torch.full((size,), torch.nan) for size in sizes[:2]), torch.zeros(sizes[2], dtype=torch.int32))
    columns = problem.tables.shape[1]
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    rows = DecodeRows(q, out, lengths, case.heads, d**-0.5, case.window, wide, wide)
    scale: Any = torch.tensor([problem.kv_scale]) if case.kv_dtype == "fp8" else 0
    pool, tables = Pool(problem.pool[:, 1:], case.shape, scale), Tables(problem.tables, n, columns)
    spec = specs.decode_spec(case.shape, case.dtype, case.heads, case.target, config, ordered=case.ordered)
    interpreted.launch(spec, decode_layout.decode_launch(config, rows, pool, tables, work))
    combine = decode_layout.combine_launch(config, rows, pool, n, work)
    if 0 not in combine.grid:
        interpreted.launch(specs.combine_spec(case.shape, case.dtype, config), combine)
    assert (out[:, case.heads * d :] == 77.0).all() and not work.arrived.any()
    found = out[:, : case.heads * d].contiguous()
    return (unorder_columns(found) if case.ordered else found).view(n, case.heads, d)


def weights_of(problem: Problem, s: int) -> torch.Tensor:
    """float64 [heads, keys that are seen]."""
    case = problem.case
    k = problem.keys[s].repeat_interleave(case.heads // case.kv_heads, 1)
    scores: torch.Tensor = torch.einsum("hd,phd->hp", problem.q[s].double(), k) * case.head_dim**-0.5
    return scores.softmax(-1)


def check(problem: Problem) -> torch.Tensor:
    """Weights and results are rounded once each; over FP8 the weights are float16."""
    case = problem.case
    got = attend(problem)
    epsilon = EPSILON[case.dtype] + EPSILON["float16" if case.kv_dtype == "fp8" else case.dtype] + 4e-6
    for s in range(len(case.lengths)):
        v = problem.values[s].repeat_interleave(case.heads // case.kv_heads, 1)
        weights = weights_of(problem, s)
        want = torch.einsum("hp,phd->hd", weights, v)
        error = torch.einsum("hp,phd->hd", weights, v.abs()) * epsilon + 1e-7
        assert ((got[s].double() - want).abs() <= error).all(), f"sequence {s} of length {case.lengths[s]}"
    return got


EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 64, 65, 200)
ROWS = DecodeConfig(1, 32, 3)
CASES = {
    "edges of pages, blocks and splits": Case(EDGES, ROWS),
    "window 40, second launch": Case(EDGES, replace(ROWS, fused=False), window=40),
    "window 32": Case((31, 32, 33, 63, 64, 65, 97), ROWS, window=32),
    "two KV heads": Case(EDGES, DecodeConfig(2, 32, 3)),
    "two KV heads, window, second launch": Case(EDGES, DecodeConfig(2, 16, 4, fused=False), window=17),
    "few splits of many blocks": Case(EDGES, DecodeConfig(1, 16, 4, least=4), window=190),
    "few splits, second launch": Case(EDGES, DecodeConfig(1, 16, 4, fused=False, least=5)),
    "more splits than a chunk": Case((600, 7), DecodeConfig(1, 16, 35)),
    "one split": Case((5, 0, 90), replace(ROWS, splits=1)),
    "ordered": Case((5, 0, 90), replace(ROWS, splits=1), head_dim=64, ordered=True),
    "27B heads": Case((70, 1, 33), DecodeConfig(4, 64, 2), 16, 8, 128, 32, "bfloat16", "bfloat16", 64),
    "270M heads": Case((70, 3), DecodeConfig(1, 32, 2), 4, 1, 256, 16, "bfloat16", "bfloat16"),
    "three query heads per KV head": Case((70, 3), DecodeConfig(2, 32, 2), 6, 2),
    "rows for 32 heads, pages of 64": Case((130, 64), DecodeConfig(8, 64, 2), 32, 8, 16, 64),
    "fp8, sm80": Case((70, 3, 16), ROWS, 4, 2, 32, dtype="bfloat16", kv_dtype="fp8", window=60, target="sm80"),
    "fp8, two KV heads": Case((70, 3, 16), replace(ROWS, heads=2), 4, 2, 32, dtype="bfloat16", kv_dtype="fp8"),
    "fp8, float16": Case((70, 3), ROWS, 4, 2, 32, kv_dtype="fp8"),
}


@pytest.mark.parametrize("name", CASES)
def test_decode(name: str) -> None:
    got = check(make(CASES[name]))
    for s, length in enumerate(CASES[name].lengths):
        assert length or not got[s].any(), "a row of nobody is 0"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_queries_of_any_size_meet_fp8_keys(dtype: str) -> None:
    problem = make(replace(CASES["fp8, float16"], dtype=dtype))
    problem.q *= torch.tensor([1e-5, 1e-2, 1.0, 300.0])[:, None]
    problem.q[0, 1] = 0
    check(problem)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kv_dtype", ["float16", "fp8"])
def test_a_row_does_not_depend_on_the_others(kv_dtype: str, fused: bool) -> None:
    whole = make(Case((150, 1, 47, 0), DecodeConfig(2, 16, 4, fused), window=100, kv_dtype=kv_dtype))
    together = attend(whole)
    for s in range(4):
        alone = replace(whole, case=replace(whole.case, lengths=(whole.case.lengths[s],)))
        alone.q, alone.tables = whole.q[s : s + 1], whole.tables[s : s + 1].clone()
        assert torch.equal(attend(alone)[0], together[s])


@pytest.mark.parametrize("kv_dtype", ["float16", "fp8"])
def test_what_is_seen_and_not_there_makes_the_row_nan(kv_dtype: str) -> None:
    case = Case((150, 60), DecodeConfig(1, 16, 4), window=100, kv_dtype=kv_dtype)
    whole = make(case)
    clean = attend(whole)
    for cut in (False, True):
        problem = replace(whole, tables=whole.tables[:, :5].contiguous() if cut else whole.tables.clone())
        if not cut:
            problem.tables[0, 6] = -1
        got = attend(problem)
        assert got[0].isnan().all() and torch.equal(got[1], clean[1])
    for kv in (0, 1):
        problem = replace(whole, pool=whole.pool.clone())
        problem.pool[whole.tables[0, 6], 1, kv, 3, 1, 5] = 0x7F if kv_dtype == "fp8" else torch.nan
        got = attend(problem)
        bad = got[0, 2:] if kv == 0 else got[0, 2:, 5]  # of the second KV head
        assert bad.isnan().all() and torch.equal(got[0, :2], clean[0, :2]) and torch.equal(got[1], clean[1])


LARGE, LARGE8 = PoolShape(52, 32, 16, 128, "bfloat16"), PoolShape(52, 32, 16, 128, "fp8")
SMALL = PoolShape(15, 16, 1, 256, "float16")


@pytest.mark.parametrize("target", targets())  # kernels of engines compile in `make test-targets`
def test_compiles(target: str) -> None:
    for pool, dtype, heads, rows in ((LARGE, "bfloat16", 32, 1), (LARGE8, "bfloat16", 32, 8), (SMALL, "float16", 4, 1)):
        if pool is SMALL and target not in ("sm89", "sm90"):
            continue  # the others' shared memory is not tighter
        config = decode_layout.decode_config(target, pool, rows)
        aot.compile_kernel(specs.decode_spec(pool, dtype, heads, target, config), target)
    aot.compile_kernel(specs.combine_spec(LARGE, "bfloat16", config), target)


def test_configurations_fill_a_gpu_and_fit_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule for what was not measured, and the table where something was."""
    monkeypatch.setattr(decode_layout, "MEASURED_DECODE", {})
    for target in decode_layout.MULTIPROCESSORS:
        for pool in (LARGE, LARGE8, SMALL):
            programs = [
                rows * pool.kv_heads * decode_layout.decode_config(target, pool, rows).splits for rows in (1, 8, 128)
            ]
            assert max(programs[1:]) >= decode_layout.MULTIPROCESSORS[target] and programs[0] >= 64
    table = ((8, DecodeConfig(2, 32, 4)), (64, DecodeConfig(1, 64, 2)))
    monkeypatch.setitem(decode_layout.MEASURED_DECODE, ("sm90", 128, 2), table)
    chosen = [decode_layout.decode_config("sm90", LARGE, rows).splits for rows in (1, 8, 9, 64, 500)]
    assert chosen == [4, 4, 2, 2, 2]


def test_short_sequences_and_windows_are_not_split() -> None:
    """No partial result is written for them, nor by any launch over a window of so few blocks."""
    config = DecodeConfig(1, 16, 8, least=4)
    assert [decode_layout.splits_used(config, w) for w in (0, 1, 64, 65, 1024)] == [8, 1, 1, 2, 8]
    for case, used in ((Case((64,), config), 1), (Case((65,), config), 2), (Case((300,), config, window=49), 1)):
        sizes = decode_layout.workspace_elements(config, case.shape, case.heads, 1)
        work = Workspace(torch.zeros(sizes[0]), torch.full((sizes[1],), torch.nan), torch.zeros(2, dtype=torch.int32))
        problem = make(case)
        rows = DecodeRows(
            problem.q, torch.empty_like(problem.q), torch.tensor(case.lengths).int(), 4, 0.25, case.window
        )
        pool, tables = Pool(problem.pool[:, 1:], case.shape, 0), Tables(problem.tables, 1, problem.tables.shape[1])
        call = decode_layout.decode_launch(config, rows, pool, tables, work)
        interpreted.launch(specs.decode_spec(case.shape, "float16", 4, "sm90", config), call)
        stats = work.stats.view(-1)[: 8 * call.arguments["n_splits"]].view(4, 2, -1)
        assert int((~stats.isnan()).all(0)[0].sum()) == (used if used > 1 else 0)


def test_what_does_not_fit_is_refused() -> None:
    for pool, dtype, heads, config in (
        (LARGE, "float16", 32, ROWS),
        (LARGE, "float32", 32, ROWS),
        (LARGE, "bfloat16", 24, ROWS),
        (LARGE, "bfloat16", 32, replace(ROWS, heads=3)),
        (LARGE, "bfloat16", 32, replace(ROWS, block_k=48)),
    ):
        with pytest.raises(ConfigError):
            specs.decode_spec(pool, dtype, heads, "sm90", config)
