"""The kernels on a real GPU: compiled ahead of time for it, launched by raw pointers, alone and through the plugins.

Run by pytest, or from a checkout without installing anything:

    python tests/plugins/test_kernels_cuda.py [--time]

which prints a line per check and exits with 1 if one fails. Needs a GPU, torch with CUDA, triton 3.6, cuda-bindings and
numpy. `--time` adds how long the kernels take at 27B's shapes.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

try:
    import wicore_trt.plugins
except ImportError:
    # A checkout: plugins/ lies beside wicore_trt/ and is a part of it only where the package is installed. With the
    # root on the package's path, `wicore_trt.plugins` is the root's plugins/.
    ROOT = str(Path(__file__).resolve().parents[2])
    sys.path.insert(0, ROOT)
    import wicore_trt

    wicore_trt.__path__.append(ROOT)

if "pytest" in sys.modules:
    import pytest

    for needed in ("torch", "triton", "cuda.bindings"):
        pytest.importorskip(needed, reason="needs a GPU, torch, triton and cuda-bindings")
    if not sys.modules["torch"].cuda.is_available():
        pytest.skip("needs a GPU", allow_module_level=True)

import attention_checks
import kernel_checks
import torch
from attention_checks import Case
from kernel_checks import TORCH, Runner

from wicore_trt.plugins.aot import KernelSpec, compile_kernel
from wicore_trt.plugins.launch import SHARED_LAUNCHER
from wicore_trt.plugins.layout import Launch
from wicore_trt.plugins.tensorrt import base
from wicore_trt.plugins.tensorrt.kv_pages import KvPages, KvPagesConfig, compile_kv_pages
from wicore_trt.plugins.tensorrt.paged_attention import (
    PagedAttention,
    PagedAttentionConfig,
    compile_paged_attention,
)


@cache
def target() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def launch(spec: KernelSpec, call: Launch) -> None:
    """As `interpreted.launch`, on the GPU."""
    pointers = {n: a.data_ptr() if isinstance(a, torch.Tensor) else a for n, a in call.arguments.items()}
    kernel = compiled(spec.name, spec)
    SHARED_LAUNCHER.launch(kernel, Launch(call.grid, pointers), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


_compiled: dict[str, Any] = {}


def compiled(name: str, spec: KernelSpec) -> Any:
    if name not in _compiled:
        _compiled[name] = compile_kernel(spec, target())
    return _compiled[name]


CHECKS: dict[str, Callable[[Runner], None]] = {
    **kernel_checks.CHECKS,
    **attention_checks.CHECKS,
    **{
        f"plugin: attention, {kv_dtype}{', graph' if graph else ''}": partial(
            check_attention_plugin, kv_dtype=kv_dtype, graph=graph
        )
        for kv_dtype in ("bfloat16", "fp8")
        for graph in (False, True)
    },
    "plugin: pages": check_pages_plugin,
}

if "pytest" in sys.modules:

    @pytest.mark.parametrize("name", CHECKS)
    def test_on_gpu(name: str) -> None:
        CHECKS[name](Runner("cuda", launch))


def milliseconds(work: Callable[[], None]) -> float:
    """Mean of 20 runs after 3, on the GPU's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(23):
        if i == 3:
            start.record()
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 20


def print_times() -> None:
    """27B's heads (32 query, 16 KV, 128 wide), bfloat16, pages of 32 tokens."""
    device = "cuda"
    for name, sequences, tokens, context in (
        ("prefill 2048 of 2048", 1, 2048, 0),
        ("chunk 512 behind 8192", 1, 512, 8192),
        ("decode 1 behind 8192", 1, 1, 8192),
        ("decode 32 behind 2048", 32, 1, 2048),
    ):
        case = Case(((context, tokens),) * sequences, 32, 16, 128, 32, "bfloat16", "bfloat16")
        columns = (context + tokens + 31) // 32
        pool = torch.randn(sequences * columns, 2, 2, 32, 16, 128, dtype=torch.bfloat16, device=device)
        table = torch.arange(sequences * columns, dtype=torch.int32, device=device).view(sequences, columns)
        q, k = (torch.randn(sequences * tokens, h, 128, dtype=torch.bfloat16, device=device) for h in (32, 16))
        positions = torch.arange(context, context + tokens, dtype=torch.int32, device=device).repeat(sequences)
        owner = torch.arange(sequences, dtype=torch.int32, device=device).repeat_interleave(tokens)
        bounds = torch.arange(sequences + 1, dtype=torch.int32, device=device) * tokens
        first = torch.full((sequences,), context, dtype=torch.int32, device=device)
        plugin, out = attention_plugin(case), torch.empty_like(q)
        inputs = [q, k, k, pool, table, positions, owner, bounds, first]
        took = milliseconds(partial(enqueue, plugin, inputs, [out, pool]))
        flops = 4 * 32 * 128 * sequences * tokens * (context + (tokens + 1) / 2)
        read = 2 * 16 * 128 * 2 * sequences * (context + tokens)
        print(f"time  {name}: {took:.3f} ms, {flops / took / 1e9:.1f} TFLOP/s, KV {read / took / 1e6:.0f} GB/s")
    config = KvPagesConfig(52, 32, 16, 128, cache_dtype="bfloat16", kv_dtype="bfloat16", to_cache=True)
    plugin = base.plugin_class(NoTensorRT, KvPages)(config, compile_kv_pages(config, target()))
    pool = torch.zeros(32, 52, 2, 32, 16, 128, dtype=torch.bfloat16, device=device)
    cache_ = torch.zeros(52, 2, 1, 16, 2048, 128, dtype=torch.bfloat16, device=device)
    table = torch.arange(32, dtype=torch.int32, device=device).view(1, 32)
    copies = torch.tensor([[0, 0, 1024, 0]], dtype=torch.int32, device=device)
    took = milliseconds(partial(enqueue, plugin, [pool, cache_, table, copies], [cache_]))
    print(f"time  1024 tokens of 52 layers to a slot: {took:.3f} ms, {2 * pool.nbytes / took / 1e6:.0f} GB/s moved")


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU: nothing was checked")
        return 2
    failed = 0
    print(f"{torch.cuda.get_device_name()} {target()}, torch {torch.__version__}")
    for name, check in CHECKS.items():
        try:
            check(Runner("cuda", launch))
            print(f"ok    {name}", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL  {name}\n{traceback.format_exc()}", flush=True)
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks hold")
    if "--time" in sys.argv[1:]:
        print_times()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
