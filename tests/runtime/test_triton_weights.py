"""Weights of the triton backend: from an engine's files as from memory; made-up ones; types that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from runtime.triton_cpu import CpuDevice, rounded, small_model  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from benchmarks.gpu.step_check import place_constants  # noqa: E402
from wicore_trt.backends.torch.weights import fuse_weights  # noqa: E402
from wicore_trt.backends.triton.table import EngineShape  # noqa: E402
from wicore_trt.backends.triton.weights import (  # noqa: E402
    engine_shape,
    finish_constants,
    load_constants,
    make_dummy_weights,
)
from wicore_trt.checkpoint.names import kv_scale_name  # noqa: E402
from wicore_trt.engine.directory import EngineDir  # noqa: E402
from wicore_trt.engine.manifest import Manifest  # noqa: E402
from wicore_trt.errors import EngineFormatError  # noqa: E402
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD  # noqa: E402
from wicore_trt.runtime.dtypes import E4M3  # noqa: E402
from wicore_trt.weight_format import BF16, FP8, FP16  # noqa: E402


def engine_at(path: Path, tensors: dict[str, torch.Tensor], shape: EngineShape, *, dummy: bool = False) -> EngineDir:
    if not dummy:
        save_file({n: t.contiguous() for n, t in tensors.items()}, path / "rank0.safetensors")
    quantization = {"algo": shape.weights.algo, "base_dtype": shape.dtype} if shape.weights.quantized else None
    manifest = Manifest(
        "m", shape.spec, "triton", ["sm90"], shape.weights.storage, shape.kv_dtype, shape.page_tokens,
        64, quantization, 1, {}, "", "", {}, "s", "", {"dummy_weights": True} if dummy else {},
    )  # fmt: skip
    return EngineDir(path, manifest)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.parametrize("fp8", [False, True])
def test_files_and_memory_give_the_same(fp8: bool, tmp_path: Path) -> None:
    model, device = small_model(1), CpuDevice("sm90")
    tensors = rounded(model, "bfloat16", fp8) | {kv_scale_name(1): torch.tensor([0.5])}
    shape = EngineShape(model.spec, "bfloat16", FP8 if fp8 else BF16, "fp8", 4)
    engine = engine_at(tmp_path, tensors, shape)
    assert engine_shape(engine) == shape and engine_shape(engine, 8).page_tokens == 8
    loaded = load_constants(engine, shape, 64, device)
    placed = place_constants(fuse_weights(tensors, model.spec), shape, 64, device)
    assert loaded.weights.keys() == placed.weights.keys()
    assert all(same(t, placed.weights[n]) for n, t in loaded.weights.items())
    assert [float(loaded.weights[kv_scale_name(i)]) for i in range(2)] == [1.0, 0.5]
    assert all(table.shape == (64, 8) for pair in loaded.rope.values() for table in pair)


@pytest.mark.parametrize("fp8", [False, True])
def test_made_up_weights_have_the_shapes_of_real_ones(fp8: bool, tmp_path: Path) -> None:
    model, device = small_model(1, tie_word_embeddings=True), CpuDevice("sm90")
    shape = EngineShape(model.spec, "bfloat16", FP8 if fp8 else BF16, "bfloat16", 4)
    made = load_constants(engine_at(tmp_path, {}, shape, dummy=True), shape, 64, device).weights
    real = finish_constants(shape, fuse_weights(rounded(model, "bfloat16", fp8), model.spec), 64, device).weights
    assert {n: (t.dtype, t.shape) for n, t in made.items()} == {n: (t.dtype, t.shape) for n, t in real.items()}
    assert made[LM_HEAD] is made[EMBEDDING] and all(t.float().isfinite().all() for t in made.values())
    assert any(t.dtype == E4M3 for t in made.values()) == fp8


def test_weights_of_another_type_are_refused() -> None:
    model, device = small_model(1), CpuDevice("sm90")
    weights = make_dummy_weights(EngineShape(model.spec, "bfloat16", BF16, "bfloat16", 4), device.torch_device)
    with pytest.raises(EngineFormatError, match="float16"):
        finish_constants(EngineShape(model.spec, "float16", FP16, "float16", 4), weights, 64, device)
