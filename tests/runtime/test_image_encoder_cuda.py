"""The image encoder on a GPU: its stream and graph against the CPU's float32, and against transformers."""

from __future__ import annotations

import pytest
import torch
from parity.paged import PagedDriver
from parity.tiny import cast, tiny_model
from parity.vision import random_encoder, random_pixels
from tiny_images import TRUE_VISION

from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.backends.torch.vision import TorchVision, VisionWeights, open_encoder
from wicore_trt.model.vision import PROJECTION
from wicore_trt.runtime.dtypes import TORCH_DTYPES
from wicore_trt.runtime.image_encoder import FeatureEncoder, StreamEncoder
from wicore_trt.runtime.options import ExecutorOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
# heads of 72 values, as the published encoder has them
NARROW = {"image_size": 224, "hidden_size": 144, "intermediate_size": 304, "num_hidden_layers": 4}
BOUNDS = [("float32", 1e-4), ("bfloat16", 0.03), ("float16", 4e-3)]


def begin(encoder: FeatureEncoder, slot: int, pixels: torch.Tensor, first: int) -> None:
    encoder.begin(slot, pixels.numpy().tobytes())
    for count in (first, encoder.parts - first):
        if count:
            encoder.run_parts(count)


def _encode_all(encoder: FeatureEncoder, images: list[torch.Tensor]) -> list[torch.Tensor]:
    """Features of more images than there are slots, all slots begun at once, every other one in two parts."""
    found: dict[int, torch.Tensor] = {}
    for first in range(0, len(images), encoder.slots):
        group = range(first, min(first + encoder.slots, len(images)))
        for image in group:
            begin(encoder, image - first, images[image], image % 2)
        ended: list[tuple[int, str | None]] = []
        while len(ended) < len(group):
            ended += encoder.take_ended(10.0)
        assert ended == [(image - first, None) for image in group]
        found |= {image: encoder.features[image - first].float().cpu() for image in group}
    return [found[n] for n in range(len(images))]


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_gpu_features_are_those_of_the_cpu(dtype: str, bound: float) -> None:
    for vision, tokens in (({}, 4), (NARROW, 16)):
        source = random_encoder(2, vision, tokens=tokens, text_hidden=64)
        images = [random_pixels(seed, source.weights.spec.image_size) for seed in range(7)]
        oracle = TorchVision(source.weights, "float32", torch.device("cpu"))
        encoder = open_encoder(source.weights, dtype, 3, torch.device("cuda"))
        assert isinstance(encoder, StreamEncoder) and encoder.features.dtype == TORCH_DTYPES[dtype]
        torch.cuda.empty_cache()
        torch.full((1 << 28,), torch.nan, device="cuda")  # where anything lay that was given back
        with torch.inference_mode():
            for image, found in zip(images, _encode_all(encoder, images), strict=True):
                wanted = oracle.encode(image)
                assert (found - wanted).norm() < bound * wanted.norm()
                assert (found - wanted).abs().max() < 5 * bound
        encoder.close()


def test_overflow_in_float16_is_told() -> None:
    source = random_encoder(3)
    tensors = dict(source.weights.tensors)
    tensors[PROJECTION] = tensors[PROJECTION].clone()
    tensors[PROJECTION][:, 6] *= 2.6e4
    encoder = open_encoder(VisionWeights(source.weights.spec, tensors), "float16", 6, torch.device("cuda"))
    for slot in range(6):
        begin(encoder, slot, random_pixels(slot, 56), 1)
    torch.cuda.synchronize()
    finite = encoder.features.isfinite().flatten(1).all(1).tolist()
    assert any(finite) and not all(finite) and [encoder.is_finite(slot) for slot in range(6)] == finite
    encoder.close()


def test_images_are_encoded_beside_steps() -> None:
    model = tiny_model(0, hidden_size=96, intermediate_size=160, vocab_size=256, head_dim=32)
    source = random_encoder(4, NARROW, tokens=16, text_hidden=model.spec.hidden_size)
    settings = ExecutorOptions(device="cuda", page_tokens=8, kv_pages={"global": 40, "local": 40}, image_slots=4)
    executor = TorchExecutor.from_tensors(
        model.spec, "float32", cast(model.spec, model.tensors, torch.float32), settings, vision=source.weights
    )
    encoder, driver = executor.images, PagedDriver(executor, 0)
    assert encoder is not None
    images = [random_pixels(seed, 224) for seed in range(4)]
    wanted = [source.hf_features(pixels) for pixels in images]
    ids = list(range(1, 61))
    alone = model.hf_logits(ids)[2::3]  # a step gives those of its last row
    sequence = driver.new_sequence()
    logits = []
    for n in range(0, 60, 3):
        if n < 12:
            begin(encoder, n // 3, images[n // 3], n // 6)
        logits.append(driver.step([(sequence, ids[n : n + 3])]))
    ended: list[tuple[int, str | None]] = []
    while len(ended) < 4:
        ended += encoder.take_ended(10.0)
    assert ended == [(slot, None) for slot in range(4)]
    for slot, features in enumerate(wanted):
        assert (encoder.features[slot].cpu() - features).abs().max() < 1e-3
    assert (torch.cat(logits).cpu() - alone).norm() < 1e-3 * alone.norm()
    executor.close()


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_features_of_the_true_shapes(dtype: str, bound: float) -> None:
    source = random_encoder(1, TRUE_VISION, tokens=256, text_hidden=5376)
    images = [random_pixels(seed, 896) for seed in range(2)]
    encoder = open_encoder(source.weights, dtype, 2, torch.device("cuda"))
    source.tower.cuda()
    source.projector.cuda()
    for image, found in zip(images, _encode_all(encoder, images), strict=True):
        wanted = source.hf_features(image)
        assert (found - wanted).norm() < bound * wanted.norm()
    encoder.close()
