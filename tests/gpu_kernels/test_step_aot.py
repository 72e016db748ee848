"""A step's small kernels compile for every target without a GPU; their launches fit what was compiled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="pip install -e .[triton]")

from gpu_kernels.targets import targets

from wicore_trt.errors import ConfigError
from wicore_trt.plugins import aot, step_layout
from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.kernels import sample, step_specs
from wicore_trt.plugins.kernels.step_specs import NormShape, StepConfig
from wicore_trt.plugins.launch import ParameterBlock
from wicore_trt.plugins.layout import Launch, Pool, PoolShape, Tables
from wicore_trt.plugins.step_layout import Logits, NormOut, QkNorms, RopeTable, SampleArrays, StepTokens

LARGE = PoolShape(52, 32, 16, 128, "bfloat16")
SMALL = PoolShape(15, 16, 1, 256, "fp8")
WIDE, NARROW = NormShape(5376, "bfloat16", fp8=True), NormShape(640, "float16")
VOCAB = 262_208


def norm_calls() -> list[tuple[KernelSpec, Launch]]:
    to, plain = NormOut(16, 4), NormOut(16)
    return [
        (
            step_specs.embed_norm_spec(WIDE, 16),
            step_layout.embed_norm_launch(4, (16, VOCAB, 73.5), 16, 32, to, 7, 1e-6),
        ),
        (
            step_specs.add_norm_spec(WIDE, 16, x_dtype="bfloat16"),
            step_layout.add_norm_launch(16, 16, (16, 32), to, 7, 1e-6),
        ),
        (
            step_specs.add_norm_spec(NARROW, 2, x_dtype="float32", gather=True),
            step_layout.add_norm_launch(16, 16, (16, 32), plain, 3, 1e-6, gathered=4),
        ),
    ]


def rope_call(pool: PoolShape, heads: int, qkv: str, q: str, block: int) -> tuple[KernelSpec, Launch]:
    spec = step_specs.qk_rope_spec(pool, heads, qkv, q, StepConfig(4, block))
    norms, rope = QkNorms(16, 32, 1e-6), RopeTable(16, 32, 4096)
    place = (Pool(16, pool), Tables(4, 8, 33), StepTokens(4, 8, 9))
    return spec, step_layout.qk_rope_launch(spec.constants, 16, 32, norms, rope, *place)


def sample_calls(*, sampled: bool, softcap: float, candidates: int) -> list[tuple[KernelSpec, Launch]]:
    specs = step_specs.sample_specs(VOCAB, sampled=sampled, softcap=softcap, candidates=candidates)
    sizes = step_layout.sample_scratch(VOCAB, int(specs["choose"].constants["CHUNK"]), sample.GROUP, 64)
    arrays = SampleArrays(4, 8, **dict.fromkeys(sizes, 8))
    calls = step_layout.sample_launches(specs["choose"].constants, Logits(16, 3, VOCAB), arrays)
    return [(spec, calls[n]) for n, spec in specs.items()]


CALLS = {
    spec.name: (spec, call)
    for spec, call in [
        *norm_calls(),
        rope_call(LARGE, 32, "bfloat16", "bfloat16", 1),
        rope_call(SMALL, 4, "float32", "float16", 4),
        *sample_calls(sampled=False, softcap=0, candidates=1024),
        *sample_calls(sampled=True, softcap=30, candidates=16),
    ]
}


@pytest.mark.parametrize("target", targets())  # `make test-targets`
@pytest.mark.parametrize("name", CALLS)
def test_step_kernel_compiles(name: str, target: str) -> None:
    spec, call = CALLS[name]
    kernel = aot.compile_kernel(spec, target)
    ParameterBlock(kernel).fill_parameters(call.arguments)
    assert min(call.grid) > 0 and kernel.shared_bytes <= 48 * 1024
    if "norm" in name:
        # A reduction's few words only: a row that changed its layout would pass through shared memory as a whole.
        assert kernel.shared_bytes <= 4 * 4 * spec.num_warps


@pytest.mark.long
def test_the_default_number_of_candidates_compiles() -> None:
    draw = step_specs.sample_specs(VOCAB, sampled=True)["draw"]
    assert draw.constants["CAPACITY"] == 2048
    assert aot.compile_kernel(draw, "sm90").shared_bytes <= 48 * 1024


def test_tables_cover_every_number_of_rows() -> None:
    for name, table in step_specs.DEFAULTS.items():
        assert [most for most, _ in table] == sorted({most for most, _ in table})
        assert step_specs.config(name, 2**31 - 1)
    assert step_specs.norm_config(1, 5376).num_warps > step_specs.norm_config(1, 640).num_warps
    with pytest.raises(ConfigError, match="5377"):
        NormShape(5377, "bfloat16")


def test_grids() -> None:
    spec, call = rope_call(SMALL, 4, "bfloat16", "bfloat16", 4)
    assert call.grid == (3, 6, 1) and spec.constants["HEADS"] == 4
    assert [call.grid for _, call in sample_calls(sampled=True, softcap=0, candidates=64)] == [
        (129, 3, 1),
        (3, 1, 1),
        (129, 3, 1),
        (3, 1, 1),
    ]
