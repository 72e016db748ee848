"""Checks of the plugin's enqueue on real data, for whatever runs the kernels: Triton's interpreter or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import attention_checks
import kernel_checks
import torch
from attention_checks import Case
from kernel_checks import TORCH, Runner

from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.tensorrt.cache_attention import (
    PAGE,
    CacheAttentionConfig,
    cache_attention_specs,
    plugin_class,
)


class NoTensorRT:
    """Bases for plugins where no TensorRT is installed: enqueue needs nothing of it."""

    __version__ = "none"
    IPluginV3 = type("IPluginV3", (), {})
    IPluginV3OneCore = type("IPluginV3OneCore", (), {})
    IPluginV3OneBuildV2 = type("IPluginV3OneBuildV2", (), {})
    IPluginV3OneRuntime = type("IPluginV3OneRuntime", (), {})


class Desc:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.dims = tuple(tensor.shape)


Enqueue = Callable[[], None]


def enqueuer(
    run: Runner,
    config: CacheAttentionConfig,
    specs: Mapping[str, KernelSpec],
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> Enqueue:
    """A call of a plugin's enqueue on the current stream."""
    kernels = {role: run.compile(spec) for role, spec in specs.items()}
    plugin = plugin_class(NoTensorRT)(config, kernels, run.launcher([*inputs, *outputs]))
    descs = [Desc(t) for t in inputs], [Desc(t) for t in outputs]
    pointers = [t.data_ptr() for t in inputs], [t.data_ptr() for t in outputs]

    def enqueue() -> None:
        stream = torch.cuda.current_stream().cuda_stream if run.device == "cuda" else 0
        plugin.enqueue(*descs, *pointers, 0, stream)

    return enqueue


def check_cache_attention(run: Runner, dtype: str) -> None:
    """Over linear caches [slots, kv_heads, entries, D], K and V far apart in one allocation: the step's keys and values
    are in them afterwards, nothing else is, and the result is right."""
    case = Case(((40, 9), (0, 3), (125, 1)), 4, 2, 64, 16, dtype=dtype, kv_dtype=dtype, window=20)
    problem, slots, entries = attention_checks.make(case), len(case.slices), 192
    config = CacheAttentionConfig(entries, 4, 2, 64, dtype, case.window, case.head_dim**-0.5)
    whole = torch.full((3, slots, 2, entries, 64), torch.nan, dtype=TORCH[dtype])  # K, something else, V
    before = whole.clone()
    for s, (first, n) in enumerate(case.slices):
        for part, values in ((0, problem.keys), (2, problem.values)):
            for position in range(first + n):
                row = values[s][position].to(TORCH[dtype])
                whole[part, s, :, position] = row
                if position < first:
                    before[part, s, :, position] = row
    places = [(s, first + i) for s, (first, n) in enumerate(case.slices) for i in range(n)]
    kv = torch.stack([torch.stack((problem.keys[s][p], problem.values[s][p])) for s, p in places]).to(TORCH[dtype])
    memory = run.put(before.clone())
    pages = entries // PAGE
    inputs = [run.put(problem.q), *(run.put(kv[:, i].contiguous()) for i in (0, 1)), memory[0], memory[2]]
    inputs += [run.ints([[s * 2 * pages + p for p in range(pages)] for s in range(slots)])]
    inputs += [run.ints([p for _, p in places]), run.ints([s for s, _ in places])]
    inputs += [run.ints(problem.bounds()), run.ints([first for first, _ in case.slices])]
    out = torch.full_like(inputs[0], torch.nan)
    enqueuer(run, config, cache_attention_specs(4, 2, 64, dtype), inputs, [out, *inputs[3:5]])()
    want, error = attention_checks.reference(problem)
    kernel_checks.same_bits(memory.view(torch.uint8), whole.view(torch.uint8))  # NaN where nothing was written
    assert ((out.cpu().double() - want).abs() <= error).all()


CHECKS: dict[str, Callable[[Runner], None]] = {
    f"plugin: cache attention {dtype}": partial(check_cache_attention, dtype=dtype)
    for dtype in ("bfloat16", "float16", "float32")
}
