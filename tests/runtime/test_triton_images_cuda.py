"""Images in TritonExecutor on a GPU, with true head sizes and images of 256 tokens, against torch on the CPU.

pytest -q -s tests/runtime/test_triton_images_cuda.py
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from parity.tiny import TinyModel  # noqa: E402
from parity.vision import random_encoder  # noqa: E402
from runtime.seeing import Part, Seeing, compare, count_images, features_of, text  # noqa: E402
from runtime.triton_cpu import oracle_of, rounded, small_model  # noqa: E402

from benchmarks.gpu.step_check import place_constants  # noqa: E402
from wicore_trt.backends.torch.weights import fuse_weights  # noqa: E402
from wicore_trt.backends.triton.compile import compile_table  # noqa: E402
from wicore_trt.backends.triton.executor import Loading, TritonExecutor  # noqa: E402
from wicore_trt.backends.triton.table import EngineShape  # noqa: E402
from wicore_trt.runtime.cuda_device import CudaDevice  # noqa: E402
from wicore_trt.runtime.options import ExecutorOptions  # noqa: E402
from wicore_trt.weight_format import FP8, PLAIN  # noqa: E402

TOKENS, PAGES = 256, {"page_tokens": 32, "kv_pages": {"global": 200, "local": 200}}
STEPS: list[list[list[Part]]] = [
    [[0, text(20)], [text(300)], [text(30), 2]],
    [[text(1)], [1, text(1), 0], [text(70)]],
    [[text(1)], [text(200), 2, text(1)], [text(1)]],
    [[text(1)], [text(1)], [text(9), 1, text(20)]],
    [[text(1)], [text(1)], [text(1)]],
]
"""All steps with images but the first, which is too large, run in graphs."""


def model_of(head_dim: int) -> TinyModel:
    """Windows end a little behind an image."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    return small_model(head_dim, num_hidden_layers=4, head_dim=head_dim, sliding_window=270, **sizes)


def opened(model: TinyModel, dtype: str, kv_dtype: str, *, fp8: bool = False, **settings: Any) -> TritonExecutor:
    device = CudaDevice()
    shape = EngineShape(model.spec, dtype, FP8 if fp8 else PLAIN[dtype], kv_dtype, 32, images=True)
    weights = fuse_weights(rounded(model, dtype, fp8), model.spec)
    options = ExecutorOptions(max_batch_tokens=1024, max_sequences=4, max_context=2048, **PAGES, **settings)
    vision = random_encoder(3, {"image_size": 224}, tokens=TOKENS, text_hidden=model.spec.hidden_size).weights
    table = compile_table(shape, device.target)
    loading = Loading(shape, table, 2048, lambda n: place_constants(weights, shape, n, device), vision=vision)
    return TritonExecutor(loading, options, device)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "fp8", "bound"),
    [
        ("bfloat16", "bfloat16", False, 0.12),  # the oracle's own distance from float32 is up to 0.08
        ("float16", "float16", False, 0.006),
        ("bfloat16", "fp8", False, 0.3),
        ("bfloat16", "bfloat16", True, 0.25),  # E4M3 values flip to their neighbours
    ],
)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_images_beside_text_and_decoding(head_dim: int, dtype: str, kv_dtype: str, fp8: bool, bound: float) -> None:
    model = model_of(head_dim)
    features = features_of(model, dtype, TOKENS)
    executor = opened(model, dtype, kv_dtype, fp8=fp8)
    mine = Seeing(executor, features.cuda(), 1)
    executor.memory.attended.fill_(torch.nan)
    ran = count_images(executor)
    oracle = Seeing(oracle_of(model, dtype, fp8=fp8, kv_dtype=kv_dtype, max_batch_tokens=1024, **PAGES), features, 2)
    compare(mine, oracle, STEPS, bound, measure_attention=not (fp8 or kv_dtype == "fp8"))
    assert ran == [640, 512, 384 if fp8 else 336]
    executor.close()


@pytest.mark.parametrize("head_dim", [128, 256])
def test_batch_invariant_rows_keep_their_bits_beside_images(head_dim: int) -> None:
    """Text alone runs in graphs by the kernel without images, and images alone in other chunks."""
    model = model_of(head_dim)
    executor = opened(model, "bfloat16", "bfloat16", batch_invariant=True)
    driver, ran = Seeing(executor, features_of(model, "bfloat16", TOKENS).cuda(), 1), count_images(executor)
    words, one, other = text(90), [text(9), 1, text(40)], [0, text(1), 2, text(3)]
    alone = [driver.see([(driver.new_sequence(), parts)]) for parts in ([words], one, other)]
    sequences = [driver.new_sequence() for _ in range(3)]
    driver.see([(sequences[0], [words[:40]]), (sequences[1], one[:1]), (sequences[2], other[:2])])
    parts = [[words[40:]], one[1:], other[2:]]
    together = driver.see(list(zip(sequences, parts, strict=True)))
    assert torch.equal(together, torch.cat(alone)) and ran
    executor.close()
