"""Micro-benchmark of the native CPU kernels beside torch: python benchmarks/cpu/kernels.py [library].

Prints the median of each kernel's time with the bound it should be read against: GB/s of weights for few rows,
GFLOP/s for many. Knows only the binding. Both columns are of the same run, alternating, so a busy machine hits both.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear

from wicore_trt.backends.torch import native, native_args


def medians(functions: list[Callable[[], object]], seconds: float = 0.6) -> list[float]:
    """Median seconds of each function, called in turn until the time is up."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for function, into in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            into.append(time.perf_counter() - start)
    return [statistics.median(t) for t in times]


def bench_linear(lib: native.NativeLibrary, n: int, k: int, rows: int, dtype: torch.dtype) -> None:
    # Enough copies that weights come from memory as in a model, not from cache.
    copies = max(1, min(24, (256 << 20) // (n * k * dtype.itemsize)))
    weights = [torch.randn(n, k).to(dtype) for _ in range(copies)]
    packed = [lib.pack(w) for w in weights]
    x = torch.randn(rows, k).to(dtype)
    operand = x.to(native_args.OPERANDS[dtype])
    out = torch.empty(rows, n)
    args = [native_args.make_linear(operand, p, out) for p in packed]
    ours, theirs = medians([lambda: lib.run(args), lambda: [linear(x, w) for w in weights]])
    flops, size = 2 * n * k * rows * copies, n * k * dtype.itemsize * copies
    name = str(dtype).removeprefix("torch.")
    print(
        f"linear {name:9} {rows:5}x{k:5} -> {n:6}  native {ours / copies * 1e6:9.0f} us {size / ours / 1e9:6.1f} GB/s "
        f"{flops / ours / 1e9:7.1f} GFLOP/s   torch {theirs / copies * 1e6:9.0f} us   x{theirs / ours:.2f}"
    )


def main() -> None:
    lib = native.load_library(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    if lib is None:
        sys.exit("The native kernels are not built: pip install -e . with a C++ compiler.")
    print(f"{lib.isa}; torch {torch.__version__}, {torch.get_num_threads()} threads")
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 8):
            bench_linear(lib, 262_144, 640, rows, dtype)
        for rows in (1, 8, 32, 256):
            bench_linear(lib, 4096, 640, rows, dtype)
        bench_linear(lib, 640, 2048, 1, dtype)
        bench_linear(lib, 640, 2048, 256, dtype)
        bench_linear(lib, 2048, 2048, 2048, dtype)


if __name__ == "__main__":
    main()
