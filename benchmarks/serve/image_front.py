"""Measure the time of a picture before its encoding: from the server's receipt of a request to the encoder's begin.

    python -m benchmarks.serve.image_front [--repeats 40]

`wicore serve`'s own processes over a paced engine whose encoder only takes pixels, as one on a GPU does: into memory
of its own. A chat of one JPEG of 1,024 x 768 pixels and 64 tokens of text is posted, another each time; milliseconds
from before its first byte is sent until the encoder has the pixels. `hold`: the longest that /health waits while a
picture of 19 MiB is posted. Invariant: the encoder sees the pixels of each picture once. Needs a C compiler and Linux,
no GPU; on a busy machine run it by `chrt -r 1`.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from benchmarks.common import say
from benchmarks.serve import paced
from benchmarks.serve.images import TEXT, TOKENIZER, VISION, make_body, make_picture, stream_answer, words
from wicore_trt.config import Settings
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import Bytes, ImageInfo, ModelInfo

REPORT = "WICORE_ENCODER_REPORT"
LARGE = (2580, 2580)


class Encoder:
    """Takes pixels as `runtime.image_encoder.StreamEncoder` does, and notes when."""

    slots, tokens, pixel_bytes, parts, part_s = 4, VISION.tokens, VISION.pixel_bytes, 0, 0.0

    def __init__(self) -> None:
        self._staged = np.zeros((self.slots, self.pixel_bytes), np.uint8)
        self._begun: list[tuple[int, str | None]] = []

    def begin(self, slot: int, pixels: Bytes) -> int:
        self._staged[slot] = np.frombuffer(pixels, np.uint8)
        now = time.monotonic()
        with open(os.environ[REPORT], "a") as report:
            report.write(f"{now}\n")
        self._begun.append((slot, None))
        return slot

    def run_parts(self, count: int) -> None:
        raise NotImplementedError

    def is_finite(self, slot: int) -> bool:
        return True

    def take_ended(self, timeout_s: float = 0.0) -> list[tuple[int, str | None]]:
        ended, self._begun = self._begun, []
        return ended


class PicturedExecutor(paced.PacedExecutor):
    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.images, self.spec = Encoder(), replace(self.spec, vocab_size=512)


def load_engine(settings: Settings | None = None) -> tuple[Any, ModelInfo]:
    with mock.patch.object(paced, "PacedExecutor", PicturedExecutor):
        core, info = paced.load_engine(settings)
    v = VISION
    return core, replace(info, images=ImageInfo(v.image_size, v.tokens, v.begin_id, v.soft_id, v.end_id), chat=True)


def load_tokenizer(settings: Settings | None = None, checked_build: str | None = None) -> Tokenizer:
    files = {name: json.dumps(content).encode() for name, content in TOKENIZER.items()}
    tokenizer = Tokenizer.from_files(files, Path("/nowhere"))
    tokenizer.reads_images = True
    return tokenizer


def serve() -> None:
    from wicore_trt.config import LoadedSettings, ServerSettings
    from wicore_trt.process.supervisor import Supervisor

    Supervisor(
        LoadedSettings(Settings(server=ServerSettings(port=0, http_port=0)), {}),
        load_engine="benchmarks.serve.image_front:load_engine",
        load_tokenizer="benchmarks.serve.image_front:load_tokenizer",
        report_serving=lambda *at: print(*filter(None, at), flush=True),
    ).run()


def measure_times(address: tuple[str, int], report: Path, repeats: int) -> list[float]:
    """Milliseconds of each picture."""
    times = []
    for i in range(repeats + 5):
        body = make_body(words(i, TEXT), make_picture(i), 1)
        begun, before = time.monotonic(), len(report.read_text().split())
        stream_answer(address, body)
        stamps = report.read_text().split()[before:]
        assert len(stamps) == 1, stamps
        times.append(1e3 * (float(stamps[0]) - begun))
        time.sleep(0.03)
    return sorted(times[5:])


def measure_hold(address: tuple[str, int]) -> float:
    """Milliseconds that /health waited at most while a large picture was served."""
    out = io.BytesIO()
    Image.frombytes("RGB", LARGE, random.Random(1).randbytes(LARGE[0] * LARGE[1] * 3)).save(out, "BMP")
    post = threading.Thread(target=stream_answer, args=(address, make_body("x", out.getvalue(), 1)))
    connection, longest = http.client.HTTPConnection(*address), 0.0
    post.start()
    while post.is_alive():
        begun = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        longest = max(longest, time.perf_counter() - begun)
        time.sleep(0.001)
    return 1e3 * longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "begun")
        report.touch()
        os.environ |= {REPORT: str(report), paced.OPTIONS: "{}"}
        command = [sys.executable, "-m", "benchmarks.serve.image_front", "--serve"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            assert server.stdout is not None
            try:
                url = server.stdout.readline().split()[-1].removeprefix("http://")
                address = (url.rpartition(":")[0], int(url.rpartition(":")[2]))
                times = measure_times(address, report, given.repeats)
                hold = [measure_hold(address) for _ in range(3)]
            finally:
                server.terminate()
    row = {"median_ms": statistics.median(times), "least_ms": times[0], "p90_ms": times[int(0.9 * len(times))]}
    say(json.dumps(row | {"hold_ms": min(hold), "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
