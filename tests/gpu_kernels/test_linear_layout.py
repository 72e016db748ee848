"""Launches of linear layers, their configurations, and the bound that keeps gate * up inside float16."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from wicore_trt.plugins.linear_configs import BUCKETS, MEASURED, find_bucket, linear_config  # noqa: E402
from wicore_trt.plugins.linear_layout import (  # noqa: E402
    LinearArrays,
    LinearConfig,
    LinearShape,
    check_config,
    geglu_exponent,
    linear_launch,
    partials_bytes,
)
from wicore_trt.weight_format import BF16, FP8, FP16, Q4_0, WeightFormat  # noqa: E402

SHAPE = LinearShape(100, 80, "bfloat16", FP8, "float32")


def test_launch_covers_every_tile() -> None:
    config = LinearConfig("matrix", 16, 32, 8, splits=2)
    call = linear_launch(SHAPE, config, LinearArrays(1, 2, 3), 17, 4.0)
    assert call.grid == (7 * 3, 2, 1) and call.arguments["alpha"] == 4.0 and call.arguments["tokens"] == 17
    assert partials_bytes(SHAPE, config, 17) == 4 * 2 * 21 * 16 * 8
    vector = LinearConfig("vector", 4, 32)
    assert linear_launch(SHAPE, vector, LinearArrays(1, 2, 3), 1).grid == (25, 1, 1)
    assert linear_launch(SHAPE, vector, LinearArrays(1, 2, 3), 0).grid[0] == 0
    assert partials_bytes(SHAPE, vector, 1) == 0
    with pytest.raises(AssertionError, match="one row"):
        linear_launch(SHAPE, vector, LinearArrays(1, 2, 3), 2)
    with pytest.raises(AssertionError, match="empty"):  # parts of 2, 2, 2 and 0 blocks
        check_config(LinearShape(16, 192, "float16", FP16, "float32"), LinearConfig("matrix", 16, 32, 8, splits=4))


@pytest.mark.parametrize("weights", [FP8, FP16])
@pytest.mark.parametrize("geglu", [False, True])
def test_every_bucket_has_a_configuration(weights: WeightFormat, geglu: bool) -> None:
    for n, k in ((8192, 5376), (5376, 4096), (21504, 5376), (5376, 21504), (262208, 5376), (640, 1024), (640, 2048)):
        for fp8_input in {False, weights.quantized}:
            shape = LinearShape(n, k, "float16", weights, "float32", fp8_input, geglu)
            for tokens in (1, 2, 9, 100, 5000):
                config = linear_config("sm90", shape, tokens)
                check_config(shape, config)
                linear_launch(shape, config, LinearArrays(1, 2, 3), tokens)
                assert config == linear_config("sm90", shape, find_bucket(tokens))
    assert find_bucket(1) == 1 and find_bucket(9) == 16 and find_bucket(10**6) == BUCKETS[-1]


def test_parts_of_a_measured_layer_take_its_configuration() -> None:
    """With sums that are split so that no part is empty and half of a GPU is not idle."""
    for n, k in ((8192, 5376), (5376, 4096), (5376, 21504)):
        whole = LinearShape(n, k, "bfloat16", FP8, "float32")
        for ranks, tokens in ((2, 32), (4, 16), (8, 64)):
            size = (n // ranks, k) if n == 8192 else (n, k // ranks)
            part, config = LinearShape(*size, "bfloat16", FP8, "float32"), linear_config("sm90", whole, tokens)
            found = linear_config("sm90", part, tokens)
            check_config(part, found)
            assert replace(found, splits=config.splits) == config
    gate_up = LinearShape(10752, 5376, "bfloat16", FP8, "bfloat16", geglu=True)
    assert linear_config("sm90", gate_up, 8).block_n == 32
    quarters = (2048, FP8, 16, "float32"), (5376, BF16, 32, "bfloat16")
    found = [
        linear_config("sm90", LinearShape(n, 5376, "bfloat16", w, out, geglu=n == 5376), t) for n, w, t, out in quarters
    ]
    assert found[0].splits == 2 and found[1].block_n == 32
    half = LinearShape(4096, 5376, "bfloat16", FP8, "float32")
    assert linear_config("sm90", half, 32).splits == 2 and linear_config("sm90", half, 16).splits == 1


def test_measured_layers_and_parts_are_taken_as_they_are() -> None:
    formats = {"w16": BF16, "w4": Q4_0}
    for (target, n, k, kind, geglu, bucket), config in MEASURED.items():
        shape = LinearShape(n, k, "bfloat16", formats.get(kind, FP8), "float32", kind == "w8x8", geglu)
        check_config(shape, config)
        assert linear_config(target, shape, bucket) == config


def test_geglu_never_overflows_float16() -> None:
    hidden, inner = 64, 32
    for size in (0.1, 3.0, 40.0):
        gate, up = (torch.randn(inner, hidden, dtype=torch.float64) * size for _ in range(2))
        norm_weight = torch.randn(hidden, dtype=torch.float64).abs() * 3
        lengths = (gate * norm_weight).norm(dim=1) * (up * norm_weight).norm(dim=1)
        exponent = geglu_exponent(hidden, float(lengths.max()))
        assert exponent == 0 or hidden * float(lengths.max()) > 2.0 ** (14 + exponent), "no larger than it must be"
        r = int(lengths.argmax())
        for direction in (gate[r], up[r], torch.randn(hidden, dtype=torch.float64)):  # the worst tokens
            n = direction * norm_weight
            x = n / n.norm() * hidden**0.5 * norm_weight * 1.07  # 1.07: rounded, at worst
            y = torch.nn.functional.gelu(gate @ x, approximate="tanh") * (up @ x) * 2.0**-exponent
            assert float(y.abs().max()) < 65504
    assert geglu_exponent(5376, 0.0) == 0
    with pytest.raises(AssertionError, match="finite"):
        geglu_exponent(5376, float("nan"))
