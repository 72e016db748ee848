"""Bytes and FLOPs of Gemma 3 against hand-computed numbers, and the bounds that follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wicore_trt.bench.bound import (
    MachineRates,
    ModelCost,
    decode_bound_s,
    measure_rates,
    prefill_bound_s,
)
from wicore_trt.model.spec import GLOBAL, LOCAL, Gemma3Spec

B27 = Gemma3Spec(
    vocab_size=262_208, hidden_size=5376, num_layers=62, num_heads=32, num_kv_heads=16, head_dim=128,
    intermediate_size=21_504, query_pre_attn_scalar=168, rms_norm_eps=1e-6, rope_theta=1e6, rope_local_theta=1e4,
    rope_scaling_factor=8.0, sliding_window=1024,
    layer_groups=tuple(GLOBAL if i % 6 == 5 else LOCAL for i in range(62)),
    max_position_embeddings=131_072, tie_word_embeddings=True,
)  # fmt: skip
RATES = MachineRates("cpu", 2, read_bytes_per_s=100e9, flops=1e12, gemm_dtype="float32")


def test_weights_of_27b():
    cost = ModelCost.from_dtypes(B27, "bfloat16", "bfloat16", "bfloat16")
    assert cost.linear_parameters == 62 * (5376 * 12_288 + 3 * 5376 * 21_504) == 25_598_361_600
    assert cost.head_parameters == 1_409_630_208
    assert cost.weight_bytes == 54_015_983_616  # 54.0 GB; a tied embedding is not read again
    assert ModelCost.from_dtypes(B27, "fp8", "bfloat16", "bfloat16").weight_bytes == pytest.approx(28.4e9, rel=0.002)
    four = ModelCost.from_dtypes(B27, "q4_0", "q6_k", "bfloat16").weight_bytes
    assert four == cost.linear_parameters * 18 // 32 + cost.head_parameters * 20 // 16
    assert ModelCost.from_dtypes(replace(B27, tie_word_embeddings=False), "bfloat16", "bfloat16", "bfloat16") != cost
    assert ModelCost.from_dtypes(B27, "float32", "float32", "float32").weight_bytes == 2 * cost.weight_bytes


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (1, 507_904),  # 62 layers x 8 KiB = 496 KiB per token
        (1024, 520_093_696),  # 520 MB
        (4096, 771_751_936),  # 772 MB: ten global layers grow, 52 local ones stop at the window
        (32_768, 3_120_562_176),  # 3.12 GB
    ],
)
def test_kv_of_27b(context, expected):
    assert ModelCost.from_dtypes(B27, "bfloat16", "bfloat16", "bfloat16").kv_read_bytes(context) == expected
    assert ModelCost.from_dtypes(B27, "bfloat16", "bfloat16", "fp8").kv_read_bytes(context) * 2 == expected


@pytest.mark.parametrize(("tokens", "tflop"), [(512, 26.3), (1024, 53.0), (2048, 106.5), (4096, 214), (8192, 432)])
def test_prefill_flops_of_27b(tokens, tflop):
    cost = ModelCost.from_dtypes(B27, "bfloat16", "bfloat16", "bfloat16")
    assert cost.prefill_flops(tokens) / 1e12 == pytest.approx(tflop, rel=0.005)


@pytest.mark.parametrize("seed", range(4))
def test_attention_counts_against_a_mask(seed):
    """Visible pairs by the masks themselves, and a step's keys by their last rows."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 6))
    groups = tuple(rng.choice([GLOBAL, LOCAL], layers).tolist())
    spec = replace(B27, num_layers=layers, layer_groups=groups, sliding_window=int(rng.integers(1, 40)))
    cost = ModelCost.from_dtypes(spec, "bfloat16", "bfloat16", "bfloat16")
    tokens = int(rng.integers(1, 60))
    behind = np.arange(tokens)[:, None] - np.arange(tokens)
    seen = {GLOBAL: behind >= 0, LOCAL: (behind >= 0) & (behind < spec.sliding_window)}
    pairs = sum(int(seen[g].sum()) for g in groups)
    linear = 2 * cost.linear_parameters * tokens + 2 * cost.head_parameters
    assert cost.prefill_flops(tokens) - linear == 4 * 32 * 128 * pairs
    keys = sum(int(seen[g][-1].sum()) for g in groups)
    assert cost.kv_read_bytes(tokens) == keys * 2 * 16 * 128 * 2


def test_decode_means_are_over_the_steps():
    cost = ModelCost.from_dtypes(B27, "bfloat16", "bfloat16", "bfloat16")
    steps = [cost.kv_read_bytes(context) for context in (1001, 1002, 1003)]  # 4 tokens are 3 decode steps
    assert cost.decode_bytes(5, 1000, 4) == pytest.approx(cost.weight_bytes + 5 * sum(steps) / 3)
    flops = 5 * (2 * 27_007_991_808 + 4 * 32 * 128 * 62 * 1002)
    assert cost.decode_flops(5, 1000, 4) == pytest.approx(flops)


def test_bounds_take_the_slower_of_memory_and_arithmetic():
    cost = ModelCost.from_dtypes(B27, "bfloat16", "bfloat16", "bfloat16")
    assert decode_bound_s(cost, RATES, 1, 128, 64) == pytest.approx(cost.decode_bytes(1, 128, 64) / 100e9)
    slow = replace(RATES, flops=1e9)
    assert decode_bound_s(cost, slow, 4, 128, 64) == pytest.approx(cost.decode_flops(4, 128, 64) / 1e9)
    assert prefill_bound_s(cost, RATES, 2, 512) == pytest.approx(2 * cost.prefill_flops(512) / 1e12)
    assert prefill_bound_s(cost, replace(RATES, flops=1e18), 2, 512) == pytest.approx(cost.weight_bytes / 100e9)


def test_rates_of_this_machine_are_plausible():
    rates = measure_rates("cpu", threads=1, read_bytes=16 << 20, gemm_size=256)
    assert rates.threads == 1 and rates.gemm_dtype in ("float32", "bfloat16")
    assert 1e8 < rates.read_bytes_per_s < 1e13
    assert 1e8 < rates.flops < 1e15
