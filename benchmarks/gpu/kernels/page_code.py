"""Coded KV pages on a GPU: is every bit kept, and how fast?

    python -m benchmarks.gpu.kernels.page_code [--pages 100000] [--kv FILE.npz] [--sweep] [--seconds 80]

Encodes and decodes pages of Gemma 3 27B and 270M in batches as the page copier moves them, of which some do not fit,
and compares every page with what it was and the code of some with the CPU's. Prints GB/s of raw pages, of a copy of
them for comparison, and the bytes that kernels read and write; the exit status is 1 if a bit differs. `--kv`: real
pages, uint16 arrays [pages, layers, 2, page_tokens, kv_heads, head_dim] by any name. `--sweep` times all launch shapes.

Needs a GPU, torch, triton, numpy and cuda-bindings. Invariant: every time printed is of kernels that were checked.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu.kernels.step import target_of_gpu
from benchmarks.gpu.page_code import encode_pages
from wicore_trt.plugins.aot import CompiledKernel, KernelSpec, compile_kernel
from wicore_trt.plugins.code_layout import BLOCK_ROWS, PageCode, decode_launch, encode_launches
from wicore_trt.plugins.kernels.page_code import page_code_specs
from wicore_trt.plugins.launch import SHARED_LAUNCHER
from wicore_trt.plugins.layout import Launch

SHAPES = {
    "27B local, 32 tokens": (PageCode(104, 32, 2048), 16),
    "27B global, 32 tokens": (PageCode(20, 32, 2048), 64),
    "27B global, 16 tokens": (PageCode(20, 16, 2048), 64),
    "270M local, 32 tokens": (PageCode(30, 32, 256), 64),
}
"""Codes, and pages in a batch."""
SMALL = PageCode(6, 32, 256)  # 270M's global layers


class Shape(NamedTuple):
    """Launch shape, as in `page_code_specs`."""

    warps: int = 2
    vector: int = 2
    step: int = 8


SWEEP = [
    Shape(warps, vector, step)
    for warps in (1, 2, 4, 8) for vector in (2, 4) for step in (4, 8, 16)
    if vector * step <= 64
]  # fmt: skip
REPEATS = 9
KINDS = ("like KV", "random bits", "NaN", "denormals", "constants", "as many escapes as fit", "one too many")
Kernels = dict[str, CompiledKernel]


def make_pages(code: PageCode, count: int, kind: str) -> torch.Tensor:
    """int16 [count, values] on the device."""
    shape = (count, code.blocks, code.rows, code.channels)

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device="cuda", dtype=torch.int32)

    if kind == "like KV":
        scale = torch.exp2(torch.randint(-9, 9, (count, code.blocks, 1, code.channels), device="cuda").float())
        return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16).view(torch.int16).view(count, -1)
    if kind == "random bits":
        values = draw(0, 65536)
    elif kind == "NaN":
        values = draw(0, 2) << 15 | 0x7F80 | draw(0, 128)
    elif kind == "denormals":
        values = draw(0, 2) << 15 | draw(0, 128)
    elif kind == "constants":
        values = torch.zeros(shape, device="cuda", dtype=torch.int32) + draw(0, 65536)[:, :1, :1, :1]
    else:
        values = draw(0, 2) << 15 | 100 << 7 | draw(0, 128)
        inner = values[:, :, 1:].reshape(count, -1)
        places = torch.rand_like(inner, dtype=torch.float32).argsort(1)[:, : code.room + (kind == "one too many")]
        inner.scatter_(1, places, torch.randint(0, 93 << 7, places.shape, device="cuda", dtype=torch.int32))
        values[:, :, 1:] = inner.view(count, code.blocks, code.rows - 1, code.channels)
    return values.to(torch.int16).view(count, -1)


@dataclass
class Batch:
    """Pages in the memory of a pool in any order, and the arrays of the launches."""

    code: PageCode
    pages: torch.Tensor
    kernels: Kernels

    def __post_init__(self) -> None:
        count = len(self.pages)
        self.order = torch.randperm(count, device="cuda")
        self.offsets = self.order * self.code.values
        self.coded = torch.full((count, self.code.coded_bytes), 0xA5, device="cuda", dtype=torch.uint8)
        self.found = torch.full((count,), -1, device="cuda", dtype=torch.int32)
        self.back = torch.zeros_like(self.pages)

    def encode(self) -> None:
        names = ("page_tops", "page_starts", "page_encode")
        arrays = {"memory": self.pages, "offsets": self.offsets, "coded": self.coded, "found": self.found}
        constants = self.kernels["page_encode"].constants
        for name, call in zip(names, encode_launches(constants, self.code, arrays, len(self.pages)), strict=True):
            self._launch(name, call)

    def decode(self) -> None:
        arrays = {"memory": self.back, "offsets": self.offsets, "coded": self.coded}
        constants = self.kernels["page_decode"].constants
        self._launch("page_decode", decode_launch(constants, self.code, arrays, len(self.pages)))

    def _launch(self, name: str, call: Launch) -> None:
        pointers = {n: a.data_ptr() if isinstance(a, torch.Tensor) else a for n, a in call.arguments.items()}
        SHARED_LAUNCHER.launch(self.kernels[name], Launch(call.grid, pointers), torch.cuda.current_stream().cuda_stream)

    def count_wrong(self, compared: int = 0) -> tuple[int, int]:
        """(pages that fit, wrong ones), after encoding and decoding; the code of `compared` is compared, too."""
        self.encode()
        self.decode()
        fits = self.found <= self.code.room
        right = torch.zeros(len(self.pages), dtype=torch.bool, device="cuda")
        right[self.order] = fits
        same = (self.pages == self.back).all(dim=1)
        wrong = int((right & ~same).sum())
        chosen = self.pages[self.order[:compared]].cpu().numpy().view(np.uint16)
        coded, escapes = encode_pages(self.code, chosen)
        here = fits[:compared].cpu().numpy()
        wrong += int((escapes != self.found[:compared].cpu().numpy()).sum())
        wrong += int((coded[here] != self.coded[:compared].cpu().numpy()[here]).any(axis=1).sum())
        return int(fits.sum()), wrong


def measure_seconds(work: Callable[[], object]) -> float:
    """Median time of `work` on the device."""
    found: list[float] = []
    for i in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


_specs: list[KernelSpec] = []  # for the workers, which are forked: a kernel's function cannot be sent to them


def _compile(index: int, target: str) -> CompiledKernel:
    return compile_kernel(_specs[index], target)


def compile_all(plans: Sequence[tuple[PageCode, Shape]], target: str) -> list[Kernels]:
    """Compile for each plan. Must come before CUDA is initialised, because the workers are forked."""
    listed = [page_code_specs(code, *shape) for code, shape in plans]
    _specs[:] = {spec.name: spec for specs in listed for spec in specs.values()}.values()
    begin = time.monotonic()
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("fork")) as pool:
        built = {k.name: k for k in pool.map(_compile, range(len(_specs)), [target] * len(_specs))}
    print(f"{len(built)} kernels compiled for {target} in {time.monotonic() - begin:.1f} s", flush=True)
    return [{name: built[spec.name] for name, spec in specs.items()} for specs in listed]


def real_pages(path: str) -> Iterator[tuple[str, PageCode, torch.Tensor]]:
    for name, pages in np.load(path).items():
        if pages.ndim == 6:
            count, layers, _, tokens, heads, size = pages.shape
            code = PageCode(layers * 2 * max(1, tokens // BLOCK_ROWS), min(tokens, BLOCK_ROWS), heads * size)
            yield name, code, torch.from_numpy(pages.view(np.int16).reshape(count, -1))


def check_many(kernels: Kernels, pages: int, until: float) -> int:
    """Check `pages` pages of SMALL of all kinds; count wrong ones."""
    wrong, done, fitted, at_once = 0, 0, 0, 2000
    while done < pages and time.monotonic() < until:
        kind = KINDS[done // at_once % len(KINDS)]
        fit, bad = Batch(SMALL, make_pages(SMALL, at_once, kind), kernels).count_wrong(compared=3)
        wrong, done, fitted = wrong + bad, done + at_once, fitted + fit
    print(f"{done:,} pages of {len(KINDS)} kinds, {fitted:,} fitted: {wrong} wrong", flush=True)
    return wrong


def time_shape(name: str, code: PageCode, count: int, kernels: Kernels, config: Shape) -> int:
    """Check and time one launch shape; count wrong pages."""
    batch = Batch(code, make_pages(code, count, "like KV"), kernels)
    fit, wrong = batch.count_wrong(compared=1)
    raw = code.raw_bytes * count / 1e9
    encode, decode = measure_seconds(batch.encode), measure_seconds(batch.decode)
    copy = measure_seconds(lambda: batch.back.copy_(batch.pages))
    shape = f"{config.warps} warps, {config.vector} channels, {config.step:>2} rows"
    rates = f"encode {raw / encode:5.0f}, decode {raw / decode:5.0f}, copy {raw / copy:5.0f} GB/s"
    print(f"{name:<22} {shape}: {rates}; {fit} of {count} fit, {wrong} wrong", flush=True)
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--kv", help="real pages, .npz")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=80, help="no new check begins after this")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.seconds
    try:
        target = target_of_gpu()
    except (OSError, IndexError):
        print("no GPU: nothing was checked")
        return 2
    real: list[tuple[str, PageCode, Any]] = list(real_pages(options.kv)) if options.kv else []
    plans = (
        [(code, Shape()) for code, _ in SHAPES.values()] + [(SMALL, Shape())] + [(code, Shape()) for _, code, _ in real]
    )
    swept = SWEEP if options.sweep else []
    code, count = SHAPES["27B global, 32 tokens"]
    kernels = compile_all([*plans, *((code, config) for config in swept)], target)
    print(torch.cuda.get_device_name(), flush=True)
    wrong = 0
    for (name, (shape, pages)), built in zip(SHAPES.items(), kernels, strict=False):
        wrong += time_shape(name, shape, pages, built, Shape())
    wrong += check_many(kernels[len(SHAPES)], options.pages, until)
    for config, built in zip(swept, kernels[len(plans) :], strict=True):
        if time.monotonic() < until:
            wrong += time_shape("27B global, 32 tokens", code, count, built, config)
    for (name, shape, pages), built in zip(real, kernels[len(SHAPES) + 1 :], strict=False):
        fit, bad = Batch(shape, pages.cuda(), built).count_wrong(compared=20)
        print(f"{fit} of {len(pages)} real pages {name} fit, {bad} wrong", flush=True)
        wrong += bad
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
