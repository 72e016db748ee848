"""Images beside sequences that decode, in the engine's own loop on a simulated GPU:

    python -m tests.schedule.image_load [--seconds 6]

27B on an H100 as a formula (measured: decode steps, steps with an image, launches of 28 ms, encodings). Sixteen
sequences decode; an image with some 20 tokens of text comes ten times a second. Prints what is kept of the decode rate,
p99 of the gaps between tokens over that without images, and the median seconds to an image's token. Any machine prints
the same table.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (1, 2)]

from schedule.simulated import Device, p99

from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.manager import CacheOptions, KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.model.spec import GLOBAL
from wicore_trt.runtime.batch import SampledTokens, StepBatch, StepResult
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.schedule.step_time import StepTime, sum_load
from wicore_trt.types import ContentSpan, GenerateRequest, SamplingParams

FP8, BF16 = (Device(10.2e-3, 2.1e-4, 0, 44e-6, 3e-10), Device(18.6e-3, 1.8e-4, 0, 78e-6, 3e-10))
STREAMS, TOKENS = 16, 256
IMAGE_S = {FP8: 24.4e-3, BF16: 35e-3}
ENCODE_S, HOST_S, LAND_S, LAUNCH_S = 12.8e-3, 0.8e-3, 0.2e-3, 28e-3


@dataclass
class Way:
    """`parts` of an encoding; `graphs`: of steps with images."""

    parts: int = 27
    graphs: bool = True


class ImageGPU:
    """An `AheadExecutor` with an encoder, and the clock of its engine."""

    kernels, slice_tokens, max_sequences, score_rows, graph_sizes = "simulated", 256, None, 0, {}
    spec, max_batch_tokens = None, 2048
    slots, tokens, pixel_bytes, broken = 8, TOKENS, 1, None

    def __init__(self, device: Device, way: Way) -> None:
        self.device, self.way, self.now, self.free = device, way, 0.0, 0.0
        self.parts, self.part_s, self._left = way.parts, ENCODE_S / way.parts, 0
        self.copier = self.images = self
        self.layout = KVLayout(32, "float32", {GLOBAL: 9000}, {GLOBAL: 64})
        self.steps: list[list[tuple[int, int]]] = []
        self._under_way: list[tuple[StepBatch, float]] = []
        self._ended: list[tuple[int, str | None]] = []

    def submit(self, batch: StepBatch) -> None:
        self.steps.append([(s.seq_id, len(s.token_ids)) for s in batch.slices])
        self.now += HOST_S
        begun = max(self.now, self.free)
        self.free = begun + self._step_s(batch)
        self._under_way.append((batch, self.free))

    def _step_s(self, batch: StepBatch) -> float:
        if any(s.images for s in batch.slices):
            return IMAGE_S[self.device] if self.way.graphs else max(LAUNCH_S, IMAGE_S[self.device])
        return self.device.step_s(sum_load([(s.start, len(s.token_ids)) for s in batch.slices]))

    def collect(self) -> StepResult:
        batch, ended = self._under_way.pop(0)
        self.now = max(self.now, ended) + LAND_S
        return StepResult([SampledTokens(s.seq_id, (7,)) for s in batch.slices if s.sample])

    def execute(self, batch: StepBatch) -> StepResult:
        self.submit(batch)
        return self.collect()

    def leads(self, batch: StepBatch) -> bool:
        return True

    def begin(self, slot: int, pixels: bytes) -> None:
        self._slot, self._left = slot, self.parts

    def run_parts(self, count: int) -> None:
        self.free, self._left = max(self.now, self.free) + count * self.part_s, self._left - count
        if not self._left:
            self._ended.append((self._slot, None))

    def take_ended(self, timeout_s: float = 0.0) -> list[tuple[int, str | None]]:
        ended, self._ended = self._ended, []
        return ended

    def release(self, seq_id: int) -> None:
        pass

    def close(self) -> None:
        pass


class Found(NamedTuple):
    kept: float
    p99_ratio: float
    image_s: float
    left: int
    steps: list[list[tuple[int, int]]]


def make_image(number: int) -> GenerateRequest:
    tokens = (2, 3, *[4] * TOKENS, 5, *[6] * 16)
    span = ContentSpan(2, 2 + TOKENS, blake2b(number.to_bytes(8, "little"), digest_size=32).digest(), b"p")
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    return GenerateRequest(f"image{number}", tokens, params, content=(span,))


def run_images(device: Device, way: Way, *, rate: float = 10.0, seconds: float = 6.0, even: bool = True) -> Found:
    """Decode for half of `seconds`, then beside images for all of them, at even times or at random ones."""
    gpu, rng = ImageGPU(device, way), random.Random(1)
    manager = KVCacheManager(gpu.layout.num_pages, 1024, KeyChain("e", 32), options=CacheOptions(prefix_cache=False))
    scheduler = Scheduler(manager, max_batch_tokens=2048, max_sequences=64, step_time=StepTime())
    core = EngineCore(gpu, scheduler, eos_ids=(1,), max_context=1 << 17, clock=lambda: gpu.now)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=1 << 16, ignore_eos=True)
    stamps: dict[str, list[float]] = {f"text{n}": [] for n in range(STREAMS)}
    for name in stamps:
        core.add(GenerateRequest(name, (5,) * 512, params))
    asked, took = dict[str, float](), list[float]()

    def step() -> None:
        for output in core.step():
            if output.request_key in stamps:
                stamps[output.request_key] += [gpu.now] * len(output.token_ids)
            elif output.token_ids:
                took.append(gpu.now - asked.pop(output.request_key))

    while min(map(len, stamps.values())) < 40:
        step()
    begun, counts = gpu.now, itertools.count()
    middle, due = begun + seconds / 2, begun + seconds / 2
    while gpu.now < middle + seconds:
        while gpu.now >= due:
            request = make_image(next(counts))
            asked[request.request_key] = due
            core.add(request)
            due += 1 / rate if even else rng.expovariate(rate)
        step()
    rates, gaps = [], []
    for low, high in ((begun, middle), (middle, middle + seconds)):
        inside = [[t for t in found if low <= t < high] for found in stamps.values()]
        rates.append(sum(map(len, inside)) / (high - low))
        gaps.append(p99([b - a for found in inside for a, b in itertools.pairwise(found)]))
    return Found(rates[1] / rates[0], gaps[1] / gaps[0], statistics.median(took), len(asked), gpu.steps)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.schedule.image_load", description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    ways = {"27 parts, launched": Way(graphs=False), **{f"{n} parts": Way(n) for n in (1, 3, 9, 27)}}
    for (name, device), (title, way), even in itertools.product(
        (("FP8", FP8), ("BF16", BF16)), ways.items(), (True, False)
    ):
        found = run_images(device, way, seconds=options.seconds, even=even)
        print(
            f"{name:5}{title:28}{'even' if even else 'random':8} kept {found.kept:.3f}, p99 x {found.p99_ratio:.2f},"
            f" image {1e3 * found.image_s:.0f} ms, {found.left} left",
            flush=True,
        )


if __name__ == "__main__":
    main()
