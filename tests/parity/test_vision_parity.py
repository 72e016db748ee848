"""The torch lowering of the image encoder against transformers' SigLIP and projector."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity.vision import RandomEncoder, random_encoder, random_pixels
from tiny_images import TRUE_VISION

from wicore_trt.backends.torch.vision import TorchVision

CPU = torch.device("cpu")
SIXTEEN_BITS = [(d, bound, faster) for d, bound in (("bfloat16", 0.02), ("float16", 2e-3)) for faster in (False, True)]
SHAPES: list[tuple[dict[str, Any], int]] = [
    ({}, 4),
    ({"image_size": 84, "hidden_size": 36, "num_attention_heads": 3, "num_hidden_layers": 3}, 4),  # pooled by 3 x 3
    ({"image_size": 40, "patch_size": 8, "intermediate_size": 31, "layer_norm_eps": 0.3}, 25),  # not pooled
]


def _features(encoder: RandomEncoder, dtype: str, pixels: torch.Tensor, *, faster: bool = False) -> torch.Tensor:
    with torch.inference_mode():
        return TorchVision(encoder.weights, dtype, CPU, faster=faster).encode(pixels)


@pytest.mark.parametrize(("vision", "tokens"), SHAPES)
def test_features_are_those_of_transformers(vision: dict[str, Any], tokens: int) -> None:
    encoder = random_encoder(tokens, vision, tokens=tokens)
    for seed in range(2):
        pixels = random_pixels(seed, encoder.weights.spec.image_size)
        theirs = encoder.hf_features(pixels)
        ours = _features(encoder, "float32", pixels)
        assert ours.shape == theirs.shape and 0.3 < theirs.abs().mean() < 3
        assert (ours - theirs).abs().max() < 1e-5
        for dtype, bound, faster in (("float32", 1e-5, True), *SIXTEEN_BITS):  # faster: as on a GPU
            close = _features(encoder, dtype, pixels, faster=faster)
            assert close.dtype == getattr(torch, dtype)
            assert (close.float() - theirs).norm() < bound * theirs.norm()


def test_pixel_values_are_those_of_the_processor() -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    pixels = torch.arange(256, dtype=torch.uint8).view(16, 16, 1).expand(-1, -1, 3).contiguous()
    theirs = Gemma3ImageProcessorPil(do_resize=False)(
        [pixels.numpy()], return_tensors="pt", input_data_format="channels_last"
    )["pixel_values"][0, 0]
    model = TorchVision(random_encoder(0).weights, "float32", CPU)
    assert torch.equal(model.pixel_values, theirs.flatten())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_features_of_the_true_shapes() -> None:
    encoder = random_encoder(1, TRUE_VISION, tokens=256, text_hidden=5376)
    pixels = random_pixels(1, 896)
    theirs = encoder.hf_features(pixels)
    for dtype, bound in (("float32", 1e-4), ("bfloat16", 0.05)):
        ours = _features(encoder, dtype, pixels)
        distance = (ours.float() - theirs).abs().max() if dtype == "float32" else (ours - theirs).norm() / theirs.norm()
        assert distance < bound
