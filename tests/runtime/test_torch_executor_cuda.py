"""TorchExecutor on a GPU against the same engine on the CPU."""

from __future__ import annotations

import random

import pytest
import torch
from parity.paged import PagedDriver, random_chunks
from parity.tiny import cast, tiny_model

from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.runtime.dtypes import TORCH_DTYPES
from wicore_trt.runtime.options import ExecutorOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize(
    ("dtype", "weights", "kv_dtype", "bound"),
    [
        ("float32", "float32", "float32", 1e-4),
        ("float32", "float32", "fp8", 0.01),
        ("bfloat16", "bfloat16", "bfloat16", 0.01),
        ("float16", "float16", "float16", 2e-3),
        ("float32", "fp8", "float32", 0.01),
        ("bfloat16", "fp8", "bfloat16", 0.05),  # E4M3 values flip to their neighbours
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_gpu_agrees_with_cpu(seed: int, dtype: str, weights: str, kv_dtype: str, bound: float) -> None:
    # row lengths and widths in multiples of 16, as every real model has them
    model, rng = (
        tiny_model(seed, hidden_size=96, intermediate_size=160, vocab_size=256, head_dim=32),
        random.Random(seed),
    )
    tensors = cast(model.spec, model.tensors, TORCH_DTYPES[weights])
    token_ids = [rng.randrange(256) for _ in range(90)]
    chunks = random_chunks(rng, token_ids, 30)
    logits = []
    for device in ("cpu", "cuda"):
        settings = ExecutorOptions(device=device, kernels="torch", page_tokens=8, kv_pages={"global": 40, "local": 40})
        executor = TorchExecutor.from_tensors(model.spec, dtype, tensors, settings, kv_dtype=kv_dtype)
        driver = PagedDriver(executor, seed)
        sequence = driver.new_sequence()
        logits.append(torch.cat([driver.step([(sequence, chunk)]) for chunk in chunks]))
    cpu, cuda = logits
    assert (cuda - cpu).norm() < bound * cpu.norm()
