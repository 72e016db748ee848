"""Reduced precision against transformers in float32, and float16 where the residual stream leaves its range (I20)."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from parity.fp8 import fp8_model
from parity.paged import PagedDriver, random_chunks
from parity.tiny import TinyModel, cast, overflowing_model, tiny_model

from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.runtime.dtypes import TORCH_DTYPES
from wicore_trt.runtime.options import ExecutorOptions

E4M3 = torch.float8_e4m3fn


def engine_logits(
    model: TinyModel,
    kernels: str,
    token_ids: list[int],
    dtype: str,
    tensors: dict[str, torch.Tensor],
    kv_dtype: str | None = None,
) -> torch.Tensor:
    """Logits [ends, vocab] after random chunks; `chunk_ends` gives their rows."""
    settings = ExecutorOptions(
        device="cpu", kernels=kernels, page_tokens=8, kv_pages={"global": 100, "local": 100}, max_batch_tokens=256
    )
    executor = TorchExecutor.from_tensors(model.spec, dtype, tensors, settings, kv_dtype=kv_dtype)
    driver = PagedDriver(executor, len(token_ids))
    sequence = driver.new_sequence()
    return torch.cat([driver.step([(sequence, chunk)]) for chunk in chunks_of(token_ids)])


def chunks_of(token_ids: list[int]) -> list[list[int]]:
    return random_chunks(random.Random(0), token_ids, 12)


def chunk_ends(token_ids: list[int]) -> list[int]:
    return [sum(len(c) for c in chunks_of(token_ids)[: i + 1]) - 1 for i in range(len(chunks_of(token_ids)))]


def rms_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm()) if actual.isfinite().all() else float("inf")


def fp8_tensors(model: TinyModel) -> dict[str, torch.Tensor]:
    return cast(model.spec, model.tensors, E4M3)


def random_tokens(model: TinyModel, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(model.spec.vocab_size) for _ in range(70)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))])
def test_16_bit_is_nearer_to_float32_than_transformers(seed: int, dtype: str, kernels: str) -> None:
    """transformers rounds the residual and every intermediate; an FP32 residual must do better in the same dtype."""
    model, torch_dtype = tiny_model(seed), TORCH_DTYPES[dtype]
    token_ids = random_tokens(model, seed)
    expected = model.hf_logits(token_ids)[chunk_ends(token_ids)]
    with torch.inference_mode():
        theirs = copy.deepcopy(model.hf).to(torch_dtype)(torch.tensor([token_ids])).logits[0][chunk_ends(token_ids)]
    ours = engine_logits(model, kernels, token_ids, dtype, cast(model.spec, model.tensors, torch_dtype))
    assert rms_error(ours, expected) < 0.85 * rms_error(theirs, expected)
    assert rms_error(ours, expected) < 8 * torch.finfo(torch_dtype).eps


@pytest.mark.parametrize("where", ["residual", "mlp"])
def test_float16_survives_values_beyond_its_range(where: str, kernels: str) -> None:
    model = overflowing_model(where)
    token_ids = random_tokens(model, 3)
    with torch.inference_mode():
        plain = copy.deepcopy(model.hf).half()(torch.tensor([token_ids])).logits
    assert not plain.isfinite().all(), "the crafted model no longer overflows plain float16"
    ours = engine_logits(model, kernels, token_ids, "float16", cast(model.spec, model.tensors, torch.float16))
    expected = model.hf_logits(token_ids)[chunk_ends(token_ids)]
    assert rms_error(ours, expected) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("seed", range(4))
def test_fp8_engine_follows_its_definition(seed: int) -> None:
    """transformers with every linear of its layers replaced by the definition. Activations are float32 in between:
    with bfloat16 there, E4M3 values flip to their neighbours and nothing sharp can be said."""
    model, tensors = fp8_model(seed)
    token_ids = random_tokens(model, seed)
    expected = model.hf_logits(token_ids)[chunk_ends(token_ids)]
    assert rms_error(engine_logits(model, "torch", token_ids, "float32", tensors), expected) < 0.01


@pytest.mark.parametrize("seed", range(4))
def test_fp8_kernels_agree(seed: int, kernels: str) -> None:
    """An FP8 engine with bfloat16 activations: near float32, and the same from every set of operators."""
    model = tiny_model(seed)
    token_ids = random_tokens(model, seed)
    ours = engine_logits(model, kernels, token_ids, "bfloat16", fp8_tensors(model))
    assert rms_error(ours, model.hf_logits(token_ids)[chunk_ends(token_ids)]) < 0.25
    if kernels != "torch":
        oracle = engine_logits(model, "torch", token_ids, "bfloat16", fp8_tensors(model))
        assert rms_error(ours, oracle) < 0.05  # E4M3 values flip to their neighbours


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bfloat16", 0.02), ("float16", 0.004), ("fp8", 0.15)])
def test_kv_dtype_apart_from_weights(kv_dtype: str, bound: float, kernels: str) -> None:
    if kernels == "native" and kv_dtype == "fp8":
        pytest.skip("the native kernels keep KV in 16 or 32 bits")
    model = tiny_model(5)
    token_ids = random_tokens(model, 5)
    ours = engine_logits(model, kernels, token_ids, "float32", model.tensors, kv_dtype)
    assert rms_error(ours, model.hf_logits(token_ids)[chunk_ends(token_ids)]) < bound
