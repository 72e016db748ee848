"""Weights in blocks, as GGUF publishes them, against transformers on the values that the formats define."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity.test_dtype_parity import chunk_ends, engine_logits, random_tokens, rms_error
from parity.tiny import TinyModel, tiny_model, transformers_model

from wicore_trt.backends.torch.weights import fuse_weights, widen_blocks
from wicore_trt.checkpoint.blocks import Blocks, quantize_q4_0
from wicore_trt.checkpoint.names import Role, unified_tensors, weight_minimum_name, weight_scale_name
from wicore_trt.errors import EngineFormatError

SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "final_logit_softcapping": None}


def quantize_rows(w: np.ndarray, storage: str) -> Blocks:
    """Rows in blocks of `storage` that the format can hold; how well they are chosen is no matter here."""
    if storage in ("q4_0", "q4_1"):
        blocks = quantize_q4_0(w)
        if storage == "q4_0":
            return blocks
        moved = blocks.add_minimums().minimums
        assert moved is not None
        return Blocks(blocks.values, blocks.scales, (moved * np.float16(0.97)).astype(np.float16))
    group, most = (32, 127) if storage == "q8_0" else (16, 31)
    parts = w.reshape(len(w), -1, group)
    scales = (np.abs(parts).max(axis=2) / most).astype(np.float16 if storage == "q8_0" else np.float32)
    values = np.rint(parts / scales.astype(np.float32)[..., None]).clip(-most - 1, most).astype(np.int8)
    return Blocks(values.reshape(w.shape), scales)


def quantized_tensors(model: TinyModel, head: str) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors: linears in Q4_0, mlp.proj in Q4_1 but for layer 1, whose minimums say Q4_0."""
    tensors = {}
    for tensor in unified_tensors(model.spec):
        if (w := model.tensors.get(tensor.name)) is None:
            continue
        if tensor.role is Role.NORM or (tensor.role is not Role.LINEAR and head in ("float16", "bfloat16")):
            tensors[tensor.name] = w if tensor.role is Role.NORM else w.to(getattr(torch, head))
            continue
        storage = head if tensor.role is not Role.LINEAR else "q4_1" if "mlp.proj" in tensor.name else "q4_0"
        blocks = quantize_rows(w.numpy(), storage)
        if storage == "q4_1" and ".1." in tensor.name:
            blocks = quantize_q4_0(w.numpy()).add_minimums()
        names = (tensor.name, weight_scale_name(tensor.name), weight_minimum_name(tensor.name))
        tensors |= {name: torch.from_numpy(part) for name, part in zip(names, blocks.parts, strict=False)}
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head", ["q8_0", "q6_k", "float16", "bfloat16"])
def test_an_engine_computes_what_widened_weights_give(head: str, dtype: str, kernels: str) -> None:
    model = tiny_model(len(head), **SIZES, tie_word_embeddings=head != "q6_k")
    if head == "bfloat16" and dtype != "bfloat16":
        pytest.skip("a head in the base dtype")
    tensors = quantized_tensors(model, head)
    wide = widen_blocks(fuse_weights(tensors, model.spec))
    token_ids = random_tokens(model, 1)
    hf = transformers_model(model.spec, {name: t.float() for name, t in wide.items()})
    scale = torch.tensor(model.spec.embedding_scale).to(getattr(torch, dtype)).float()
    hf.model.embed_tokens.embed_scale = scale
    with torch.inference_mode():
        expected = hf(torch.tensor([token_ids])).logits[0][chunk_ends(token_ids)]
    ours = engine_logits(model, kernels, token_ids, dtype, tensors)
    bound = 2e-5 if dtype == "float32" else 8 * torch.finfo(getattr(torch, dtype)).eps
    assert rms_error(ours, expected) < bound


def test_groups_of_another_size_or_dtype_are_refused() -> None:
    model = tiny_model(1, **SIZES)
    tensors = quantized_tensors(model, "q8_0")
    for name in ("transformer.layers.0.mlp.proj.weight", "transformer.vocab_embedding.weight"):
        scale = weight_scale_name(name)
        for wrong in (
            tensors[scale][:, :1],
            tensors[scale].float(),
            tensors[scale].repeat_interleave(2, 1),
            tensors[scale][1:],
        ):
            with pytest.raises(EngineFormatError, match="do not fit its spec"):
                fuse_weights(tensors | {scale: wrong.contiguous()}, model.spec)
