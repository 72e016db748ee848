"""Encoders of images: a thread beside steps on the CPU, CUDA graphs on the steps' own stream on a GPU.

Must not know operators, requests or which image is whose. Invariants: images are encoded in the order of `begin`; a
slot that was reported without an error holds the finite features of the image begun there last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

import numpy as np
import torch

from wicore_trt.model.vision import CHANNELS, VisionSpec
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.executor import NOT_ENCODED, NOT_FINITE, ImageEncoder
from wicore_trt.types import Bytes

log = logging.getLogger(__name__)
Encode = Callable[[torch.Tensor], torch.Tensor]
"""From uint8 [size, size, 3] to features [tokens, text hidden size], on the CPU."""
Cut = Callable[[torch.Tensor], Callable[[int], torch.Tensor]]
"""From pixels on a GPU to what puts a part of their encoding on the stream; the last part returns features."""

AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Adds bfloat16 [P, H] to the residual float32 [P, H] in place; returns its LayerNorm, rounded, by weight, bias and
epsilon (`plugins.kernels.layer_norm`)."""


class FeatureEncoder(ImageEncoder, Protocol):
    """Encoder whose slots operators read: `features` [slots, tokens, text hidden size], on the engine's device."""

    features: torch.Tensor

    def close(self) -> None:
        """Stop encoding, for good; images under way may be left out."""


class ThreadEncoder:
    """Implements `FeatureEncoder` on the CPU. `stop`, from any thread, lets an `encode` under way raise soon."""

    parts, part_s = 0, 0.0

    def __init__(
        self, spec: VisionSpec, slots: int, dtype: torch.dtype, encode: Encode, stop: Callable[[], None]
    ) -> None:
        self.slots, self.tokens, self.pixel_bytes = slots, spec.tokens, spec.pixel_bytes
        self.features = torch.zeros(slots, spec.tokens, spec.text_hidden_size, dtype=dtype)
        self._shape, self._encode, self._stop = _pixel_shape(spec), encode, stop
        self._under_way, self._closed = 0, False
        self._begun: SimpleQueue[tuple[int, Bytes] | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
        self._thread = Thread(target=self._run, name="image-encoder", daemon=True)
        self._thread.start()

    def begin(self, slot: int, pixels: Bytes) -> int:
        assert len(pixels) == self.pixel_bytes, f"an image of {len(pixels)} bytes"
        self._under_way += 1
        self._begun.put((slot, pixels))
        return slot

    def run_parts(self, count: int) -> None:
        pass

    def is_finite(self, begun: int) -> bool:
        return True  # others ended with an error

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
    """Implements `FeatureEncoder` on the stream of `device`, which is the steps' own, with a CUDA graph of each of as
    many parts as the encoder has layers. Each slot has pinned memory for its pixels, so nothing waits for the device.
    """

    def __init__(self, spec: VisionSpec, slots: int, dtype: torch.dtype, cut: Cut, device: CudaDevice) -> None:
        self.slots, self.tokens, self.pixel_bytes, self.parts = slots, spec.tokens, spec.pixel_bytes, spec.num_layers
        self._device, shape, self._slot, self._left = device, _pixel_shape(spec), 0, 0
        self._ended: list[tuple[int, str | None]] = []
        self._staged = device.staging((slots, *shape), torch.uint8)
        self._finite, self._flags = device.staging((2 * slots,), torch.bool), [slots + slot for slot in range(slots)]
        with device.active(), torch.inference_mode():
            self.features = device.empty((slots, spec.tokens, spec.text_hidden_size), dtype).zero_()
            self._pixels = device.empty(shape, torch.uint8).zero_()
            self._found, self._all_finite = device.empty(self.features.shape[1:], dtype), device.empty((), torch.bool)
            part = cut(self._pixels)

            def run_part(number: int) -> None:
                found = part(number)
                if number + 1 == self.parts:
                    self._found.copy_(found)
                    self._all_finite.copy_(found.isfinite().all())

            self._kept = [partial(run_part, number) for number in range(self.parts)]  # with what the graphs read
            for work in self._kept:
                work()  # libraries choose their kernels and take workspaces
            device.synchronize()
            own = device.with_own_graphs()  # whose memory no step overwrites between two parts
            self._graphs = [own.capture(work) for work in self._kept]
            for _ in range(2):
                device.synchronize()
                begun = time.perf_counter()
                for graph in self._graphs:
                    graph()
                device.synchronize()
            self.part_s = (time.perf_counter() - begun) / self.parts

    def begin(self, slot: int, pixels: Bytes) -> int:
        assert len(pixels) == self.pixel_bytes, f"an image of {len(pixels)} bytes"
        flag = self._flags[slot] = (self._flags[slot] + self.slots) % (2 * self.slots)  # one of two in turn
        self._slot, self._left, self._finite[flag] = slot, self.parts, True
        self._staged[slot].view(-1).numpy()[:] = np.frombuffer(pixels, np.uint8)
        with self._device.active(), torch.inference_mode():
            self._pixels.copy_(self._staged[slot], non_blocking=True)
        return flag

    def run_parts(self, count: int) -> None:
        assert 0 < count <= self._left, f"{count} parts, of which {self._left} are left"
        begin = self.parts - self._left
        self._left -= count
        with self._device.active(), torch.inference_mode():
            for graph in self._graphs[begin : begin + count]:
                graph()
            if not self._left:
                self.features[self._slot].copy_(self._found)
                self._finite[self._flags[self._slot]].copy_(self._all_finite, non_blocking=True)
                self._ended.append((self._slot, None))

    def take_ended(self, timeout_s: float = 0.0) -> list[tuple[int, str | None]]:
        ended, self._ended = self._ended, []
        return ended

    def is_finite(self, begun: int) -> bool:
        return bool(self._finite[begun])

    def close(self) -> None:
        self._device.synchronize()
        del self._graphs, self._kept


def _pixel_shape(spec: VisionSpec) -> tuple[int, int, int]:
    return spec.image_size, spec.image_size, CHANNELS
