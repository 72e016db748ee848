"""Checks of the plugins' enqueue on real data, for whatever runs the kernels: Triton's interpreter or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attention_checks
import kernel_checks
import torch
from attention_checks import Case
from kernel_checks import TORCH, Runner

from wicore_trt.plugins.tensorrt import base
from wicore_trt.plugins.tensorrt.kv_pages import KvPages, KvPagesConfig, kv_pages_specs
from wicore_trt.plugins.tensorrt.paged_attention import PagedAttention, PagedAttentionConfig, paged_attention_specs


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


def enqueue(plugin: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    plugin.enqueue(
        [Desc(t) for t in inputs],
        [Desc(t) for t in outputs],
        [t.data_ptr() for t in inputs],
        [t.data_ptr() for t in outputs],
        0,
        torch.cuda.current_stream().cuda_stream,
    )


def attention_plugin(case: Case) -> Any:
    config = PagedAttentionConfig(
        layers=2,
        layer=1,
        page_tokens=case.page_tokens,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
        window=case.window,
        softmax_scale=case.head_dim**-0.5,
    )
    return base.plugin_class(NoTensorRT, PagedAttention)(config, compile_paged_attention(config, target()))


def check_attention(run: Runner, kv_dtype: str) -> None:
    """A step's keys and values are absent from the pool before and present after; on a GPU also in a CUDA graph."""
    case = Case(((40, 9), (0, 3), (25, 1)), 4, 2, 64, 16, dtype="bfloat16", kv_dtype=kv_dtype, window=20)
    problem = attention_checks.make(case)
    places = [(s, first + i) for s, (first, n) in enumerate(case.slices) for i in range(n)]
    kv = torch.stack([torch.stack((problem.keys[s][p], problem.values[s][p])) for s, p in places])
    before = problem.pool.clone()
    for s, p in places:
        before[problem.tables[s, p // 16], 1, :, p % 16] = 0x7F if kv_dtype == "fp8" else torch.nan
    pool = run.put(before)
    inputs = [run.put(problem.q), *(run.put(kv[:, i].to(TORCH[case.dtype])) for i in (0, 1)), pool]
    inputs += [run.put(problem.tables), run.ints([p for _, p in places]), run.ints([s for s, _ in places])]
    inputs += [run.ints(problem.bounds()), run.ints([first for first, _ in case.slices])]
    if kv_dtype == "fp8":
        inputs.append(run.put(torch.tensor([9.9, problem.kv_scale])))
    out = torch.full_like(inputs[0], torch.nan)
    plugin = attention_plugin(case)
    enqueue(plugin, inputs, [out, pool])
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            enqueue(plugin, inputs, [out, pool])
        pool.copy_(before)
        out.fill_(torch.nan)
        captured.replay()
        torch.cuda.synchronize()
    if kv_dtype != "fp8":
        kernel_checks.same_bits(pool.view(torch.int16), problem.pool.view(torch.int16))
    want, error = attention_checks.reference(problem)
    if kv_dtype == "fp8":  # the step's own values were rounded twice; one code of E4M3 is 1/8 of a value at most
        error = error + 0.13 * want.abs().amax()
    assert ((out.cpu().double() - want).abs() <= error).all()


def check_pages_plugin(run: Runner) -> None:
    """Pages to a cache and back: every page as before."""
    pool = run.put(kernel_checks.noise(6, 3, 2, 8, 2, 64, dtype="bfloat16"))
    cache = run.put(kernel_checks.noise(3, 2, 2, 2, 48, 64, dtype="bfloat16"))
    tables, copies = run.ints([[3, 0, 5], [1, 4, 2]]), run.ints([[0, 0, 24, 24], [1, 0, 24, 0]])
    before = pool.clone()
    for to_cache in (True, False):
        config = KvPagesConfig(3, 8, 2, 64, cache_dtype="bfloat16", kv_dtype="bfloat16", to_cache=to_cache)
        plugin = base.plugin_class(NoTensorRT, KvPages)(config, compile_kv_pages(config, target()))
        enqueue(plugin, [pool, cache, tables, copies], [cache if to_cache else pool])
        if to_cache:
            pool.zero_()
    torch.cuda.synchronize()
    kernel_checks.same_bits(pool, before.cpu())


