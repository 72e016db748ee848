"""Image encoders: on a thread, and on a stream that is late, slots hold the features of their own images."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from parity.paged import PagedDriver
from parity.tiny import cast, tiny_model
from parity.vision import RandomEncoder, random_encoder, random_pixels
from runtime.late_cpu import LateDevice
from runtime.triton_cpu import executor_of, small_model
from tiny_images import write_image_source

from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.backends.torch.vision import TorchVision, VisionWeights, open_encoder
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.errors import EngineFormatError
from wicore_trt.model.vision import FINAL_NORM, PROJECTION
from wicore_trt.runtime.executor import NOT_ENCODED
from wicore_trt.runtime.image_encoder import NOT_FINITE, FeatureEncoder, StreamEncoder, ThreadEncoder
from wicore_trt.runtime.options import ExecutorOptions

SLOTS = 3


class LateStream(LateDevice):
    """A `CudaDevice`: everything put on it happens some time before somebody waits for it."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        kept = weakref.ref(work)  # a graph keeps no memory that it reads

        def replay() -> None:
            found = kept()
            assert found is not None, "the memory of a graph was given back"
            self.put(found)

        return replay


@pytest.fixture(scope="module")
def source() -> RandomEncoder:
    return random_encoder(3)


@pytest.fixture(params=["thread", "stream"])
def encoder(request: pytest.FixtureRequest, source: RandomEncoder) -> Iterator[FeatureEncoder]:
    model = TorchVision(source.weights, "float32", torch.device("cpu"))
    if request.param == "thread":
        made: FeatureEncoder = ThreadEncoder(source.weights.spec, SLOTS, torch.float32, model.encode, model.stop)
    else:
        late = LateStream("sm90", random.Random(5))
        made = StreamEncoder(source.weights.spec, SLOTS, torch.float32, model.cut, late)  # type: ignore[arg-type]
        late.late = True
    yield made
    made.close()


def _begin(encoder: FeatureEncoder, slot: int, pixels: torch.Tensor) -> int:
    number = encoder.begin(slot, pixels.numpy().tobytes())
    if encoder.parts:
        encoder.run_parts(1)
        encoder.run_parts(encoder.parts - 1)
    return number


def _take(encoder: FeatureEncoder, count: int) -> list[tuple[int, str | None]]:
    ended: list[tuple[int, str | None]] = []
    while len(ended) < count:
        found = encoder.take_ended(10.0)
        assert found, "no image ended in ten seconds"
        ended += found
    assert encoder.take_ended() == encoder.take_ended(10.0) == [], "nothing is under way, so nothing is waited for"
    return ended


def test_slots_hold_the_features_of_their_own_images(encoder: FeatureEncoder, source: RandomEncoder) -> None:
    assert (encoder.slots, encoder.tokens, encoder.pixel_bytes) == (SLOTS, 4, 56 * 56 * 3)
    rng = random.Random(0)
    images = [random_pixels(seed, 56) for seed in range(5)]
    wanted = [source.hf_features(pixels) for pixels in images]
    assert min((a - b).abs().max() for n, a in enumerate(wanted) for b in wanted[:n]) > 0.1
    held: dict[int, int] = {}
    for _ in range(6):
        slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
        for slot in slots:
            held[slot] = rng.randrange(len(images))
            _begin(encoder, slot, images[held[slot]])
        assert _take(encoder, len(slots)) == [(slot, None) for slot in slots]
        if isinstance(encoder, StreamEncoder):
            encoder._device.synchronize()  # as a step behind it does
        for slot, image in held.items():
            assert (encoder.features[slot] - wanted[image]).abs().max() < 1e-5, (slot, image)


def test_features_that_overflow_fail_their_image_alone(source: RandomEncoder) -> None:
    tensors = dict(source.weights.tensors)
    tensors[PROJECTION] = tensors[PROJECTION].clone()
    tensors[PROJECTION][:, 6] *= 2.6e4  # the features of some images are beyond float16
    weights = VisionWeights(source.weights.spec, tensors)
    images = [random_pixels(seed, 56) for seed in range(6)]
    with torch.inference_mode():
        for dtype, all_finite in (("float16", False), ("bfloat16", True)):
            encoder = open_encoder(weights, dtype, len(images), torch.device("cpu"))
            for slot, pixels in enumerate(images):
                _begin(encoder, slot, pixels)
            ended = _take(encoder, len(images))
            encoder.close()
            finite = [bool(encoder.features[slot].isfinite().all()) for slot, _ in ended]
            assert [why for _, why in ended] == [None if ok else NOT_FINITE for ok in finite]
            assert any(finite) and all(finite) is all_finite
            model = TorchVision(weights, dtype, torch.device("cpu"))
            late = LateStream("sm90", random.Random(1))
            stream = StreamEncoder(weights.spec, 3, model.dtype, model.cut, late)  # type: ignore[arg-type]
            late.late, begun = True, list[int]()
            for some in (images[:3], images[3:]):  # these take the slots of those
                begun += [_begin(stream, slot, pixels) for slot, pixels in enumerate(some)]
                late.synchronize()
            assert [stream.is_finite(number) for number in begun] == finite


def test_an_image_that_raises_fails_alone_and_thread_encodes_on(source: RandomEncoder) -> None:
    model = TorchVision(source.weights, "float32", torch.device("cpu"))

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        if not pixels.any():
            raise MemoryError("no room")
        return model.encode(pixels)

    encoder = ThreadEncoder(source.weights.spec, 2, torch.float32, encode, model.stop)
    pixels = random_pixels(0, 56)
    encoder.begin(0, bytes(encoder.pixel_bytes))
    _begin(encoder, 1, pixels)
    assert _take(encoder, 2) == [(0, NOT_ENCODED), (1, None)]
    assert (encoder.features[1] - source.hf_features(pixels)).abs().max() < 1e-5
    encoder.close()


def test_begin_returns_at_once_and_steps_run_beside_an_encoding(source: RandomEncoder) -> None:
    model = tiny_model(0)
    settings = ExecutorOptions(
        device="cpu", kernels="torch", page_tokens=8, kv_pages={"global": 8, "local": 8}, image_slots=2
    )
    vision = random_encoder(3, text_hidden=model.spec.hidden_size).weights
    executor = TorchExecutor.from_tensors(
        model.spec, "float32", cast(model.spec, model.tensors, torch.float32), settings, vision=vision
    )
    encoder = executor.images
    assert isinstance(encoder, ThreadEncoder) and encoder.features.shape == (2, 4, model.spec.hidden_size)
    free, encode = threading.Event(), encoder._encode
    encoder._encode = lambda pixels: encode(pixels) if free.wait(60) else torch.zeros(0)
    _begin(encoder, 0, random_pixels(0, 56))
    driver = PagedDriver(executor, 0)
    logits = driver.step([(driver.new_sequence(), [1, 2, 3])])
    assert (logits[-1] - model.hf_logits([1, 2, 3])[-1]).abs().max() < 1e-4
    assert encoder.take_ended() == [] and encoder.take_ended(0.02) == []
    free.set()
    assert _take(encoder, 1) == [(0, None)]
    executor.close()
    assert not encoder._thread.is_alive()


def test_closing_waits_for_no_image(source: RandomEncoder) -> None:
    model, inside = TorchVision(source.weights, "float32", torch.device("cpu")), threading.Event()

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        inside.set()
        while True:  # an image that takes for ever
            model.encode(pixels)

    encoder = ThreadEncoder(source.weights.spec, 2, torch.float32, encode, model.stop)
    encoder.begin(0, bytes(encoder.pixel_bytes))
    assert inside.wait(60)
    encoder.close()
    assert encoder.take_ended() == []


def test_an_engine_that_reads_text_alone_has_no_encoder() -> None:
    model = tiny_model(0)
    settings = ExecutorOptions(device="cpu", page_tokens=8, kv_pages={"global": 8, "local": 8})
    executor = TorchExecutor.from_tensors(model.spec, "float32", model.tensors, settings)
    assert executor.images is None
    executor.close()


def test_a_triton_engine_has_the_same_encoder_and_names_it(source: RandomEncoder) -> None:
    model = small_model(0)
    vision = random_encoder(3, text_hidden=model.spec.hidden_size)
    seeing, reading = executor_of(model, vision=vision.weights, image_slots=1), executor_of(model)
    assert reading.images is None and reading.kernels != seeing.kernels
    encoder, pixels = seeing.images, random_pixels(0, 56)
    assert encoder is not None and encoder.features.dtype == torch.bfloat16
    _begin(encoder, 0, pixels)
    assert _take(encoder, 1) == [(0, None)]
    wanted = vision.hf_features(pixels)
    assert (encoder.features[0] - wanted).norm() < 0.02 * wanted.norm()
    seeing.close()
    reading.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_on_disk_opens_with_its_encoder(tmp_path: Path, dtype: str) -> None:
    source = write_image_source(tmp_path / "source", 7)
    engine = open_engine(build_engine(source, tmp_path / "engine", dtype=dtype).path)
    settings = ExecutorOptions(device="cpu", page_tokens=8, kv_pages={"global": 8, "local": 8})
    executor, pixels = TorchExecutor(engine, settings), random_pixels(0, 56)
    assert executor.images is not None
    _begin(executor.images, 31, pixels)
    assert _take(executor.images, 1) == [(31, None)]
    wanted = random_encoder(7).hf_features(pixels)  # the source's weights are made with the same seed
    found = executor.images.features[31].float()
    assert (found - wanted).norm() < (1e-5 if dtype == "float32" else 0.02) * wanted.norm()
    executor.close()


def test_tensors_that_do_not_fit_are_named(source: RandomEncoder) -> None:
    tensors = dict(source.weights.tensors)
    tensors[PROJECTION] = tensors[PROJECTION].T
    del tensors[f"{FINAL_NORM}.bias"]
    with pytest.raises(EngineFormatError, match=f"{FINAL_NORM}.bias.*{PROJECTION}"):
        VisionWeights(source.weights.spec, tensors)
