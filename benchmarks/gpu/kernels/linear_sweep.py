"""Configurations of the linear kernels that are worth a try, and times of their launches on a GPU.

Needs torch, triton and cuda-bindings where it is used (imported inside). Invariant: what is timed reads other weights
at each launch, more of them than L2 holds, and its last launch is compared with float32 arithmetic.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.kernels.tiles_back import unpack_scales, unpack_tiles
from wicore_trt.arithmetic import div_ceil
from wicore_trt.backends.triton.tiles import dequantize_blocks
from wicore_trt.plugins.aot import SHARED_LIMIT, CompiledKernel, compile_kernel
from wicore_trt.plugins.kernels.linear_specs import dequantize_spec
from wicore_trt.plugins.layout import Launch
from wicore_trt.plugins.linear_layout import (
    MATRIX,
    TILES,
    VECTOR,
    LinearArrays,
    LinearConfig,
    LinearShape,
    check_config,
    dequantize_launch,
    linear_launch,
    partials_bytes,
)

LAUNCHES = 64  # per graph, at least: what starting the graph costs disappears among them
GRAPH_BYTES = 40e9  # and at most this much read per graph
COLD_BYTES = 300 << 20  # six times an H100's L2
PEAK_BYTES_PER_S = 3.0e12
PROGRAM_TARGETS = (264, 132, 528)

MATRIX_BLOCKS = {
    # (block_n, block_k, num_warps, num_stages)
    "w16": ((64, 64, 4, 6), (64, 128, 4, 4), (32, 128, 4, 4), (16, 256, 4, 4), (128, 64, 4, 4)),
    "w8": ((32, 256, 4, 4), (64, 128, 2, 4), (64, 128, 4, 4), (16, 512, 4, 3), (32, 128, 2, 6), (128, 128, 8, 4)),
    "w8x8": ((64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 4), (128, 128, 8, 3)),
}
TILE_BLOCKS = {
    # columns: (block_n, warps of a row, num_warps, num_stages, unroll); the first ones are tried in a short run
    8: ((32, 4, 4, 2, 4), (32, 8, 8, 1, 2), (32, 8, 8, 2, 4), (64, 4, 4, 2, 2), (32, 2, 2, 2, 4), (64, 4, 8, 2, 4),
        (32, 8, 8, 3, 3), (32, 4, 4, 1, 6)),
    16: ((32, 4, 4, 1, 3), (32, 8, 8, 1, 2), (64, 4, 4, 1, 2), (64, 4, 8, 1, 3), (64, 2, 4, 1, 3)),
    32: ((64, 4, 8, 1, 2), (128, 2, 8, 1, 2), (32, 4, 4, 1, 2), (64, 2, 4, 1, 2), (64, 4, 4, 1, 2), (128, 4, 8, 1, 2),
         (256, 2, 8, 1, 2), (128, 2, 4, 1, 2), (64, 8, 8, 1, 2), (128, 4, 4, 1, 2)),
    64: ((64, 4, 8, 1, 2), (64, 2, 4, 1, 2), (128, 2, 8, 1, 2)),
}  # fmt: skip
VECTOR_BLOCKS = {
    # (block_n, block_k, num_warps, num_stages, unroll)
    "w16": ((4, 512, 4, 1, 2), (2, 1024, 4, 1, 2), (4, 1024, 4, 1, 1), (1, 2048, 4, 1, 2), (4, 512, 4, 3, 1)),
    "w8": ((4, 1024, 4, 1, 2), (2, 2048, 4, 1, 2), (4, 1024, 4, 1, 1), (2, 1024, 2, 1, 4), (4, 1024, 4, 3, 1)),
}


@dataclass(frozen=True)
class ConfigTiming:
    """One configuration's result; `error` says why there is none."""

    config: LinearConfig
    microseconds: float = math.inf
    error: str = ""


def kind_of(shape: LinearShape) -> str:
    if shape.four_bit:
        return "w4"
    return "w16" if not shape.weights.quantized else "w8x8" if shape.fp8_input else "w8"


def candidates(shape: LinearShape, bucket: int, quick: bool) -> list[LinearConfig]:
    """Configurations for up to `bucket` rows (per program, at most 128)."""
    kind = kind_of(shape)
    if kind == "w4":
        return _tile_candidates(shape, bucket, quick)
    found: list[LinearConfig] = []
    if bucket == 1 and kind != "w8x8":
        for block_n, block_k, warps, stages, unroll in VECTOR_BLOCKS[kind][: 3 if quick else None]:
            if shape.geglu:
                block_n = max(1, block_n // 2)
            while block_k > shape.k or (shape.k < 2048 and shape.k % block_k):
                block_k, block_n = block_k // 2, block_n * 2
            found.append(LinearConfig(VECTOR, block_n, block_k, 1, 1, warps, stages, unroll))
    columns = max(16 if kind == "w8x8" else 8, bucket)
    for block_n, block_k, warps, stages in MATRIX_BLOCKS[kind][: 4 if quick else None]:
        if columns >= 64:  # activations are the larger traffic; sums need the registers of more warps
            block_n, stages, warps = max(block_n, 64), min(stages, 4), max(warps, 4)
        if columns * block_n * (2 if shape.geglu else 1) > 8192:
            warps = 8
        if shape.geglu and block_n > 32 and columns < 64 and kind != "w8x8":
            block_n //= 2
        for splits in _splits(shape, block_n, block_k, bucket, quick):
            found.append(LinearConfig(MATRIX, block_n, block_k, columns, splits, warps, stages, 1, columns < 64))
    return [c for c in dict.fromkeys(found) if _fits(shape, c)]


def _tile_candidates(shape: LinearShape, bucket: int, quick: bool) -> list[LinearConfig]:
    most, found = min(64, max(8, bucket)), list[LinearConfig]()
    sizes = {min(most, 32)} if shape.geglu else {most, min(most, 32)}
    tried = [(c, blocks) for c in sizes for blocks in TILE_BLOCKS[c][: 3 if quick or c < most <= bucket else None]]
    for columns, (block_n, warps_k, warps, stages, unroll) in tried:
        if shape.geglu and block_n > 32 * warps // warps_k:
            block_n //= 2
        for splits in (1, 2, 4) if quick else (1, 2, 3, 4, 6):
            filled = div_ceil(shape.n, block_n) * splits * warps / 132  # warps of a multiprocessor
            if (splits == 1 or filled <= 24) and filled >= 6 and shape.k // (32 * warps_k * splits) >= 3:
                block = block_n, 32 * warps_k, columns, splits, warps, stages, unroll
                found.append(LinearConfig(TILES, *block, bucket <= columns))
    return [c for c in dict.fromkeys(found) if _fits(shape, c)]


def _splits(shape: LinearShape, block_n: int, block_k: int, bucket: int, quick: bool) -> Iterator[int]:
    """1, and what brings the number of programs to the targets, while each part keeps 4 blocks of k."""
    yield 1
    blocks, parts = div_ceil(shape.n, block_n), div_ceil(shape.k, block_k)
    if not shape.geglu and bucket < 128:
        for target in PROGRAM_TARGETS[: 1 if quick else None]:
            splits = min(8, div_ceil(target, blocks))
            if splits > 1 and parts // splits >= 4:
                yield splits


def _fits(shape: LinearShape, config: LinearConfig) -> bool:
    weights = config.block_n * (2 if shape.geglu else 1) * (1 if shape.weights.quantized else 2)
    stage = config.block_k * (weights + config.columns * (1 if shape.fp8_input else 2))
    if config.kind == MATRIX and stage * config.num_stages > SHARED_LIMIT["sm90"]:
        return False
    try:
        check_config(shape, config)
    except AssertionError:
        return False
    return True


def compile_linear(shape: LinearShape, config: LinearConfig, target: str) -> CompiledKernel | str:
    """A kernel, or why there is none; for worker processes."""
    try:
        from wicore_trt.plugins.kernels.linear_specs import linear_spec

        return compile_kernel(linear_spec(shape, config, target), target)
    except Exception as error:  # a sweep goes on without it
        return f"{type(error).__name__}: {error}"[:200]


class Weights:
    """Random weights in GPU memory, from which every shape takes as many different matrices as it needs."""

    def __init__(self, device: str, total: dict[str, int]) -> None:
        import torch

        self._pools = {}
        for name, count in total.items():
            if name == "w4":
                self._pools[name] = torch.randint(0, 256, (count // 2,), dtype=torch.uint8, device=device)
                continue
            pool = torch.empty(count, dtype=torch.bfloat16 if name == "w16" else torch.float8_e4m3fn, device=device)
            for chunk in torch.split(pool, 1 << 28):
                scale = 0.02 if name == "w16" else 64.0
                chunk.copy_((torch.randn(len(chunk), device=device) * scale).clamp(-448, 448))
            self._pools[name] = pool

    def matrices(self, shape: LinearShape) -> list[Any]:
        """Matrices [weight_rows, k]: 8, or what the memory has of them, and together more than L2 holds."""
        import torch

        if shape.four_bit:
            pool, columns = self._pools["w4"], shape.k // 2
            size = shape.weight_rows * columns
            count = min(len(pool) // size, max(8, div_ceil(COLD_BYTES, size)))
            return [pool[i * size : (i + 1) * size].view(shape.weight_rows, columns) for i in range(count)]
        pool = self._pools["w16" if not shape.weights.quantized else "w8"]
        size = shape.weight_rows * shape.k
        count = min(len(pool) // size, max(8, div_ceil(COLD_BYTES, size * pool.itemsize)))
        views = [pool[i * size : (i + 1) * size].view(shape.weight_rows, shape.k) for i in range(count)]
        if not shape.weights.quantized and shape.dtype == "float16":
            views = [v.view(torch.float16) for v in views]  # other numbers, as good for timing
        return views


def launches_of(count: int, bytes_each: int) -> int:
    """Count the launches of a graph: whole rounds over `count` matrices."""
    wanted = max(count, min(LAUNCHES, int(GRAPH_BYTES / 8 // bytes_each)))
    return div_ceil(wanted, count) * count


def graph_microseconds(calls: list[Callable[[], Any]], rounds: int = 5) -> float:
    """Median time of one of `calls`, run in order as a CUDA graph; each is run once before."""
    import torch

    for call in dict.fromkeys(calls):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(rounds):
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) * 1000 / len(calls)


class LinearProblem:
    """One shape at one number of rows: inputs, a float32 reference for the last matrix, and timings over all."""

    def __init__(self, shape: LinearShape, tokens: int, weights: Weights) -> None:
        import torch

        self.shape, self.tokens = shape, tokens
        self.matrices = weights.matrices(shape)
        device = self.matrices[0].device
        x = torch.randn(tokens, shape.k, device=device)
        self.x = (x * 64).to(torch.float8_e4m3fn) if shape.fp8_input else x.to(getattr(torch, shape.dtype))
        self.x_scale = torch.rand(tokens, device=device) / 64 if shape.fp8_input else None
        fp8 = shape.weights.fp8
        self.scales: list[Any] = [None] * len(self.matrices)
        if shape.four_bit:
            size = (len(self.matrices), shape.weight_rows, shape.k // 32)
            self.scales = list((torch.randn(size, device=device) / 64).half())
        self.w_scale = (torch.rand(shape.weight_rows, device=device) + 0.5) / 3200 if fp8 else None
        self.want = self._reference(self.matrices[-1])

    def _reference(self, w: Any) -> Any:
        import torch

        if self.shape.four_bit:
            w = dequantize_blocks(unpack_tiles(w), unpack_scales(self.scales[-1]))
        y = self.x.float() @ w.float().T
        if self.x_scale is not None:
            y = y * self.x_scale[:, None]
        if self.w_scale is not None:
            y = y * self.w_scale
        if self.shape.geglu:
            gate, up = y.chunk(2, dim=1)
            y = torch.nn.functional.gelu(gate, approximate="tanh") * up
        return y

    def time(self, config: LinearConfig, kernel: CompiledKernel) -> ConfigTiming:
        """Raises AssertionError where the last launch's result is wrong."""
        import torch

        from wicore_trt.plugins.launch import SHARED_LAUNCHER

        shape, tokens, device = self.shape, self.tokens, self.x.device
        out = torch.empty(tokens, shape.n, dtype=getattr(torch, shape.out), device=device)
        partials = torch.empty(partials_bytes(shape, config, tokens) // 4, device=device)
        counters = torch.zeros(config.count_tiles(shape, tokens), dtype=torch.int32, device=device)

        def launcher(w: Any, scale: Any) -> Callable[[], None]:
            arrays = self.x, w, out, self.w_scale if scale is None else scale, self.x_scale, partials, counters
            at = LinearArrays(*(0 if t is None else t.data_ptr() for t in arrays))
            call: Launch = linear_launch(shape, config, at, tokens)
            return lambda: SHARED_LAUNCHER.launch(kernel, call, torch.cuda.current_stream().cuda_stream)

        calls = [launcher(*pair) for pair in zip(self.matrices, self.scales, strict=True)]
        rounds = launches_of(len(calls), shape.weight_bytes) // len(calls)
        took = graph_microseconds(calls * rounds)
        out.fill_(math.nan)
        calls[-1]()
        torch.cuda.synchronize()
        off = (out.float() - self.want).abs() - 2.0**-7 * self.want.abs()
        worst = float(off.max() / self.want.abs().max())
        assert worst < 2e-3, f"wrong result: off by {worst:.3g} of the largest output"  # false for NaN
        return ConfigTiming(config, took)

    def library_microseconds(self) -> float:
        """cuBLAS: torch.mm for 16-bit weights, torch._scaled_mm by rows for E4M3 times E4M3 (16-bit results; gate and
        up stay apart). Weights of 4 bits are written in 16 bits first, each time. NaN where there is none."""
        import torch

        from wicore_trt.plugins.launch import SHARED_LAUNCHER

        if kind_of(self.shape) == "w8":
            return math.nan
        shape = self.shape
        if shape.four_bit:
            major, minor = torch.cuda.get_device_capability()
            kernel = compile_kernel(dequantize_spec(shape), f"sm{major}{minor}")
            wide = torch.empty(shape.weight_rows, shape.k, dtype=self.x.dtype, device=self.x.device)
            scales = {w.data_ptr(): scale for w, scale in zip(self.matrices, self.scales, strict=True)}

            def one(w: Any) -> Callable[[], Any]:
                at = (w.data_ptr(), wide.data_ptr(), scales[w.data_ptr()].data_ptr())
                call = dequantize_launch(kernel.constants, *at)

                def multiply() -> Any:
                    SHARED_LAUNCHER.launch(kernel, call, torch.cuda.current_stream().cuda_stream)
                    return torch.mm(self.x, wide.T)

                return multiply
        elif self.x_scale is not None and self.w_scale is not None:
            a, b = self.x_scale[:, None].contiguous(), self.w_scale[None, :].contiguous()

            def one(w: Any) -> Callable[[], Any]:
                return lambda: torch._scaled_mm(self.x, w.T, a, b, out_dtype=torch.bfloat16)  # noqa: SLF001
        else:

            def one(w: Any) -> Callable[[], Any]:
                return lambda: torch.mm(self.x, w.T)

        try:
            calls = [one(w) for w in self.matrices]
            return graph_microseconds(calls * (launches_of(len(calls), self.shape.weight_bytes) // len(calls)))
        except RuntimeError as error:
            print(f"  library failed: {str(error)[:120]}")
            return math.nan
