"""Keys divided between the kernel that knows pages and a product that knows none: together against float64."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import interpreted
import torch
from attention_checks import Case, make, reference

from wicore_trt.backends.triton import products
from wicore_trt.plugins import aot, decode_layout
from wicore_trt.plugins.decode_layout import PrefillConfig, Segments
from wicore_trt.plugins.kernels import fast_attention_specs as specs
from wicore_trt.plugins.layout import Pool, PoolShape, Slices, Tables

SMALL = Segments(64, 128, 128, 2)


def halves(cases: list[Any]) -> list[Any]:
    """Each case with one type of keys, by turns; with the other one in the long profile."""
    types = ("float16", "fp8")
    other = [pytest.param(*case, types[1 - n % 2], marks=pytest.mark.long) for n, case in enumerate(cases)]
    return [(*case, types[n % 2]) for n, case in enumerate(cases)] + other


def test_spans_cover_all_whole_segments_once() -> None:
    assert list(SMALL.spans(64 * 5 + 3)) == [(0, 128), (128, 128), (256, 64)]
    for first in range(0, 700, 13):
        covered = [key for begin, count in SMALL.spans(first) for key in range(begin, begin + count)]
        assert covered == list(range(first // 64 * 64))
    assert [SMALL.dense_rows(64, n) for n in (127, 128, 255, 256)] == [0, 128, 128, 256]
    assert SMALL.dense_rows(63, 500) == 0 and Segments(64, 128, 100, 2).dense_rows(64, 230) == 230


@pytest.mark.parametrize("first, length, kv_dtype", halves([(64, 128), (127, 130), (200, 261), (300, 128)]))
def test_kernels_together_against_float64(first: int, length: int, kv_dtype: str) -> None:
    """The kernel that leaves segments out, the gathering and the adding up, beside slices that have none; nothing else
    is written."""
    case = Case(((5, 40), (first, length), (70, 1)), 4, 2, 16, 8, "float16", kv_dtype, 0)
    problem = make(case)
    got = divided(case, problem)
    want, error = reference(problem)
    worst = ((got.double() - want).abs() / (3 * error + 1e-6)).max().item()
    assert got.isfinite().all() and worst <= 1, worst


def test_an_absent_page_of_a_segment_makes_all_rows_that_see_it_nan() -> None:
    case = Case(((5, 40), (140, 128)), 4, 2, 16, 8, "float16", "float16", 0)
    problem = make(case)
    problem.tables[1, 3] = -1
    got = divided(case, problem)
    assert got[40:].isnan().all() and got[:40].isfinite().all()


def divided(case: Case, problem: Any) -> torch.Tensor:
    """What the parts of `SegmentAttention` give for one layer of a problem."""
    total, width = problem.q.shape[0], case.heads * case.head_dim
    shape = PoolShape(2, case.page_tokens, case.kv_heads, case.head_dim, case.kv_dtype)
    scale: Any = torch.tensor([problem.kv_scale]) if case.kv_dtype == "fp8" else 0
    pool = Pool(problem.pool[:, 1:], shape, scale)
    spec = specs.prefill_spec(shape, case.dtype, case.heads, "sm90", PrefillConfig(32, 32), segmented=True)
    sums = torch.full((total, width), torch.nan)
    lse = torch.full((total, case.heads), torch.nan)
    bounds = problem.bounds()
    slices = Slices(
        torch.tensor(bounds, dtype=torch.int32), torch.tensor([f for f, _ in case.slices], dtype=torch.int32), total
    )
    tables = Tables(problem.tables, *problem.tables.shape)
    call = decode_layout.prefill_launch(spec.constants, (problem.q, sums), pool, tables, slices, case.head_dim**-0.5, 0)
    interpreted.launch(spec, decode_layout.leave_segments(call, spec.constants, SMALL, lse))
    gather = specs.gather_spec(shape, case.dtype, "sm90")
    adding = specs.add_segment_spec(shape, case.dtype, case.heads)
    out = torch.full((total + 5, width), 77.0, dtype=problem.q.dtype)
    out[:total] = sums.to(out.dtype)
    padded = torch.cat([problem.q, torch.full((SMALL.rows, *problem.q.shape[1:]), torch.nan, dtype=problem.q.dtype)])
    dense = torch.full((2, 130, case.kv_heads, case.head_dim), 55.0, dtype=problem.q.dtype)
    for n, (first, length) in enumerate(case.slices):
        spans, rows = list(SMALL.spans(first)), SMALL.dense_rows(first, length)
        for number, span in enumerate(spans if rows else ()):
            to = (dense, dense.stride(0))
            interpreted.launch(
                gather,
                decode_layout.gather_launch(gather.constants, pool, (problem.tables[n], tables.length), span, to),
            )
            assert (dense[:, span[1] :] == 55.0).all() or number, "more was gathered than asked for"
            for at in range(0, rows, SMALL.rows):
                row, count = bounds[n] + at, min(SMALL.rows, rows - at)
                queries = padded[row : row + SMALL.rows]
                part, part_lse = products.full_attention(
                    queries, dense[0, : span[1]], dense[1, : span[1]], case.head_dim**-0.5
                )
                part = part.contiguous()
                call = decode_layout.add_segment_launch(
                    adding.constants,
                    (sums[row:], lse[row:]),
                    (part, part_lse.contiguous()),
                    part.stride()[:2],
                    SMALL.rows,
                    count,
                    out[row:],
                    last=number == len(spans) - 1,
                )
                interpreted.launch(adding, call)
    assert (out[total:] == 77.0).all()
    return out[:total].reshape(total, case.heads, case.head_dim)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_compile(kv_dtype: str) -> None:
    pool = PoolShape(10, 32, 16, 128, kv_dtype)
    for spec in (specs.gather_spec(pool, "bfloat16", "sm90"), specs.add_segment_spec(pool, "bfloat16", 32)):
        aot.compile_kernel(spec, "sm90")


def split(case: Case, problem: Any, config: PrefillConfig, rows: int) -> torch.Tensor:
    """What the programs that share the keys give together; `rows`: places of tokens in their memory."""
    total, width = problem.q.shape[0], case.heads * case.head_dim
    shape = PoolShape(2, case.page_tokens, case.kv_heads, case.head_dim, case.kv_dtype)
    scale: Any = torch.tensor([problem.kv_scale]) if case.kv_dtype == "fp8" else 0
    spec = specs.prefill_spec(shape, case.dtype, case.heads, "sm90", config)
    adding = specs.add_splits_spec(shape, case.dtype, case.heads, config)
    sums = torch.full((config.splits, rows, width), torch.nan)
    lse = torch.full((config.splits, rows, case.heads), torch.nan)
    first = torch.tensor([f for f, _ in case.slices], dtype=torch.int32)
    call = decode_layout.prefill_launch(
        spec.constants,
        (problem.q, sums),
        Pool(problem.pool[:, 1:], shape, scale),
        Tables(problem.tables, *problem.tables.shape),
        Slices(torch.tensor(problem.bounds(), dtype=torch.int32), first, total),
        case.head_dim**-0.5,
        0,
    )
    interpreted.launch(spec, decode_layout.split_keys(call, spec.constants, lse, rows))
    assert not lse[:, :total].isnan().any() or (problem.tables < 0).any()
    out = torch.full((total + 5, width), 77.0, dtype=problem.q.dtype)
    interpreted.launch(adding, decode_layout.add_splits_launch(adding.constants, (sums, lse), rows, out, total))
    assert (out[total:] == 77.0).all()
    return out[:total].reshape(total, case.heads, case.head_dim)


SLICES = [((0, 1), (17, 5), (95, 33), (300, 16)), ((0, 90),), ((31, 2), (32, 2), (600, 3))]


@pytest.mark.parametrize(
    "slices, splits, least, kv_dtype",
    [
        pytest.param(s, *split, kv_dtype, marks=[] if n == number and kv_dtype == "fp8" else [pytest.mark.long])
        for number, s in enumerate(SLICES)
        for n, split in enumerate([(2, 1), (3, 32), (8, 48)])
        for kv_dtype in ("float16", "fp8")
    ],
)
def test_programs_that_share_keys(slices: Any, splits: int, least: int, kv_dtype: str) -> None:
    """Ranges without keys, with keys that some rows of a block do not see, and with all of them."""
    case = Case(slices, 4, 2, 16, 8, "float16", kv_dtype, 0)
    problem = make(case)
    got = split(case, problem, PrefillConfig(16, 16, splits=splits, least=least), problem.q.shape[0] + 3)
    want, error = reference(problem)
    worst = ((got.double() - want).abs() / (3 * error + 1e-6)).max().item()
    assert got.isfinite().all() and worst <= 1, worst


def test_an_absent_page_in_one_of_the_ranges_makes_the_row_nan() -> None:
    case = Case(((200, 9), (250, 3)), 4, 2, 16, 8, "float16", "float16", 0)
    for gone in (0, 13, 25):
        problem = make(case)
        problem.tables[0, gone] = -1
        got = split(case, problem, PrefillConfig(16, 16, splits=4, least=16), 12)
        assert got[:9].isnan().all() and got[9:].isfinite().all()
