"""Linear kernels in Triton's interpreter against float64, and compiled for every target."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import interpreted  # noqa: E402
from gpu_kernels.targets import targets  # noqa: E402

from benchmarks.gpu.kernels.linear_cases import LinearInputs, check_case, draw, reference, run_case  # noqa: E402
from wicore_trt.errors import ConfigError  # noqa: E402
from wicore_trt.plugins import aot  # noqa: E402
from wicore_trt.plugins.kernels.linear_specs import linear_spec  # noqa: E402
from wicore_trt.plugins.linear_layout import LinearConfig, LinearShape  # noqa: E402
from wicore_trt.weight_format import BF16, FP8, FP16  # noqa: E402

VECTOR = LinearConfig("vector", 4, 128, unroll=2)
MATRIX = LinearConfig("matrix", 16, 32, 16)
SPLIT = LinearConfig("matrix", 32, 32, 8, splits=3)

# n and k are no multiples of the blocks: the last program, the last block of k and the last split are partial.
SHAPES = {
    "bf16": LinearShape(70, 208, "bfloat16", BF16, "float32"),
    "fp16": LinearShape(33, 160, "float16", FP16, "float16"),
    "bf16_w8": LinearShape(70, 208, "bfloat16", FP8, "bfloat16"),
    "bf16_w16": LinearShape(70, 208, "bfloat16", FP16, "float32"),
    "fp16_w8": LinearShape(64, 256, "float16", FP8, "float32"),
}
GEGLU = {
    "bf16": LinearShape(37, 208, "bfloat16", BF16, "bfloat16", geglu=True),
    "fp16_w8": LinearShape(48, 128, "float16", FP8, "float16", geglu=True),
}


ON_TARGETS = [(name, target) for name in SHAPES for target in ("sm80", "sm90") if "w8" in name or target == "sm90"]
"""sm80 has no E4M3 type; for other weights its kernel is that of sm90."""


@pytest.mark.parametrize(("config", "tokens"), [(VECTOR, 1), (MATRIX, 1), (MATRIX, 19), (SPLIT, 8), (SPLIT, 11)])
@pytest.mark.parametrize(("name", "target"), ON_TARGETS)
def test_linear(name: str, target: str, config: LinearConfig, tokens: int) -> None:
    shape = SHAPES[name]
    check_case(draw(shape, tokens), config, linear_spec(shape, config, target), interpreted.launch)


@pytest.mark.parametrize(("config", "tokens"), [(VECTOR, 1), (MATRIX, 5)])
@pytest.mark.parametrize("name", GEGLU)
def test_geglu(name: str, config: LinearConfig, tokens: int) -> None:
    case = draw(GEGLU[name], tokens)
    check_case(case, config, linear_spec(case.shape, config, "sm90"), interpreted.launch, alpha=2.0**-3)


@pytest.mark.parametrize("config", [MATRIX, SPLIT])
def test_fp8_inputs(config: LinearConfig) -> None:
    shape = LinearShape(40, 208, "bfloat16", FP8, "float32", fp8_input=True)
    check_case(draw(shape, 9), config, linear_spec(shape, config, "sm90"), interpreted.launch)
    geglu = replace(shape, geglu=True, out="bfloat16", largest=True)
    check_case(draw(geglu, 9), MATRIX, linear_spec(geglu, MATRIX, "sm90"), interpreted.launch)


@pytest.mark.parametrize("config", [MATRIX, SPLIT])
def test_a_row_does_not_depend_on_the_others(config: LinearConfig) -> None:
    shape = SHAPES["bf16_w8"]
    many = draw(shape, 21)
    spec = linear_spec(shape, config, "sm80")
    together = run_case(many, config, spec, interpreted.launch)
    for row in (0, 7, 20):
        x = torch.full_like(many.x[:3], math.nan)
        x[0] = many.x[row]
        alone = run_case(replace(many, tokens=1).with_x(x), config, spec, interpreted.launch)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(("config", "tokens"), [(VECTOR, 1), (MATRIX, 3), (SPLIT, 3)])
def test_nan_reaches_its_outputs_only(config: LinearConfig, tokens: int) -> None:
    case = draw(SHAPES["bf16_w8"], tokens)
    case.w[13, 207] = math.nan  # 0x7F
    if tokens > 1:
        case.x[2, 0] = math.inf
    out = run_case(case, config, linear_spec(case.shape, config, "sm80"), interpreted.launch)[:tokens]
    bad = ~out.isfinite()
    assert bad[:, 13].all() and bad[2:].all() and not bad[:2, :13].any() and not bad[:2, 14:].any()


COMPILED = [
    (SHAPES["bf16_w8"], VECTOR),
    (LinearShape(5376, 4096, "bfloat16", FP8, "float32"), LinearConfig("matrix", 32, 128, 16, 2, 4, 4)),
    (LinearShape(2048, 640, "float16", FP16, "float16", geglu=True), LinearConfig("matrix", 64, 64, 16, 1, 4, 3)),
    (
        LinearShape(640, 2048, "bfloat16", FP8, "float32", fp8_input=True),
        LinearConfig("matrix", 64, 128, 32, 1, 4, 3),
    ),
]


@pytest.mark.parametrize("target", targets())  # kernels of engines compile in `make test-targets`
@pytest.mark.parametrize(("shape", "config"), COMPILED, ids=lambda c: getattr(c, "short_name", str)())
def test_compiles(shape: LinearShape, config: LinearConfig, target: str) -> None:
    if shape.fp8_input and target == "sm80":
        return
    kernel = aot.compile_kernel(linear_spec(shape, config, target), target)
    assert kernel.shared_bytes <= aot.SHARED_LIMIT[target]


def test_rows_of_fp8_are_refused_where_no_instruction_multiplies_them() -> None:
    with pytest.raises(ConfigError, match="FP8"):
        linear_spec(*COMPILED[3], "sm80")


def test_checks_see_one_missing_product() -> None:
    case = draw(SHAPES["bf16"], 2)
    x = case.x.clone()
    x[1, 200] = 0
    want, allowed = reference(case)
    got, _ = reference(LinearInputs(case.shape, 2, x, case.w, None, None))
    assert bool(((want - got).abs() > allowed)[1].any())
