"""Prefill attention in Triton's interpreter against float64, and compiled for every target.

Problems and the reference are those of `attention_checks`: slots of nobody are NaN, pages outside of windows absent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import interpreted
import torch
from attention_checks import Case, Problem, make, reference
from gpu_kernels.targets import targets
from kernel_checks import EPSILON

from wicore_trt.plugins import aot, decode_layout
from wicore_trt.plugins.decode_layout import PrefillConfig
from wicore_trt.plugins.kernels import fast_attention_specs as specs
from wicore_trt.plugins.layout import Pool, PoolShape, Slices, Tables

SMALL_BLOCKS = PrefillConfig(16, 16)


def attend(problem: Problem, config: PrefillConfig = SMALL_BLOCKS, target: str = "sm90") -> torch.Tensor:
    """The kernel's result; queries and results lie in longer rows, and what is not a result must stay as it is."""
    case, total = problem.case, problem.q.shape[0]
    width = case.heads * case.head_dim
    shape = PoolShape(2, case.page_tokens, case.kv_heads, case.head_dim, case.kv_dtype)
    q = torch.full((total, width + 16), torch.nan, dtype=problem.q.dtype)
    q[:, :width] = problem.q.view(total, width)
    out = torch.full((total + 7, width + 32), 77.0, dtype=problem.q.dtype)
    out[:total, :width] = torch.nan
    scale: Any = torch.tensor([problem.kv_scale]) if case.kv_dtype == "fp8" else 0
    spec = specs.prefill_spec(shape, case.dtype, case.heads, target, config)
    bounds = torch.tensor(problem.bounds(), dtype=torch.int32)
    first = torch.tensor([f for f, _ in case.slices], dtype=torch.int32)
    call = decode_layout.prefill_launch(
        spec.constants,
        (q, out),
        Pool(problem.pool[:, 1:], shape, scale),
        Tables(problem.tables, *problem.tables.shape),
        Slices(bounds, first, total),
        case.head_dim**-0.5,
        case.window,
        (width + 16, width + 32),
    )
    interpreted.launch(spec, call)
    assert (out[total:] == 77.0).all() and (out[:, width:] == 77.0).all(), "rows of nobody were written"
    return out[:total, :width].reshape(total, case.heads, case.head_dim)


def check(case: Case, config: PrefillConfig = SMALL_BLOCKS, target: str = "sm90") -> None:
    problem = make(case)
    got, (want, error) = attend(problem, config, target).double(), reference(problem)
    if case.kv_dtype == "fp8":  # weights are float16
        error = error * (EPSILON["float16"] + EPSILON[case.dtype] + 4e-6) / (2 * EPSILON[case.dtype] + 4e-6)
    assert got.isfinite().all(), "a slot that no query sees was used"
    worst = ((got - want).abs() / (error + 1e-7)).max().item()
    assert worst <= 1, f"{worst:.2f} times the error that rounding allows"


HALF = Case((), dtype="float16", kv_dtype="float16", head_dim=16)
RAGGED = ((0, 1), (17, 5), (9, 0), (0, 23), (31, 1), (8, 8))
EDGES = tuple((first, 5) for first in (*range(11, 18), 30, 62))
CASES = {
    **{f"block edges, window {w}": replace(HALF, slices=EDGES, window=w) for w in (0, 15, 16, 17, 40)},
    "ragged": replace(HALF, slices=RAGGED),
    "ragged, window 1": replace(HALF, slices=RAGGED, window=1),
    "ragged, pages of 5": replace(HALF, slices=RAGGED, window=9, page_tokens=5),
    "three query heads per KV head": replace(HALF, slices=((7, 20),), heads=6, window=5),
    "long and short": replace(HALF, slices=((0, 90), (0, 1), (120, 40)), window=50, page_tokens=16),
    "many pages": replace(HALF, slices=((600, 3),), heads=1, kv_heads=1, page_tokens=2),
}


@pytest.mark.parametrize("name", CASES)
def test_prefill(name: str) -> None:
    check(CASES[name])


def test_shapes_of_the_models() -> None:
    large = Case(((100, 1), (63, 2), (0, 66)), 4, 2, 128, 32, "bfloat16", "bfloat16", 64)
    check(large, PrefillConfig(64, 64))
    check(replace(large, heads=4, kv_heads=1, head_dim=256, page_tokens=16, slices=((20, 40),)), PrefillConfig(32, 32))


@pytest.mark.parametrize("target, dtype", [("sm80", "bfloat16"), ("sm90", "bfloat16"), ("sm90", "float16")])
def test_fp8_keys(target: str, dtype: str) -> None:
    check(Case(((40, 9), (0, 3)), 4, 1, 32, 16, dtype, "fp8", 20), target=target)


def test_absent_pages_and_keys_that_are_nan() -> None:
    case = replace(HALF, slices=((30, 2), (0, 9)), window=20)
    whole = make(case)
    clean = attend(whole)
    for cut in (False, True):
        problem = replace(whole, tables=whole.tables[:, :3].contiguous() if cut else whole.tables.clone())
        if not cut:
            problem.tables[0, 2] = -1
        got = attend(problem)
        assert got[:2].isnan().all() and torch.equal(got[2:], clean[2:])
    for kv in (0, 1):
        problem = replace(whole, pool=whole.pool.clone())
        problem.pool[whole.tables[0, 2], 1, kv, 3] = torch.nan
        got = attend(problem)
        assert got[:2].isnan().all() and torch.equal(got[2:], clean[2:])


def test_a_row_does_not_depend_on_the_others() -> None:
    case = replace(HALF, slices=((5, 60), (0, 7)), heads=4, kv_heads=2, page_tokens=16, window=33)
    whole = make(case)
    together = attend(whole)
    for cuts in ((0, 60), (0, 1, 2, 31, 60), tuple(range(0, 61, 12))):
        for a, b in zip(cuts, cuts[1:], strict=False):
            part = replace(whole, case=replace(case, slices=((5 + a, b - a),)))
            part.q, part.tables = whole.q[a:b], whole.tables[:1]
            assert torch.equal(attend(part), together[a:b])


@pytest.mark.parametrize("target", targets("sm90"))
def test_compiles(target: str) -> None:
    pool = PoolShape(52, 32, 16, 128, "bfloat16")
    config = decode_layout.prefill_config(target, pool)
    aot.compile_kernel(specs.prefill_spec(pool, "bfloat16", 32, target, config), target)


@pytest.mark.parametrize("target", ["sm80", "sm89"])  # without and with instructions for E4M3
def test_fp8_keys_compile(target: str) -> None:
    pool = PoolShape(52, 32, 16, 64, "fp8")  # of 128 would take three times as long
    aot.compile_kernel(specs.prefill_spec(pool, "float16", 32, target, PrefillConfig(32, 32, 4)), target)


def test_heads_of_256_fit_into_small_shared_memory() -> None:
    pool = PoolShape(15, 16, 1, 256, "float16")
    config = decode_layout.prefill_config("sm89", pool)
    aot.compile_kernel(specs.prefill_spec(pool, "float16", 4, "sm89", config), "sm89")
