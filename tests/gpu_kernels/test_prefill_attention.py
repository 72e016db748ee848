"""Prefill attention in Triton's interpreter against float64, and compiled for every target.

Problems and the reference are those of `attention_checks`: slots of nobody are NaN, pages outside of windows absent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import torch
from attention_checks import Case, Problem, make, reference
from gpu_kernels.targets import targets
from kernel_checks import EPSILON, Runner
from step_runners import CPU, GPU

from wicore_trt.plugins import aot, decode_layout
from wicore_trt.plugins.decode_layout import PrefillConfig
from wicore_trt.plugins.kernels import fast_attention_specs as specs
from wicore_trt.plugins.layout import Pool, PoolShape, Slices, Tables

SMALL_BLOCKS = PrefillConfig(16, 16)


def attend(
    problem: Problem,
    config: PrefillConfig = SMALL_BLOCKS,
    target: str = "sm90",
    *,
    run: Runner = CPU,
    causal: bool = False,
) -> torch.Tensor:
    """The kernel's result; queries and results lie in longer rows, and what is not a result must stay as it is. Images
    are taken for text if it is to be `causal`."""
    case, total = problem.case, problem.q.shape[0]
    ends = bool(case.images) and not causal
    width = case.heads * case.head_dim
    shape = PoolShape(2, case.page_tokens, case.kv_heads, case.head_dim, case.kv_dtype)
    q = torch.full((total, width + 16), torch.nan, dtype=problem.q.dtype)
    q[:, :width] = problem.q.view(total, width)
    noise = torch.full((total + 7, width + 32), 77.0, dtype=problem.q.dtype)
    noise[:total, :width] = torch.nan
    out = run.put(noise)
    scale: Any = run.put(torch.tensor([problem.kv_scale])) if case.kv_dtype == "fp8" else 0
    spec = specs.prefill_spec(shape, case.dtype, case.heads, target, config, ends=ends)
    bounds, first = run.ints(problem.bounds()), run.ints([f for f, _ in case.slices])
    call = decode_layout.prefill_launch(
        spec.constants,
        (run.put(q), out),
        Pool(run.put(problem.pool)[:, 1:], shape, scale),
        Tables(run.put(problem.tables), *problem.tables.shape),
        Slices(bounds, first, total, run.put(problem.key_ends()) if ends else None),
        case.head_dim**-0.5,
        case.window,
        (width + 16, width + 32),
    )
    run.launch(spec, call)
    out = out.cpu()
    assert (out[total:] == 77.0).all() and (out[:, width:] == 77.0).all(), "rows of nobody were written"
    return out[:total, :width].reshape(total, case.heads, case.head_dim)


def check(
    case: Case, config: PrefillConfig = SMALL_BLOCKS, target: str = "sm90", *, run: Runner = CPU
) -> tuple[Problem, torch.Tensor]:
    problem = make(case)
    found = attend(problem, config, target, run=run)
    got, (want, error) = found.double(), reference(problem)
    if case.kv_dtype == "fp8":  # weights are float16
        error = error * (EPSILON["float16"] + EPSILON[case.dtype] + 4e-6) / (2 * EPSILON[case.dtype] + 4e-6)
    assert got.isfinite().all(), "a slot that no query sees was used"
    worst = ((got - want).abs() / (error + 1e-7)).max().item()
    assert worst <= 1, f"{worst:.2f} times the error that rounding allows"
    return problem, found


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


def check_images(case: Case, config: PrefillConfig, target: str, run: Runner) -> None:
    """Rows of images see all of them, and those of text have the bits that the kernel without images gives them."""
    problem, got = check(case, config, target, run=run)
    text = torch.ones(len(got), dtype=torch.bool)
    for row, count in case.images:
        text[row : row + count - 1] = False  # an image's last row sees what text would
    causal = attend(problem, config, target, run=run, causal=True)
    assert torch.equal(got[text], causal[text]) and not torch.equal(got, causal)


PAIR = replace(HALF, heads=2, kv_heads=1)
LONG = replace(PAIR, slices=((7, 60), (0, 5)), images=((10, 33),))
IMAGES = {
    **{f"over blocks, window {w}": replace(LONG, window=w) for w in (0, 9, 36)},
    "first and last": replace(PAIR, slices=((0, 20), (13, 18)), images=((0, 17), (22, 16)), window=18),
    "three, two of them side by side": replace(
        HALF, slices=((3, 75),), images=((2, 20), (22, 17), (50, 25)), window=30, heads=3, kv_heads=1, page_tokens=5
    ),
    "shorter than a block": replace(PAIR, slices=((30, 9), (0, 3)), images=((2, 4), (9, 3)), window=3),
    "E4M3 keys": Case(((40, 30), (0, 3)), 4, 1, 32, 16, "bfloat16", "fp8", 20, images=((3, 21),)),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str) -> None:
    check_images(IMAGES[name], SMALL_BLOCKS, "sm90", CPU)


def test_an_image_has_the_same_bits_in_any_chunks() -> None:
    case = replace(PAIR, slices=((5, 60),), page_tokens=16, window=33, images=((11, 25),))
    whole = make(case)
    together = attend(whole)
    for a, b in ((0, 36), (11, 60)):
        part = replace(whole, case=replace(case, slices=((5 + a, b - a),), images=((11 - a, 25),)))
        part.q = whole.q[a:b]
        assert torch.equal(attend(part), together[a:b])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "fp8")])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 16, 128), (16, 8, 256), (8, 4, 256)])
@pytest.mark.parametrize("window", [0, 260, 1024])
def test_images_on_a_gpu(heads: int, kv_heads: int, head_dim: int, window: int, dtype: str, kv_dtype: str) -> None:
    """Published models' heads and images of 256 tokens, by the configuration that engines take."""
    major, minor = torch.cuda.get_device_capability()
    target, slices = f"sm{major}{minor}", ((1300, 700), (0, 300), (77, 1), (9, 40))
    case = Case(slices, heads, kv_heads, head_dim, 32, dtype, kv_dtype, window)
    case = replace(case, images=((3, 256), (260, 256), (520, 180), (700, 256)))
    config = decode_layout.prefill_config(target, PoolShape(2, 32, kv_heads, head_dim, kv_dtype))
    check_images(case, config, target, GPU)


@pytest.mark.parametrize("target", targets())
def test_images_compile(target: str) -> None:
    pool = PoolShape(52, 32, 16, 64, "bfloat16")  # of 128 would take three times as long
    aot.compile_kernel(specs.prefill_spec(pool, "bfloat16", 32, target, PrefillConfig(32, 32, 4), ends=True), target)


@pytest.mark.parametrize("target", targets())  # kernels of engines compile in `make test-targets`
def test_compiles(target: str) -> None:
    pool = PoolShape(52, 32, 16, 128, "bfloat16")
    config = decode_layout.prefill_config(target, pool)
    aot.compile_kernel(specs.prefill_spec(pool, "bfloat16", 32, target, config), target)


@pytest.mark.parametrize("target", targets())
def test_fp8_keys_compile(target: str) -> None:
    pool = PoolShape(52, 32, 16, 64, "fp8")  # of 128 would take three times as long
    aot.compile_kernel(specs.prefill_spec(pool, "float16", 32, target, PrefillConfig(32, 32, 4)), target)


@pytest.mark.long
def test_heads_of_256_fit_into_small_shared_memory() -> None:
    pool = PoolShape(15, 16, 1, 256, "float16")
    config = decode_layout.prefill_config("sm89", pool)
    aot.compile_kernel(specs.prefill_spec(pool, "float16", 4, "sm89", config), "sm89")
