"""Attention of long slices on a GPU, at 27B's shapes: kernel and cuDNN together give what the kernel gives alone.

pytest -q -s tests/runtime/test_triton_segments_cuda.py
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from benchmarks.gpu.kernels.attention import LARGE  # noqa: E402
from benchmarks.gpu.kernels.attention_problem import AttentionProblem, Point, pointer  # noqa: E402
from wicore_trt.backends.triton.memory import StepLimits  # noqa: E402
from wicore_trt.backends.triton.roles import ADD_SEGMENT, GATHER, PREFILL, PREFILL_SEGMENTS  # noqa: E402
from wicore_trt.backends.triton.segments import LongSlice, make_segment_attention  # noqa: E402
from wicore_trt.backends.triton.table import ANY, EngineShape, KernelEntry, KernelTable  # noqa: E402
from wicore_trt.kv.sizing import builtin_spec  # noqa: E402
from wicore_trt.plugins.aot import compile_kernel  # noqa: E402
from wicore_trt.plugins.decode_layout import leave_segments, prefill_config, prefill_launch  # noqa: E402
from wicore_trt.plugins.kernels import fast_attention_specs as specs  # noqa: E402
from wicore_trt.plugins.launch import SHARED_LAUNCHER  # noqa: E402
from wicore_trt.plugins.layout import Slices  # noqa: E402
from wicore_trt.weight_format import FP8  # noqa: E402

TARGET = "sm{}{}".format(*torch.cuda.get_device_capability())


@pytest.mark.skipif(TARGET != "sm90", reason="segments are for GPUs that they were measured on")
@pytest.mark.parametrize("kv", ["bfloat16", "fp8"])
@pytest.mark.parametrize("first, length", [(8192, 8192), (42_000, 3_500), (20_001, 2_047), (9_000, 2_100)])
@pytest.mark.parametrize("absent", [False, True])
def test_divided_attention(kv: str, first: int, length: int, absent: bool) -> None:
    p = AttentionProblem(Point(LARGE, 1, first + length, kv=kv, tokens=length), [first + length], 2, "cuda")
    shape, config = EngineShape(builtin_spec("gemma3-27b"), "bfloat16", FP8, kv, 32), prefill_config(TARGET, p.shape)
    scale = shape.spec.query_pre_attn_scalar**-0.5
    if absent:
        p.tables[0, 100] = -1
    made = {
        PREFILL: specs.prefill_spec(p.shape, "bfloat16", 32, TARGET, config),
        PREFILL_SEGMENTS: specs.prefill_spec(p.shape, "bfloat16", 32, TARGET, config, segmented=True),
        GATHER: specs.gather_spec(p.shape, "bfloat16", TARGET),
        ADD_SEGMENT: specs.add_segment_spec(p.shape, "bfloat16", 32),
    }
    table = KernelTable(TARGET, [KernelEntry(role, ANY, compile_kernel(spec, TARGET)) for role, spec in made.items()])
    ordered = torch.cuda.current_stream()
    stream = ordered.cuda_stream

    def empty(size: Any, dtype: Any) -> Any:
        return torch.full(tuple(size), torch.nan, dtype=dtype, device="cuda")

    attention = make_segment_attention(shape, table, StepLimits(8192, 8, 131072), empty)
    assert attention is not None
    slices, q = Slices(pointer(p.cu), pointer(p.first), length), empty((length + 2048, 32, 128), torch.bfloat16)
    kernels = [table.find_entry(role, 1).kernel for role in (PREFILL, PREFILL_SEGMENTS)]
    q[:length] = p.q
    q = q.view(len(q), -1)
    SHARED_LAUNCHER.launch(
        kernels[0],
        prefill_launch(kernels[0].constants, (pointer(q), pointer(p.out)), p.pools[1], p.table, slices, scale, 0),
        stream,
    )
    for where in ("this thread", "another"):
        sums, out = empty((length, 4096), torch.float32), empty((length, 4096), torch.bfloat16)

        def work(sums: Any = sums, out: Any = out) -> None:
            with torch.inference_mode(), torch.cuda.stream(ordered):  # a thread that is new has another
                attention.check_library(empty((2048, 4096), torch.bfloat16))
                assert attention.wanted
                args = (pointer(q), pointer(sums)), p.pools[1], p.table, slices, scale, 0
                call = prefill_launch(kernels[1].constants, *args)
                call = leave_segments(call, kernels[1].constants, attention.segments, pointer(attention.lse))
                SHARED_LAUNCHER.launch(kernels[1], call, stream)
                attention.add_segments(
                    (SHARED_LAUNCHER, stream), q, sums, out, p.pools[1], p.table, [LongSlice(0, length, first, 0)]
                )
                torch.cuda.synchronize()

        if where == "another":
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
        want, got = p.out.view(length, -1).float(), out.float()
        if absent:
            assert got.isnan().all() and want.isnan().all()
            continue
        rows = (got - want).norm(dim=1) / want.norm(dim=1)
        median, worst = float(rows.median()), float(rows.max())
        print(f"{kv} {first}+{length}, {where}: rows differ by {median:.1e}, at most {worst:.1e}")
        assert worst < 0.01
