"""Drives the networks of a TensorRT engine through the evaluator, as a runtime would drive its plans on a GPU.

Weights, rope tables and caches are made here, not by the product's runtime, so that a mistake there cannot hide one
in the lowering. Caches begin as NaN: what was never written must not be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from network_evaluator import Evaluator
from safetensors.torch import save_file

from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.plan_build import make_network
from wicore_trt.backends.tensorrt.plan_io import (
    DECODE,
    PHASES,
    PREFILL,
    PlanLimits,
    PlanRequest,
    TensorSpec,
    weight_tensors,
)
from wicore_trt.model.spec import GROUPS, LOCAL, Gemma3Spec

trt: Any = pytest.importorskip("tensorrt_rtx_bindings")
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int32": torch.int32}


def weight_feeds(inputs: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values of a plan's weight inputs."""
    feeds: dict[str, torch.Tensor] = {}
    for t in inputs:
        if t.kind != "weight":
            continue
        parts = [tensors[name] for name in t.parts]
        if t.combine == "max":
            value = torch.stack(parts).amax(0)
        elif len(parts) == 1:
            value = parts[0]
        elif parts[0].dtype == torch.float8_e4m3fn:
            value = torch.cat([p.view(torch.uint8) for p in parts]).view(torch.float8_e4m3fn)
        else:
            value = torch.cat(parts)
        feeds[t.name] = value.view(*t.shape)
    return feeds


def make_rope_tables(spec: Gemma3Spec, inputs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    tables = {}
    for t in inputs:
        if t.kind == "table":
            _, group, part = t.name.split(".")
            theta, factor = (spec.rope_local_theta, 1.0) if group == LOCAL else (spec.rope_theta, 1.0)
            factor = 1.0 if group == LOCAL else spec.rope_scaling_factor
            frequency = theta ** -(torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim)
            angles = torch.arange(t.shape[0], dtype=torch.float64)[:, None] / factor * frequency
            tables[t.name] = (angles.cos() if part == "cos" else angles.sin()).float()
    return tables


@dataclass
class Slot:
    """One sequence's linear caches [kv_heads, entries, head_dim]. `tokens` is their number so far;
    entry 0 of a group's cache is position `base[group]`."""

    caches: dict[str, torch.Tensor]
    tokens: int = 0
    base: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GROUPS, 0))


class PlanDriver:
    """Both networks of an engine over the `tensors` of a unified checkpoint in memory."""

    def __init__(
        self, spec: Gemma3Spec, tensors: Mapping[str, torch.Tensor], path: Path, limits: PlanLimits, *,
        dtype: str, kv_dtype: str | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.limits, self.dtype = spec, limits, dtype
        save_file({n: t.contiguous() for n, t in tensors.items()}, path / "rank0.safetensors")
        weights = weight_tensors(path / "rank0.safetensors", spec, kv_dtype or dtype)
        self.networks, self.inputs, self.evaluators = {}, {}, {}
        self._builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        for phase in PHASES:
            request = PlanRequest(spec, limits, weights, dtype, kv_dtype or dtype, "sm89", phase)
            network, io = make_network(trt, self._builder, request)
            self.networks[phase], self.inputs[phase] = network, io
            self.evaluators[phase] = Evaluator(network, weight_feeds(io, tensors) | make_rope_tables(spec, io))

    def new_slot(self) -> Slot:
        shapes = [t for t in self.inputs[PREFILL] if t.kind == "cache"]
        return Slot({t.name: torch.full(t.shape[1:], torch.nan, dtype=TORCH[t.dtype]) for t in shapes})

    def prefill(self, slot: Slot, token_ids: list[int]) -> torch.Tensor:
        """Logits [vocab] after the chunk's last token."""
        return self._step(PREFILL, [slot], [token_ids], [len(token_ids) - 1])[0]

    def decode(self, slots: Sequence[Slot], token_ids: Sequence[int | None]) -> torch.Tensor:
        """Logits [active slots, vocab]; None leaves a slot idle."""
        rows = [row for row, token in enumerate(token_ids) if token is not None]
        return self._step(DECODE, slots, [None if t is None else [t] for t in token_ids], rows)

    def _step(
        self, phase: str, slots: Sequence[Slot], token_ids: Sequence[list[int] | None], rows: list[int]
    ) -> torch.Tensor:
        count = next(len(t) for t in token_ids if t is not None)
        for slot, tokens in zip(slots, token_ids, strict=True):
            if tokens is not None:
                self._slide(slot, count)
        feeds: dict[str, torch.Tensor] = {
            "token_ids": torch.tensor([t or [0] * count for t in token_ids], dtype=torch.int32),
            "positions": torch.tensor([range(s.tokens, s.tokens + count) for s in slots], dtype=torch.int32),
            "sample_rows": torch.tensor(rows, dtype=torch.int32),
        }
        for group in GROUPS:
            if not self.spec.layers_of(group):
                continue
            scratch = self.limits.entries(self.spec, group) - 1
            first = [
                s.tokens - s.base[group] if t is not None else scratch for s, t in zip(slots, token_ids, strict=True)
            ]
            feeds[plan_io.write_indices(group)] = torch.tensor(first, dtype=torch.int32)
            feeds[plan_io.kv_lengths(group)] = torch.tensor([f + count for f in first], dtype=torch.int32)
        stacked = {n: torch.stack([s.caches[n] for s in slots]) for n in slots[0].caches}
        result: dict[str, torch.Tensor] = self.evaluators[phase].evaluate(feeds | stacked)
        for row, slot in enumerate(slots):
            for name in slot.caches:
                slot.caches[name] = result[plan_io.updated(name)][row]
        for slot, tokens in zip(slots, token_ids, strict=True):
            slot.tokens += count if tokens is not None else 0
        return result["logits"]

    def _slide(self, slot: Slot, count: int) -> None:
        """Make room for `count` tokens in the local caches, and poison what was given up."""
        if not self.spec.layers_of(LOCAL):
            return
        length = slot.tokens - slot.base[LOCAL]
        if length + count < self.limits.entries(self.spec, LOCAL):
            return
        keep = min(length, self.spec.sliding_window - 1)
        for layer in self.spec.layers_of(LOCAL):
            for part in ("k", "v"):
                old = slot.caches[plan_io.cache(part, layer)]
                new = torch.full_like(old, torch.nan)
                new[:, :keep] = old[:, length - keep : length]
                slot.caches[plan_io.cache(part, layer)] = new
        slot.base[LOCAL] = slot.tokens - keep
