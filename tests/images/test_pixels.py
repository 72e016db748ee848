"""Pixels of files equal those that transformers makes of them, bit for bit."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from image_files import make_files
from PIL import Image, ImageOps

from wicore_trt.images import worker
from wicore_trt.images.prepare import prepare_image
from wicore_trt.types import ImageFile, ImageInfo


def load_as_transformers(data: bytes) -> Image.Image:
    """`transformers.image_utils.load_image` of a file's bytes, which it takes as a path or a URL."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def normalize(pixels: bytes, size: int) -> np.ndarray:
    values = np.frombuffer(pixels, np.uint8).reshape(size, size, 3).transpose(2, 0, 1).astype(np.float32)
    return (values / np.float32(255) - np.float32(0.5)) / np.float32(0.5)


def make_oracle(size: int):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(
        size={"height": size, "width": size}, do_pan_and_scan=True, pan_and_scan_min_crop_size=256,
        pan_and_scan_max_num_crops=4, pan_and_scan_min_ratio_to_activate=1.2,
    )  # fmt: skip


def check_files(count: int, size: int, seed: int) -> int:
    """Compare files with and without pan and scan; return how many crops there were."""
    info, oracle, crops = ImageInfo(size, 4, 1, 2, 3), make_oracle(size), 0
    named: dict[bytes, bytes] = {}
    for name, data in make_files(count, seed):
        want = oracle([load_as_transformers(data)])
        got = prepare_image(ImageFile(data=data, crops=True), info)
        assert not got.data and len(got.pixels) == len(want["pixel_values"]) == 1 + want["num_crops"][0], name
        alone = prepare_image(ImageFile(data=data), info)
        assert (alone.pixels, alone.digests) == (got.pixels[:1], got.digests[:1])
        for pixels, digest in zip(got.pixels, got.digests, strict=True):
            assert named.setdefault(digest, bytes(pixels)) == pixels, name
        crops += want["num_crops"][0]
        for ours, theirs in zip(got.pixels, want["pixel_values"], strict=True):
            assert np.array_equal(normalize(ours, size), np.asarray(theirs)), name
    assert len(set(named.values())) == len(named) > count // 2
    return crops


def test_pixels_equal_those_of_transformers() -> None:
    assert check_files(200, 56, seed=0) > 30


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_pixels_of_the_true_size_equal_those_of_transformers() -> None:
    assert check_files(300, 896, seed=1) > 50


def test_the_true_size_and_every_number_of_crops(tmp_path) -> None:
    """Files of transformers' own reader, from wide to tall."""
    from transformers.image_utils import load_image

    info, oracle = ImageInfo(896, 256, 1, 2, 3), make_oracle(896)
    counts = []
    for width, height in ((300, 250), (600, 499), (640, 256), (301, 1024), (256, 1500)):
        random = np.random.default_rng(width)
        small = random.integers(0, 256, (height // 4, width // 4, 3), np.uint8)
        Image.fromarray(small).resize((width, height)).save(tmp_path / "a.jpg")
        want = oracle([load_image(str(tmp_path / "a.jpg"))])
        got = prepare_image(ImageFile(data=(tmp_path / "a.jpg").read_bytes(), crops=True), info)
        counts.append(len(got.pixels))
        for ours, theirs in zip(got.pixels, want["pixel_values"], strict=True):
            assert np.array_equal(normalize(ours, 896), np.asarray(theirs))
    assert counts == [1, 3, 3, 4, 5]


@pytest.mark.parametrize("native", [True, False])
def test_squares_equal_those_of_pillow(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Of all shapes, and of pictures whose rows lie in several blocks."""
    monkeypatch.setattr(worker, "_library", worker._open_library() if native else None)
    if native and worker._library is None:
        pytest.skip("the native library was not built, or for another processor")
    rng, sizes = random.Random(0), [(4001, 1201, 33), (1, 1, 5), (9000, 1, 7), (56, 56, 56), (40, 90, 56)]
    assert worker._find_pixels(Image.new("RGB", (4001, 1201))) is None
    for _ in range(60):
        height = rng.choice((rng.randint(1, 9), rng.randint(1, 300)))
        sizes.append((rng.randint(height, 500), height, rng.choice((56, rng.randint(1, 200)))))
    for width, height, size in sizes:
        image = Image.frombytes("RGB", (width, height), rng.randbytes(width * height * 3))
        square = np.zeros((size, size, 3), np.uint8)
        worker._resize_image(image, square)
        want = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
        assert np.array_equal(square, want), (width, height, size)
