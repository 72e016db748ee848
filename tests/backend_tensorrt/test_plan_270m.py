"""Gemma 3 270M with its real weights: the networks of an engine against transformers, a prompt and decode steps."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import pytest
import torch
from parity.fp8 import replace_linears
from parity.paged import relative_error
from parity.tiny import transformers_model
from plan_driver import PlanDriver
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn

from wicore_trt.backends.tensorrt.plan_io import PlanLimits
from wicore_trt.backends.torch.weights import fuse_weights
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.format import Checkpoint
from wicore_trt.model.spec import Gemma3Spec

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(900)]
LIMITS = PlanLimits(max_batch=2, max_chunk=512, max_context=1024)
PROMPT = 540  # longer than the window of 512
BOUNDS = {"float32": 2e-5, "bfloat16": 0.04, "float16": 0.01, "fp8": 0.25}


@pytest.mark.parametrize(
    ("dtype", "steps"),
    [(dtype, 16) for dtype in BOUNDS],
)
def test_prompt_and_decode_steps(
    dtype: str, steps: int, gemma_270m_gguf: Path, checkpoint_270m: Checkpoint, tmp_path: Path
) -> None:
    """KV is carried through the cache outputs; the window slides out of the cache's beginning while decoding."""
    checkpoint = checkpoint_270m
    if dtype != "float32":
        checkpoint = convert(gemma_270m_gguf, tmp_path / "checkpoint", dtype=dtype)
    tensors = load_file(checkpoint.rank_files[0])
    spec, base = checkpoint.spec, checkpoint.dtype
    driver = PlanDriver(spec, tensors, tmp_path, LIMITS, dtype=base)
    hf = reference(fuse_weights(tensors, spec), spec, quantized=dtype == "fp8")
    tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    text = max(pydoc_data.topics.topics.values(), key=len)
    prompt = [2, *tokenizer.encode(text, add_special_tokens=False).ids[: PROMPT - 1]]
    slot, idle = driver.new_slot(), driver.new_slot()
    driver.prefill(slot, prompt[: LIMITS.max_chunk])
    ours = [driver.prefill(slot, prompt[LIMITS.max_chunk :])]
    output: list[int] = []
    for _ in range(steps):
        output.append(int(ours[-1].argmax()))
        ours.append(driver.decode([idle, slot], [None, output[-1]])[0])
    with torch.inference_mode():
        expected = hf(torch.tensor([prompt + output]), logits_to_keep=steps + 1).logits[0]
    errors = [relative_error(a, b) for a, b in zip(ours, expected, strict=True)]
    print(f"{dtype}: largest relative error {max(errors):.2e}")
    assert max(errors) < BOUNDS[dtype]
    if dtype == "float32":
        assert expected.argmax(1).tolist()[:-1] == output


def reference(fused: dict[str, torch.Tensor], spec: Gemma3Spec, *, quantized: bool) -> nn.Module:
    """transformers in float32 over the engine's values; FP8 linears by their definition."""
    whole = {}
    for name, tensor in fused.items():
        scale = fused.get(name + "s_scaling_factor")
        whole[name] = tensor.float() if scale is None else tensor.float() * scale[:, None]
    hf = transformers_model(spec, whole)
    if quantized:
        replace_linears(hf)
    return hf
