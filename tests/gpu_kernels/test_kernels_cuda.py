"""The kernels on a real GPU: compiled ahead of time for it, launched by raw pointers.

Run by pytest, or from a checkout without installing anything:

    python tests/gpu_kernels/test_kernels_cuda.py [--time]

which prints a line per check and exits with 1 if one fails. Needs a GPU, torch with CUDA, triton 3.6, cuda-bindings and
numpy. `--time` adds how long the kernels take at 27B's shapes.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
else:
    import pytest

    for needed in ("torch", "triton", "cuda.bindings"):
        pytest.importorskip(needed, reason="needs a GPU, torch, triton and cuda-bindings")
    if not sys.modules["torch"].cuda.is_available():
        pytest.skip("needs a GPU", allow_module_level=True)

import kernel_checks
import torch
from step_runners import GPU

from wicore_trt.plugins import layout
from wicore_trt.plugins.kernels import specs
from wicore_trt.plugins.layout import CacheShape, Pool, PoolShape, Tables

CHECKS = kernel_checks.CHECKS

if __name__ != "__main__":

    @pytest.mark.parametrize("name", CHECKS)
    def test_on_gpu(name: str) -> None:
        CHECKS[name](GPU)


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
    """27B's heads (16 KV, 128 wide), bfloat16, pages of 32 tokens."""
    device = "cuda"
    shape, lines = PoolShape(52, 32, 16, 128, "bfloat16"), CacheShape(52, 1, 16, 2048, 128, "bfloat16")
    spec = specs.copy_pages_spec(shape, "bfloat16", to_cache=True)
    pool = torch.zeros(32, 52, 2, 32, 16, 128, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(52, 2, 1, 16, 2048, 128, dtype=torch.bfloat16, device=device)
    table = torch.arange(32, dtype=torch.int32, device=device).view(1, 32)
    copies = torch.tensor([[0, 0, 1024, 0]], dtype=torch.int32, device=device)
    tables = Tables(table, 1, 32)
    call = layout.copy_pages_launch(spec.constants, Pool(pool, shape), (cache, lines), tables, copies, 1024)
    took = milliseconds(partial(GPU.launch, spec, call))
    print(f"time  1024 tokens of 52 layers to a slot: {took:.3f} ms, {2 * pool.nbytes / took / 1e6:.0f} GB/s moved")


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU: nothing was checked")
        return 2
    failed = 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, check in CHECKS.items():
        try:
            check(GPU)
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
