"""Encoders of images beside steps: a thread on the CPU, a stream with a CUDA graph on a GPU.

Must not know operators, requests or which image is whose. Invariants: images are encoded in the order of `begin`; a
slot that was reported without an error holds the finite features of the image begun there last.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

import numpy as np
import torch

from wicore_trt.model.vision import CHANNELS, VisionSpec
from wicore_trt.runtime.cuda_device import CudaDevice, Mark
from wicore_trt.runtime.executor import NOT_ENCODED, NOT_FINITE, ImageEncoder

log = logging.getLogger(__name__)
_POLL_SECONDS = 2e-4
Encode = Callable[[torch.Tensor], torch.Tensor]
"""From uint8 [size, size, 3] to features [tokens, text hidden size], on the same device. It is synchronous on a CPU, on
a GPU put on the current stream, with no wait for it."""


class FeatureEncoder(ImageEncoder, Protocol):
    """Encoder whose slots operators read: `features` [slots, tokens, text hidden size] in the engine's dtype, on its
    device."""

    features: torch.Tensor

    def close(self) -> None:
        """Stop encoding, for good; images under way may be left out."""
        ...


class ThreadEncoder:
    """Implements `FeatureEncoder` on the CPU. `stop`, from any thread, lets an `encode` under way raise soon."""

    def __init__(
        self, spec: VisionSpec, slots: int, dtype: torch.dtype, encode: Encode, stop: Callable[[], None]
    ) -> None:
        self.slots, self.tokens, self.pixel_bytes = slots, spec.tokens, spec.pixel_bytes
        self.features = torch.zeros(slots, spec.tokens, spec.text_hidden_size, dtype=dtype)
        self._shape, self._encode, self._stop = _pixel_shape(spec), encode, stop
        self._under_way, self._closed = 0, False
        self._begun: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
        self._thread = Thread(target=self._run, name="image-encoder", daemon=True)
        self._thread.start()

    def begin(self, slot: int, pixels: bytes, beside: bool = False) -> None:
        assert len(pixels) == self.pixel_bytes, f"an image of {len(pixels)} bytes"
        self._under_way += 1
        self._begun.put((slot, pixels))

    def take_ended(self, timeout_s: float = 0.0) -> list[tuple[int, str | None]]:
        ended: list[tuple[int, str | None]] = []
        try:
            while self._under_way:
                ended.append(self._ended.get(timeout=0.0 if ended or timeout_s <= 0 else timeout_s))
                self._under_way -= 1
        except Empty:
            pass
        return ended

    def close(self) -> None:
        self._closed = True
        self._stop()
        self._begun.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None and not self._closed:
            slot, pixels = begun
            try:
                with torch.inference_mode():
                    found = self._encode(torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(self._shape))
                    self.features[slot].copy_(found)
                why = None if bool(found.isfinite().all()) else NOT_FINITE
            except Exception:  # fails this image alone
                if self._closed:
                    return
                log.exception("an image could not be encoded")
                why = NOT_ENCODED
            self._ended.put((slot, why))


class StreamEncoder:
    """Implements `FeatureEncoder` on the stream of `device`, which is not the steps' own; beside steps that decode on
    the stream added last. Each slot has pinned memory for its pixels, so `begin` never waits for the device."""

    def __init__(self, spec: VisionSpec, slots: int, dtype: torch.dtype, encode: Encode, device: CudaDevice) -> None:
        self.slots, self.tokens, self.pixel_bytes = slots, spec.tokens, spec.pixel_bytes
        self._begun = deque[tuple[int, Mark]]()
        shape = _pixel_shape(spec)
        self._staged = device.staging((slots, *shape), torch.uint8)
        self._finite = device.staging((slots,), torch.bool)
        with device.visit(), torch.inference_mode():
            self.features = device.empty((slots, spec.tokens, spec.text_hidden_size), dtype).zero_()
            self._pixels = device.empty(shape, torch.uint8).zero_()
            found, finite = device.empty(self.features.shape[1:], dtype), device.empty((), torch.bool)

            def encode_pixels() -> None:
                found.copy_(encode(self._pixels))
                finite.copy_(found.isfinite().all())

        device.synchronize()
        self._found, self._all_finite, self._kept = found, finite, encode_pixels  # with the weights that graphs read
        self._ways: list[tuple[CudaDevice, Callable[[], None]]] = []
        self.add_stream(device)

    def add_stream(self, device: CudaDevice) -> None:
        """Encode on this stream, too. Raises RuntimeError for one that takes no graph."""
        with device.visit(), torch.inference_mode():
            self._kept()  # libraries choose their kernels and take workspaces
            device.synchronize()
            self._ways.append((device, device.capture(self._kept)))
            device.synchronize()

    def begin(self, slot: int, pixels: bytes, beside: bool = False) -> None:
        assert len(pixels) == self.pixel_bytes, f"an image of {len(pixels)} bytes"
        assert all(slot != begun for begun, _ in self._begun), "a slot whose encoding is under way"
        device, encode = self._ways[-1 if beside else 0]
        with device.visit(), torch.inference_mode():
            if self._begun:
                device.wait_for(self._begun[-1][1])
            self._staged[slot].view(-1).numpy()[:] = np.frombuffer(pixels, np.uint8)
            self._pixels.copy_(self._staged[slot], non_blocking=True)
            encode()
            self.features[slot].copy_(self._found)
            self._finite[slot].copy_(self._all_finite, non_blocking=True)
            self._begun.append((slot, device.mark()))

    def take_ended(self, timeout_s: float = 0.0) -> list[tuple[int, str | None]]:
        ended: list[tuple[int, str | None]] = []
        deadline = time.monotonic() + timeout_s
        while self._begun:
            slot, mark = self._begun[0]
            if mark.query():
                self._begun.popleft()
                ended.append((slot, None if self._finite[slot] else NOT_FINITE))
            elif ended or time.monotonic() >= deadline:
                break
            else:
                time.sleep(_POLL_SECONDS)
        return ended

    def close(self) -> None:
        for device, _ in self._ways:
            device.synchronize()
        self._begun.clear()
        del self._ways, self._kept


def _pixel_shape(spec: VisionSpec) -> tuple[int, int, int]:
    return spec.image_size, spec.image_size, CHANNELS
