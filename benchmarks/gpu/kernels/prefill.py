"""Measure large steps and E4M3 rows on a GPU, choice by choice: python -m benchmarks.gpu.kernels.prefill

    [--rows 1024,2048,4096,8192] [--no-products] [--no-kernels] [--out FILE.json]

Products of Gemma 3 27B's four linears by cuBLAS: bfloat16 operands with float32 or bfloat16 results; E4M3 operands with
a scale per row and channel or with one per tensor, whose sums are float32 or the matrix unit's own ("fast"). Each with
its error against float64, so that a faster choice is seen with its price. Then the kernels beside them (GeGLU, norms,
rotation, quantisation), in several launch shapes; those that quantise are first compared with the oracle's bytes (exit
status 1 where one differs). The figures fill `triton_products.FAST_SUMS` and the launch shapes of
`kernels.step_specs`, `geglu` and `linear_specs`.

Needs a GPU from sm90 on, torch, triton and cuda-bindings; about 40 s of it. Invariant: products read other weights at
each launch than at the one before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import say
from benchmarks.gpu.kernels.linear_sweep import graph_microseconds
from wicore_trt.arithmetic import div_ceil
from wicore_trt.backends.torch.ops import quantize_rows
from wicore_trt.plugins.aot import CompiledKernel, KernelSpec, compile_kernel
from wicore_trt.plugins.kernels.geglu import geglu_rows_spec, geglu_spec
from wicore_trt.plugins.kernels.linear_specs import quantize_parts_spec, quantize_rows_spec
from wicore_trt.plugins.kernels.step_specs import NormShape, StepConfig, add_norm_spec, qk_rope_spec
from wicore_trt.plugins.launch import SHARED_LAUNCHER
from wicore_trt.plugins.layout import Launch, Pool, PoolShape, Tables
from wicore_trt.plugins.linear_layout import quantize_launch
from wicore_trt.plugins.step_layout import (
    NormOut,
    QkNorms,
    RopeTable,
    StepTokens,
    add_norm_launch,
    geglu_launch,
    qk_rope_launch,
)
from wicore_trt.runtime.dtypes import E4M3

POOL = PoolShape(1, 32, 16, 128, "bfloat16")
ROTATIONS = ((1, 1), (4, 4), (4, 8), (4, 16), (8, 16), (4, 32), (8, 32))  # (warps, tokens) of a program
SHAPES = {"qkv": (8192, 5376), "o": (5376, 4096), "gate_up": (43008, 5376), "down": (5376, 21504)}
LAYERS, WIDTH, HIDDEN, HEADS = 62, 21504, 5376, 4096
MATRICES = 3  # of weights, taken in turn: the smallest has 22 MB, an H100's L2 50
CHECKED, COLUMNS = 32, 4096  # of a result that are compared with float64
SMALL_ROWS = (32, 64, 128)
EPS = 1e-6
Product = Callable[[Any, Any, Any], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1024,2048,4096,8192")
    parser.add_argument("--no-products", action="store_true")
    parser.add_argument("--no-kernels", action="store_true")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        print("There is no GPU from sm90 on.")
        return 2
    rows = [int(n) for n in args.rows.split(",")]
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    say(f"{report['gpu']}, torch {torch.__version__}")
    wrong: list[str] = []
    if not args.no_kernels:
        kernels = compiled(args.workers)
        wrong = check_bytes(kernels)
        report["kernels"] = time_kernels(kernels, rows)
        torch.cuda.empty_cache()
    if not args.no_products:
        report["products"] = [time_products(n) for n in rows]
        summary(report["products"])
    for text in wrong:
        say(f"WRONG: {text}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(bool(wrong))


def scaled(per_row: bool, fast: bool) -> Product:
    """E4M3 operands with bfloat16 results; without `per_row` the scales are left to whoever reads the result."""
    one = torch.ones((), device="cuda")

    def call(x: Any, w: Any, scales: Any) -> Any:
        a, b = scales if per_row else (one, one)
        return torch._scaled_mm(  # noqa: SLF001
            x, w.T, scale_a=a, scale_b=b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return call


def in_parts(parts: int) -> Product:
    """bfloat16 partial sums [parts, rows, n] over as many parts of k: more tiles where a result has too few of them to
    fill every multiprocessor equally often (1,024 x 5,376 are 168 of 128 x 256). The norm behind o and down adds up."""

    def call(x: Any, w: Any, _: Any) -> Any:
        (rows, k), n = x.shape, len(w)
        each = k // parts
        return torch.bmm(x.view(rows, parts, each).transpose(0, 1), w.view(n, parts, each).permute(1, 2, 0))

    return call


BF16, BY_ROWS, BY_TENSOR = "bf16", "fp8 by rows", "fp8 by tensor"


def products() -> dict[str, tuple[str, Product]]:
    """By name: operands and scales, and the product."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return {
        "bf16, float32 results": (BF16, lambda x, w, _: torch.mm(x, w.T, out_dtype=torch.float32)),
        "bf16, bf16 results": (BF16, lambda x, w, _: torch.mm(x, w.T)),
        "bf16, 2 parts": (BF16, in_parts(2)),
        "bf16, 3 parts": (BF16, in_parts(3)),
        "fp8 by rows": (BY_ROWS, scaled(True, False)),
        "fp8 by rows, fast": (BY_ROWS, scaled(True, True)),
        "fp8 by tensor": (BY_TENSOR, scaled(False, False)),
        "fp8 by tensor, fast": (BY_TENSOR, scaled(False, True)),
    }


def time_products(rows: int) -> dict[str, Any]:
    """Microseconds and errors of every product of every linear for steps of `rows` rows."""
    found: dict[str, Any] = {"rows": rows}
    for layer, (n, k) in SHAPES.items():
        problem = ProductProblem(rows, n, k)
        flops = 2.0 * rows * n * k
        for name, (kind, product) in products().items():
            if "parts" in name and (layer not in ("o", "down") or k % int(name.split()[1])):
                continue
            try:
                took, error = problem.timed(kind, product)
            except RuntimeError as why:
                say(f"  {layer}, {name}: left out: {str(why)[:160]}")
                continue
            rate = flops / took / 1e6
            found[f"{layer}: {name}"] = {"us": took, "error": error, "tflops": rate}
            say(f"  {rows:>5} x {layer:<8} {name:<22} {took:9.1f} us {rate:6.0f} TFLOP/s  error {error:.1e}")
        del problem
    return found


class ProductProblem:
    """x [rows, k] and several weights [n, k], in bfloat16 and quantised by rows."""

    def __init__(self, rows: int, n: int, k: int) -> None:
        self.x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        self.ws = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(MATRICES)]
        self.x8 = quantize_rows(self.x)
        self.ws8 = [quantize_rows(w) for w in self.ws]

    def timed(self, kind: str, product: Product) -> tuple[float, float]:
        """(microseconds, error: root mean square of the differences from float64 over that of the results)."""
        x, x_scale = (self.x, None) if kind == BF16 else self.x8
        pairs = [(w, None) for w in self.ws] if kind == BF16 else self.ws8
        calls: list[Callable[[], Any]] = []
        for w, scale in pairs:
            scales = None if scale is None or x_scale is None else (x_scale, scale.view(1, -1))
            calls.append(partial(product, x, w, scales))
        took = graph_microseconds(calls * 2, rounds=3)
        w, w_scale = pairs[0]
        want = x[:CHECKED].double() @ w[:COLUMNS].double().T
        if kind == BY_ROWS and x_scale is not None and w_scale is not None:
            want = want * x_scale[:CHECKED].double() * w_scale[:COLUMNS].view(1, -1).double()
        result = calls[0]()
        got = (result if result.dim() == 2 else result.float().sum(0))[:CHECKED, :COLUMNS].double()
        return took, float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def summary(results: list[dict[str, Any]]) -> None:
    """Milliseconds of the linears of all layers."""
    for found in results:
        for name in products():
            each = [found.get(f"{layer}: {name}") for layer in SHAPES]
            if all(each):
                total = sum(e["us"] for e in each if e) * LAYERS / 1e3
                say(f"{found['rows']:>5} rows, {name:<22} {total:8.2f} ms for {LAYERS} layers")


@cache
def specs() -> dict[str, tuple[str, KernelSpec]]:
    """(What is launched, kernel) by a name that says the launch shape."""
    found: dict[str, tuple[str, KernelSpec]] = {}

    def add(what: str, spec: KernelSpec, *warps: int) -> None:
        for count in warps or (spec.num_warps,):
            name = f"{spec.name.removesuffix(f'_w{spec.num_warps}')}_w{count}"
            found[name] = (what, replace(spec, name=name, num_warps=count))

    add("geglu float32", geglu_spec(WIDTH, "bfloat16", "float32"), 4, 8)
    add("geglu bfloat16", geglu_spec(WIDTH, "bfloat16", "bfloat16"), 4, 8)
    add("geglu8", geglu_rows_spec(WIDTH, "bfloat16", "bfloat16", native=True), 8, 16, 32)
    add("quantize o", quantize_rows_spec(HEADS, "bfloat16", native=True), 4, 8, 16)
    add("quantize act", quantize_parts_spec(WIDTH, "bfloat16", native=True), 2, 4, 8)
    for x in ("float32", "bfloat16"):
        add(f"add_norm {x}", add_norm_spec(NormShape(HIDDEN, "bfloat16"), 8, x_dtype=x), 4, 8, 16)
        add(f"add_norm8 {x}", add_norm_spec(NormShape(HIDDEN, "bfloat16", True, True), 8, x_dtype=x), 4, 8, 16)
        for shape in ROTATIONS:
            add(f"qk_rope {x}", qk_rope_spec(POOL, HEADS // POOL.head_dim, x, "bfloat16", StepConfig(*shape)))
    add("add_norm8 float32, by integers", add_norm_spec(NormShape(HIDDEN, "bfloat16", True), 16, x_dtype="float32"))
    return found


def compile_one(name: str, target: str) -> CompiledKernel:
    """For worker processes."""
    return compile_kernel(specs()[name][1], target)


def compiled(workers: int) -> dict[str, CompiledKernel]:
    major, minor = torch.cuda.get_device_capability()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {name: pool.submit(compile_one, name, f"sm{major}{minor}") for name in specs()}
        made = {name: future.result() for name, future in futures.items()}
    say(f"{len(made)} kernels compiled")
    return made


def launched(kernel: CompiledKernel, call: Launch) -> Callable[[], None]:
    at = {n: a.data_ptr() if isinstance(a, torch.Tensor) else a for n, a in call.arguments.items()}
    fixed = Launch(call.grid, at)
    return lambda: SHARED_LAUNCHER.launch(kernel, fixed, torch.cuda.current_stream().cuda_stream)


class Arrays:
    """Random inputs and outputs of the kernels for `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.gate_up = torch.randn(rows, 2 * WIDTH, device="cuda")
        self.gate_up16 = self.gate_up.bfloat16()
        self.act, self.attended = (torch.randn(rows, k, device="cuda").bfloat16() for k in (WIDTH, HEADS))
        self.out16 = torch.empty(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.out8 = torch.empty(rows, WIDTH, device="cuda", dtype=torch.uint8)
        self.scales = torch.empty(rows, device="cuda")
        self.largest = self.act.float().abs().amax(1).view(torch.int32)
        self.cleared = torch.empty_like(self.largest)
        self.residual, self.x = (torch.randn(rows, HIDDEN, device="cuda") for _ in range(2))
        self.x16 = self.x.bfloat16()
        self.weights = torch.rand(2, HIDDEN, device="cuda") + 0.5
        self.qkv = torch.randn(rows, SHAPES["qkv"][0], device="cuda")
        self.qkv16 = self.qkv.bfloat16()
        self.angles = torch.rand(2, rows, POOL.head_dim // 2, device="cuda")
        pages, one = div_ceil(rows, POOL.page_tokens), POOL.strides()["pool_page"]
        self.pool = torch.empty(pages, one, device="cuda", dtype=torch.bfloat16)
        self.table, self.positions = (torch.arange(n, device="cuda", dtype=torch.int32) for n in (pages, rows))
        self.sequences = torch.zeros_like(self.positions)

    def call(self, what: str, kernel: CompiledKernel) -> tuple[Launch, int]:
        """(launch, bytes that it reads and writes)."""
        kind, _, x_type = what.split(",")[0].partition(" ")
        rows, constants = self.rows, kernel.constants
        if kind == "geglu":
            source = self.gate_up if x_type == "float32" else self.gate_up16
            return geglu_launch(constants, source, self.out16, 0, rows), source.nbytes + self.out16.nbytes
        if kind == "geglu8":
            launch = geglu_launch(constants, self.gate_up16, self.out8, self.scales, rows)
            return launch, self.gate_up16.nbytes + self.out8.nbytes
        if kind == "quantize":
            source = self.attended if x_type == "o" else self.act
            largest = self.cleared if x_type == "o" else self.largest
            return quantize_launch(constants, source, self.out8, self.scales, largest, rows), source.numel() * 3
        if kind == "qk_rope":
            source = self.qkv if x_type == "float32" else self.qkv16
            launch = qk_rope_launch(
                constants,
                source,
                self.attended,
                QkNorms(self.weights[0], self.weights[1], EPS),
                RopeTable(self.angles[0], self.angles[1], rows),
                Pool(self.pool, POOL, 0),
                Tables(self.table, 1, len(self.table)),
                StepTokens(self.positions, self.sequences, rows),
            )
            return launch, source.nbytes + source.numel() * 2
        x = self.x if x_type == "float32" else self.x16
        to = NormOut(self.out8, self.scales) if kind == "add_norm8" else NormOut(self.out16)
        launch = add_norm_launch(self.residual, x, (self.weights[0], self.weights[1]), to, rows, EPS)
        return launch, rows * HIDDEN * (8 + x.itemsize + (1 if kind == "add_norm8" else 2))


def time_kernels(kernels: dict[str, CompiledKernel], rows: list[int]) -> list[dict[str, Any]]:
    """Microseconds of each launch in a graph of its own, whose data may lie in L2 for few rows."""
    found = []
    for n in sorted({*SMALL_ROWS, rows[0], rows[-1]}):
        arrays = Arrays(n)
        for name, kernel in kernels.items():
            what = specs()[name][0]
            call, nbytes = arrays.call(what, kernel)
            took = graph_microseconds([launched(kernel, call)] * 20)
            found.append({"rows": n, "what": what, "kernel": name, "us": took, "bytes": nbytes})
            bound = nbytes / 3e6
            say(f"  {n:>5} {what:<32} {took:8.2f} us, at 3 TB/s {bound:7.2f} us  {name}")
        del arrays
    return found


def one_zero(bits: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes with 0 for -0."""
    return torch.where(bits == 0x80, 0, bits)


def check_bytes(kernels: dict[str, CompiledKernel]) -> list[str]:
    """Quantised rows of many sizes, ties among them, against the oracle's bytes."""
    arrays, wrong = Arrays(256), []
    for source in (arrays.act, arrays.attended):
        source *= torch.exp2(torch.randint(-40, 40, (256, 1), device="cuda").float()).bfloat16()
        source[:64] = (torch.randint(-448, 449, source[:64].shape, device="cuda") / 64).bfloat16()
        source[64] = 0
    arrays.largest.copy_(arrays.act.float().abs().amax(1).view(torch.int32))
    for name, kernel in kernels.items():
        what = specs()[name][0]
        if not what.startswith(("quantize", "geglu8")):
            continue
        arrays.out8.fill_(0x7F)
        launched(kernel, arrays.call(what, kernel)[0])()
        torch.cuda.synchronize()
        width = HEADS if what.endswith("o") else WIDTH
        out = arrays.out8.view(-1)[: 256 * width].view(256, width)
        if what == "geglu8":
            gate, up = arrays.gate_up16.double().chunk(2, 1)
            want = (torch.nn.functional.gelu(gate, approximate="tanh") * up).float()
            got = out.view(E4M3).float() * arrays.scales[:, None]
            off = (got - want).abs() - want.abs() * 0.08 - arrays.scales[:, None] * 2.0**-9
            ok = bool((off <= 0).all())
        else:
            want8, scale = quantize_rows(arrays.attended if width == HEADS else arrays.act)
            ok = torch.equal(one_zero(out), one_zero(want8.view(torch.uint8)))
            ok = ok and torch.equal(arrays.scales, scale[:, 0])
        if not ok:
            wrong.append(f"{name}: other bytes than the oracle's")
    say(f"bytes: {wrong or 'ok'}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
