"""Linear kernels of 4-bit weights in Triton's interpreter, bit by bit where a result is exact, and compiled."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import interpreted  # noqa: E402
from gpu_kernels import gluon_numpy  # noqa: E402
from gpu_kernels.ptx import recorded_ptx  # noqa: E402
from gpu_kernels.targets import targets  # noqa: E402

from benchmarks.gpu.kernels.linear_cases import check_case, draw, pack_case, run_case  # noqa: E402
from benchmarks.gpu.kernels.tiles_back import unpack_scales, unpack_tiles  # noqa: E402
from wicore_trt.backends.triton.tiles import (  # noqa: E402
    dequantize_blocks,
    pack_scales,
    pack_tiles,
)
from wicore_trt.plugins import aot  # noqa: E402
from wicore_trt.plugins.kernels.linear_specs import dequantize_spec, linear_spec  # noqa: E402
from wicore_trt.plugins.linear_configs import groups_config  # noqa: E402
from wicore_trt.plugins.linear_layout import LinearConfig, LinearShape, dequantize_launch  # noqa: E402
from wicore_trt.weight_format import Q4_0, WeightFormat  # noqa: E402

Q4_1 = replace(Q4_0, minimums=("mlp.proj",))
SHAPE = LinearShape(96, 224, "bfloat16", Q4_0, "float32")
SMALL, SPLIT = LinearConfig("tiles", 32, 128, 8, 1, 4), LinearConfig("tiles", 64, 64, 16, 2, 4, 1, 2)
CASES = [  # 7 blocks of columns and 3 tiles of rows: the last step, split and program are partial
    (SHAPE, SMALL, 1),
    (SHAPE, SPLIT, 19),
    (replace(SHAPE, dtype="float16", out="float16", weights=Q4_1), SPLIT, 11),
    (replace(SHAPE, n=64, k=256, out="bfloat16", geglu=True), LinearConfig("tiles", 64, 64, 32, 2, 4, 2, 3), 5),
]


@pytest.mark.parametrize(("shape", "config", "tokens"), CASES)
def test_linear(shape: LinearShape, config: LinearConfig, tokens: int) -> None:
    check_case(draw(shape, tokens), config, linear_spec(shape, config, "sm90"), interpreted.launch)


def test_a_row_has_the_same_bits_in_a_loop_that_is_not_unrolled() -> None:
    case = draw(SHAPE, 19)
    rolled = replace(SPLIT, unroll=1, num_stages=2)
    outs = [run_case(case, c, linear_spec(SHAPE, c, "sm90"), interpreted.launch)[:19] for c in (SPLIT, rolled)]
    assert torch.equal(*outs)


WIDE = replace(SHAPE, n=160, k=640)  # the last program has a strip of 4
WHOLE, PARTS = LinearConfig("groups", 128, 128, 16, 1, 4, 3), LinearConfig("groups", 128, 128, 8, 3, 4, 2)
GROUPS_CASES = [
    (WIDE, PARTS, 19),
    (replace(WIDE, n=288, dtype="float16"), LinearConfig("groups", 256, 128, 32, 2, 8, 4), 3),
    (replace(WIDE, out="bfloat16", geglu=True), LinearConfig("groups", 64, 128, 16, 2, 4, 3), 17),
    (replace(WIDE, out="bfloat16", geglu=True), LinearConfig("groups", 64, 128, 32, 1, 4, 2), 32),
]


@pytest.mark.parametrize(("shape", "config", "tokens"), GROUPS_CASES)
def test_linear_by_warp_groups(shape: LinearShape, config: LinearConfig, tokens: int) -> None:
    check_case(draw(shape, tokens), config, linear_spec(shape, config, "sm90"), gluon_numpy.launch)


def test_warp_groups_sum_as_tiles_do() -> None:
    """Whole sums take a block after the other. Small integers have no other order within a block."""
    case = draw(WIDE, 9)
    case.x.copy_((case.x * 2).round().clamp(-8, 8))
    one = LinearConfig("tiles", 32, 32, 16, 1, 1)
    launches = ((WHOLE, gluon_numpy.launch), (one, interpreted.launch))
    outs = [run_case(case, c, linear_spec(WIDE, c, "sm90"), run)[:9] for c, run in launches]
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_weight_is_rounded(dtype: str) -> None:
    """Rows that are 1 in one column each give the weights themselves: float32(d) * (q - 8), every bit of it."""
    shape = replace(SHAPE, k=64, dtype=dtype)
    case = draw(shape, 64)
    case.x[:64] = torch.eye(64)
    config = LinearConfig("tiles", 64, 32, 64, 1, 2)
    out = run_case(case, config, linear_spec(shape, config, "sm90"), interpreted.launch)[:64]
    q = torch.empty(96, 2, 32)
    for j in range(16):  # GGUF: the low half of byte j is weight j of its block of 32, the high half weight j + 16
        q[:, :, j], q[:, :, j + 16] = (case.w.view(96, 2, 16)[:, :, j] & 15), (case.w.view(96, 2, 16)[:, :, j] >> 4)
    want = ((q - 8) * case.w_scale.float()[:, :, None]).view(96, 64)
    assert torch.equal(out.T, want) and torch.equal(dequantize_blocks(case.w, case.w_scale, None), want)


@pytest.mark.parametrize("weights", [Q4_0, Q4_1])
def test_dequantize_rounds_once(weights: WeightFormat) -> None:
    shape = replace(SHAPE, weights=weights)
    case = draw(shape, 0)
    spec, out = dequantize_spec(shape), torch.full((97, 224), math.nan, dtype=torch.bfloat16)
    w, d, m = pack_case(case)
    interpreted.launch(spec, dequantize_launch(spec.constants, w, out, d, 0 if m is None else m))
    want = dequantize_blocks(case.w, case.w_scale, case.w_minimum)
    assert bool(out[96].isnan().all())
    if weights.minimums:  # d (q - 8) + (8 d + m) for d q + m
        assert torch.allclose(out[:96].float(), want, rtol=2.0**-8, atol=2.0**-22)
    else:
        assert torch.equal(out[:96], want.bfloat16())


def test_order_of_tiles_is_reversible() -> None:
    w, d = torch.randint(0, 256, (4128, 48), dtype=torch.uint8), torch.randn(4128, 3).half()
    packed, scales = w.clone(), d.clone()
    pack_tiles(packed)
    pack_scales(scales)
    assert torch.equal(unpack_tiles(packed), w) and torch.equal(unpack_scales(scales), d)
    assert not torch.equal(packed, w) and not torch.equal(scales, d)


@pytest.mark.parametrize("config", [SMALL, SPLIT, PARTS])
def test_a_row_does_not_depend_on_the_others(config: LinearConfig) -> None:
    shape = WIDE if config.kind == "groups" else SHAPE
    many, spec = draw(shape, 21), linear_spec(shape, config, "sm90")
    launch = gluon_numpy.launch if config.kind == "groups" else interpreted.launch
    together = run_case(many, config, spec, launch)
    for row in (0, 20):
        x = torch.full_like(many.x[:3], math.nan)
        x[0] = many.x[row]
        alone = run_case(replace(many, tokens=1).with_x(x), config, spec, launch)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("target", targets("sm90"))
def test_operands_cross_no_lanes(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks of columns in the loop's body take no more barriers or shuffles: no layout is converted."""
    texts, shape = recorded_ptx(monkeypatch), LinearShape(5376, 4096, "bfloat16", Q4_0, "float32")
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    for unroll in (1, 2):
        config = LinearConfig("tiles", 32, 64, 8, 1, 2, 1, unroll)
        aot.compile_kernel(linear_spec(shape, config, target), target)
    one, two = (text.count("bar.sync") + text.count("shfl") for text in texts)
    assert one == two and texts[1].count("mma.sync") == 2 * texts[0].count("mma.sync") > 0


@pytest.mark.parametrize("columns", [16, 32])
def test_warp_groups_fit_their_registers(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No value of an operand crosses lanes, and the maps are what the compiler's copies take."""
    texts = recorded_ptx(monkeypatch)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    shape = LinearShape(5376, 4096, "bfloat16", Q4_0, "float32")
    config = groups_config("sm90", shape, columns)
    assert config is not None
    kernel = aot.compile_kernel(linear_spec(shape, config, "sm90"), "sm90")
    registers = 168 if columns == 32 else 128
    assert texts[0].count("wgmma.mma_async") == 4 * 4 and "shfl" not in texts[0]
    sizes = re.findall(r"\.param \.(?:align 64 \.)?([bu]\w+|f32)", texts[0])
    assert sizes[:7] == ["b8", *["u32"] * 3, *["u64"] * 3] and sizes.count("b8") == 3, "maps, their sizes and strides"
    assert f".maxnreg {registers}" in texts[0] and 3 * kernel.shared_bytes < aot.SHARED_LIMIT["sm90"]
