"""Measure how much a stream of images slows sequences that decode, by the ways to encode and compute them, on this GPU.

    python -m benchmarks.gpu.vision_beside [--only fp8,bf16] [--rate 10] [--seconds 6] [--ways product,longer=1,...]

The engine's own loop in this process, 27B's shapes and the true image encoder, made-up weights; neither server nor
front. `--streams` sequences decode behind 512 tokens; then a request with an image comes `--rate` times a second, of
some 280 tokens and for one more. Ways: `product`; `longer=F`: parts of an encoding make a step that decodes longer by
F of its time; `whole`: encodings are in one part; `launched`: steps with images run kernel by kernel; `bucket=N`: they
are padded to N tokens at least.
Prints a JSON row for each: tokens a second, quantiles of gaps between tokens in ms before and during, the rate kept,
p99 over that before, and how long images took from their arrival. First of all it prints what the products of a step
of `--rows` take, by which the sizes of graphs of steps with images should be chosen. Needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import say
from benchmarks.gpu.cases import CONFIGS, PAGE_TOKENS
from benchmarks.gpu.vision import Timer
from benchmarks.serve.images import VISION, build_image_engine
from wicore_trt.backends.triton.products import float_mm, scaled_mm
from wicore_trt.backends.triton.roles import LINEARS
from wicore_trt.backends.triton.table import EngineShape
from wicore_trt.config import resolve_settings
from wicore_trt.core.assemble import load_engine
from wicore_trt.core.engine import EngineCore
from wicore_trt.model.vision import VisionSpec
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.dtypes import E4M3
from wicore_trt.schedule import images
from wicore_trt.types import ContentSpan, FinishReason, GenerateRequest, SamplingParams
from wicore_trt.weight_format import FP8, PLAIN

WAYS = "product,longer=0.25,longer=0.6,whole,product"
PROMPT, TEXT, WARM = 512, 16, 40
_NUMBERS = itertools.count()


def make_text_request(vocab: int, tokens: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(f"text{next(_NUMBERS)}", tuple(random.choices(range(vocab), k=PROMPT)), params)


def make_image_request(vocab: int, vision: VisionSpec, pixels: bytes) -> GenerateRequest:
    """Two tokens, an image that no other request shows, and some text. Its pixels are always the same."""
    number = next(_NUMBERS)
    text, begin = random.choices(range(vocab), k=TEXT), 2
    tokens = (2, vision.begin_id, *[vision.soft_id] * vision.tokens, vision.end_id, *text)
    digest = blake2b(number.to_bytes(8, "little"), digest_size=32).digest()
    content = (ContentSpan(begin, begin + vision.tokens, digest, pixels),)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    return GenerateRequest(f"image{number}", tokens, params, content=content)


def measure_way(
    core: EngineCore, vision: VisionSpec, *, streams: int, rate: float, seconds: float
) -> dict[str, dict[str, float] | float]:
    """Decode alone for half of `seconds`, then beside images. Raises RuntimeError for a sequence that fails."""
    vocab, pixels = core.executor.spec.vocab_size, random.randbytes(vision.pixel_bytes)
    stamps: dict[str, list[float]] = {}
    for request in [make_text_request(vocab, 1 << 20) for _ in range(streams)]:
        stamps[request.request_key] = []
        core.add(request)
    asked, took = dict[str, float](), list[float]()

    def step() -> None:
        outputs, now = core.step(), time.monotonic()
        for output in outputs:
            if output.finish_reason not in (None, FinishReason.LENGTH):
                raise RuntimeError(f"{output.request_key} ended: {output.error}")
            if output.request_key in stamps:
                stamps[output.request_key] += [now] * len(output.token_ids)
            else:
                took.append(1e3 * (now - asked.pop(output.request_key)))

    while min(map(len, stamps.values())) < WARM:
        step()
    begun = time.monotonic()
    middle, end, sent = begun + seconds / 2, begun + 1.5 * seconds, 0
    while (now := time.monotonic()) < end:
        while now >= middle + sent / rate:
            request = make_image_request(vocab, vision, pixels)
            asked[request.request_key] = middle + sent / rate
            core.add(request)
            sent += 1
        step()
    found: dict[str, dict[str, float] | float] = {}
    for name, low, high in (("before", begun, middle), ("during", middle, end)):
        inside = [[t for t in s if low <= t < high] for s in stamps.values()]
        gaps = sorted(1e3 * (b - a) for s in inside for a, b in itertools.pairwise(s))
        quantiles = {f"p{q:g}": round(gaps[int(q / 100 * (len(gaps) - 1))], 2) for q in (50, 80, 90, 95, 99, 100)}
        found[name] = {"tokens_s": round(sum(map(len, inside)) / (high - low), 1), **quantiles}
    before, during = found["before"], found["during"]
    assert isinstance(before, dict) and isinstance(during, dict)
    took.sort()
    found["kept"] = round(during["tokens_s"] / before["tokens_s"], 3)
    found["p99_ratio"] = round(during["p99"] / before["p99"], 2)
    found["image_p50_ms"] = round(took[len(took) // 2], 1) if took else 0.0
    found["images_s"] = round(len(took) / seconds, 1)
    core.abort_all()
    while core.has_work:
        core.step()
    return found


def time_products(name: str, rows: int) -> float:
    """Milliseconds of the products of a step of so many rows by cuBLAS, without the head; a layer exceeds the L2."""
    spec, fp8 = CONFIGS[name].spec, CONFIGS[name].dtype == "fp8"
    shape = EngineShape(spec, "bfloat16", FP8 if fp8 else PLAIN["bfloat16"], "bfloat16", PAGE_TOKENS)
    products = []
    for role in LINEARS[:4]:
        linear = shape.linear_shape(role)
        n, k = linear.weight_rows, linear.k
        out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
        x, w = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (rows, n))
        if fp8:
            scales = [torch.ones(size, device="cuda") for size in (rows, n)]
            products.append(partial(scaled_mm, x.to(E4M3), scales[0], w.to(E4M3), scales[1], out))
        else:
            products.append(partial(float_mm, x, w, out))
    return Timer(CudaDevice(), 10).measure(lambda: [product() for product in products], 8) * spec.num_layers


@contextmanager
def choose_way(core: EngineCore, way: str) -> Iterator[None]:
    """Let an engine work in one of the ways; afterwards as before."""
    executor: Any = core.executor
    graphs, longer = executor.prompt_graphs, images.LONGER
    name, _, number = way.partition("=")
    if name in ("longer", "whole"):
        images.LONGER = float(number or 1e3)
    elif name in ("launched", "bucket"):
        least = int(number or 1 << 30)
        executor.prompt_graphs = {p: graph for p, graph in graphs.items() if not p.images or p.tokens >= least}
    elif name != "product":
        raise ValueError(f"no way {way}")
    try:
        yield
    finally:
        executor.prompt_graphs, images.LONGER = graphs, longer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="fp8,bf16")
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rows", default="256,272,288,304,320,336,352,368,384,416,448")
    parser.add_argument("--output", type=Path)
    given, rows = parser.parse_args(argv), list[dict[str, Any]]()
    for name, count in itertools.product(given.only.split(","), map(int, filter(None, given.rows.split(",")))):
        rows.append({"engine": name, "rows": count, "products_ms": round(time_products(name, count), 2)})
        say(json.dumps(rows[-1]))
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.only.split(","):
            path = Path(scratch, name)
            build_image_engine(path, name, CudaDevice().target)
            flags = {"engine": str(path), "executor.device": "cuda", "kv.prefix_cache": True}
            flags |= {"kv.device_bytes": 8 << 30, "scheduler.max_sequences": 64, "scheduler.max_context": 8192}
            core = load_engine(resolve_settings(None, flags, environ={}).settings).engine_core
            for way in given.ways.split(","):
                with choose_way(core, way):
                    measure = {"streams": given.streams, "rate": given.rate, "seconds": given.seconds}
                    row = {"engine": name, "way": way, **measure_way(core, VISION, **measure)}
                rows.append(row)
                say(json.dumps(row))
                if given.output:
                    given.output.write_text(json.dumps(rows, indent=1) + "\n")
            core.close()


if __name__ == "__main__":
    main()
