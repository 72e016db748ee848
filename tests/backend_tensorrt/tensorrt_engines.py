"""Engines of backend tensorrt whose plans are `tensorrt_fakes`' JSON, around the weights of tiny models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from backend_tensorrt.tensorrt_fakes import VERSION, FakeDevice, fake_tensorrt
from safetensors.torch import save_file

from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.executor import TensorRTExecutor
from wicore_trt.backends.tensorrt.plan_io import INDEX, PHASES, PLANS, PlanLimits, plan_file, weight_tensors
from wicore_trt.engine.directory import EngineDir, describe_files
from wicore_trt.engine.manifest import Manifest
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.options import ExecutorOptions

LIMITS = PlanLimits(max_batch=3, max_chunk=11, max_context=256)


def fake_engine(
    path: Path,
    spec: Gemma3Spec,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    limits: PlanLimits = LIMITS,
    page_tokens: int = 8,
    compiled: Mapping[str, Any] | None = None,
    targets: Sequence[str] = ("sm89", "sm120"),
) -> EngineDir:
    """An engine directory. `dtype` is that of the activations."""
    (path / PLANS).mkdir(parents=True)
    weights = path / "rank0.safetensors"
    save_file({name: t.contiguous() for name, t in tensors.items()}, weights)
    kv_dtype = kv_dtype or dtype
    caches = plan_io.cache_tensors(spec, limits, dtype)
    aliases = {plan_io.updated(c.name): c.name for c in caches}
    index: dict[str, Any] = {"tensors": {}, "plans": {}}
    for phase in PHASES:
        profile = limits.profile(phase)
        listed = [
            *plan_io.step_tensors(spec, limits),
            *weight_tensors(weights, spec, kv_dtype),
            *caches,
            *plan_io.output_tensors(spec, caches),
        ]
        index["tensors"][phase] = msgspec.to_builtins([t.fixed(profile) for t in listed])
        plan = {"spec": spec.to_dict(), "phase": phase, "kv_dtype": kv_dtype, "profile": profile, "hosted": []}
        plan |= {"tensors": index["tensors"][phase], "aliases": aliases}
        for target in targets:
            (path / plan_file(target, phase)).write_text(json.dumps(plan))
    (path / INDEX).write_text(json.dumps(index))
    manifest = Manifest(
        model_id="tiny", spec=spec, backend="tensorrt", targets=list(targets), dtype=dtype, kv_dtype=kv_dtype,
        page_tokens=page_tokens, max_context=limits.max_context, quantization=None, tp_size=1,
        files=describe_files(path), weights_hash="", fingerprint="", tools={}, source="tiny", created="",
        compiled={"flavour": "tensorrt-rtx", "version": VERSION, "max_batch": limits.max_batch,
                  "max_chunk": limits.max_chunk, **(compiled or {})},
    )  # fmt: skip
    return EngineDir(path, manifest)


def executor_of(
    engine: EngineDir, device: FakeDevice | None = None, trt: Any = None, **settings: Any
) -> TensorRTExecutor:
    device = device or FakeDevice()
    values = {"kv_pages": {"global": 80, "local": 80}, "max_batch_tokens": 64, **settings}
    return TensorRTExecutor(engine, ExecutorOptions(**values), trt or fake_tensorrt(device), device)
