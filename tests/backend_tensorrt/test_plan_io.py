"""Limits and shapes of plans: what a slot costs, and that a window and a step always fit."""

from __future__ import annotations

from math import prod

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wicore_trt.backends.tensorrt.plan_io import DECODE, PREFILL, PlanLimits, TensorSpec, cache_tensors, step_tensors
from wicore_trt.errors import ConfigError
from wicore_trt.kv.sizing import builtin_spec
from wicore_trt.model.spec import GLOBAL, LOCAL

SPEC = builtin_spec("gemma3-27b")


def test_a_128k_slot_does_not_pay_for_local_layers() -> None:
    """52 of 62 layers keep about two windows: 10.8 GiB in place of 62 GiB."""
    limits = PlanLimits(max_batch=8, max_chunk=512, max_context=131_072)
    caches = cache_tensors(SPEC, limits, "bfloat16")
    slot = sum(2 * prod(d for d in t.shape if isinstance(d, int)) for t in caches)
    assert len(caches) == 2 * 62 and 10.8 < slot / 2**30 < 10.9
    assert limits.entries(SPEC, LOCAL) == 2048 and limits.entries(SPEC, GLOBAL) == 131_136


@given(chunk=st.integers(1, 5000), context=st.integers(1, 20_000))
def test_a_window_and_a_step_fit_beside_the_scratch_entry(chunk: int, context: int) -> None:
    limits = PlanLimits(max_batch=1, max_chunk=min(chunk, context), max_context=context)
    needed = min(context, SPEC.sliding_window - 1 + limits.max_chunk)
    for group, least in ((LOCAL, needed), (GLOBAL, context)):
        assert limits.entries(SPEC, group) % 64 == 0 and limits.entries(SPEC, group) > least


def test_profiles_and_shapes() -> None:
    limits = PlanLimits(max_batch=6, max_chunk=100, max_context=1000)
    ids = step_tensors(SPEC, limits)[0]
    assert ids.fixed(limits.profile(PREFILL)).shape == (1, "T")
    assert ids.fixed(limits.profile(DECODE)).shape == ("B", 1)
    assert [ids.bound(limits.profile(DECODE), which) for which in range(3)] == [(1, 1), (6, 1), (6, 1)]
    assert msgspec.convert(msgspec.to_builtins(ids), TensorSpec) == ids


@pytest.mark.parametrize("limits", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_limits_are_positive(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        PlanLimits(*limits)
