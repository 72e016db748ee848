"""Sizes of a step's working memory, for every kind of product."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from wicore_trt.backends.triton.memory import wide_floats
from wicore_trt.backends.triton.table import CROSSOVER, EngineShape
from wicore_trt.kv.sizing import builtin_spec
from wicore_trt.weight_format import FP8, PLAIN


@pytest.mark.parametrize(
    ("dtype", "fp8", "each"),
    [("bfloat16", False, 21504), ("float16", False, 43008), ("bfloat16", True, 21504), ("float16", True, 21504)],
)
def test_results_of_every_step_find_room(dtype: str, fp8: bool, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = EngineShape(builtin_spec("gemma3-27b"), dtype, FP8 if fp8 else PLAIN[dtype], dtype, 32)
    assert wide_floats(shape, "sm90", 8192, invariant=False) == 8192 * each
    assert wide_floats(shape, "sm90", 8192, invariant=True) == 8192 * 8192
    monkeypatch.setitem(CROSSOVER, "sm90", {"16-bit": 24, "fp8": 8, "fp8 rows": 80})
    for tokens in (1, 24, 25, 60, 81, 300):
        have = wide_floats(shape, "sm90", tokens, invariant=False)
        for rows in range(1, tokens + 1):
            product = shape.choose_product("sm90", "qkv", rows)
            columns = 8192 if product.kernels else 43008
            assert have >= rows * columns / (2 if product.results == "bfloat16" else 1)
